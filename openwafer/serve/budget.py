"""How a budget of memory is spent: keys and values, weights that stay, and buffers for those that are streamed."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from openwafer.direct_io import BLOCK_BYTES, rounded_up
from openwafer.errors import UserError
from openwafer.memoryx.placement import shown
from openwafer.serve.inventory import Inventory
from openwafer.serve.region import Region
from openwafer.serve.stream import Placement

_DEFAULT_CACHE = 1 << 30
_NUM_BUFFERS = 2  # one is computed with while the next is read
_CACHE_SHARE = 4  # a quarter of a small budget at most is for keys and values, if nobody says how much


def cache_bytes(kv_cache: int | None, dram: int | None) -> int:
    """Memory for keys and values."""
    if kv_cache is not None:
        return kv_cache
    return _DEFAULT_CACHE if dram is None else min(_DEFAULT_CACHE, dram // _CACHE_SHARE)


def available_bytes() -> int | None:
    """Memory of this host that can still be had, with what the page cache would give up; None where it does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        return None
    return None if found is None else int(found[1]) << 10


def share(
    dram: int,
    inventory: Inventory,
    regions: Sequence[Region],
    cache_with: Callable[[int], int],
    max_rows: int,
) -> list[int]:
    """A budget's part for the weights of each region; what is more than the least goes by their sizes.

    `cache_with`: bytes of all keys and values with a budget.
    """
    least, cache = least_bytes(inventory, regions, max_rows), cache_with(dram)
    needed = sum(least) + cache
    if dram < needed:
        raise UserError(
            f"dram {shown(dram)} is too small: {shown(needed)} are needed for keys and values ({shown(cache)}) and for "
            f"the weights being read, packed and computed with ({shown(sum(least))}); give at least --dram "
            f"{enough(dram, lambda more: sum(least) + cache_with(more))}, or a smaller --kv_cache"
        )
    totals = [inventory.total(region) for region in regions]
    return [low + (dram - needed) * total // sum(totals) for low, total in zip(least, totals, strict=True)]


def enough(dram: int, needed: Callable[[int], int]) -> int:
    """A larger budget that has room for what is needed with it; if nobody says how much memory keys and values may
    have, they grow with it."""
    while dram < (more := needed(dram)):
        dram = more
    return dram


def least_bytes(inventory: Inventory, regions: Sequence[Region], max_rows: int) -> list[int]:
    """For the weights of each region, if all that can be is streamed."""
    return [_least(inventory, region, max_rows) for region in regions]


def place(weight_bytes: int, inventory: Inventory, region: Region, max_rows: int) -> Placement | None:
    """What of a region is streamed so that its weights take `weight_bytes` of memory at most; None: nothing is."""
    if inventory.total(region) <= weight_bytes:
        return None
    unit = _unit_bytes(inventory, region)
    head = inventory.head.matrices if region.has_head else 0
    room = weight_bytes - _fixed(inventory, region, max_rows)
    sizes = [inventory.layers[layer].matrices for layer in region.layers]
    if region.embeds and sum(sizes) + head + unit <= room:
        # Only the table of embeddings does not fit.
        return _placement(inventory, region, frozenset(), has_head=False, pool_bytes=unit)
    room -= _buffers(unit)
    keeps_head = head <= room
    room -= head if keeps_head else 0
    num_kept = min(len(sizes), room // max(sizes))
    streamed = spread(region.layers, len(sizes) - num_kept)
    return _placement(inventory, region, streamed, has_head=not keeps_head, pool_bytes=_NUM_BUFFERS * unit)


def _placement(
    inventory: Inventory, region: Region, layers: frozenset[int], *, has_head: bool, pool_bytes: int
) -> Placement:
    streams_head = region.has_head and has_head
    # A tied table stays where the head does.
    table = region.embeds and not (inventory.is_tied and region.has_head and not streams_head)
    file_bytes = sum(inventory.layers[layer].matrices for layer in layers)
    file_bytes += inventory.head.matrices * streams_head + inventory.embedding.matrices * table
    return Placement(
        layers=layers,
        head=streams_head,
        table=table,
        unit_bytes=_unit_bytes(inventory, region),
        pool_bytes=pool_bytes,
        file_bytes=file_bytes + (file_bytes >> 6),  # files are whole blocks
    )


def _least(inventory: Inventory, region: Region, max_rows: int) -> int:
    """Bytes for the weights of a region of which everything that can be is streamed.

    While it is loaded, a layer is there as it is stored, packed, and in the buffer that is written; a table is packed
    whole before it is written.
    """
    unit = _unit_bytes(inventory, region)
    table = inventory.embedding.matrices if region.embeds else inventory.head.matrices if region.has_head else 0
    least = _fixed(inventory, region, max_rows) + max(unit + _buffers(unit), table + unit)
    return min(least, inventory.total(region))


def _fixed(inventory: Inventory, region: Region, max_rows: int) -> int:
    """What stays in any case: vectors, and rows of the table for the tokens of a step."""
    size = sum(inventory.layers[layer].vectors for layer in region.layers)
    if region.has_head:
        size += inventory.head.vectors
    if region.embeds:
        size += inventory.embedding.vectors + max_rows * inventory.group_bytes
    return size


def _buffers(unit: int) -> int:
    """Two units; while a layer that stays is loaded, one, the layer as it is stored, and half of it being joined."""
    return _NUM_BUFFERS * unit + unit // 2


def _unit_bytes(inventory: Inventory, region: Region) -> int:
    largest = max(inventory.layers[layer].matrices for layer in region.layers)
    return rounded_up(max(largest, inventory.group_bytes) + BLOCK_BYTES)


def spread(layers: range, count: int) -> frozenset[int]:
    """`count` of the layers at even distances: while those that stay are computed, the next one is read."""
    num = len(layers)
    return frozenset(layer for k, layer in enumerate(layers) if (k + 1) * count // num > k * count // num)
