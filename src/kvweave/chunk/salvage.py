"""A good index of what a damaged one still says; what does not verify is left out and reported.

If anything was lost the report stays beside the index, ``index.sqlite.lost``: `lost_of`.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4
from zlib import crc32

from kvweave.chunk.format import meta_sum, name_sum, row_sum, tokens_sum
from kvweave.chunk.guard import as_ours, free_name, give_lock, lost_of, take_lock
from kvweave.chunk.identity import check_name
from kvweave.chunk.log import log_of, look
from kvweave.chunk.pages import Cell, Pages
from kvweave.chunk.rebuild import fsync, put_in_place, there, write_index, write_json
from kvweave.chunk.record import Row, from_row
from kvweave.chunk.seal import Seal
from kvweave.errors import CorruptChunk, InvalidName, StoreError

_IDS_LEFT_OUT = 1000
"""Where the index does not know any more which ids were given, so many behind those it has are not."""


@dataclass(slots=True)
class Salvage:
    """What came out of a damaged index."""

    path: str
    kept_aside: str
    """The damaged file, as it was; with its log beside it, if it had one."""
    n_chunks: int = 0
    n_names: int = 0
    lost_chunks: list[int] = field(default_factory=list)
    """Ids that something still speaks of."""
    lost_names: list[str] = field(default_factory=list)
    """Names whose chunk is lost; ``namespace:name``."""
    n_unreadable: int = 0
    """Rows that are not what was written; what they said is not known."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return the fields, JSON-ready."""
        return asdict(self)


def salvage(path: Path) -> Salvage:
    """Put an index of all rows that verify in the place of ``path``, and keep that one aside.

    Needs the memory of the whole file. Raises CorruptChunk when nothing in it is of an index, StoreError
    when the disk refuses; then nothing was changed. Raises InvalidArgument when it is open elsewhere.
    """
    with as_ours(path), _locked(path):
        wal, seal, (is_others, _) = log_of(path), Seal(path).read(), look(path)
        if there(wal):
            log = b"" if is_others else wal.read_bytes()
        else:
            log = _left_of(path)
        found = _Found(Pages(path.read_bytes(), log))
        if not (found.meta or found.chunks or found.names or seal.said.uuid):
            raise CorruptChunk(str(path), "nothing in it is of an index")
        aside = free_name(path)
        report = Salvage(str(path), str(aside))
        found.settle(report)
        uuid = str(found.meta.get("uuid") or seal.said.uuid)
        if not uuid:
            uuid = uuid4().hex
            if not found.is_old:
                report.notes.append("whose index it was is not known: tiers take it for another")
        n = max(found.meta.get("n_writes", 0), seal.said.n)
        more: dict[str, str] = {k: found.meta[k] for k in ("place", "was") if k in found.meta}
        was = more.get("was", "").split()
        if missing := seal.missing(uuid, found.meta.get("n_writes", n), was):
            report.notes.append(missing)
        next_id = found.highest + 1
        if "next_id" in found.meta:
            next_id = max(next_id, found.meta["next_id"])
        else:
            next_id += _IDS_LEFT_OUT
        new = path.with_name(path.name + ".new")
        write_index(
            new,
            (uuid, next_id, n + 1),
            (found.chunks[id] for id in sorted(found.chunks)),
            ((*key, found.names[key]) for key in sorted(found.names)),
            ((id, found.tokens[id]) for id in sorted(found.chunks)),
            more,
        )
        report.n_chunks, report.n_names = len(found.chunks), len(found.names)
        is_told = "n_writes" in found.meta or (found.is_old and found.chunks)
        if missing or report.lost_chunks or report.n_unreadable or not is_told:
            write_json(lost_of(path), report.to_dict())
        _keep(path, aside)
        if there(wal):
            wal.rename(aside.with_name(aside.name + "-wal"))
        put_in_place(new, path)
        seal.end(uuid, n + 1)
        return report


