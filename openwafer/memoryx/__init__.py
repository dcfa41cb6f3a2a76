"""MemoryX: where weights and optimizer state live, and where the optimizer runs.

Start at `store.py` (the store of a model's Units), then `tier.py` (DRAM, and what a tier is) and `optimizer.py`
(whose update rules are in `optimizers/`).
"""
