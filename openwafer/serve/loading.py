"""From a stored model to the weights of a program, packed tensor by tensor."""

import torch

from openwafer.models.build import build
from openwafer.models.load import StoredModel
from openwafer.models.weights import match
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.matrix import Format, Matrix
from openwafer.serve.program import Program, Weights, build_program

_FORMATS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def load_program(stored: StoredModel, config: EngineConfig) -> Program:
    """The model ready to run; each tensor is packed as it is read, so memory holds the packed model and one tensor."""
    with torch.device("meta"):
        module = build(stored.config)
    weights: Weights = {}
    for matched in match(module, stored.tensors(), str(stored.path)):
        weights[matched.names[0]] = _packed(matched.names[0], matched.tensor, stored, config)
    return build_program(stored.config, weights)


def _packed(name: str, tensor: torch.Tensor, stored: StoredModel, config: EngineConfig) -> Matrix | torch.Tensor:
    # Positions are added as they are, and are few.
    if tensor.dim() != 2 or name == "transformer.wpe.weight":
        return tensor.detach().float().contiguous()
    if config.quantization is not None:
        return Matrix.quantized(tensor, 8 if config.quantization == "int8" else 4)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(config.dtype)
    dtype = wanted or stored.dtype or tensor.dtype
    match _FORMATS.get(dtype, "fp32"):
        case "bf16":
            return Matrix.from_floats(tensor, "bf16")
        case "fp16":
            return Matrix.from_floats(tensor, "fp16")
        case _:
            return Matrix.from_floats(tensor, "fp32")
