"""The `openwafer` command: one thin module per subcommand, imported only when it is used.

Start at `main.py`. A subcommand module has `add_arguments(parser)` and `run(args) -> None`.
"""
