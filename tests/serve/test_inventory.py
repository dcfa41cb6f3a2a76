"""The inventory says beforehand what loading then takes."""

import pytest

from openwafer.errors import UserError
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.inventory import take_inventory
from openwafer.serve.loading import load_program
from openwafer.serve.program import Embed, Linear, Program
from openwafer.serve.region import Region, split
from tests.serve.conftest import CONFIGS, stored, tiny_module

OPTIONS = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bf16"}]


def matrix_bytes(program: Program) -> int:
    matrices = {op.matrix for op in (*program.body, *program.head) if isinstance(op, Linear)}
    matrices |= {op.table for op in program.body if isinstance(op, Embed)}
    return sum(matrix.data.nbytes for matrix in matrices)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_loaded_program(name: str, options: dict) -> None:
    model, config = stored(tiny_module(CONFIGS[name])), EngineConfig(**options)
    inventory = take_inventory(model, config)
    whole = Region.whole(model.config)
    program = load_program(model, config)
    vectors = inventory.embedding.vectors + inventory.head.vectors + sum(s.vectors for s in inventory.layers)
    assert inventory.total(whole) == matrix_bytes(program) + vectors
    assert inventory.is_packed == program.is_packed
    regions = split([1.0] * len(inventory.layers), 1.0, 2)
    for region in regions:
        size = inventory.total(region) - sum(inventory.layers[layer].vectors for layer in region.layers)
        size -= inventory.embedding.vectors * region.embeds + inventory.head.vectors * region.has_head
        assert size == matrix_bytes(load_program(model, config, region))


def test_a_weight_that_is_missing_or_strange_is_told_whatever_the_region() -> None:
    model = stored(tiny_module(CONFIGS["llama"]))
    first, second = split([1.0, 1.0], 1.0, 2)
    tensors = dict(model.tensors())

    def without(name: str):
        left = {key: tensor for key, tensor in tensors.items() if key != name}
        object.__setattr__(model, "tensors", lambda wanted: ((n, t) for n, t in left.items() if wanted(n)))

    without("model.layers.1.mlp.up_proj.weight")
    load_program(model, EngineConfig(), first)
    with pytest.raises(UserError, match=r"missing: model\.layers\.1\.mlp\.up_proj"):
        load_program(model, EngineConfig(), second)
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
    without("")
    with pytest.raises(UserError, match="has no place in this model"):
        load_program(model, EngineConfig(), first)