class _Found:
    """The rows of a damaged index that verify."""

    def __init__(self, pages: Pages) -> None:
        self.chunks: dict[int, Row] = {}
        self.names: dict[tuple[str, str], int] = {}
        self.tokens: dict[int, bytes] = {}
        self.meta: dict[str, Any] = {}
        self.highest = 0
        self.n_unreadable = 0
        for cell in pages.cells():
            self.n_unreadable += cell is None or not self._take(cell)
        self.is_old = not (self.chunks or self.names or self.tokens or self.meta)
        if self.is_old:
            older, self.n_unreadable = _Older(), 0
            for cell in pages.cells():
                self.n_unreadable += cell is None or not older.take(cell)
            self.chunks, self.names, self.tokens = older.chunks, older.names, older.tokens
            self.meta = older.meta
        elif not pages.log_is_whole:
            self.n_unreadable += 1
        ids = (self.chunks, self.tokens, self.names.values())
        self.highest = max((max(each, default=0) for each in ids), default=0)

    def settle(self, report: Salvage) -> None:
        """Leave out what cannot stand without what is lost."""
        chunks, lost = self.chunks, set(self.tokens) - self.chunks.keys()
        digests: dict[bytes, int] = {}
        for id, row in sorted(chunks.items()):
            if len(self.tokens.get(id, b"")) != 4 * row[2] or row[1] in digests:
                lost.add(id)
            digests.setdefault(row[1], id)
        while True:  # a chunk's KV was computed after its base, and cannot be without it
            for id in lost & chunks.keys():
                del chunks[id]
            lost |= {row[5] for row in chunks.values() if row[5] is not None} - chunks.keys()
            more = {id for id, row in chunks.items() if row[5] in lost}
            lost |= more
            if not more:
                break
        for (space, name), id in sorted(self.names.items()):
            if id not in chunks or chunks[id][4] != space:
                lost |= {id} - chunks.keys()
                report.lost_names.append(f"{space}:{name}" if space else name)
                del self.names[space, name]
        report.lost_chunks = sorted(lost)
        report.n_unreadable = self.n_unreadable
        if self.is_old:
            report.notes.append(
                "format 1 has no checksums but those of tokens: the rest is as it was found"
            )

    def _take(self, cell: Cell) -> bool:
        id, values = cell
        try:
            if id is not None and len(values) == 14:
                row = (id, *values[1:13])
                good = row_sum(row) == values[13]  # type: ignore[arg-type]
                if good:
                    from_row(row)  # type: ignore[arg-type]
                    self.chunks[id] = row  # type: ignore[assignment]
            elif id is not None and len(values) == 3:
                _, wanted, data = values
                good = isinstance(data, bytes) and tokens_sum(id, data) == wanted
                if good:
                    self.tokens[id] = data  # type: ignore[assignment]
            elif id is None and len(values) == 4:
                space, name, chunk, wanted = values
                good = name_sum(space, name, chunk) == wanted  # type: ignore[arg-type]
                if good:
                    self.names[space, name] = chunk  # type: ignore[assignment,index]
            elif id is None and len(values) == 3 and isinstance(values[0], str):
                key, value, wanted = values
                good = meta_sum(key, value) == wanted  # type: ignore[arg-type]
                if good:
                    self.meta[key] = value  # type: ignore[index]
            else:
                return True  # an index's, or the schema's
        except (struct.error, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            return False
        return good


class _Older:
    """The rows of an index of format 1, taken for what they look like."""

    def __init__(self) -> None:
        self.chunks: dict[int, Row] = {}
        self.names: dict[tuple[str, str], int] = {}
        self.tokens: dict[int, bytes] = {}
        self.meta: dict[str, Any] = {}

    def take(self, cell: Cell) -> bool:
        """Take a cell and return True if it may be a row of format 1."""
        id, values = cell
        try:
            if id is not None and len(values) == 13:
                row: Row = (id, *values[1:])  # type: ignore[assignment]
                from_row(row)
                row_sum(row)  # all types are right
                self.chunks[id] = row
            elif id is not None and len(values) == 3:
                _, wanted, data = values
                if not isinstance(data, bytes) or crc32(data) != wanted:
                    return False
                self.tokens[id] = data
            elif id is None and len(values) == 3 and isinstance(values[2], int):
                space, name, chunk = values
                self.names[str(space), check_name(str(name))] = chunk  # type: ignore[assignment]
            elif id is None and len(values) == 2 and values[0] == "next_id":
                self.meta["next_id"] = values[1]
            else:
                return False
        except (struct.error, TypeError, ValueError, IndexError, AttributeError, InvalidName):
            return False
        return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise StoreError(f"there is no index {path}", hint="nothing to mend", path=str(path))
    lock = take_lock(path)
    try:
        yield
    finally:
        give_lock(lock)


def _left_of(path: Path) -> bytes:
    """Return the log of a salvage that ended between keeping this file aside, with its log, and putting a
    new one in its place."""
    for aside in sorted(path.parent.glob(f"{path.name}.damaged-*")):
        log = aside.with_name(aside.name + "-wal")
        if there(log) and filecmp.cmp(aside, path, shallow=False):
            return log.read_bytes()
    return b""


def _keep(path: Path, aside: Path) -> None:
    """Give a file a second name, or copy it where files have one name only."""
    try:
        os.link(path, aside)
    except OSError:
        shutil.copy2(path, aside)
        fsync(aside)
