import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openwafer.checkpoint import BrokenCheckpoint, Checkpoint, latest, save
from openwafer.errors import UserError


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    yield "weights/a", torch.randn(5, 7, generator=generator)
    yield "weights/b", torch.randn(16, generator=generator).to(torch.bfloat16)
    yield "buffers/count", torch.tensor(3, dtype=torch.int64)
    yield "optimizer/m/a", torch.randn(5, 7, generator=generator)
    yield "weights/empty", torch.empty(0, 4)


def same(checkpoint, expected):
    expected = dict(expected)
    assert checkpoint.names() == list(expected)
    for name, tensor in expected.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def listing(model_dir):
    return sorted(p.name for p in (model_dir / "checkpoints").iterdir() if p.name != ".lock")


@pytest.mark.parametrize("shard_bytes", [1, 200, 1 << 30])
def test_what_is_saved_comes_back(tmp_path, shard_bytes):
    meta = {"params": {"lr": 3e-4}, "note": "é"}
    folder = save(tmp_path, 100, tensors(), meta, shard_bytes=shard_bytes)
    assert folder == tmp_path / "checkpoints" / "step_00000100" == latest(tmp_path)
    checkpoint = Checkpoint.open(folder)
    assert (checkpoint.step, checkpoint.meta, checkpoint.tokenizer) == (100, meta, None)
    same(checkpoint, tensors())
    assert checkpoint.names("weights/") == ["weights/a", "weights/b", "weights/empty"]
    sizes = [p.stat().st_size for p in folder.glob("*.safetensors")]
    assert len(sizes) == {1: 5, 200: 2, 1 << 30: 2}[shard_bytes]
    with pytest.raises(UserError, match="no tensor 'weights/zzz'"):
        checkpoint.read("weights/zzz")


