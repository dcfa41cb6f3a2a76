"""Which field of which Unit lives in which tier, under a budget.

Wires come first: they are streamed twice per step, the other fields once. Fields go to flash as soon as the
budget is full, and then part of it serves as buffers for them: a Unit that is worked on, the next one being read
and the last one being written.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from openwafer.direct_io import BLOCK_BYTES, aligned_bytes, rounded_up
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.memoryx.config import MemoryConfig
from openwafer.memoryx.flash import FlashTier
from openwafer.memoryx.optimizer import Optimizer
from openwafer.memoryx.snapshot import PIECE_BYTES
from openwafer.memoryx.store import FieldSpec, Wire, fields, layout
from openwafer.memoryx.tier import DramTier, Key, Tier

# Buffers for this many times the largest Unit on flash let reads, work and writes overlap; one time is enough to run.
_WANTED_UNITS = 2
_SNAPSHOT_SHARE = 10  # a checkpoint may use a tenth of the budget on top of it


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything goes, in bytes."""

    dram: frozenset[Key]
    flash: frozenset[Key]
    dram_bytes: int
    flash_bytes: int
    pool_bytes: int  # buffers for what is on flash
    reader_bytes: int  # the buffer with which checkpoints read what is on flash

    @property
    def total_dram_bytes(self) -> int:
        return self.dram_bytes + self.pool_bytes + self.reader_bytes

    def __str__(self) -> str:
        text = f"state: {shown(self.dram_bytes)} in DRAM"
        if self.flash:
            text += f", {shown(self.flash_bytes)} on flash, {shown(self.pool_bytes + self.reader_bytes)} of buffers"
        return text


def place(graph: Graph, optimizer: Optimizer, config: MemoryConfig, wire: Wire = "fp32") -> Placement:
    """Decide, or say how much memory is missing."""
    specs = fields(graph, optimizer, wire)
    total = sum(spec.num_bytes for spec in specs)
    if config.dram is None or total <= config.dram:
        keys = frozenset(spec.key for spec in specs)
        return Placement(dram=keys, flash=frozenset(), dram_bytes=total, flash_bytes=0, pool_bytes=0, reader_bytes=0)
    if config.flash is None:
        raise UserError(
            f"weights and optimizer state need {shown(total)}, dram is {shown(config.dram)}: "
            f"{shown(total - config.dram)} are missing; raise --dram or give a folder with --flash"
        )
    together = _used_together(graph, specs)
    reader = _reader_bytes(graph, optimizer)
    for num_units in range(_WANTED_UNITS, 0, -1):
        placement = _fill(specs, together, config.dram, reader, num_units)
        if placement is not None:
            return placement
    least = max(_pool_bytes(specs, keys) for keys in together) + reader
    raise UserError(
        f"dram {shown(config.dram)} is too small: the largest Unit needs {shown(least)} of buffers to be worked on "
        f"from flash; give at least --dram {least}"
    )


def open_tiers(
    placement: Placement,
    config: MemoryConfig,
    *,
    make_dram: Callable[[int | None], DramTier] = DramTier,
    allocate: Callable[[int], Tensor] = aligned_bytes,
) -> dict[Key, Tier]:
    """The tier of each key. Whoever opens them closes them, see `close_tiers`.

    `make_dram` is given the bytes for snapshots; `allocate` makes the buffers of what is on flash.
    """
    snapshot = config.snapshot
    if snapshot is None and config.dram is not None:
        snapshot = config.dram // _SNAPSHOT_SHARE
    dram = make_dram(snapshot)
    tiers: dict[Key, Tier] = dict.fromkeys(placement.dram, dram)
    if placement.flash:
        assert config.flash is not None
        flash = FlashTier(config.flash, placement.pool_bytes, allocate=allocate)
        try:
            _check_space(config.flash, placement.flash_bytes)
        except UserError:
            flash.close()
            raise
        tiers |= dict.fromkeys(placement.flash, flash)
    return tiers


