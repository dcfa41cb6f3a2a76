"""Settings of the HTTP side of `openwafer serve`; the engine has its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openwafer.config import option


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where to listen, who may ask, and how much of it."""

    host: str | None = option(
        None, help="address to listen on (default: 127.0.0.1, or all addresses once there are keys)"
    )
    port: int = option(8000, help="port to listen on; 0 takes a free one", minimum=0, maximum=65535)
    api_key: str | None = option(None, help="one key that clients must send; better kept in $OPENWAFER_API_KEY")
    keys: Path | None = option(
        None, help="file of the keys made by `openwafer keys` (default: in the user's data folder)"
    )
    served_model_name: str | None = option(None, help="names that clients may ask for, separated by commas")
    chat_template: Path | None = option(None, help="file with a chat template to use instead of the model's own")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "generic"] = option(
        "auto", help="how the model writes tool calls; auto reads it off the chat template"
    )
    max_body_size: int = option(8 << 20, help="largest request body, unpacked", size=True, minimum=1024)
    body_timeout_s: float = option(30.0, help="seconds a client has to send its request", minimum=0.1)
    stall_timeout_s: float = option(60.0, help="seconds a client may leave a stream unread", minimum=0.1)
    hang_timeout_s: float = option(60.0, help="seconds without progress after which /health says 503", minimum=0.1)
    shutdown_timeout_s: float = option(30.0, help="seconds that running requests have to finish on shutdown", minimum=0)
    log: Literal["json", "text"] = option("json", help="form of the log lines on stderr")