def test_large_checkpoints_are_written_in_larger_pieces(tmp_path):
    def numbered(index):
        return torch.full(((20 << 20) // 4,), float(index))

    folder = save(tmp_path, 1, ((str(index), numbered(index)) for index in range(6)), {}, shard_bytes=1)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert [entry["piece_bytes"] for entry in files.values()] == [4 << 20] * 4 + [16 << 20] * 2
    saved = Checkpoint.open(folder)
    assert all(torch.equal(saved.read(str(index)), numbered(index)) for index in range(6))
    with (folder / list(files)[-1]).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(BrokenCheckpoint):
        Checkpoint.open(folder).read("5")


def test_views_ties_and_reused_buffers(tmp_path):
    flat = torch.arange(12.0)

    def stream():
        yield "weights/first", flat[:6].view(2, 3)
        yield "weights/tied", flat[:6].view(2, 3)
        yield "weights/turned", flat[6:].view(2, 3).T
        flat.fill_(7)  # a producer that loads the next Unit into the same memory
        yield "weights/next", flat

    checkpoint = Checkpoint.open(save(tmp_path, 1, stream(), {}))
    assert checkpoint.read("weights/first").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.read("weights/tied").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.read("weights/turned").tolist() == [[6, 9], [7, 10], [8, 11]]
    assert checkpoint.read("weights/next").tolist() == [7.0] * 12


def test_the_tokenizer_travels_along(tmp_path):
    (tmp_path / "t.json").write_text('{"x": 1}')
    checkpoint = Checkpoint.open(save(tmp_path, 1, tensors(), {}, tokenizer=tmp_path / "t.json"))
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.name == "tokenizer.json"
    assert checkpoint.tokenizer.read_text() == '{"x": 1}'


def test_the_last_ones_are_kept(tmp_path):
    assert latest(tmp_path) is None
    for step in (5, 10, 15, 20):
        save(tmp_path, step, tensors(), {})
    assert listing(tmp_path) == ["step_00000010", "step_00000015", "step_00000020"]
    save(tmp_path, 25, tensors(), {}, keep=None)
    assert len(listing(tmp_path)) == 4
    # A run that went back: what was just saved is never what is deleted.
    save(tmp_path, 7, tensors(), {}, keep=2)
    assert listing(tmp_path) == ["step_00000007", "step_00000025"]
    save(tmp_path, 123456789, tensors(), {}, keep=1)
    assert listing(tmp_path) == ["step_123456789"]


def test_a_step_is_replaced(tmp_path):
    save(tmp_path, 5, tensors(0), {"n": 1})
    save(tmp_path, 5, tensors(1), {"n": 2})
    assert listing(tmp_path) == ["step_00000005"]
    checkpoint = Checkpoint.open(tmp_path / "checkpoints" / "step_00000005")
    assert checkpoint.meta == {"n": 2}
    same(checkpoint, tensors(1))


def test_a_replacement_cut_in_half_loses_nothing(tmp_path):
    """Killed after the old folder stepped aside and before the new one took its name."""
    folder = save(tmp_path, 5, tensors(0), {"n": 1})
    folder.rename(folder.with_name(".step_00000005.old"))
    found = latest(tmp_path)
    assert found is not None
    same(Checkpoint.open(found), tensors(0))
    save(tmp_path, 6, tensors(1), {})
    assert listing(tmp_path) == ["step_00000005", "step_00000006"]


def test_a_failing_producer_leaves_nothing(tmp_path):
    save(tmp_path, 1, tensors(), {})

    def failing():
        yield from tensors()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, failing(), {}, shard_bytes=1)
    assert listing(tmp_path) == ["step_00000001"]


def test_leftovers_are_cleaned_and_foreign_files_are_not(tmp_path):
    save(tmp_path, 1, tensors(), {})
    root = tmp_path / "checkpoints"
    for name in (".step_00000002.new.abc", ".step_00000001.gone.77", "notes"):
        (root / name).mkdir()
        (root / name / "file").write_text("x")
    assert latest(tmp_path) == root / "step_00000001"
    save(tmp_path, 3, tensors(), {})
    assert listing(tmp_path) == ["notes", "step_00000001", "step_00000003"]


def test_two_runs_in_one_folder(tmp_path):
    save(tmp_path, 1, tensors(), {})
    with (tmp_path / "checkpoints" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run is saving"):
            save(tmp_path, 2, tensors(), {})
    save(tmp_path, 2, tensors(), {})


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


SHARD = "tensors-00001.safetensors"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (SHARD, truncate),
        (SHARD, Path.unlink),
        ("manifest.json", truncate),
        ("manifest.json", Path.unlink),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"step": 9', '"step": 8'))),
        ("manifest.json", lambda path: path.write_text("[]")),
        ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe")),
        ("tokenizer.json", Path.unlink),
    ],
)
def test_damage_is_found_at_open_and_latest_passes_over_it(tmp_path, name, damage, caplog):
    (tmp_path / "t.json").write_text("{}")
    good = save(tmp_path, 8, tensors(), {})
    bad = save(tmp_path, 9, tensors(), {}, shard_bytes=150, tokenizer=tmp_path / "t.json")
    damage(bad / name)
    with pytest.raises(UserError) as error:
        Checkpoint.open(bad)
    assert str(bad / name) in str(error.value)
    assert latest(tmp_path) == latest(tmp_path) == good
    assert caplog.text.count("passing over") == 1  # said once, however often one asks
    assert str(bad / name) in caplog.text


def test_a_changed_bit_is_found_before_the_first_use(tmp_path):
    folder = save(tmp_path, 9, tensors(), {}, shard_bytes=150)
    flip(folder / SHARD)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.read("weights/a").shape == (5, 7)
    with pytest.raises(UserError, match=f"{SHARD} does not match its checksum: remove {folder} to go on"):
        checkpoint.read("weights/b")


def rewrite_manifest(folder, change):
    from openwafer.checkpoint import _checksum

    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest)
    manifest["checksum"] = _checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_first_format_is_read_and_checked(tmp_path):
    """Files with the SHA-256 of their whole content."""
    folder = save(tmp_path, 1, tensors(), {})

    def downgrade(manifest):
        manifest["format"] = 1
        for name, entry in manifest["files"].items():
            content = (folder / name).read_bytes()
            manifest["files"][name] = {"bytes": entry["bytes"], "sha256": hashlib.sha256(content).hexdigest()}

    rewrite_manifest(folder, downgrade)
    same(Checkpoint.open(folder), tensors())
    flip(folder / "tensors-00000.safetensors")
    with pytest.raises(UserError, match="does not match its checksum"):
        Checkpoint.open(folder).read("weights/a")


