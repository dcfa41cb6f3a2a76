"""Kernels in C, each beside a plain reference that defines it.

`compiled.py` builds and loads them; where no compiler is found the reference runs instead.
"""
