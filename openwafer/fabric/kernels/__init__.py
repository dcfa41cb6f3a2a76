"""The kernel library: each file is one kernel with its config, its program, its closed cycle formula.

Start with `reduce.py` (collectives along a line) and `gemv.py` (a kernel built on them). `outcome.py` is what every
kernel returns; `catalog.py` names them for the command line.
"""
