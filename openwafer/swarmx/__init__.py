"""SwarmX: weights go out to every worker, gradients are summed on their way back.

The world is M MemoryX ranks, which hold stripes of every Unit, and N CSX ranks, which compute. Start at `hub.py` (what
a store sees of its workers) and `port.py` (what a worker sees of its stores); `local.py` joins processes of one host
through shared memory, `network.py` hosts through torch.distributed. `tree.py` is why N changes no bit.
"""
