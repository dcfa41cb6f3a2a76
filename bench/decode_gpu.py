"""Tokens per second of the engine on one GPU: `python bench/decode_gpu.py`, a Llama-3.1-8B shape, random bf16 weights.

    --first             all there is in a few minutes, each part in a process of its own; what fails stops nothing else
    --check             every Triton kernel against its plain definition, and the fast path's greedy tokens
    --parts one users   some parts alone: compile, bandwidth, tune, one, users, packed, prompt, profile, streamed
    --parts packed      4- and 8-bit weights: one user and 32, beside the bandwidth that their packed bytes need
    --parts streamed    half of the layers are copied from host memory in every step
    --parts compile     every kernel compiled for a Hopper GPU: registers, spills, loads. Needs no GPU
    --parts tune        other tiles, for --budget_s seconds; --only int4 int8: of these weights alone
    --device cpu --tiny the same code with plain operations on a tiny shape (TRITON_INTERPRET=1: with the kernels, in
                        Triton's interpreter): shows that this script works, no more

All numbers are of one run: the bound of one user is the measured copy bandwidth (bytes read and written) over the
bytes of weights and cache that a token needs, the floor of a prompt is the measured time of its matrix products.
`--out FILE` gets every number as a line of JSON as soon as it is known.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import _gpu_kernels
import torch
from _gpu_engine import RUNS, Bench, copy_bandwidth
from _journal import Journal, read_journal

from openwafer.models.config import ModelConfig
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.interpreted import is_interpreted
from openwafer.serve.gpu.invariant import InvariantKernels
from openwafer.serve.gpu.tuning import Tuning

PARTS = ("compile", "bandwidth", "tune", "one", "users", "packed", "prompt", "profile", "streamed")
ENGINE_PARTS = ("one", "users", "prompt", "profile")
LLAMA_8B = ModelConfig(
    family="llama",
    hidden_size=4096,
    num_hidden_layers=32,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)
TINY = ModelConfig(  # whole groups of packed inputs
    family="llama",
    hidden_size=256,
    num_hidden_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=256,
    vocab_size=512,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


SMOLLM2 = ModelConfig(
    family="llama",
    hidden_size=576,
    num_hidden_layers=30,
    num_heads=9,
    num_kv_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def main() -> None:
    args = parsed()
    if args.first:
        first_run(args)
        return
    device = torch.device(args.device)
    config = TINY if args.tiny else LLAMA_8B
    journal = Journal(args.out)
    tuning = Tuning(overlaps=not args.cautious, library_adds=not args.cautious)
    if args.check:
        journal.part("check", lambda: _gpu_kernels.check(config, device, journal, cases(args.tiny), tuning=tuning))
        sys.exit(bool(journal.failed) or journal.numbers.get("kernels") != "right")
    if "compile" in args.parts:
        journal.part("compile", lambda: compile_kernels(config, tuning, journal))
    if "bandwidth" in args.parts or "one" in args.parts:
        journal.part("bandwidth", lambda: copy_bandwidth(device, args.tiny, journal))
    if set(ENGINE_PARTS) & set(args.parts):
        journal.part("engine", lambda: run_engine_parts(config, device, args, tuning, journal))
    if "packed" in args.parts:
        import _gpu_packed

        journal.part("packed", lambda: _gpu_packed.packed_weights(config, device, args, tuning, journal))
    if "streamed" in args.parts:
        import _gpu_streamed

        journal.part("streamed", lambda: _gpu_streamed.streamed(config, device, args, tuning, journal))
    if "tune" in args.parts:
        import _gpu_tune

        journal.part("tune", lambda: _gpu_tune.tune(config, device, journal, args.budget_s, args.only))
    sys.exit(bool(journal.failed))


def cases(tiny: bool) -> tuple[_gpu_kernels.Case, ...]:
    return _gpu_kernels.CASES[:4] if tiny else _gpu_kernels.CASES


def run_engine_parts(
    config: ModelConfig, device: torch.device, args: argparse.Namespace, tuning: Tuning, journal: Journal
) -> None:
    bench = Bench.opened(config, device, args, tuning, journal)
    for part in args.parts:
        if part in ENGINE_PARTS:
            journal.part(part, lambda part=part: RUNS[part](bench, journal))
    bench.engine.close()


def compile_kernels(config: ModelConfig, tuning: Tuning, journal: Journal) -> None:
    import _gpu_compile

    batches = ([1], [1] * 16, [1] * 32, [1] * 128, [100, 300]) if config is LLAMA_8B else ([1], [1, 1, 12])
    packed_batches = {bits: ([1], [1] * 16, [1] * 32, [1] * 128, [300]) for bits in _gpu_kernels.PACKED}
    if config is not LLAMA_8B:  # some of each
        packed_batches = {4: ([1], [300]), 8: ([1], [1, 1])}
    for name, shape in (("Llama-3.1-8B", config), ("SmolLM2-135M", SMOLLM2)) if config is LLAMA_8B else (("", config),):
        rows = _gpu_compile.compile_all(shape, TritonKernels(tuning), batches)
        if config is LLAMA_8B:
            invariant = InvariantKernels(shape.max_position_embeddings, tuning)
            rows += _gpu_compile.compile_all(shape, invariant, [[1], [100]])
        for num_bits in _gpu_kernels.PACKED:
            rows += _gpu_compile.compile_all(shape, TritonKernels(tuning), packed_batches[num_bits], num_bits)
            if config is LLAMA_8B:
                invariant = InvariantKernels(shape.max_position_embeddings, tuning)
                rows += _gpu_compile.compile_all(shape, invariant, [[1]], num_bits)
        print(f"{name}\n{_gpu_compile.table(rows)}", flush=True)
        num_spilling = sum(row.stack_bytes > 0 for row in rows)
        journal.note(**{f"compiled {name}": len(rows), f"spilling {name}": num_spilling})
        if num_spilling and config is LLAMA_8B:  # the compiler does odd things with loops of one round
            raise RuntimeError(f"{num_spilling} kernels use local memory")


def first_run(args: argparse.Namespace) -> None:
    """Everything, the most wanted first; a part that fails is tried once more in a simpler way."""
    same = ["--device", args.device, *(["--tiny"] if args.tiny else []), *(["--out", args.out] if args.out else [])]
    quick = [*same, "--rounds", "2", "--quick"]
    began = time.perf_counter()

    def run(limit_s: int, *options: str, **environment: str) -> bool:
        print(f"== {' '.join(options)} ({time.perf_counter() - began:.0f} s so far)", flush=True)
        command = [sys.executable, "-u", __file__, *options]
        try:
            return subprocess.run(command, timeout=limit_s, env=os.environ | environment).returncode == 0
        except subprocess.TimeoutExpired:
            print(f"== stopped after {limit_s} s", flush=True)
            return False

    def apart(name: str) -> list[str]:
        """A file of its own, because the numbers have the same names."""
        return ["--out", f"{args.out}.{name}"] if args.out else []

    overlap: list[str] = []
    if not run(100, *same, "--check"):
        overlap = ["--cautious"]
        if not run(80, *same, "--check", *overlap) and args.device == "cuda":
            run(60, *same, "--check", *overlap, CUDA_LAUNCH_BLOCKING="1")  # says which kernel it was
    engine = ("--parts", "bandwidth", "one", "users", "prompt", "profile")
    if not run(150, *quick, *engine, *overlap):
        if not run(100, *quick, *engine[:4], "--cautious"):
            run(100, *quick, *engine[:4], "--plain")
    elif not overlap:
        run(60, *quick, "--parts", "one", "--cautious", *apart("cautious"))  # what starting early is worth
    run(80, *quick, "--parts", "one", "users", "--invariant", *apart("invariant"), *overlap)
    run(60, *same, "--rounds", "1", "--parts", "packed", *overlap)
    run(60, *quick, "--parts", "streamed", *overlap)
    run(100, *same, "--parts", "tune", "--budget_s", str(args.budget_s))
    for path in sorted(Path(args.out).parent.glob(f"{Path(args.out).name}*")) if args.out else []:
        print(f"== {path.name}", flush=True)
        numbers = read_journal(path)
        wanted = ("kernels", "equal", "worst", "copy", "one_user", "runner", "users", "first_token", "matmul", "failed")
        wanted += ("streamed", "host_to_device")
        for name, value in numbers.items():
            if name.startswith((*wanted, "int4_", "int8_")) or name.endswith("_failed"):
                print(f"{name}: {value}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and few tokens")
    parser.add_argument("--first", action="store_true", help="check, measure and tune, in processes of their own")
    parser.add_argument("--check", action="store_true", help="compare kernels, measure nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["bandwidth", "one", "users", "prompt"])
    parser.add_argument(
        "--only", nargs="+", choices=["bf16", "int4", "int8"], help="weights that --parts tune and packed look at"
    )
    parser.add_argument("--users", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--inputs", type=int, default=256, help="tokens of each of many users' prompts")
    parser.add_argument("--outputs", type=int, default=128, help="tokens decoded for each user")
    parser.add_argument(
        "--prompt", type=int, default=2048, help="tokens of the prompt that the first token is timed of"
    )
    parser.add_argument("--step_tokens", type=int, default=2048, help="tokens computed in one step at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget_s", type=float, default=60, help="seconds of tuning")
    parser.add_argument("--quick", action="store_true", help="record graphs for these numbers of users only")
    parser.add_argument("--plain", action="store_true", help="plain operations instead of Triton kernels and graphs")
    parser.add_argument("--invariant", action="store_true", help="kernels whose bits do not depend on the batch")
    parser.add_argument(
        "--cautious", action="store_true", help="kernels start after the one before has ended, products add nothing"
    )
    parser.add_argument("--out", help="append the numbers to this file, a line of JSON each")
    args = parser.parse_args()
    if args.tiny:
        args.users, args.inputs, args.outputs, args.prompt, args.step_tokens = [2, 4], 24, 12, 64, 64
        if is_interpreted():
            args.users, args.outputs, args.prompt = [2], 3, 20
        args.budget_s = min(args.budget_s, 5)
    return args


if __name__ == "__main__":
    main()
