"""The `openwafer` command, also as `python -m openwafer`."""

from openwafer.interrupt import LeaveAtOnce


def main() -> int:
    """Run the command; returns its exit code."""
    with LeaveAtOnce():
        from openwafer.cli.main import main as run
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
