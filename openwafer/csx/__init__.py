"""CSX: the worker that computes one Unit at a time on weights that pass through.

Start at `worker.py`. `link.py` is the way to MemoryX and back, `cuda.py` that of a GPU, `footprint.py` what a step
takes of its memory; `loss.py` finds the loss in a result.
"""
