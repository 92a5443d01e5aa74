"""Indexes on disk for tests: filled, looked into, and changed behind their back."""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path

from forking import IMPORTABLE

import kvweave.errors
from kvweave.chunk.table import Table

SOURCE = str(Path(kvweave.errors.__file__).parents[1])
# of processes that tests start: what is importable here is there too, wherever it lies
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, IMPORTABLE])}
N = 60

Content = dict[str, tuple[int, tuple[int, ...]]]


def fill(path: Path, remove: bool = True) -> None:
    """An index with removed names, long tokens, bases and namespaces."""
    rows = random.Random(1)
    with Table(path) as table:
        with table.transaction():
            for i in range(1, N + 30):
                long = [i, *rows.choices(range(50_000), k=3000 if i == 40 else 9)]
                base = i - 1 if i % 7 == 0 else None
                space = "" if i % 5 else "tenant"
                if base is not None and table.get(base).namespace != space:
                    base = None
                digest = i.to_bytes(16, "little")
                id, _ = table.add(long, digest=digest, namespace=space, base=base, tier="disk")
                table.bind(f"docs/part-{i:03}", id, namespace=space)
        for i in range(N, N + 30 if remove else 0):
            space = "" if i % 5 else "tenant"
            table.unbind(f"docs/part-{i:03}", space)
        table.touch([3, 4, 5], now=7.0)


def content(table: Table) -> Content:
    """Return name -> digest and tokens, for all namespaces."""
    return {
        f"{space}:{name}": (record.digest, tuple(table.tokens(record.id).tolist()))
        for space in table.namespaces()
        for name in table.names(space)
        if (record := table.resolve(name, space))
    }


def digest_of(*tokens: int) -> bytes:
    return bytes(tokens).rjust(16, b"\0")


def put(table: Table, name: str, *tokens: int) -> int:
    with table.transaction():
        id, _ = table.add(tokens, digest=digest_of(*tokens))
        table.bind(name, id)
    return id


def changed(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()
