"""A snapshot is of one moment: fp32 masters, whatever holds them and whatever training does meanwhile."""

import threading
from pathlib import Path

import pytest
import torch

from openwafer import checkpoint
from openwafer.graph import Graph, capture
from openwafer.graph.deferred import deferred
from openwafer.memoryx import snapshot
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.flash import FlashTier
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.placement import close_tiers
from openwafer.memoryx.store import Store, Wire, fields
from openwafer.memoryx.tier import DramTier, Key, Tier
from openwafer.memoryx.update import UpdateNumbers
from openwafer.models.build import build
from openwafer.models.config import ModelConfig

Values = dict[tuple[str, str], torch.Tensor]
FROZEN = "transformer.h.0.mlp.c_fc.weight"


@pytest.fixture(scope="module")
def graph() -> Graph:
    size = {"hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "vocab_size": 61, "max_position_embeddings": 8}
    with deferred():
        module = build(ModelConfig(**size))
    module.get_parameter(FROZEN).requires_grad_(False)
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    return capture(module.train(), (), {"input_ids": ids, "labels": ids.clone()})


def tiers_of(kind: str, keys: list[Key], folder: Path) -> dict[Key, Tier]:
    """`dram` and `no room` have everything there, `flash` nothing; else DRAM has only the fields that are named."""
    dram = DramTier(snapshot_bytes=0 if kind == "no room" else 20_000)
    if kind in ("dram", "no room"):
        return dict.fromkeys(keys, dram)
    flash = FlashTier(folder, 1 << 20, num_threads=2)
    return {key: dram if key[1] in kind.split() else flash for key in keys}


def store_of(
    graph: Graph, folder: Path, wire: Wire, kind: str = "dram", config: OptimizerConfig | None = None
) -> tuple[Store, dict[Key, Tier]]:
    optimizer = make_optimizer(config or OptimizerConfig())
    tiers = tiers_of(kind, [spec.key for spec in fields(graph, optimizer, wire)], folder)
    return Store(graph, optimizer, tiers, wire), tiers


def random_values(store: Store) -> Values:
    """A value for every field of every weight, as a checkpoint would have it."""
    generator = torch.Generator().manual_seed(1)
    dtype = store.optimizer.state_dtype
    return {
        (name, field): torch.randn(segment.shape, generator=generator).to(torch.float32 if field == "wire" else dtype)
        for name, parts in store.segments.items()
        for field, segment in parts.items()
        if field != "remainder"
    }


def write(store: Store, values: Values) -> None:
    store.write_all((name, field, value) for (name, field), value in values.items())


def assert_equal(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value), key


MIXES = ["dram", "no room", "flash", "wire", "remainder m", "wire remainder", "m v"]


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MIXES)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_it_is_of_the_moment_it_was_taken(
    graph: Graph, wire: Wire, kind: str, state_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_PIECE", 700)  # most weights are larger: they come in several pieces
    config = OptimizerConfig(kind="adamw", state_dtype=state_dtype, beta2=0.9, lr=0.1)
    store, tiers = store_of(graph, tmp_path, wire, kind, config)
    values = random_values(store)
    for (_, field), value in values.items():
        if field == "v":
            value.abs_()
    write(store, values)
    taken = store.freeze()
    must_stop, num_rounds = threading.Event(), 0

    def train() -> None:
        nonlocal num_rounds
        while not must_stop.is_set():
            num_rounds += 1
            for unit in reversed(graph.units):
                weights = [weight for weight in graph.owned(unit) if weight.requires_grad]
                gradients = {weight.name: torch.ones(weight.spec.shape) for weight in weights}
                store.update(unit, gradients, UpdateNumbers(lr=0.1, step=num_rounds, divisor=1.0))

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        found: Values = {}
        for name, field, value in taken.read_all():
            assert (name, field) not in found
            found[name, field] = value.clone()
            must_stop.wait(0.001)  # slowly enough for training to run into it
    finally:
        must_stop.set()
        taken.close()
        trainer.join()
    assert_equal(found, values)
    after = {(name, field): value.clone() for name, field, value in store.read_all()}
    assert all(torch.equal(after[key], value) == (key[0] == FROZEN) for key, value in values.items() if key[1] != "v")
    with_pause = store.freeze()
    assert_equal({(name, field): value.clone() for name, field, value in with_pause.read_all()}, after)
    with_pause.close()
    close_tiers(tiers)


def test_a_checkpoint_does_not_depend_on_the_wire(graph: Graph, tmp_path: Path) -> None:
    folders = []
    for wire, kind in (("fp32", "dram"), ("bf16", "dram"), ("bf16", "wire")):
        store, tiers = store_of(graph, tmp_path / "flash", wire, kind)
        write(store, random_values(store))
        taken = store.freeze()
        named = ((f"{field}/{name}", value) for name, field, value in taken.read_all())
        folders.append(checkpoint.save(tmp_path / wire / kind, 1, named, {}))
        taken.close()
        close_tiers(tiers)
    first, *others = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert len(first) >= 2
    assert all(other == first for other in others)


def test_memory_is_one_weight_and_one_piece(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_PIECE", 700)
    store, tiers = store_of(graph, tmp_path, "bf16", "flash")
    flash = next(iter(tiers.values()))
    assert isinstance(flash, FlashTier)
    taken = store.freeze()
    largest = max(4 * segment.num_elements for parts in store.segments.values() for segment in parts.values())
    for _ in taken.read_all():
        assert taken._buffer.nbytes <= largest
        assert flash._reader is not None
        assert flash._reader.nbytes <= 2 * 4096
    taken.close()
    close_tiers(tiers)
