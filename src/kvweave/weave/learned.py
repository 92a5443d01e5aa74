"""A file of what was learned: numbers that nothing else can tell right from wrong, so they have a checksum.

One digit of a bound is a promise that nobody made. A file of before has none, and is believed. No torch.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

from kvweave.chunk.background import Background, NoThread
from kvweave.chunk.rebuild import has_its_sum, with_sum, write_whole

log = logging.getLogger("kvweave.weave")

WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading a file raises that is not of its kind."""


def write_learned(path: Path, told: dict[str, Any]) -> None:
    """Write it as JSON: all of it, or nothing. Raises OSError."""
    write_whole(path, json.dumps(with_sum(told), indent=1) + "\n")


def parsed(text: bytes) -> dict[str, Any]:
    """Return what was written. Raises ValueError, or another of `WRONG`, where this is not what was."""
    told: dict[str, Any] = json.loads(text)
    if not has_its_sum(told):
        raise ValueError("its checksum differs")
    told.pop("sum", None)
    return told


class LearnedFile:
    """A file that is written again when there is news, while nobody waits for it, and at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = threading.Lock()
        self._news: dict[str, Any] | None = None  # what no thread has taken

    def later(self, told: dict[str, Any]) -> None:
        """Have it written; nothing may change ``told`` from here on. Where that fails it stays what it was."""
        self._news = told
        try:
            Background(self._write_news)
        except NoThread as error:
            log.warning("%s is not written now: %s", self.path, error)

    def now(self, told: dict[str, Any]) -> None:
        """Write it, behind what is being written. Raises OSError."""
        self._news = None
        with self._writing:
            write_learned(self.path, told)

    def _write_news(self) -> None:
        with self._writing:
            told, self._news = self._news, None
            try:
                if told is not None:
                    write_learned(self.path, told)
            except OSError as error:
                log.warning("%s is not written now: %s", self.path, error)
