"""Values of kvweave before 2026-11-23, which kept them in slabs, become files of their own.

::

    DIR/seg-000001.slab   extents of 4 KiB pages: a header page, the value, zeros to the page's end
    DIR/slab.sqlite       slots(key, segment, page, n, seq)

A header says whose bytes follow (`_HEADER`, then the key), so a record of format 1, which does not
name its chunk, can be trusted here, and is written anew with its name. A slab goes when all that it
holds is safe elsewhere; what does not verify stays where it is.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import xxhash

from kvweave.chunk.rebuild import there
from kvweave.errors import StoreError
from kvweave.store.record.encode import renamed
from kvweave.store.record.layout import Head
from kvweave.store.record.transfer import key_of
from kvweave.store.tier.base import PAGE, Put, Tier

_HEADER = struct.Struct(
    "<8sIIQQQQ"
)  # magic, version, bytes of key, its xxh3, seq, bytes, their xxh3
INDEX = "slab.sqlite"
log = logging.getLogger("kvweave.store")


def is_in(directory: Path) -> bool:
    """Tell whether there is a slab in ``directory``. Raises OSError."""
    return there(directory / INDEX)


def move(directory: Path, to: Tier) -> None:
    """Put the values of the slab in ``directory`` into ``to``, durably; it goes if that was all of them.

    Raises StoreError when there is no room; then it stays, as one does that cannot be read.
    """
    index = directory / INDEX
    try:
        if left := _move(directory, index, to):
            log.warning("%s values of %s do not verify, and stay there", left, index)
            return
        for path in [*directory.glob("seg-*.slab"), *directory.glob("slab.*")]:
            path.unlink()
    except (sqlite3.Error, OSError) as error:
        hint = "its values are computed again; move the slab's files away to be rid of this"
        log.warning("%s cannot be read: %s (%s)", index, error, hint)


def _move(directory: Path, index: Path, to: Tier) -> int:
    """Return how many values do not verify."""
    with closing(sqlite3.connect(index)) as db:
        rows = db.execute(
            "SELECT key, segment, page, n FROM slots ORDER BY segment, page"
        ).fetchall()
    left = 0
    for key, segment, page, n in rows:
        found = _value(directory / f"seg-{segment:06d}.slab", str(key), page, n)
        if found is None:
            left += 1
            continue
        head, data = found
        put = Put(
            key_of(key, head.choice, head.lossy and not head.choice.lossy), renamed(head, data, key)
        )
        (outcome,) = to.put([put], durable=True)
        if outcome.state not in ("done", "exists"):
            raise StoreError(
                f"{index}: its values cannot be moved: {outcome.why}",
                hint="make room on this disk, then open the home again; nothing was lost",
            )
    return left


def _value(path: Path, key: str, page: int, n: int) -> tuple[Head, memoryview] | None:
    """Return a value whose header and checksum are right and whose record verifies, and its head."""
    try:
        with path.open("rb") as file:
            file.seek(page * PAGE)
            header, data = file.read(PAGE), file.read(n)
        magic, _, n_key, _, _, said, payload = _HEADER.unpack_from(header)
        name = header[_HEADER.size : _HEADER.size + n_key]
        there = magic, name, said, payload
        if there != (b"kvwslab1", key.encode(), n, xxhash.xxh3_64_intdigest(data)):
            return None
        return Head.parse(data, key), memoryview(data)
    except (OSError, StoreError, struct.error):
        return None
