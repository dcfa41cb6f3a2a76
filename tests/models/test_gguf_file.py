"""The GGUF container: quantisation types, damage of every kind."""

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openwafer.errors import UserError
from openwafer.models.gguf import load_gguf
from openwafer.models.gguf_file import GgufFile
from openwafer.models.gguf_tokenizer import tokenizer_from_gguf


def test_metadata_and_shapes(write_gguf):
    path = write_gguf(
        "llama",
        {"a.int": 7, "a.float": 0.5, "a.bool": True, "a.text": "é", "a.texts": ["x", ""], "a.ints": [1, -2]},
        {"t": np.arange(6, dtype=np.float32).reshape(2, 3)},
    )
    file = GgufFile(path)
    assert file.metadata == {
        "general.architecture": "llama",
        "a.int": 7,
        "a.float": 0.5,
        "a.bool": True,
        "a.text": "é",
        "a.texts": ["x", ""],
        "a.ints": [1, -2],
    }
    assert np.array_equal(file.float32(file.tensors["t"]), [[0, 1, 2], [3, 4, 5]])


# Half a step of the coarsest scale of a block, as a share of its largest value.
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("F16", 1e-3),
        ("BF16", 8e-3),
        ("Q8_0", 8e-3),
        ("Q5_0", 0.07),
        ("Q5_1", 0.07),
        ("Q4_0", 0.14),
        ("Q4_1", 0.14),
    ],
)
def test_encoded_values_come_back(write_gguf, name, error):
    values = np.random.default_rng(0).uniform(-1, 1, (3, 64)).astype(np.float32)
    raw = values.astype(np.float16) if name == "F16" else gguf.quants.quantize(values, Kind[name])
    path = write_gguf("llama", {}, {"t": (raw, None if name == "F16" else Kind[name])})
    file = GgufFile(path)
    assert file.tensors["t"].shape == (3, 64)
    assert np.abs(file.float32(file.tensors["t"]) - values).max() <= error


def test_k_quants(write_gguf):
    """Blocks of 256 made by hand: the package decodes these types but does not encode them."""
    one, zero = np.float16(1).tobytes(), np.float16(0).tobytes()
    # Q6_K: low bits, high bits, 16 scales, d. Value = d * scale * (q - 32); here q = 0b10_0101, scale 2.
    q6 = bytes([0x55] * 128 + [0xAA] * 64 + [2] * 16) + one
    # Q4_K and Q5_K: d, dmin, 12 bytes of scales and minima, quants. The first 4 scales are the low 6 bits of
    # bytes 0-3, the last 4 the low nibbles of bytes 8-11; here 3 for all of them, minima off.
    scales = bytes([3] * 4 + [0] * 4 + [3] * 4)
    q4 = one + zero + scales + bytes([0x7] * 128)  # low nibble 7, high nibble 0
    q5 = one + zero + scales + bytes([0xFF] * 32) + bytes([0x77] * 128)  # fifth bit set
    blocks = {"Q6_K": q6, "Q4_K": q4, "Q5_K": q5}
    path = write_gguf("llama", {}, {k: (np.frombuffer(v, np.uint8).reshape(1, -1), Kind[k]) for k, v in blocks.items()})
    file = GgufFile(path)
    found = {name: file.float32(info) for name, info in file.tensors.items()}
    assert np.array_equal(found["Q6_K"], np.full((1, 256), 2 * (0b100101 - 32)))
    assert np.array_equal(found["Q4_K"], np.tile(np.repeat([21.0, 0.0], 32), 4)[None])
    assert np.array_equal(found["Q5_K"], np.full((1, 256), 3 * (7 + 16)))


def _header(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GG", "not with GGUF"),
        (b"PK\3\4" + b"\0" * 60, "not with GGUF"),
        (b"GGUF" + struct.pack("<I", 1), "version is 1"),
        (b"GGUF" + struct.pack(">I", 3), "version is"),
        (_header(0, 2**63), "ends inside its header"),
        (_header(2**63, 0), "more than fit"),
        (_header(0, 1, struct.pack("<Q", 2**64 - 1)), "ends inside its header"),
        (_header(0, 1, struct.pack("<QcIIQ", 1, b"k", 9, 4, 2**61)), "more than fit"),
        (_header(0, 1, struct.pack("<QcIIQ", 1, b"k", 9, 9, 1)), "unknown type 9"),
        (_header(0, 1, struct.pack("<QcI", 1, b"k", 99)), "unknown type 99"),
        (_header(0, 1, struct.pack("<QcIB", 1, b"\xff", 0, 0)), "not UTF-8"),
        (_header(1, 0, struct.pack("<QcIQIQ", 1, b"t", 1, 2**40, 0, 0)), "cut off"),
        (_header(1, 0, struct.pack("<QcIQQIQ", 1, b"t", 2, 2**32, 2**32, 0, 0)), "cut off"),
        (_header(1, 0, struct.pack("<QcIQIQ", 1, b"t", 1, 0, 0, 0)), "cannot hold"),
        (_header(1, 0, struct.pack("<QcIQIQ", 1, b"t", 1, 31, 8, 0)), "cannot hold"),
        (_header(1, 0, struct.pack("<QcIQIQ", 1, b"t", 1, 256, 10, 0)), "Q2_K"),
        (_header(1, 0, struct.pack("<QcIQIQ", 1, b"t", 1, 8, 777, 0)), "number 777"),
        (_header(1, 0, struct.pack("<QcI", 1, b"t", 2**31) + b"\0" * 24), "dimensions"),
        (_header(0, 1, struct.pack("<Q17sII", 17, b"general.alignment", 4, 3)), "power of two"),
    ],
)
def test_malformed(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_no_such_file_and_a_folder(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(UserError, match="cannot read"):
        GgufFile(tmp_path)


def test_two_tensors_of_one_name(write_gguf):
    path = write_gguf("llama", {}, {"aa": np.zeros(8), "ab": np.zeros(8)})
    path.write_bytes(path.read_bytes().replace(b"ab", b"aa"))
    with pytest.raises(UserError, match="two tensors called 'aa'"):
        GgufFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_a_user_error(write_gguf, tiny_llama, tmp_path: Path, data: st.DataObject):
    path = write_gguf("llama", *tiny_llama)
    assert tokenizer_from_gguf(path).vocab_size == len(load_gguf(path).model.embed_tokens.weight)
    good = path.read_bytes()
    header = good.index(b"blk.0.ffn_down.weight") + 64
    content = bytearray(good)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, header))] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 127, 255]))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content[: data.draw(st.none() | st.integers(0, len(good)))])
    for read in (load_gguf, tokenizer_from_gguf):
        with contextlib.suppress(UserError):
            read(bad)