def check_space_to_save(placement: Placement, config: MemoryConfig) -> None:
    """For a run that trains while a checkpoint is written: what changes meanwhile is on flash twice. The tiers are
    open and nothing is on flash yet."""
    if not placement.flash:
        return
    assert config.flash is not None
    free, needed = shutil.disk_usage(config.flash).free, 2 * placement.flash_bytes
    if free < needed:
        raise UserError(
            f"flash folder {config.flash} has {shown(free)} free, {shown(needed)} are needed: training goes on while "
            "a checkpoint is written, and what it changes is then there twice; free some space, choose another "
            "folder, raise --dram, or leave out --checkpoint_every to save only at the end"
        )


def close_tiers(tiers: Mapping[Key, Tier]) -> None:
    for tier in dict.fromkeys(tiers.values()):
        tier.close()


def shown(num_bytes: int) -> str:
    """A size for people: `12.3 GiB`."""
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def _fill(
    specs: Sequence[FieldSpec], together: Sequence[frozenset[Key]], dram: int, reader: int, num_units: int
) -> Placement | None:
    """Into DRAM, in order, what fits beside the buffers that the rest needs; None if not even those fit."""
    groups_of: dict[Key, list[int]] = {}
    for number, keys in enumerate(together):
        for key in keys:
            groups_of.setdefault(key, []).append(number)
    on_flash = [_pool_bytes(specs, keys) for keys in together]  # per Unit
    left = {spec.key: spec for spec in specs}
    left_bytes = sum(rounded_up(spec.num_bytes) for spec in specs)
    kept_bytes = 0

    def pool_bytes() -> int:
        return min(num_units * max(on_flash), left_bytes)

    def move(spec: FieldSpec, sign: int) -> None:
        nonlocal kept_bytes, left_bytes
        kept_bytes += sign * spec.num_bytes
        left_bytes -= sign * rounded_up(spec.num_bytes)
        for number in groups_of[spec.key]:
            on_flash[number] -= sign * rounded_up(spec.num_bytes)

    # The buffers shrink when the last Unit's field of a kind leaves flash, so a longer run of fields may fit where
    # a shorter one does not.
    longest = 0 if reader + pool_bytes() <= dram else None
    for count, spec in enumerate(specs, start=1):
        move(spec, +1)
        if kept_bytes + reader + pool_bytes() <= dram:
            longest = count
    if longest is None:
        return None
    for spec in specs[longest:]:
        move(spec, -1)
    for spec in specs[longest:]:  # what comes later may be small enough for the room that is left
        move(spec, +1)
        if kept_bytes + reader + pool_bytes() > dram:
            move(spec, -1)
        else:
            del left[spec.key]
    for spec in specs[:longest]:
        del left[spec.key]
    return Placement(
        dram=frozenset(spec.key for spec in specs if spec.key not in left),
        flash=frozenset(left),
        dram_bytes=kept_bytes,
        flash_bytes=left_bytes,
        pool_bytes=pool_bytes(),
        reader_bytes=reader,
    )


def _used_together(graph: Graph, specs: Iterable[FieldSpec]) -> list[frozenset[Key]]:
    """For each Unit, what is loaded while it is updated: its own fields, and the wires it is sent."""
    keys = [spec.key for spec in specs]
    groups = []
    for unit in graph.units:
        owners = {graph.weights[name].owner for name in unit.weights}
        groups.append(frozenset(k for k in keys if k[0] == unit.index or (k[0] in owners and k[1] == "wire")))
    return groups


def _pool_bytes(specs: Iterable[FieldSpec], keys: frozenset[Key]) -> int:
    return sum(rounded_up(spec.num_bytes) for spec in specs if spec.key in keys)


def _reader_bytes(graph: Graph, optimizer: Optimizer) -> int:
    """A checkpoint reads one weight of one field at a time, through a piece of it if it is large."""
    largest = 0
    for parts in layout(graph, optimizer).values():
        for segment in parts.values():
            largest = max(largest, 4 * math.prod(segment.shape))
    return rounded_up(largest) + min(rounded_up(largest), PIECE_BYTES) + BLOCK_BYTES


def _check_space(folder: Path, num_bytes: int) -> None:
    """Files start as holes, so a disk that is too small would show only after a while."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"flash folder {folder} has {shown(free)} free, {shown(num_bytes)} are needed: free some space, "
            "choose another folder, or raise --dram"
        )
