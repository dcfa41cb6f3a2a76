"""Greedy answers of the engine in fp32 against transformers on the same weights: `python bench/greedy_transformers.py`.

20 prompts, 100 tokens each, all at once in the engine and one by one in transformers.
"""

import argparse
import queue
import tempfile
from pathlib import Path
from typing import Any

import torch

from openwafer.models.huggingface_export import export
from openwafer.models.load import StoredModel, open_model
from openwafer.serve.core import Event, Request, Sampling
from openwafer.serve.engine import EngineConfig, open_engine

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969, the first",
    "My favourite recipe for soup begins with",
    "The theory of relativity says that",
    "Dear Sir or Madam,",
    "A haiku about the sea:\n",
    "The three primary colours are",
    "To install the package, run",
    "Question: What is 12 times 12?\nAnswer:",
    "The old lighthouse keeper",
    "SELECT name FROM users WHERE",
    "Photosynthesis is the process by which",
    "List of planets: Mercury, Venus,",
    "She opened the letter and read:",
    "The stock market fell today because",
    "Translate to German: Good morning.\n",
    "import numpy as np\n",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="pulled name or GGUF file")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    stored = open_model(args.model)
    tokenizer = stored.tokenizer()
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in PROMPTS[: args.prompts]]
    mine = engine_answers(args.model, prompts, args.tokens)
    theirs = transformers_answers(stored, prompts, args.tokens)
    num_equal = 0
    for text, ours, other in zip(PROMPTS, mine, theirs, strict=False):
        if ours == other:
            num_equal += 1
            continue
        at = next(i for i, pair in enumerate(zip(ours, other, strict=False)) if pair[0] != pair[1])
        print(f"{text!r}: differs at token {at}: ours {ours[at]}, transformers {other[at]}")
    print(f"{num_equal} of {len(prompts)} answers of {args.tokens} tokens are equal")
    raise SystemExit(num_equal != len(prompts))


def engine_answers(model: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    engine, tokenizer, _ = open_engine(model, EngineConfig(dtype="fp32"))
    stop_ids = frozenset(tokenizer.eos_ids if tokenizer is not None else ())
    answers: list[list[int]] = [[] for _ in prompts]
    ended: queue.Queue[int] = queue.Queue()

    def listen(index: int):
        def on_event(event: Event) -> None:
            answers[index].extend(event.tokens)
            if event.finish_reason is not None:
                ended.put(index)

        return on_event

    for index, prompt in enumerate(prompts):
        # Both go on to the last token: none may end the text.
        sampling = Sampling(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0, stop_ids=stop_ids)
        engine.submit(Request(id=str(index), prompt=tuple(prompt), sampling=sampling), listen(index))
    for _ in prompts:
        ended.get()
    engine.close()
    return answers


def transformers_answers(stored: StoredModel, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        export(stored, Path(folder, "exported"), dtype=torch.float32)
        loaded = AutoModelForCausalLM.from_pretrained(Path(folder, "exported"), dtype=torch.float32)
    model: Any = loaded.eval()
    answers = []
    for prompt in prompts:
        # Plain greedy search, nothing that the file's own settings might add.
        ids = torch.tensor([prompt])
        out = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


if __name__ == "__main__":
    main()
