"""What index.sqlite looks like: its tables, and the checksum that each row carries.

A row's checksum covers everything the row says, also whose it is, so that rows that were exchanged
are found like rows that were changed.
"""

from __future__ import annotations

import struct
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvweave.chunk.record import Row
from kvweave.errors import CorruptChunk

FORMAT = 2
APPLICATION_ID = 0x6B76_7765  # "kvwe": tells our file from any other SQLite file
PAGE_BYTES = 4096

CHUNKS = """CREATE TABLE chunks(
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, n_tokens INT NOT NULL, kind INT NOT NULL,
    namespace TEXT NOT NULL, base INT, deps BLOB, tier INT NOT NULL, n_bytes INT NOT NULL,
    pinned INT NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL, n_uses INT NOT NULL,
    sum INT NOT NULL)"""
SCHEMA = (
    CHUNKS,
    "CREATE INDEX chunks_base ON chunks(base) WHERE base IS NOT NULL",
    """CREATE TABLE names(
    namespace TEXT NOT NULL, name TEXT NOT NULL, id INT NOT NULL, sum INT NOT NULL,
    PRIMARY KEY(namespace, name)) WITHOUT ROWID""",
    "CREATE INDEX names_id ON names(id)",
    "CREATE TABLE tokens(id INTEGER PRIMARY KEY, sum INT NOT NULL, ids BLOB NOT NULL)",
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value NOT NULL, sum INT NOT NULL) WITHOUT ROWID",
)

_FIXED = struct.Struct("<qqqqqqqqddq")
_MASK = (1 << 63) - 1  # SQLite's integers have a sign


def row_sum(row: Row) -> int:
    """Return the checksum of a row of ``chunks``. Raises struct.error, TypeError or ValueError for
    columns of wrong types."""
    (
        id, digest, n_tokens, kind, namespace, base, deps, tier, n_bytes, pinned, created,
        last_used, n_uses,
    ) = row  # fmt: skip
    deps = deps or b""
    fixed = _FIXED.pack(
        id, n_tokens, kind, -1 if base is None else base, tier, n_bytes, pinned, len(deps),
        created, last_used, n_uses,
    )  # fmt: skip
    return xxh3_64_intdigest(fixed + digest + deps + namespace.encode()) & _MASK


def name_sum(namespace: str, name: str, id: int) -> int:
    """Return the checksum of a row of ``names``."""
    return xxh3_64_intdigest(f"{namespace}\0{name}".encode(), id) & _MASK


def tokens_sum(id: int, data: bytes) -> int:
    """Return the checksum of a row of ``tokens``."""
    return xxh3_64_intdigest(data, id) & _MASK


def meta_sum(key: str, value: int | str) -> int:
    """Return the checksum of a row of ``meta``."""
    return xxh3_64_intdigest(f"{key}\0{value!r}".encode()) & _MASK


def damaged(path: Path, what: str) -> CorruptChunk:
    """Return the error for an index that is not what was written."""
    return CorruptChunk(str(path), what, hint=f"run `kvweave fsck {path.parent} --repair`")
