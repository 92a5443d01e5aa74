"""What was read of a load is decoded while the next layers are read.

python -m pytest tests/store/test_reader.py
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from store.test_mover import about, kv, level, same

from kvweave.chunk.background import NoThread
from kvweave.errors import LoadFailed
from kvweave.store import reader
from kvweave.store.kv import KV
from kvweave.store.mover import Mover
from kvweave.store.record.layout import Head
from kvweave.store.tier.base import Get, Outcome
from kvweave.store.tier.memory import Memory


@pytest.fixture
def by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for each layer, of three."""
    monkeypatch.setattr(reader, "TOGETHER", 1)
    monkeypatch.setattr(reader, "REQUESTS", 3)


class Counted(Memory):
    """Calls of `get` for rows, behind the one for heads."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.n, self.second = -1, threading.Event()
        self.fails: BaseException | None = None

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        self.n += 1
        if self.n == 2:
            self.second.set()
            if self.fails is not None:
                raise self.fails
        return super().get(gets, deadline=deadline)


@pytest.fixture
def tier() -> Counted:
    return Counted()


@pytest.fixture
def mover(tier: Counted) -> Mover:
    made = Mover([level(tier)], about)
    for id in (1, 2):
        made.save(id, kv(10, id))
    return made


def test_the_next_layers_are_read_while_the_first_are_decoded(
    by_layers: None, tier: Counted, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, overlaps = Head.decode, []

    def waits(self: Head, *args: Any) -> KV:
        overlaps.append(tier.second.wait(20))
        return decode(self, *args)

    monkeypatch.setattr(Head, "decode", waits)
    for id, found in mover.load([1, 2]).items():
        assert same(found.whole(), kv(10, id))
    assert overlaps == [True] * 6 and tier.n == 3


def test_an_error_of_the_thread_that_reads_ends_the_load(
    by_layers: None, tier: Counted, mover: Mover
) -> None:
    tier.fails = RuntimeError("nobody foresaw this")
    found = mover.load([1, 2])
    found[1].load.wait(0)
    with pytest.raises(LoadFailed, match="nobody foresaw this"):
        found[2].whole()


def test_without_a_thread_for_it_all_is_read_first(
    by_layers: None, tier: Counted, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise NoThread("none")

    monkeypatch.setattr(reader, "Background", none)
    for id, found in mover.load([1, 2]).items():
        assert same(found.whole(), kv(10, id))
    assert tier.n == 3
