"""Files written in chunks by threads are what the safetensors library reads, and every bit of them is checked."""

import errno
import hashlib
import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from openwafer import tensor_file
from openwafer.direct_io import has_direct
from openwafer.tensor_file import CHUNK_BYTES, HEADER_BYTES, ChunkPool, TensorFile, digest_of, header_bytes_for


def written(path: Path, tensors: dict[str, torch.Tensor], *, direct: bool = True, threads: int = 3) -> TensorFile:
    pool = ChunkPool(threads)
    name, first = next(iter(tensors.items()))
    file = TensorFile(path, pool, direct=direct, header_bytes=header_bytes_for(name, first))
    for name, tensor in tensors.items():
        assert file.has_room(name, tensor)
        file.add(name, tensor)
    file.finish()
    pool.close()
    return file


def random(num_elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_elements)
    return torch.randint(-100, 100, (num_elements,), generator=generator).to(dtype)


CHUNK = CHUNK_BYTES // 4  # elements


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "sizes", [[0], [1], [CHUNK], [CHUNK - 1, 1, 3], [CHUNK + 1, 5, 0, 2 * CHUNK], [3 * CHUNK - 7]], ids=str
)
def test_the_library_reads_what_was_written(tmp_path: Path, sizes: list[int], direct: bool) -> None:
    tensors = {f"t{number}": random(size) for number, size in enumerate(sizes)}
    file = written(tmp_path / "file", tensors, direct=direct and has_direct(tmp_path))
    loaded = load_file(file.path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert file.path.stat().st_size == HEADER_BYTES + 4 * sum(sizes)
    # The definition, in a few lines: pieces are hashed, then their hashes.
    content = file.path.read_bytes()
    ends = [0, HEADER_BYTES, *range(HEADER_BYTES + CHUNK_BYTES, len(content), CHUNK_BYTES), len(content)]
    pieces = [content[start:end] for start, end in itertools.pairwise(ends) if end > start]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    assert file.digest == digest_of(file.path, HEADER_BYTES, CHUNK_BYTES) == expected


def test_every_kind_of_damage_changes_the_digest(tmp_path: Path) -> None:
    file = written(tmp_path / "file", {"a": random(CHUNK + 5), "b": random(CHUNK)})
    content = file.path.read_bytes()
    swapped = bytearray(content)
    first, second = slice(HEADER_BYTES, HEADER_BYTES + CHUNK_BYTES), slice(HEADER_BYTES + CHUNK_BYTES, None)
    swapped[first], swapped[second] = content[second][:CHUNK_BYTES], content[first] + content[-20:]
    for position in (0, 9, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + CHUNK_BYTES, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 1
        file.path.write_bytes(damaged)
        assert digest_of(file.path, HEADER_BYTES, CHUNK_BYTES) != file.digest, position
    for damaged in (swapped, content[:-1], content + b"\0", b"", content[: HEADER_BYTES + CHUNK_BYTES]):
        file.path.write_bytes(damaged)
        assert digest_of(file.path, HEADER_BYTES, CHUNK_BYTES) != file.digest
    file.path.write_bytes(content)
    assert digest_of(file.path, HEADER_BYTES, CHUNK_BYTES) == file.digest


def test_without_its_end_a_file_has_no_header(tmp_path: Path) -> None:
    pool = ChunkPool(2)
    file = TensorFile(tmp_path / "file", pool, direct=False)
    file.add("a", random(3 * CHUNK))
    pool.close()
    file.close()
    assert file.digest is None
    assert file.path.stat().st_size > CHUNK_BYTES
    with pytest.raises(SafetensorError):
        load_file(file.path)


def test_the_caller_may_change_a_tensor_at_once(tmp_path: Path) -> None:
    pool, tensor = ChunkPool(1), torch.zeros(3 * CHUNK + 1)
    file = TensorFile(tmp_path / "file", pool, direct=has_direct(tmp_path))
    for number in range(4):
        tensor.fill_(number)
        file.add(str(number), tensor)
    tensor.fill_(-1)
    file.finish()
    pool.close()
    assert all(bool((value == int(name)).all()) for name, value in load_file(file.path).items())


def test_memory_is_a_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    allocate = tensor_file.aligned_bytes
    monkeypatch.setattr(tensor_file, "aligned_bytes", lambda size: made.append(size) or allocate(size))
    written(tmp_path / "file", {"a": torch.zeros(20 * CHUNK)}, threads=2)
    assert sum(made) <= 3 * CHUNK_BYTES + HEADER_BYTES


def test_room_and_alignment(tmp_path: Path) -> None:
    pool = ChunkPool(1)
    long = "x" * 100_000
    file = TensorFile(tmp_path / "a", pool, direct=False, header_bytes=header_bytes_for(long, random(1)))
    assert file.has_room(long, random(1))
    file.add(long, random(1))
    assert not file.has_room(long + "y", random(1))  # the header is full
    assert file.has_room("z", random(1))
    assert not file.has_room("z", random(1, torch.float64))  # it would start at byte 4
    file.finish()
    pool.close()
    assert torch.equal(load_file(file.path)[long], random(1))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told_to_the_writer(tmp_path: Path) -> None:
    pool = ChunkPool(2)
    file = TensorFile(tmp_path / "file", pool, direct=False)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._file)
    os.close(full)
    with pytest.raises(OSError, match="No space left") as caught:
        file.add("a", random(20 * CHUNK))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        pool.close()
    file.close()
