"""What each GPU holds: its layers, those of them that are streamed, and keys and values; decided before one is read.

Everything that a process has on a GPU at one time stays within a limit: weights that stay, two buffers for those that
are streamed, keys and values, the activations of a step, and a reserve for what nobody counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from openwafer.errors import UserError
from openwafer.memoryx.placement import shown
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel
from openwafer.serve.budget import spread
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.drawing import scratch_bytes
from openwafer.serve.gpu.gpus import Gpus
from openwafer.serve.gpu.layer_shelf import NUM_FLASH_BUFFERS, flash_buffer_bytes
from openwafer.serve.gpu.layer_stream import ALIGNMENT, NUM_BUFFERS
from openwafer.serve.gpu.splitting import most_bytes
from openwafer.serve.gpu.tuning import Tuning
from openwafer.serve.host import Host, by_host, num_cores
from openwafer.serve.inventory import Inventory, Size, take_inventory
from openwafer.serve.lowering import PAGE
from openwafer.serve.program import ProgramBuilder
from openwafer.serve.region import Region
from openwafer.serve.stage_plan import divided, num_cache_blocks, threads_of_stages, token_bytes

_FREE_SHARE = 0.92  # of the free memory, when no limit is given
_RESERVE_SHARE = 20  # a twentieth of the limit: libraries' workspaces, small tensors, holes between large ones
_CACHE_SHARE = 16  # of the limit, for keys and values if nobody says how much and weights need the rest
_LEAST_TOKENS = 256  # of keys and values, if nobody says how much
_MOST_TENSORS = 24  # of a layer; each is filled up to whole ALIGNMENTs
_GRAPH_ROWS = 256  # of the largest graph, whose activations stay


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """What one process has on its GPU."""

    region: Region
    gpu: int
    limit: int  # bytes of all tensors
    num_blocks: int  # of keys and values, in its own layers
    streamed_layers: tuple[int, ...]
    flash_layers: tuple[int, ...]  # those of them that host memory has no room for
    layer_bytes: int  # of the largest
    resident_bytes: int
    streamed_bytes: int
    num_threads: int

    def __str__(self) -> str:
        cache = f"{self.num_blocks * PAGE} tokens have keys and values"
        held = f"GPU {self.gpu}: {shown(self.resident_bytes)} of weights stay"
        if not self.streamed_layers:
            return f"{held}, {cache}"
        layers = f"{len(self.streamed_layers)} of {len(self.region.layers)} layers"
        if self.flash_layers:
            layers += f", {len(self.flash_layers)} of them from flash"
        return f"{held}, {shown(self.streamed_bytes)} ({layers}) are copied from host memory in every step, {cache}"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes of a region on a device."""

    ends: int  # the embedding and the output, which always stay
    layers: tuple[int, ...]
    activations: int
    block: int  # of keys and values in all of its layers

    @property
    def buffers(self) -> int:
        """Where streamed layers are copied to."""
        return NUM_BUFFERS * max(self.layers)

    @property
    def least(self) -> int:
        """For the layers, if all that can be is streamed."""
        return min(self.buffers, sum(self.layers))

    def cache(self, num_blocks: int) -> int:
        """One block more than is lent out."""
        return (num_blocks + 1) * self.block


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a process may use of its GPU: `limit` bytes for tensors. `used` are others' bytes, and those of CUDA."""

    limit: int  # less `beside_fixed`
    num_sharing: int
    used: int
    # Of a draft model on this GPU; its blocks are divided over the processes that share it.
    beside_fixed: int = 0
    beside_block: int = 0
    has_draft: bool = False  # in this very process

    def whole(self, limit: int) -> int:
        """The `device_memory` with which this would be the limit."""
        return self.num_sharing * limit + self.used + self.beside_fixed

    def limit_of_process(self, num_blocks: int) -> int:
        """Bytes of all of its tensors."""
        if self.has_draft:
            return self.limit + self.beside_fixed
        return self.limit - (num_blocks + 1) * self.beside_block


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Bytes of a draft model, which is on the first GPU whatever the model needs (`draft_plan.py`)."""

    fixed: int  # its weights and activations, and its reserve
    block: int  # of its keys and values: it has as many blocks as the model


class TooSmall(Exception):
    """So many bytes would be enough, `cache_bytes` of them for keys and values."""

    def __init__(self, least_bytes: int, cache_bytes: int) -> None:
        super().__init__(least_bytes, cache_bytes)
        self.least_bytes = least_bytes
        self.cache_bytes = cache_bytes


def plan_devices(
    stored: StoredModel,
    config: EngineConfig,
    gpus: Gpus,
    free_dram: int | None = None,
    beside: Beside | None = None,
    hosts: Sequence[Host] | None = None,
) -> list[DevicePlan]:
    """One plan for each of `num_csx` processes, by what their products cost; several may have to share a GPU.

    `free_dram`: bytes of the host that can be had; None: enough. With `hosts` those say what they have, and `gpus`
    only what CUDA takes; a draft model is on the first of them.
    """
    shape, dtype = stored.config, device_dtype(config)
    inventory = take_inventory(stored, config)
    regions = divided(inventory, config.num_csx)
    hosts = hosts or [_this_host(gpus, len(regions), free_dram)]
    context_bytes = gpus.context_bytes if len(regions) > 1 else None
    shares = [
        share
        for index, host in enumerate(hosts)
        for share in _shares(config.device_memory, host, context_bytes, beside if index == 0 else None)
    ]
    # Who shares a GPU with a draft model leaves room for its keys and values.
    needs = [
        replace(need, block=need.block + share.beside_block)
        for need, share in zip(
            [needs_of(shape, inventory, region, config, dtype) for region in regions], shares, strict=True
        )
    ]
    most = config.num_running * -(-shape.max_position_embeddings // PAGE)
    given = None
    if config.kv_cache is not None:
        given = num_cache_blocks(shape, config, config.kv_cache, dtype.itemsize)
    fits = _all_fitted(shares, needs, given, most)
    if len(fits) > 1:  # all have the same blocks; who has room for more keeps more layers
        fits = _all_fitted(shares, needs, min(num_blocks for num_blocks, _ in fits), most)
    parts = by_host(hosts, list(zip(regions, needs, shares, fits, strict=True)))
    return [
        plan
        for host, held in zip(hosts, parts, strict=True)
        for plan in shelved(_plans_of(host, config, held), config.dram, host.free_dram)
    ]


def _plans_of(
    host: Host, config: EngineConfig, held: "Sequence[tuple[Region, Needs, Share, tuple[int, int]]]"
) -> list[DevicePlan]:
    threads = threads_of_stages(config.num_threads, host.num_stages, host.num_cores)
    plans: list[DevicePlan] = []
    for place, (region, need, share, (num_blocks, num_streamed)) in enumerate(held):
        streamed = sorted(spread(region.layers, num_streamed))
        streamed_bytes = sum(need.layers[layer - region.first] for layer in streamed)
        plans.append(
            DevicePlan(
                region=region,
                gpu=place % len(host.gpus),
                limit=share.limit_of_process(num_blocks),
                num_blocks=num_blocks,
                streamed_layers=tuple(streamed),
                flash_layers=(),
                layer_bytes=max(need.layers),
                resident_bytes=need.ends + sum(need.layers) - streamed_bytes,
                streamed_bytes=streamed_bytes,
                num_threads=threads[place],
            )
        )
    return plans


def shelved(plans: list[DevicePlan], dram: int | None, free_dram: int | None) -> list[DevicePlan]:
    """The streamed layers that `dram` (default: most of what is free) has no room for put on flash."""
    total = sum(plan.streamed_bytes for plan in plans)
    if dram is None and free_dram is not None and total > free_dram:
        dram = free_dram * 4 // 5
    if dram is None or total <= dram:
        return plans
    least = sum(NUM_FLASH_BUFFERS * flash_buffer_bytes(plan.layer_bytes) for plan in plans if plan.streamed_layers)
    if dram < least:
        raise UserError(
            f"dram {dram} is too small: {shown(total)} of weights do not fit on the GPU, and {least} bytes are needed "
            f"for layers that are read from flash; give at least --dram {least}, or a larger --device_memory"
        )
    found: list[DevicePlan] = []
    for plan in plans:
        size, count = flash_buffer_bytes(plan.layer_bytes), len(plan.streamed_layers)
        room = (dram - least) * plan.streamed_bytes // total  # besides the buffers
        on_flash = spread(range(count), count - min(count, room // size))
        layers = tuple(layer for index, layer in enumerate(plan.streamed_layers) if index in on_flash)
        found.append(replace(plan, flash_layers=layers))
    return found


def device_dtype(config: EngineConfig) -> torch.dtype:
    return {"fp32": torch.float32, "fp16": torch.float16}.get(config.dtype, torch.bfloat16)


def needs_of(
    shape: ModelConfig,
    inventory: Inventory,
    region: Region,
    config: EngineConfig,
    dtype: torch.dtype,
    *,
    guesses: bool = False,
) -> Needs:
    """`guesses`: for a draft model, of which the host sees one row of logits for each request."""

    def held(size: Size) -> int:
        """Matrices are of `dtype` or packed, whichever is less; vectors are fp32."""
        return min(size.matrices, size.products * dtype.itemsize) + size.vectors

    ends = held(inventory.embedding) if region.embeds else 0
    if region.has_head:
        ends += inventory.head.vectors if region.embeds and inventory.is_tied else held(inventory.head)
    ends += 2 * 4 * shape.max_position_embeddings * shape.head_size  # rotations; some families have two tables
    widths = dict(ProgramBuilder(shape).widths)
    vocab = widths.pop("logits") if region.has_head else 0
    num_rows = config.num_step_tokens + min(_GRAPH_ROWS, 2 * config.num_running)
    # Each buffer and what it is made of, as if all were fp32. Logits are there twice where the host wants to see them,
    # or where tokens are drawn from them.
    activations = 8 * num_rows * sum(widths.values())
    parts = [*(inventory.layers[layer] for layer in region.layers), *((inventory.head,) if region.has_head else ())]
    tuning = Tuning()
    is_packed = any(size.matrices < size.products * dtype.itemsize for size in parts)
    if is_packed or config.batch_invariant:
        num_split_rows = num_rows if config.batch_invariant else min(num_rows, tuning.packed_rows)
        activations += most_bytes(num_split_rows, max(widths.values()), tuning)
    if is_packed:
        # Packed matrices are unpacked for products of many rows; none is larger than its part.
        activations += min(tuning.scratch_bytes, dtype.itemsize * max(size.products for size in parts))
    if guesses:
        activations += 8 * vocab * (num_rows - config.num_step_tokens + config.num_running)
    else:
        activations += 8 * vocab * num_rows + scratch_bytes(config.num_step_tokens, vocab)
    return Needs(
        ends=ends,
        layers=tuple(held(inventory.layers[layer]) + _MOST_TENSORS * ALIGNMENT for layer in region.layers),
        activations=activations,
        block=PAGE * token_bytes(shape, len(region.layers), dtype.itemsize),
    )


def _all_fitted(
    shares: Sequence[Share], needs: Sequence[Needs], num_blocks: int | None, most_blocks: int
) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    refused: list[tuple[int, Share, Needs, TooSmall]] = []
    for share, need in zip(shares, needs, strict=True):
        try:
            found.append(fitted(share.limit, need, num_blocks, most_blocks))
        except TooSmall as error:
            refused.append((share.whole(error.least_bytes), share, need, error))
    if refused:
        raise _too_small(*max(refused, key=lambda each: each[0]))
    return found


def with_reserve(num_bytes: int) -> int:
    """What has room for so many bytes beside its reserve."""
    return -(-num_bytes * _RESERVE_SHARE // (_RESERVE_SHARE - 1))


def fitted(limit: int, needs: Needs, num_blocks: int | None, most_blocks: int) -> tuple[int, int]:
    """(blocks of the cache, layers that are streamed) within `limit` bytes; None: as many blocks as have room."""
    fixed = needs.ends + needs.activations + limit // _RESERVE_SHARE
    least_blocks = min(most_blocks, -(-_LEAST_TOKENS // PAGE)) if num_blocks is None else num_blocks
    room = limit - fixed - needs.cache(least_blocks)
    if room < needs.least:
        cache = needs.cache(least_blocks)
        counted = needs.ends + needs.activations + needs.least + cache
        raise TooSmall(with_reserve(counted), cache)
    blocks = least_blocks
    if num_blocks is None:
        wanted = min(most_blocks, max(least_blocks, limit // _CACHE_SHARE // needs.block))
        blocks = min(wanted, least_blocks + (room - needs.least) // needs.block)
        room = limit - fixed - needs.cache(blocks)
    if sum(needs.layers) > room:
        return blocks, len(needs.layers) - (room - needs.buffers) // max(needs.layers)
    if num_blocks is None:
        blocks = min(most_blocks, blocks + (room - sum(needs.layers)) // needs.block)
    return blocks, 0


def _too_small(least: int, share: Share, needs: Needs, error: TooSmall) -> UserError:
    given, whose, fewer = f"{max(0, share.limit)} bytes", "keys and values", ""
    if share.beside_fixed:
        given += f" (besides {share.beside_fixed} of the draft model)"
        whose, fewer = "keys and values with those of the draft model", " or another --draft_model"
    return UserError(
        f"{given} of device memory for the tensors of a process are too few: {error.least_bytes} are "
        f"needed for the embedding and the output ({needs.ends}), two layers, one computed with while the next is "
        f"copied ({needs.least}), {whose} ({error.cache_bytes}), the activations of a step "
        f"({needs.activations}) and a reserve of a twentieth; give at least --device_memory {least}{fewer}, or a "
        "smaller --kv_cache, --max_step_tokens or --max_running"
    )


def _this_host(gpus: Gpus, num_stages: int, free_dram: int | None) -> Host:
    memory = tuple(gpus.memory(index) for index in range(min(gpus.count(), num_stages)))
    return Host(num_stages=num_stages, num_cores=num_cores(), free_dram=free_dram, gpus=memory)


def _shares(device_memory: int | None, host: Host, context_bytes: int | None, beside: Beside | None) -> list[Share]:
    """Each process's part of `device_memory`, or of what is free, less what CUDA and a draft model take.

    `context_bytes` of CUDA are for each process that is not there yet; None: this is the only one, and has them.
    """
    num_gpus, num_stages = len(host.gpus), host.num_stages
    shares: list[Share] = []
    for stage in range(num_stages):
        num_sharing = len(range(stage % num_gpus, num_stages, num_gpus))
        draft = beside if stage % num_gpus == 0 else None
        free, total = host.gpus[stage % num_gpus]
        used = total - free
        if device_memory is not None and device_memory > total:
            raise UserError(
                f"device_memory {shown(device_memory)}: the GPU has {shown(total)}, and {shown(free)} are free; "
                f"give at most {shown(total)}"
            )
        # Also of the engine's own process if it has a model to run.
        used += (num_sharing + (draft is not None)) * (context_bytes or 0)
        limit = int(_FREE_SHARE * (total - used)) if device_memory is None else device_memory - used
        if limit <= 0:
            raise UserError(
                f"device_memory {shown(device_memory or free)}: CUDA and others take {shown(used)} of it; give "
                "more, or end what else uses the GPU"
            )
        fixed, block = (0, 0) if draft is None else (draft.fixed, draft.block)
        shares.append(
            Share(
                limit=(limit - fixed) // num_sharing,
                num_sharing=num_sharing,
                used=used,
                beside_fixed=fixed,
                beside_block=-(-block // num_sharing),
                has_draft=draft is not None and context_bytes is None,
            )
        )
    return shares
