"""The machines as data: wafers (WSE-1, 2, 3), systems (CS-1, 2, 3), MemoryX and SwarmX.

Numbers and their sources are in docs/facts.md. The clock is a parameter, because the sources disagree about it:
cycles are what we simulate, seconds are derived.
"""

from dataclasses import dataclass, field

from openwafer.config import unknown
from openwafer.errors import UserError

KB, MB, GB, TB, PB = (1000**power for power in range(1, 6))


@dataclass(frozen=True, kw_only=True)
class InstructionCosts:
    """Cycles of one PE's instructions. One set per chip: nothing here knows of a kernel or a grid."""

    vector_startup: int  # before the first element of a vector instruction over memory
    vector_minimum: int  # shortest distance between two vector instructions
    vector_overlap: int  # cycles of one instruction that the next one hides
    group_cycles_16: int  # per SIMD group of 16-bit elements, without bank conflicts
    simd_16: int  # 16-bit elements in a group
    write_buffer_16: int | None  # groups that wait to be written; None: writes never hold up reads
    fabric_startup: int  # before the first word of a fabric instruction
    forward_latency: int  # from reading a word off the fabric to its result in the output queue
    task_start: int  # from choosing a task to its first instruction
    scalar: int  # one scalar instruction
    loop_inner: int  # one iteration of a scalar-indexed loop, besides its body
    loop_outer: int  # one iteration of a loop around such loops
    divide: int  # one division, exponential or square root
    reroute: int  # before a broadcast whose sender is another than before; fitted to the SUMMA rows


@dataclass(frozen=True, kw_only=True)
class Wafer:
    """One wafer: the vendor's totals, the fabric as programmed, and the parts of a PE and its router."""

    name: str
    area_mm2: int = 46_225
    transistors: float
    node_nm: int
    num_cores: int  # as on the slides; the programmable fabric has fewer
    memory_bytes: int
    memory_bandwidth_bytes_s: float
    fabric_bandwidth_bits_s: float
    peak_flop_s: float | None  # None: not published
    peak_is_sparse: bool = False
    fabric_columns: int
    fabric_rows: int
    usable_columns: int
    usable_rows: int
    sram_bytes: int = 48 * 1024
    num_banks: int = 8
    bank_bytes: int = 4
    num_colours: int = 24
    host_colours: tuple[int, ...] = (21, 22, 23)
    num_switch_positions: int = 4
    num_microthreads: int = 8
    num_registers: int = 32
    ramp_cycles: int = 2
    hop_cycles: int = 1
    router_queue_words: int = 4  # not published; undisturbed streams cost the same from 3 words up
    input_queue_words: tuple[int, ...]
    output_queue_words: tuple[int, ...]
    costs: InstructionCosts
    clock_hz: float = 1.1e9

    @property
    def usable_pes(self) -> int:
        return self.usable_columns * self.usable_rows

    def seconds(self, cycles: float) -> float:
        return cycles / self.clock_hz


# Vector start-up, task start and loop overheads: the vendor's simulator for WSE-2 (facts.md).
_WSE2_COSTS = InstructionCosts(
    vector_startup=6,
    vector_minimum=0,
    vector_overlap=0,
    group_cycles_16=1,
    simd_16=4,
    write_buffer_16=None,
    fabric_startup=5,
    forward_latency=1,
    task_start=13,
    scalar=1,
    loop_inner=43,
    loop_outer=10,
    divide=50,
    reroute=65,
)
# Multiply-accumulates of WSE-3: max(5, 2 * groups - 1) cycles apart, 40 cycles per outer step. Vectors of 60 and 120
# elements take longer than that; a buffer of four groups in front of the single-ported banks fits both. The forward
# latency and the 2 cycles per hop below solve the slopes over P of two measured kernels, the fabric start-up their
# offset (facts.md).
_WSE3_COSTS = InstructionCosts(
    vector_startup=0,
    vector_minimum=5,
    vector_overlap=1,
    group_cycles_16=2,
    simd_16=8,
    write_buffer_16=4,
    fabric_startup=12,
    forward_latency=7,
    task_start=13,
    scalar=1,
    loop_inner=0,
    loop_outer=40,
    divide=50,
    reroute=65,
)

