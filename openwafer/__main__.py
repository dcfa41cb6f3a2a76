"""`python -m openwafer` is the `openwafer` command."""

from openwafer.cli.main import main

raise SystemExit(main())
