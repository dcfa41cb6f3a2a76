"""What a user may choose about the engine; imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openwafer.config import conform, option
from openwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and how requests share it. Where None depends on the device, a property resolves it."""

    device: Literal["cpu", "cuda"] = option(
        "cpu", help="where the model runs; cuda: the first GPU, or with num_csx each in turn"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto", help="of weights that are not quantised; auto: as stored, and a GGUF's packed weights stay packed"
    )
    quantization: Literal["int8", "int4"] | None = option(
        None, help="pack weights to 8 or 4 bits in groups of 32 while loading (default: as stored)"
    )
    num_threads: int | None = option(
        None,
        help="CPU threads of the model, all stages together (default: the cores there are)",
        minimum=1,
        maximum=1024,
    )
    num_csx: int = option(
        1,
        help="processes that the layers are divided over, each with its own weights; under torchrun its ranks",
        minimum=1,
    )
    dram: int | None = option(
        None,
        help="memory for weights, keys and values, such as 4GiB; weights that do not fit are streamed from flash "
        "(default: all in memory, as long as they fit); cuda: for weights that do not fit on the GPU",
        minimum=1,
        size=True,
    )
    device_memory: int | None = option(
        None,
        help="cuda: the most memory of each GPU to use, such as 8GiB (default: what is free); weights that do not fit "
        "are copied from host memory in every step",
        minimum=1,
        size=True,
    )
    flash: Path | None = option(None, help="folder for weights that do not fit into dram (default: in the cache)")
    kv_cache: int | None = option(
        None,
        help="memory for keys and values (default: 1 GiB, at most a quarter of dram; cuda: most of what is free)",
        minimum=1,
        size=True,
    )
    max_context: int | None = option(None, help="longest prompt and answer together (default: the model's)", minimum=2)
    max_running: int | None = option(None, help="requests decoded at once (default: 64; cuda: 128)", minimum=1)
    max_waiting: int = option(1024, help="requests that may wait; more are refused", minimum=1)
    max_step_tokens: int | None = option(
        None, help="tokens computed in one step: answers first, then prompts (default: 256; cuda: 2048)", minimum=1
    )
    batch_invariant: bool = option(
        False, help="cuda: a request has the same bits alone and among others, at some cost (always so on the cpu)"
    )
    prefix_cache: bool = option(True, help="reuse keys and values of equal beginnings of prompts")
    speculation: Literal["none", "lookup", "draft"] = option(
        "none",
        help="guess ahead from the text so far (lookup) or with a small model (draft); answers stay equal",
    )
    draft_model: str | None = option(None, help="speculation draft: the small model, of the same vocabulary")
    num_draft_tokens: int = option(4, help="tokens guessed ahead at most", minimum=1, maximum=64)

    def __post_init__(self) -> None:
        conform(self)
        if self.device == "cpu" and self.device_memory is not None:
            raise UserError(f"device_memory {self.device_memory} is for --device cuda: on the CPU give --dram")
        if self.draft_model is not None and self.speculation != "draft":
            raise UserError(
                f"draft_model {self.draft_model} is not used with speculation {self.speculation}: "
                "give --speculation draft"
            )

    @property
    def num_running(self) -> int:
        return self.max_running or (128 if self.device == "cuda" else 64)

    @property
    def num_step_tokens(self) -> int:
        return self.max_step_tokens or (2048 if self.device == "cuda" else 256)
