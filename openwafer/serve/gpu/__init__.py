"""A model on a GPU: a program with its operations joined, its weights on the device, its steps recorded as graphs.

Start at `runner.py`. `plan.py` joins operations, `plain.py` is what they mean in PyTorch operations (and runs on any
device), `fast.py` is the same with the Triton kernels of `gemv.py`, `rows.py` and `attention.py`.
"""
