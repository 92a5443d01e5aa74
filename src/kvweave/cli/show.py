"""How results are shown: JSON, a table on a terminal, or aligned plain text for a pipe."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module

from kvweave.chunk.files import Entry
from kvweave.errors import KVWeaveError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PROGRESS_AFTER = 1.0  # seconds; what is faster needs no bar


@dataclass(frozen=True, slots=True)
class Out:
    """Where a command's results go: data to stdout, notes to stderr."""

    as_json: bool = False
    quiet: bool = False

    @classmethod
    def of(cls, args: Namespace) -> Out:
        """Return what the common options ask for."""
        return cls(as_json=args.json, quiet=args.quiet)

    def data(self, value: object) -> None:
        """Print one JSON value on a line of its own."""
        print(json.dumps(value, ensure_ascii=False), flush=True)

    def piece(self, text: str) -> None:
        """Print a piece of an answer as it comes; what is told as JSON is told at the end."""
        if not self.as_json:
            print(text, end="", flush=True)

    def note(self, text: str) -> None:
        """Tell something that is not the result."""
        if not self.quiet and not self.as_json:
            print(text, file=sys.stderr, flush=True)

    def error(self, error: KVWeaveError) -> None:
        """Report an error the command goes on after."""
        if self.as_json:
            print(json.dumps({"error": error.to_dict()}), file=sys.stderr, flush=True)
            return
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
        """Print rows under a head; the first ``left`` columns are text, the rest numbers."""
        if sys.stdout.isatty():
            import_module("kvweave.cli.pretty").table(head, rows, left)
        else:
            print("\n".join(aligned([head, *rows], left)))

    def entries(self, entries: Sequence[Entry], *, long: bool) -> None:
        """Print a listing of names, or a table of what stands behind them."""
        if self.as_json:
            self.data([entry.to_dict() for entry in entries])
        elif not entries:
            return
        elif long:
            head = ("name", "id", "kind", "tier", "pin", "tokens", "size", "refs", "uses")
            self.table(head, [_row(entry) for entry in entries], left=5)
        else:
            print("\n".join(entry.name for entry in entries))

    def done(self, verb: str, entries: Iterable[Entry], *, dry_run: bool) -> None:
        """Say what a verb did to which chunks, or would do."""
        entries = list(entries)
        if self.as_json:
            self.data([entry.to_dict() for entry in entries])
        elif not entries:
            self.note("nothing to do")
        elif not self.quiet:
            would = "would be " if dry_run else ""
            for e in entries:
                print(f"{would}{verb}: {e.name}  #{e.id}, {e.n_tokens} tokens, {size(e.n_bytes)}")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function to be told of ``n`` more; draws a bar when it takes over a second."""
        if self.quiet or self.as_json or not sys.stderr.isatty():
            yield lambda n: None
            return
        started, done, bar = time.monotonic(), 0, None

        def advance(n: int) -> None:
            nonlocal done, bar
            done += n
            if bar is None and time.monotonic() - started > PROGRESS_AFTER:
                bar = import_module("kvweave.cli.pretty").Bar(what, total)
            if bar is not None:
                bar.at(done)

        try:
            yield advance
        finally:
            if bar is not None:
                bar.close()


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return lines; the first ``left`` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def date(seconds: float) -> str:
    """Return a time of this place, to the second."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def size(n_bytes: int) -> str:
    """Return ``36 KiB``, ``1.5 MiB``; three digits at the most."""
    number, unit = float(n_bytes), 0
    while number >= 1000 and unit < len(UNITS) - 1:
        number, unit = number / 1024, unit + 1
    digits = 1 if unit and number < 10 else 0
    return f"{number:.{digits}f} {UNITS[unit]}"


def _row(entry: Entry) -> tuple[str, ...]:
    return (
        entry.name,
        f"#{entry.id}",
        entry.kind,
        entry.tier,
        "pin" if entry.pinned else "-",
        str(entry.n_tokens),
        size(entry.n_bytes),
        str(entry.refs),
        str(entry.n_uses),
    )
