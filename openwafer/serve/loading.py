"""From a stored model to a program, packed tensor by tensor."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from openwafer.models.build import build
from openwafer.models.gguf import RawTensor
from openwafer.models.load import StoredModel
from openwafer.models.weights import match
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gguf_blocks import matrix_from_raw
from openwafer.serve.matrix import Matrix
from openwafer.serve.program import Program, Weights, build_program

_INITIALISERS = {"normal_", "zeros_", "ones_", "constant_", "zero_", "fill_"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_program(stored: StoredModel, config: EngineConfig) -> Program:
    """The model ready to run; each tensor is packed as it is read, so memory holds the packed model and one tensor."""
    with torch.device("meta"), _NoInitialisation():
        module = build(stored.config)  # for names and shapes only
    weights: Weights = {}
    if stored.raw is not None and config.dtype == "auto" and config.quantization is None:
        given: dict[str, RawTensor | torch.Tensor] = {}
        for matched in match(module, _described(stored.raw(), given), str(stored.path)):
            ((_, raw),) = given.items()
            given.clear()
            weights[matched.names[0]] = _as_stored(matched.names[0], raw)
    else:
        for matched in match(module, stored.tensors(), str(stored.path)):
            weights[matched.names[0]] = _packed(matched.names[0], matched.tensor, stored, config)
    return build_program(stored.config, weights)


class _NoInitialisation(TorchFunctionMode):
    """Leaves new parameters as they are: on the meta device alone, initialising loads 3 s worth of modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _INITIALISERS and args:
            return args[0]
        return func(*args, **kwargs or {})


def _described(
    tensors: Iterator[tuple[str, RawTensor | torch.Tensor]], given: dict[str, RawTensor | torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `match` checks: names and shapes. The tensor that was described last is in `given`."""
    for name, tensor in tensors:
        given[name] = tensor
        yield name, torch.empty(tensor.shape, device="meta")


def _as_stored(name: str, tensor: RawTensor | torch.Tensor) -> Matrix | torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor
    matrix = matrix_from_raw(tensor)
    return matrix.dense() if _is_vector(name) else matrix


def _packed(name: str, tensor: torch.Tensor, stored: StoredModel, config: EngineConfig) -> Matrix | torch.Tensor:
    if tensor.dim() != 2 or _is_vector(name):
        return tensor.detach().float().contiguous()
    if config.quantization is not None:
        return Matrix.quantized(tensor, 8 if config.quantization == "int8" else 4)
    dtype = _DTYPES.get(config.dtype) or stored.dtype or tensor.dtype
    if dtype == torch.bfloat16:
        return Matrix.from_floats(tensor, "bf16")
    return Matrix.from_floats(tensor, "fp16" if dtype == torch.float16 else "fp32")


def _is_vector(name: str) -> bool:
    """Learned positions are looked up and added as they are."""
    return name == "transformer.wpe.weight"
