"""A file of what was learned: numbers that nothing else can tell right from wrong, so they have a checksum.

One digit of a bound is a promise that nobody made. A file of before has none, and is believed. No torch.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvweave.chunk.rebuild import write_whole

WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading a file raises that is not of its kind."""


def write_learned(path: Path, told: dict[str, Any]) -> None:
    """Write it as JSON: all of it, or nothing. Raises OSError."""
    write_whole(path, json.dumps(told | {"sum": _sum_of(told)}, indent=1) + "\n")


def parsed(text: bytes) -> dict[str, Any]:
    """Return what was written. Raises ValueError, or another of `WRONG`, where this is not what was."""
    told: dict[str, Any] = json.loads(text)
    wanted = told.pop("sum", None)
    if wanted is not None and wanted != _sum_of(told):
        raise ValueError("its checksum differs")
    return told


def _sum_of(told: dict[str, Any]) -> str:
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()
