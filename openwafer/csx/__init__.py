"""CSX: the worker that computes one Unit at a time on weights that pass through.

Start at `worker.py`. `tree.py` is the order in which gradients are summed, `loss.py` finds the loss in a result.
"""
