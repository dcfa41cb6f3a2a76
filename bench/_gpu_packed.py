"""The part of `decode_gpu.py` with packed weights: 4 and 8 bits, beside what reading them takes."""

import argparse
from dataclasses import replace

import torch
from _gpu_engine import Bench, ask, copy_bandwidth, decode_rate, runner_alone
from _gpu_kernels import PACKED, Bits, Case, compare_steps, random_program
from _journal import Journal

from openwafer.models.config import ModelConfig
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.interpreted import is_interpreted
from openwafer.serve.gpu.plain import PlainKernels
from openwafer.serve.gpu.plan import make_plan
from openwafer.serve.gpu.tuning import Tuning

# One row, few, and more than are unpacked in registers. The kernels are those that are measured: compiling takes time.
CASES = (
    Case(name="1 user", counts=[1], starts=[40]),
    Case(name="32 users", counts=[1] * 32, starts=list(range(32))),
    Case(name="a prompt", counts=[300], starts=[0]),
)


def packed_weights(
    config: ModelConfig, device: torch.device, args: argparse.Namespace, tuning: Tuning, journal: Journal
) -> None:
    """Each kernel against its definition first, then one user and the fewest of the many users.

    The interpreter takes minutes for an answer: there kernels are compared only.
    """
    if "copy_bytes_per_s" not in journal.numbers:
        copy_bandwidth(device, args.tiny, journal)
    for num_bits in PACKED:
        name = f"int{num_bits}"
        if args.only and name not in args.only:
            continue
        if not args.plain and (device.type == "cuda" or is_interpreted()):
            journal.part(f"{name} check", lambda bits=num_bits: check(config, device, bits, tuning, journal))
        if not is_interpreted():
            journal.part(f"{name} speed", lambda bits=num_bits: measure(config, device, args, bits, tuning, journal))


def check(config: ModelConfig, device: torch.device, num_bits: Bits, tuning: Tuning, journal: Journal) -> None:
    config = replace(config, num_hidden_layers=1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    program = random_program(config, device, num_bits)
    plan = make_plan(program, device, dtype, config.max_position_embeddings)
    worst = 0.0
    with torch.inference_mode():
        for case in CASES if device.type == "cuda" else CASES[:1]:
            steps = plan.body, case, config, TritonKernels(tuning), PlainKernels(), device, dtype
            errors = dict(compare_steps(*steps))
            print(f"int{num_bits} {case.name:12}" + "  ".join(f"{name} {e:.1e}" for name, e in errors.items()))
            worst = max(worst, *errors.values())
    verdict = "right" if worst < 0.02 else "WRONG"
    print(f"int{num_bits}: worst {worst:.1e}: {verdict} (bf16 rounds at 4e-3)", flush=True)
    journal.note(**{f"int{num_bits}_worst_error": worst, f"int{num_bits}_kernels": verdict})
    if verdict != "right":
        raise RuntimeError(f"int{num_bits}: the kernels are wrong")


def measure(
    config: ModelConfig,
    device: torch.device,
    args: argparse.Namespace,
    num_bits: Bits,
    tuning: Tuning,
    journal: Journal,
) -> None:
    users = min(args.users)
    args = argparse.Namespace(**vars(args) | {"users": [users], "quick": True})
    bench = Bench.opened(config, device, args, tuning, journal, num_bits)
    try:
        ask(bench, 1, args.inputs, 4, seed=0)
        rate = max(
            decode_rate(ask(bench, 1, args.inputs, args.outputs, seed=1 + number)[1]) for number in range(args.rounds)
        )
        token_bytes = bench.weight_bytes + bench.token_bytes * (args.inputs + args.outputs // 2)
        bound = journal.numbers["copy_bytes_per_s"] / token_bytes
        alone_s = runner_alone(bench)
        print(
            f"int{num_bits}, 1 user: {rate:.1f} tokens/s, {100 * rate / bound:.1f} % of the bound {bound:.1f} "
            f"({token_bytes / 1e9:.2f} GB a token); without the engine {1 / alone_s:.1f} tokens/s",
            flush=True,
        )
        began, heard = ask(bench, users, args.inputs, args.outputs, seed=100)
        total = users * args.outputs / (max(mine.times[-1] for mine in heard) - began)
        print(f"int{num_bits}, {users} users: decoding {decode_rate(heard):.0f} tokens/s, end to end {total:.0f}")
        found = {
            "one_user_tokens_per_s": rate,
            "one_user_bound": bound,
            "one_user_share": rate / bound,
            "runner_alone_tokens_per_s": 1 / alone_s,
            f"users_{users}_decode_tokens_per_s": decode_rate(heard),
            f"users_{users}_total_tokens_per_s": total,
        }
        journal.note(**{f"int{num_bits}_{name}": number for name, number in found.items()})
    finally:
        bench.engine.close()
