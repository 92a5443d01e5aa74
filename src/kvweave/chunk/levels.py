"""What an open transaction changed in memory, and how it is taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.record import Fields, Record
from kvweave.interrupts import HELD

Holders = dict[ChunkId, dict[str, int]]
"""id -> context -> how often it holds it"""


@dataclass(slots=True)
class Savepoint:
    """One of the transactions that stand in each other. IndexRows are the database's to take back."""

    n_freed: int
    loose: dict[ChunkId, bool] = field(default_factory=dict)
    """Whether a chunk was let go of before, of each of which that was changed: a copy of all in each
    transaction took half of the time that removing 20,000 names did."""
    records: dict[ChunkId, tuple[Record, Fields | None]] = field(default_factory=dict)
    """Each record that was changed, as it was before; None for a new one."""
    holders: dict[ChunkId, dict[str, int] | None] = field(default_factory=dict)
    undone: list[Callable[[], object]] = field(default_factory=list)
    """What others have to take back with it."""

    def keep(self, record: Record) -> None:
        """Remember a record before its first change."""
        if record.id not in self.records:
            self.records[record.id] = (record, record.fields())

    def pass_on(self, record: Record) -> None:
        """Leave tier, size and deps of a record as they are now when it is put back."""
        _, fields = self.records.get(record.id, (record, None))
        if fields is not None:
            now = record.fields()
            self.records[record.id] = record, (fields[0], *now[1:4], *fields[4:])

    def keep_holders(self, holders: Holders, id: ChunkId) -> None:
        """Remember who holds a chunk before the first change of that."""
        if id not in self.holders:
            self.holders[id] = dict(holders[id]) if id in holders else None

    def join(self, outer: Savepoint) -> None:
        """Let the transaction around it take it back too."""
        for id, kept in self.records.items():
            outer.records.setdefault(id, kept)
        for id, held in self.holders.items():
            outer.holders.setdefault(id, held)
        for id, was in self.loose.items():
            outer.loose.setdefault(id, was)
        outer.undone += self.undone

    def undo(self, holders: Holders) -> None:
        """Put back what was there."""
        for record, fields in self.records.values():
            if fields is not None:
                record.set_fields(fields)
        for id, held in self.holders.items():
            if held is None:
                holders.pop(id, None)
            else:
                holders[id] = held


class Transaction:
    """What ``with`` wants; a generator would take three times as long, twice in each verb."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        HELD.__enter__()
        try:
            self._begin()
        except BaseException:
            HELD.__exit__()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._end(kind is not None)
        finally:
            HELD.__exit__()


def require(truth: object, sentence: str) -> None:
    """Raise AssertionError, also under ``python -O``."""
    if not truth:
        raise AssertionError(sentence)


def take_back(calls: list[Callable[[], object]]) -> None:
    """Make calls of `Transactions.if_undone`, then what they return."""
    for again in [call() for call in reversed(calls)]:
        if callable(again):
            again()
