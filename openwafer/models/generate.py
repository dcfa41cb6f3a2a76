"""Token by token: the plain generation loop over one sequence, with the dense key/value cache."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from openwafer.errors import UserError
from openwafer.models.cache import KVCache
from openwafer.models.config import ModelConfig


def generate(
    module: nn.Module,
    ids: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Continue `ids` by up to `max_tokens` ids, which are given as they come.

    Ends before that at one of `stop_ids` (not given out) or at the end of the model's context.
    `temperature` 0 takes the likeliest id; `seed` None draws differently every time.
    """
    config = module.config
    assert isinstance(config, ModelConfig)
    context = config.max_position_embeddings
    if not ids:
        raise UserError("there is nothing to continue: give at least one token")
    if len(ids) >= context:
        raise UserError(f"the prompt has {len(ids)} tokens and the model sees {context}: shorten the prompt")
    if not all(0 <= token_id < config.vocab_size for token_id in ids):
        raise UserError(f"the prompt has token ids outside 0..{config.vocab_size - 1}: wrong tokenizer?")
    if max_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise UserError(
            f"max_tokens {max_tokens} must be at least 1, temperature {temperature} at least 0, "
            f"top_p {top_p} above 0 and at most 1"
        )
    return _tokens(module, config, ids, min(max_tokens, context - len(ids)), temperature, top_p, seed, stop_ids)


def _tokens(
    module: nn.Module,
    config: ModelConfig,
    ids: Sequence[int],
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    stop_ids: Collection[int],
) -> Iterator[int]:
    weight = next(module.parameters())
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    was_training = module.training
    module.eval()
    try:
        cache = KVCache(config, 1, len(ids) + max_tokens, weight.dtype, weight.device)
        new = list(ids)
        for _ in range(max_tokens):
            # Entered anew for each token: held across a `yield` it would leak into the caller's code.
            with torch.inference_mode():
                logits = module(torch.tensor([new], device=weight.device), cache=cache)[0, -1]
                token_id = sample(logits.float().cpu(), temperature, top_p, generator)
            if token_id in stop_ids:
                return
            yield token_id
            new = [token_id]
    finally:
        module.train(was_training)


def sample(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One id from fp32 logits [vocab] on the CPU."""
    if logits.isnan().any():
        raise UserError("the model's output is not a number: its weights are damaged or overflow the dtype")
    if temperature == 0:
        return int(logits.argmax())
    # The maximum goes first, so that a tiny temperature gives zeros and not infinities.
    probabilities = ((logits - logits.max()) / temperature).softmax(dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # An id stays while the likelier ones have not reached top_p; the likeliest always does.
        ordered[ordered.cumsum(0) - ordered >= top_p] = 0
        return int(order[torch.multinomial(ordered, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))
