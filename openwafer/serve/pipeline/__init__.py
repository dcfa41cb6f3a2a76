"""A model whose layers are divided over processes; only activations go from one to the next.

Start at `runner.py` (the engine's side), then `stage.py` (what runs in each process). Where stages are ranks that
torchrun started on several hosts: `members.py` (who they are), `cluster.py` (rank 0), `rank.py` (the others).
"""