WSE1 = Wafer(
    name="wse1",
    transistors=1.2e12,
    node_nm=16,
    num_cores=400_000,
    memory_bytes=18 * GB,
    memory_bandwidth_bytes_s=9e15,
    fabric_bandwidth_bits_s=100e15,
    peak_flop_s=None,
    fabric_columns=633,
    fabric_rows=633,
    usable_columns=633,
    usable_rows=633,
    input_queue_words=(6, 6, 4, 4, 2, 2, 2, 2),
    output_queue_words=(2, 2, 6, 6, 2, 2),
    costs=_WSE2_COSTS,
)
WSE2 = Wafer(
    name="wse2",
    transistors=2.6e12,
    node_nm=7,
    num_cores=850_000,
    memory_bytes=40 * GB,
    memory_bandwidth_bytes_s=20e15,
    fabric_bandwidth_bits_s=220e15,
    peak_flop_s=7.5e15,
    fabric_columns=757,
    fabric_rows=996,
    usable_columns=750,
    usable_rows=994,
    input_queue_words=(6, 6, 4, 4, 2, 2, 2, 2),
    output_queue_words=(2, 2, 6, 6, 2, 2),
    costs=_WSE2_COSTS,
)
WSE3 = Wafer(
    name="wse3",
    transistors=4e12,
    node_nm=5,
    num_cores=900_000,
    memory_bytes=44 * GB,
    memory_bandwidth_bytes_s=21e15,
    fabric_bandwidth_bits_s=214e15,
    peak_flop_s=125e15,
    peak_is_sparse=True,
    fabric_columns=762,
    fabric_rows=1172,
    usable_columns=755,
    usable_rows=1170,
    input_queue_words=(8, 8, 4, 4, 4, 4, 4, 4),
    output_queue_words=(8, 8, 8, 8, 8, 8, 8, 8),
    hop_cycles=2,
    costs=_WSE3_COSTS,
)


@dataclass(frozen=True, kw_only=True)
class MemoryX:
    """The store of weights and optimizer state outside the wafer."""

    name: str
    dram_bytes: int
    flash_bytes: int = 0
    max_parameters: int  # with optimizer state, as the vendor states it


@dataclass(frozen=True, kw_only=True)
class SwarmX:
    """The tree that broadcasts weights to systems and reduces their gradients."""

    max_systems: int


@dataclass(frozen=True, kw_only=True)
class System:
    """One computer around one wafer."""

    name: str
    wafer: Wafer
    io_bits_s: float | None  # None: not published
    io_latency_s: float | None
    memoryx: tuple[MemoryX, ...] = field(default=())
    swarmx: SwarmX | None = None

    @property
    def io_words_per_cycle(self) -> float | None:
        """32-bit words that cross the edge of the wafer in one cycle, in one direction."""
        return None if self.io_bits_s is None else self.io_bits_s / 32 / self.wafer.clock_hz


CS1 = System(name="cs1", wafer=WSE1, io_bits_s=1.2e12, io_latency_s=None)
CS2 = System(
    name="cs2",
    wafer=WSE2,
    io_bits_s=1.2e12,
    io_latency_s=None,
    memoryx=(
        MemoryX(name="12TB", dram_bytes=12 * TB, max_parameters=240 * 10**9),
        MemoryX(name="2.4PB", dram_bytes=4 * TB, flash_bytes=2400 * TB, max_parameters=120 * 10**12),
    ),
    swarmx=SwarmX(max_systems=192),
)
CS3 = System(
    name="cs3",
    wafer=WSE3,
    io_bits_s=1.2e12,
    io_latency_s=5e-6,
    memoryx=(
        MemoryX(name="36TB", dram_bytes=36 * TB, max_parameters=720 * 10**9),
        MemoryX(name="1.2PB", dram_bytes=36 * TB, flash_bytes=1200 * TB, max_parameters=24 * 10**12),
    ),
    swarmx=SwarmX(max_systems=2048),
)

WAFERS = {wafer.name: wafer for wafer in (WSE1, WSE2, WSE3)}
SYSTEMS = {system.name: system for system in (CS1, CS2, CS3)}


def wafer(name: str) -> Wafer:
    """The wafer called `name` (wse1, wse2, wse3, or the system around it: cs1, cs2, cs3)."""
    if name in SYSTEMS:
        return SYSTEMS[name].wafer
    if name not in WAFERS:
        raise UserError(unknown(f"wafer {name!r}", name, [*WAFERS, *SYSTEMS]))
    return WAFERS[name]
