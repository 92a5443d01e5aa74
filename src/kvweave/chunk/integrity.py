"""Whether the index agrees with itself and with its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvweave.chunk.identity import ChunkId, check_name
from kvweave.chunk.journal import Journal
from kvweave.chunk.record import Row, to_row
from kvweave.chunk.state import IndexState

_USES = slice(11, 13)
"""The columns of a row that may be older in the journal: last_used, n_uses."""


def require(truth: object, sentence: str) -> None:
    """Raise AssertionError, also under ``python -O``."""
    if not truth:
        raise AssertionError(sentence)


def check_memory(state: IndexState) -> None:
    """Raise AssertionError when the maps of the index contradict each other."""
    records = state.records
    for id, record in records.items():
        require(record.id == id, f"#{id} is filed as #{record.id}")
        require(0 < id < state.next_id, f"#{id} is not below the next id {state.next_id}")
        require(record.n_tokens > 0, f"#{id} has no tokens")
        require(record.n_bytes >= 0, f"#{id} has {record.n_bytes} bytes")
        require(state.by_digest.get(record.digest) == id, f"the digest of #{id} is not filed")
    require(len(state.by_digest) == len(records), "there are digests of no chunk")
    children = Counter(r.base for r in records.values() if r.base is not None)
    require(state.n_children == dict(children), "the counts of chunks on a base are wrong")
    for base in children:
        require(base in records, f"#{base}, the base of a living chunk, is gone")
    for id, holders in state.holders.items():
        require(id in records, f"#{id}, held by {sorted(holders)}, is gone")
        require(holders and min(holders.values()) > 0, f"#{id} is held by nobody")
    _check_names(state)


def _check_names(state: IndexState) -> None:
    n_names = 0
    for namespace, names in state.names.items():
        for name, id in names.items():
            require(check_name(name) == name, f"{name!r} is not in normal form")
            require(id in state.records, f"{name!r} names #{id}, which is gone")
            record = state.records[id]
            require(record.namespace == namespace, f"{name!r} names #{id} of another namespace")
            n_names += 1
    for id, record in state.records.items():
        for name in record.names:
            bound = state.names.get(record.namespace, {}).get(name)
            require(bound == id, f"#{id} has the name {name!r}, which names #{bound}")
    linked = sum(record.n_names for record in state.records.values())
    require(linked == n_names, f"chunks have {linked} names, {n_names} are filed")


def check_journal(state: IndexState, journal: Journal, unwritten_uses: Collection[ChunkId]) -> None:
    """Raise AssertionError when the journal says something else than memory."""
    require(journal.damage() == "", f"SQLite finds {journal.damage()}")
    seen = 0
    for row in journal.chunks():
        record = state.records.get(ChunkId(row[0]))
        require(record is not None, f"#{row[0]} is in the journal only")
        assert record is not None
        wanted: Row = to_row(record)
        same = row == wanted
        if not same and record.id in unwritten_uses:
            same = row[: _USES.start] == wanted[: _USES.start]
        require(same, f"#{record.id} is {wanted} in memory and {row} in the journal")
        data = journal.tokens(record.id)
        require(len(data) == 4 * record.n_tokens, f"#{record.id} has {len(data)} bytes of tokens")
        seen += 1
    require(seen == len(state.records), "chunks are in memory only")
    names = {(namespace, name): id for namespace, name, id in journal.names()}
    wanted_names = {
        (namespace, name): id
        for namespace, known in state.names.items()
        for name, id in known.items()
    }
    require(names == wanted_names, "names in memory and journal differ")
    require(journal.token_ids() == set(state.records), "tokens are kept of other chunks")
    require(journal.next_id() == state.written_next_id, "the journal has another next id")
    highest = max(state.records, default=0)
    sure = max(highest + 1, state.written_next_id)
    require(sure <= state.next_id, "the next id was given before")
