"""What a user may choose about the engine; imports no torch."""

from dataclasses import dataclass
from typing import Literal

from openwafer.config import option


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and how requests share it."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto", help="of weights that are not quantised; auto: as stored, and a GGUF's packed weights stay packed"
    )
    quantization: Literal["int8", "int4"] | None = option(
        None, help="pack weights to 8 or 4 bits in groups of 32 while loading (default: as stored)"
    )
    num_threads: int | None = option(None, help="CPU threads of the model (default: the cores there are)", minimum=1)
    kv_cache: int = option(1 << 30, help="memory for keys and values of all requests", minimum=1, size=True)
    max_context: int | None = option(None, help="longest prompt and answer together (default: the model's)", minimum=2)
    max_running: int = option(64, help="requests decoded at the same time", minimum=1)
    max_waiting: int = option(1024, help="requests that may wait; more are refused", minimum=1)
    max_step_tokens: int = option(256, help="tokens computed in one step: answers first, then prompts", minimum=1)
    prefix_cache: bool = option(True, help="reuse keys and values of equal beginnings of prompts")
    speculation: Literal["none", "lookup", "draft"] = option(
        "none",
        help="guess ahead from the text so far (lookup) or with a small model (draft); answers stay equal",
    )
    draft_model: str | None = option(None, help="speculation draft: the small model, of the same vocabulary")
    num_draft_tokens: int = option(4, help="tokens guessed ahead at most", minimum=1, maximum=64)
