"""What the index holds in memory, and how it is read from the journal."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvweave.chunk.format import damaged
from kvweave.chunk.identity import ChunkId
from kvweave.chunk.journal import Journal
from kvweave.chunk.record import Record, from_row


@dataclass(slots=True)
class IndexState:
    """The maps of an index; ``holders`` alone is not in the journal."""

    records: dict[ChunkId, Record] = field(default_factory=dict)
    by_digest: dict[bytes, ChunkId] = field(default_factory=dict)
    names: dict[str, dict[str, ChunkId]] = field(default_factory=dict)
    """namespace -> name -> id"""
    n_children: dict[ChunkId, int] = field(default_factory=dict)
    """How many chunks have this one as base; no entry for none."""
    holders: dict[ChunkId, dict[str, int]] = field(default_factory=dict)
    """id -> context -> how often it holds it"""
    next_id: int = 1
    written_next_id: int = 1
    """``next_id`` as the journal has it; it may lag while the newest chunk's row says the same."""


def load(journal: Journal) -> IndexState:
    """Return the state the journal describes; raise CorruptChunk when it contradicts itself."""
    state = IndexState()
    state.written_next_id = state.next_id = journal.next_id()
    with no_garbage_collection():
        try:
            _load_chunks(state, journal)
        except (ValueError, TypeError, IndexError, struct.error) as error:
            raise damaged(journal.path, f"a chunk's row: {error}") from error
        _load_names(state, journal)
    for base in state.n_children:
        if base not in state.records:
            raise damaged(journal.path, f"#{base}, the base of others, is missing")
    if not journal.is_whole:
        journal.check_tokens()
    return state


def _load_chunks(state: IndexState, journal: Journal) -> None:
    records, by_digest, n_children = state.records, state.by_digest, state.n_children
    id = ChunkId(0)
    for row in journal.chunks():
        record = from_row(row)
        id = record.id
        records[id] = record
        by_digest[record.digest] = id
        base = record.base
        if base is not None:
            n_children[base] = n_children.get(base, 0) + 1
    if len(by_digest) != len(records):
        raise ValueError("two have the same digest")
    state.next_id = max(state.next_id, id + 1)  # rows come by id


def _load_names(state: IndexState, journal: Journal) -> None:
    records = state.records
    space, names = "", state.names.setdefault("", {})
    for namespace, name, id in journal.names():
        record = records.get(id)
        if record is None or record.namespace != namespace:
            raise damaged(journal.path, f"{name!r} names #{id}, which is not there")
        if namespace != space:  # they come sorted by namespace
            space, names = record.namespace, state.names.setdefault(record.namespace, {})
        names[name] = record.id
        if record.linked is None:
            record.linked = name
        else:
            record.link(name)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Stop the collector, which would walk a million records again and again while many are made."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
