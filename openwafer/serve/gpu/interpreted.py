"""Kernels without a GPU: with TRITON_INTERPRET=1 in the environment, Triton runs them in NumPy, program by program.

Set it before anything imports Triton. It shows that indices and sums are right, not that a kernel compiles or how fast
it is: for that, `bench/decode_gpu.py --parts compile` and a GPU.
"""

import os
from typing import Any


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def mend() -> None:
    """NumPy 2.4 takes arrays of one element for numbers no more; Triton 3.6 bounds its loops with such ones."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "is_mended", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.is_mended = True  # pyright: ignore[reportFunctionMemberAccess]
    interpreter._patch_lang_tensor = patched
