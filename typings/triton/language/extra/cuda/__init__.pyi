# Triton's own types differ from version to version, and kernels are not Python: pyright takes all of it for Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
