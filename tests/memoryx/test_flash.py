"""The flash tier against a dict, and what happens to it when its files or its disk fail."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.direct_io import aligned_bytes
from openwafer.errors import UserError
from openwafer.memoryx.flash import FlashTier

SIZES = [1024, 1024, 1024, 3000, 16, 5000]  # elements of fp32: 4096, 12288, 4096, 20480 bytes with padding
KEYS = [(index, "m") for index in range(len(SIZES))]
ROOT = Path(__file__).parents[2]

operation = st.tuples(
    st.sampled_from(["load", "load", "change", "prefetch", "release", "freeze", "read_frozen", "drop", "thaw"]),
    st.integers(0, len(SIZES) - 1),
    st.floats(-100, 100, width=32),
)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FlashTier]:
    made = tier_of(tmp_path / "flash", 40960)
    yield made
    made.close()


def tier_of(folder: Path, pool_bytes: int) -> FlashTier:
    made = FlashTier(folder, pool_bytes, num_threads=3)
    for key, size in zip(KEYS, SIZES, strict=True):
        made.create(key, size, torch.float32)
    return made


def used_bytes(tier: FlashTier) -> int:
    return tier._used_bytes


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(operation, max_size=60), pool_blocks=st.integers(11, 30))
def test_it_behaves_as_a_dict(operations: list[tuple[str, int, float]], pool_blocks: int) -> None:
    expected = {key: torch.zeros(size) for key, size in zip(KEYS, SIZES, strict=True)}
    frozen: dict[tuple[int, str], torch.Tensor] = {}
    loaded: dict[tuple[int, str], tuple[torch.Tensor, bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tier = tier_of(Path(folder), pool_blocks * 4096)
        for action, index, value in operations:
            key = KEYS[index]
            if action in ("load", "change") and key not in loaded and sum(KEYS[i] in loaded for i in range(6)) < 2:
                array = tier.load(key)
                assert torch.equal(array, expected[key])
                if action == "change":
                    tier.preserve(key)
                    array[index % len(array) :] = value
                    expected[key][index % len(array) :] = value
                loaded[key] = (array, action == "change")
            elif action == "release" and loaded:
                released = next(iter(loaded))
                tier.release(released, changed=loaded.pop(released)[1])
            elif action == "prefetch":
                tier.prefetch(key)
            elif action == "freeze" and not loaded and not frozen:
                tier.freeze()
                frozen = {key: array.clone() for key, array in expected.items()}
            elif action == "read_frozen" and key in frozen:
                assert torch.equal(tier.read_frozen(key, 3, 10), frozen[key][3:13])
                assert torch.equal(tier.read_frozen(key, 0, len(frozen[key])), frozen[key])
            elif action == "drop" and key in frozen:
                tier.drop_frozen(key)
                del frozen[key]
            elif action == "thaw":
                tier.thaw()
                frozen.clear()
            assert used_bytes(tier) <= pool_blocks * 4096
        for key in list(loaded):
            tier.release(key, changed=loaded.pop(key)[1])
        for key in KEYS:
            assert torch.equal(tier.load(key), expected[key])
            tier.release(key, changed=False)
        tier.close()
        assert [name for name in os.listdir(folder) if name != ".lock"] == []


def test_many_passes_on_a_pool_of_one_array(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 20480)
    for turn in range(30):
        for key in KEYS if turn % 2 else reversed(KEYS):
            tier.prefetch(key)
            array = tier.load(key)
            assert torch.equal(array, torch.full_like(array, turn))
            array += 1
            tier.release(key, changed=True)
            assert used_bytes(tier) <= 20480
    tier.close()


def test_a_pending_write_is_not_read_back(tier: FlashTier) -> None:
    before = tier.load(KEYS[0]).data_ptr()
    tier.release(KEYS[0], changed=True)
    assert tier.load(KEYS[0]).data_ptr() == before
    tier.release(KEYS[0], changed=False)


def test_a_new_array_is_a_hole(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path, 1 << 40)
    tier.create((0, "wire"), 1 << 33, torch.float32)  # 32 GiB
    assert (tmp_path / "00000.wire.0.flash").stat().st_blocks == 0
    tier.close()


def test_more_at_one_time_than_the_pool_holds_is_said(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 20480)
    tier.load(KEYS[5])
    with pytest.raises(UserError, match=r"24,576 bytes of flash arrays are in use at one time.*20,480"):
        tier.load(KEYS[0])
    tier.release(KEYS[5], changed=False)
    tier.load(KEYS[0])
    tier.close()
    with pytest.raises(UserError, match=r"hold 8,192 bytes.*needs 12,288"):
        tier_of(tmp_path, 8192)


def test_a_load_waits_for_another_threads_release(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 20480)
    tier.load(KEYS[5])
    other = threading.Thread(target=lambda: tier.release(KEYS[0], changed=tier.load(KEYS[0]).sum().item() > 0))
    other.start()
    other.join(0.2)
    assert other.is_alive()
    tier.release(KEYS[5], changed=True)
    other.join(10)
    assert not other.is_alive()
    tier.close()


def change(tier: FlashTier, index: int, times: int = 1) -> None:
    for _ in range(times):
        tier.load(KEYS[index]).add_(1)
        tier.release(KEYS[index], changed=True)


def test_a_missing_file(tier: FlashTier, tmp_path: Path) -> None:
    path = tmp_path / "flash" / "00001.m.0.flash"
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read .*00001\.m\.0\.flash: No such file.*same command resumes"):
        tier.load(KEYS[1])
    with pytest.raises(UserError, match=r"00001"):  # and from then on
        tier.load(KEYS[0])


def test_a_truncated_file(tier: FlashTier, tmp_path: Path) -> None:
    os.truncate(tmp_path / "flash" / "00003.m.0.flash", 8192)
    tier.prefetch(KEYS[3])
    with pytest.raises(UserError, match=r"cannot read .*00003\.m\.0\.flash: the file is shorter"):
        tier.load(KEYS[3])


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_an_unreadable_block(tier: FlashTier, tmp_path: Path) -> None:
    path = tmp_path / "flash" / "00002.m.0.flash"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # reading its first page is a real EIO
    with pytest.raises(UserError, match=r"cannot read .*00002\.m\.0\.flash: Input/output error; the disk may be"):
        tier.load(KEYS[2])


def test_a_full_disk(tier: FlashTier, tmp_path: Path) -> None:
    path = tmp_path / "flash" / "00004.m.0.flash"
    path.unlink()
    path.symlink_to("/dev/full")
    tier.load(KEYS[4]).add_(1)
    tier.release(KEYS[4], changed=True)  # written behind: the next call tells
    with pytest.raises(UserError, match=r"cannot write .*00004\.m\.0\.flash: No space left.*free some space"):
        tier.flush()
    with pytest.raises(UserError, match=r"00004"):
        tier.load(KEYS[0])


def test_two_runs_in_one_folder(tier: FlashTier, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is used by another run: give each run its own --flash"):
        FlashTier(tmp_path / "flash", 1 << 20)
    change(tier, 0)  # the first one is not disturbed
    tier.flush()


def test_what_a_killed_run_left_is_removed_and_other_files_are_not(tmp_path: Path) -> None:
    script = (
        "import os, sys, torch, pathlib\n"
        "from openwafer.memoryx.flash import FlashTier\n"
        "t = FlashTier(pathlib.Path(sys.argv[1]), 1 << 20)\n"
        "key = (7, 'm')\n"
        "t.create(key, 64, torch.float32); t.load(key).add_(1); t.release(key, changed=True); t.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False)
    (tmp_path / "notes.txt").write_text("mine")
    assert (tmp_path / "00007.m.0.flash").stat().st_size == 4096
    tier = tier_of(tmp_path, 40960)
    assert not (tmp_path / "00007.m.0.flash").exists()
    tier.close()
    assert sorted(os.listdir(tmp_path)) == [".lock", "notes.txt"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs")
def test_without_direct_io() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tier = tier_of(Path(folder), 20480)
        for index in range(6):
            change(tier, index, times=index + 1)
        for index in range(6):
            array = tier.load(KEYS[index])
            assert torch.equal(array, torch.full_like(array, index + 1))
            tier.release(KEYS[index], changed=False)
        tier.close()


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot use flash folder .*file"):
        FlashTier(tmp_path / "file", 1 << 20)


def test_closing_wakes_whoever_waits(tmp_path: Path) -> None:
    tier = tier_of(tmp_path / "flash", 20480)
    tier.load(KEYS[5])  # takes all of the pool
    told: list[str] = []

    def load() -> None:
        try:
            tier.load(KEYS[3])
        except UserError as error:
            told.append(str(error))

    waiter = threading.Thread(target=load)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    tier.close()
    waiter.join(30)
    assert not waiter.is_alive()
    assert "was closed while it was in use" in told[0]


def test_no_memory_for_a_buffer_reaches_whoever_waits(tmp_path: Path) -> None:
    def allocate(num_bytes: int) -> torch.Tensor:
        if num_bytes > 4096:
            raise UserError("no memory to be had")
        return aligned_bytes(num_bytes)

    tier = FlashTier(tmp_path / "flash", 12288, num_threads=1, allocate=allocate)
    tier.create((0, "m"), 1024, torch.float32)
    tier.create((1, "m"), 3072, torch.float32)
    tier.create((2, "m"), 1024, torch.float32)
    for index in (0, 2):
        tier.load((index, "m")).fill_(1.0)
    tier.prefetch((1, "m"))  # no room yet
    for index in (0, 2):
        with contextlib.suppress(UserError):
            tier.release((index, "m"), changed=True)
    with pytest.raises(UserError, match="no memory to be had"):  # a thread made room by writing, and found no memory
        tier.flush()
    tier.close()
