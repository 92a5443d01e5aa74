"""``python -m kvweave.cli``."""

from kvweave.cli import main

raise SystemExit(main())