def test_a_newer_format_is_refused_even_by_latest(tmp_path):
    save(tmp_path, 1, tensors(), {})
    folder = save(tmp_path, 2, tensors(), {})
    rewrite_manifest(folder, lambda manifest: manifest.update(format=3))
    for attempt in (lambda: Checkpoint.open(folder), lambda: latest(tmp_path)):
        with pytest.raises(UserError, match=r"manifest\.json has format 3.*update openwafer"):
            attempt()


def test_a_manifest_cannot_lead_elsewhere(tmp_path):
    folder = save(tmp_path / "m", 1, tensors(), {})
    save_file({"weights/a": torch.zeros(5, 7)}, tmp_path / "outside.safetensors")
    rewrite_manifest(folder, lambda m: m["tensors"]["weights/a"].update(file="../../../outside.safetensors"))
    with pytest.raises(UserError, match="is damaged"):
        Checkpoint.open(folder)


def test_a_manifest_that_disagrees_with_its_file(tmp_path):
    folder = save(tmp_path, 1, tensors(), {})
    rewrite_manifest(folder, lambda m: m["tensors"]["weights/a"].update(shape=[7, 5]))
    with pytest.raises(UserError, match="weights/a is float32"):
        Checkpoint.open(folder).read("weights/a")


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from openwafer.errors import UserError
from openwafer.checkpoint import Checkpoint, latest, save
model_dir, limit = Path(sys.argv[1]), int(sys.argv[2])
save(model_dir, 1, [("weights/a", torch.ones(1000))], {})
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    save(model_dir, 2, [("weights/a", torch.ones(4_000_000))], {})
except UserError as error:
    print(error)
found = latest(model_dir)
assert found and found.name == "step_00000001", found
assert Checkpoint.open(found).read("weights/a").tolist() == [1.0] * 1000
assert sorted(p.name for p in (model_dir / "checkpoints").iterdir()) == [".lock", "step_00000001"]
"""


def run_script(script, *args):
    done = subprocess.run([sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_write_that_fails_keeps_the_previous_checkpoint(tmp_path):
    said = run_script(FULL_DISK, tmp_path, 1_000_000)
    assert said.startswith(f"cannot write checkpoint {tmp_path}/checkpoints/step_00000002")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)])
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        said = run_script(FULL_DISK, tmp_path, 0)
        assert "No space left" in said
        assert "earlier checkpoints are intact" in said
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# One process that has torch imported forks the writers, which makes a round cost milliseconds.
KILLED = """
import os, random, signal, sys, time, torch
from pathlib import Path
from openwafer.checkpoint import Checkpoint, latest, save
model_dir = Path(sys.argv[1])
random.seed(int(sys.argv[2]))

def stream(step):
    for i in range(6):
        yield f"weights/{i}", torch.full((3000,), float(step))

save(model_dir, 0, stream(0), {"step": 0}, keep=1)
reached, num_kills, parent = 0, 0, os.getpid()
while num_kills < 12 or reached < 3:
    num_kills += 1
    pid = os.fork()
    if pid == 0:
        i = -1
        while os.getppid() == parent:  # it must not outlive the test
            i += 1
            # Each step twice: replacing is at risk as well. keep=1: there is nothing to fall back on.
            step = reached + i // 2
            save(model_dir, step, stream(step), {"step": step}, keep=1, shard_bytes=20000)
    time.sleep(random.uniform(0.02, 0.25))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = latest(model_dir)
    assert found is not None, os.listdir(model_dir / "checkpoints")
    checkpoint = Checkpoint.open(found)
    assert checkpoint.step >= reached
    assert checkpoint.meta == {"step": checkpoint.step}
    for name in checkpoint.names():
        assert torch.equal(checkpoint.read(name), torch.full((3000,), float(checkpoint.step)))
    reached = checkpoint.step
save(model_dir, reached + 1, stream(1), {}, keep=1)
assert len(os.listdir(model_dir / "checkpoints")) == 2
print(reached)
"""


def test_killed_writers_never_leave_a_broken_latest(tmp_path):
    assert int(run_script(KILLED, tmp_path, 1)) >= 3
