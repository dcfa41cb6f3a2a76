"""The training commands on a GPU as a user types them: `python bench/cli_gpu.py [--device cpu]`.

The same small run, on real text and with clipping, in several ways that must end with the same bits: straight through;
stopped half way and resumed with another limit of device memory and part of the state on flash; with two workers; under
torchrun with a store and two workers. Then a limit that is too small, which must be refused with the bytes that are
needed, and the Python API, which finds its own micro-batch. Needs no network: the text is this project's own sources.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from _child import ROOT, child_environment

import openwafer as ow
from openwafer.checkpoint import Checkpoint, latest
from openwafer.data.prepare import PrepareConfig, prepare
from openwafer.models.build import build
from openwafer.models.config import ModelConfig

PARAMS = """
model: {{hidden_size: {hidden}, num_hidden_layers: 4, num_heads: 8, vocab_size: 4096, max_position_embeddings: 128,
         dropout: 0.1}}
data: {{path: {data}}}
train: {{num_steps: 20, batch_size: 32, micro_batch_size: 8, checkpoint_every: 10, log_every: 5}}
optimizer: {{lr: 1.0e-3, max_grad_norm: 1.0}}
schedule: {{kind: constant}}
"""


class Runs:
    def __init__(self, folder: Path, device: str, hidden: int, data: Path | None) -> None:
        self.folder, self.device = folder, device
        if data is None:
            text, data = folder / "text.txt", folder / "data"
            text.write_bytes(b"".join(path.read_bytes() for path in sorted(ROOT.glob("openwafer/**/*.py"))))
            prepare([text], data, PrepareConfig(vocab_size=4096, val_fraction=0.02))
        self.params = folder / "params.yaml"
        self.params.write_text(PARAMS.format(hidden=hidden, data=data.resolve()))
        self.environment = child_environment(OMP_NUM_THREADS="1")

    def train(self, name: str, *flags: str, launcher: tuple[str, ...] = (), status: int = 0) -> str:
        """What it said; ends the bench with that if it ended otherwise than expected."""
        command = [sys.executable, *launcher, "-m", "openwafer", "train", "--params", str(self.params)]
        command += ["--model_dir", str(self.folder / name), "--device", self.device, *flags]
        began = time.perf_counter()
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != status:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-6000:]}")
        print(f"{name} {' '.join(flags)}: {time.perf_counter() - began:.1f} s", flush=True)
        return done.stderr

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        newest = latest(self.folder / name)
        assert newest is not None
        saved = Checkpoint.open(newest)
        assert saved.step == 20, saved.step
        return {tensor: saved.read(tensor) for tensor in saved.names()}


def trainer_finds_its_micro_batch(device: Literal["cuda", "cpu"], hidden: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=hidden, num_hidden_layers=4, num_heads=8, vocab_size=4096, max_position_embeddings=128
    )
    ids = torch.randint(0, 4096, (32, 128), generator=torch.Generator().manual_seed(0))
    with ow.Trainer(build(config), cluster=ow.Cluster(device=device)) as job:
        losses = job.fit([{"input_ids": ids, "labels": ids}] * 4)
        print(
            f"ow.Trainer: micro-batch of {job.micro_batch_size}, loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True
        )
    assert losses[-1] < losses[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--data", type=Path, help="prepared, vocabulary of 4096 (a machine without `tokenizers`)")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), args.device, args.hidden, args.data)
        runs.train("straight")
        runs.train("resumed", "--num_steps", "10", *(("--device_memory", "2GiB") if on_gpu else ()))
        runs.train("resumed", "--dram", "100MB", "--flash", f"{folder}/flash")
        runs.train("two", "--num_csx", "2")
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
        runs.train("torchrun", "--num_csx", "2", "--num_memoryx", "1", launcher=launcher)
        expected = runs.tensors("straight")
        for name in ("resumed", "two", "torchrun"):
            found = runs.tensors(name)
            different = [key for key in expected if not torch.equal(found[key], expected[key])]
            if different or found.keys() != expected.keys():
                raise SystemExit(f"{name}: {len(different)} of {len(expected)} tensors differ, {different[:3]}")
        print(f"all {len(expected)} tensors have the same bits in all four runs", flush=True)
        if on_gpu:
            said = runs.train("small", "--device_memory", "600MiB", status=2)
            print(f"refused: {said.strip().splitlines()[-1]}", flush=True)
    trainer_finds_its_micro_batch(args.device, args.hidden)


if __name__ == "__main__":
    main()
