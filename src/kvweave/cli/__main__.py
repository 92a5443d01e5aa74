"""``python -m kvweave.cli``."""

from kvweave.cli.app import main

raise SystemExit(main())
