"""openwafer: an open wafer-scale AI cluster in software.

Start reading at `cli/main.py` (the commands) or `graph/unit.py` (the thing everything streams).
"""

__version__ = "0.1.0"
