"""The GGUF container: its header as Python values, its tensors as views of the mapped file.

Every length, count and offset is checked against the file before it is used, so a damaged or hostile file
is a UserError and never a crash, a long wait or a large allocation. The `gguf` package's own reader makes
several NumPy views per string (3.9 s for SmolLM2's 98,000 vocabulary strings, against 0.1 s here) and
trusts what it reads; from that package we take the type table and the dequantisation.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from openwafer.errors import UserError

# The types models are shipped in; all of them are tested against hand-made blocks or the package's encoder.
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

# The codes mean the same to struct and to NumPy.
_SCALARS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# A string's length field plus nothing, or one scalar: what an array item occupies at the least.
_MIN_ITEM_BYTES = {kind: struct.calcsize(code) for kind, code in _SCALARS.items()} | {_STRING: 8}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of the file: `shape` has the slowest dimension first, as PyTorch writes it."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """An open, checked GGUF file: `metadata` by key, `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _mapped(path)
        self._position = 0
        if self._data[:4] != b"GGUF":
            self.fail(f"it begins with {self._data[:4]!r}, not with GGUF: it is another kind of file")
        self._position = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            self.fail(f"its version is {version}; 2 and 3 (little-endian) can be read")
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):  # a key takes at least 13 bytes, so the end of the file bounds this loop
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(self._bounded(num_tensors, 24, "tensors"))]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self._position // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, type_id, shape, offset in infos:
            if name in self.tensors:
                self.fail(f"it has two tensors called {name!r}")
            self.tensors[name] = self._placed(name, type_id, shape, start + offset)

    def fail(self, reason: str) -> NoReturn:
        """Raise the UserError for this file."""
        raise broken(self.path, reason)

    def float32(self, info: TensorInfo) -> np.ndarray:
        """A tensor's values, dequantised into new memory."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[info.type_name]
        raw = self.raw(info)
        with np.errstate(all="ignore"):  # weights that are not finite are the model's business
            if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
                code = "<f4" if kind == GGMLQuantizationType.F32 else "<f2"
                return raw.view(code).reshape(info.shape).astype(np.float32)
            return dequantize(raw, kind).reshape(info.shape)

    def raw(self, info: TensorInfo) -> np.ndarray:
        """A tensor's bytes as they are in the file, uint8 [rows, bytes of a row], not copied."""
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        return raw.reshape(math.prod(info.shape[:-1]), -1)

    def forget(self, info: TensorInfo) -> None:
        """Give back the memory of a tensor that was read: mapped pages count as ours until somebody wants them."""
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, start, info.offset + info.num_bytes - start)

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        if self._position + size > len(self._data):
            self._end()
        (value,) = struct.unpack_from(code, self._data, self._position)
        self._position += size
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        if length > len(self._data) - self._position:
            self._end()
        raw = self._data[self._position : self._position + length]
        self._position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise broken(self.path, f"text at byte {self._position - length} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            self.fail(f"a metadata value at byte {self._position} has the unknown type {kind}")
        item, length = self._scalar("<I"), self._scalar("<Q")
        if item not in _MIN_ITEM_BYTES:
            self.fail(f"a metadata array at byte {self._position} has items of the unknown type {item}")
        self._bounded(length, _MIN_ITEM_BYTES[item], "array items")
        if item == _STRING:
            return [self._string() for _ in range(length)]
        values = np.frombuffer(self._data, dtype=_SCALARS[item], count=length, offset=self._position)
        self._position += values.nbytes
        return values.tolist()

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            self.fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(num_dims)]))
        return name, self._scalar("<I"), shape, self._scalar("<Q")

    def _placed(self, name: str, type_id: int, shape: tuple[int, ...], offset: int) -> TensorInfo:
        """The tensor with its bytes found inside the file."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        type_name = next((kind.name for kind in GGMLQuantizationType if kind == type_id), f"number {type_id}")
        if type_name not in TENSOR_TYPES:
            self.fail(f"tensor {name!r} has type {type_name}; readable: {', '.join(TENSOR_TYPES)}")
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        num_elements = math.prod(shape)
        if num_elements == 0 or shape[-1] % block_size:
            self.fail(f"tensor {name!r} has shape {shape}, which {type_name} cannot hold")
        num_bytes = num_elements // block_size * block_bytes
        if offset + num_bytes > len(self._data):
            self.fail(
                f"tensor {name!r} should end at byte {offset + num_bytes}, the file has {len(self._data)}: "
                "it is cut off or damaged; fetch it again"
            )
        return TensorInfo(name=name, type_name=type_name, shape=shape, offset=offset, num_bytes=num_bytes)

    def _bounded(self, count: int, item_bytes: int, what: str) -> int:
        left = len(self._data) - self._position
        if count * item_bytes > left:
            self.fail(f"it announces {count} {what}, more than fit in the {left} bytes that are left")
        return count

    def _end(self) -> NoReturn:
        self.fail("it ends inside its header: it is cut off or damaged; fetch it again")


def broken(path: Path, reason: str) -> UserError:
    """The error for a GGUF file that cannot be used."""
    return UserError(f"cannot read {path} as GGUF: {reason}")


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except ValueError:
        raise broken(path, "it is empty") from None
    except OSError as error:
        raise broken(path, str(error)) from None
