"""Sweeping a tier that engines share: every place where one can be in the middle of the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from store.records import MODEL, about, load
from store.test_record import make_kv

from kvweave.errors import InvalidArgument
from kvweave.keep import LRU
from kvweave.store.codec import parse
from kvweave.store.collect import register, retire, sweep
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record.transfer import MARK, digest_of, key_of
from kvweave.store.tier.base import Put
from kvweave.store.tier.memory import Memory

MINE, OTHER = "1" * 32, "2" * 32
ROWS = make_kv(20)
CHUNK = "0c" * 16


class Shared(Memory):
    """Calls ``before`` with the number of each operation."""

    shared = True

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.n = 0
        self.before: Callable[[int], None] = lambda n: None

    def _step(self) -> None:
        before, self.n = self.n, self.n + 1
        hook, self.before = self.before, lambda n: None  # who comes in between is not interrupted
        hook(before)
        self.before = hook

    def put(self, *args, **how):  # type: ignore[no-untyped-def]
        self._step()
        return super().put(*args, **how)

    def look(self, *args, **how):  # type: ignore[no-untyped-def]
        self._step()
        return super().look(*args, **how)

    def get(self, *args, **how):  # type: ignore[no-untyped-def]
        self._step()
        return super().get(*args, **how)

    def discard(self, *args, **how):  # type: ignore[no-untyped-def]
        self._step()
        return super().discard(*args, **how)


class Index:
    """Digests that are committed."""

    def __init__(self, tier: Shared) -> None:
        self.named: set[str] = set()
        self.tier = tier

    def marks(self) -> set[str]:
        return set(self.named)

    def put(self, chunk: str = CHUNK) -> Level:
        """Commit, then have it on the tier; what a durable put does. Returns where it is."""
        level = Level(self.tier, parse("raw"), MODEL, LRU(), index=(MINE, "here"))
        self.named.add(chunk)
        outcome = level.put(1, about(ROWS, chunk), ROWS, durable=True)
        assert outcome.ok, outcome
        return level

    def sweep(self, **how: float) -> None:
        sweep(self.tier, self.marks, {MINE}, **how)  # type: ignore[arg-type]

    def check(self, level: Level) -> None:
        found = load(self.tier, level.held[1].key, about(ROWS))
        assert isinstance(found, KV), f"acknowledged, and {found}"


def lying(tier: Shared) -> Index:
    """An index whose chunk was put once, and removed: its record lies there, named by nobody."""
    index = Index(tier)
    index.put()
    index.named.clear()
    tier.n = 0
    return index


def test_what_nobody_names_goes_and_leaves_nothing() -> None:
    index = lying(Shared())
    index.put("0d" * 16)
    swept = sweep(index.tier, index.marks, {MINE}, dry_run=True)
    assert (swept.n_records, swept.n_named, len(swept.removed)) == (2, 1, 1)
    assert len(list(index.tier.keys())) == 3
    swept = sweep(index.tier, index.marks, {MINE})
    assert swept.removed == [key_of(CHUNK, parse("raw"), False)] and swept.n_bytes > 0
    assert sorted(index.tier.keys()) == [f"{'0d' * 16}.raw", f"index.{MINE}"]


def n_steps(run: Callable[[Index], object]) -> int:
    index = lying(Shared())
    run(index)
    return index.tier.n


@pytest.mark.parametrize("step", range(n_steps(Index.sweep)))
@pytest.mark.parametrize("grace", [0.0, 1e-9])
def test_a_durable_put_in_the_middle_of_a_sweep_is_kept(step: int, grace: float) -> None:
    index = lying(Shared())
    if grace:
        index.sweep(grace=1000.0)  # it is marked already
        index.tier.n = 0
    made: list[Level] = []

    def between(n: int) -> None:
        if n == step:
            made.append(index.put())

    index.tier.before = between
    index.sweep(grace=grace)
    index.tier.before = lambda n: None
    for level in made:
        index.check(level)
    index.sweep()
    for level in made:
        index.check(level)
    index.named.clear()
    index.sweep()
    assert list(index.tier.keys()) == [f"index.{MINE}"], "no bytes are left"


@pytest.mark.parametrize("step", range(n_steps(Index.put)))
def test_a_sweep_in_the_middle_of_a_durable_put_takes_nothing(step: int) -> None:
    index = lying(Shared())

    def between(n: int) -> None:
        if n == step:
            index.sweep()

    index.tier.before = between
    level = index.put()
    index.tier.before = lambda n: None
    index.check(level)
    index.sweep()
    index.check(level)


@pytest.mark.parametrize("dies", range(1, n_steps(Index.sweep)))
def test_a_sweep_that_dies_is_finished_by_the_next(dies: int) -> None:
    """Whatever it had done; and a put in between relies on nothing that the dead one may remove."""
    index = lying(Shared())

    def die(n: int) -> None:
        if n == dies:
            raise KeyboardInterrupt

    index.tier.before = die
    with pytest.raises(KeyboardInterrupt):
        index.sweep()
    index.tier.before = lambda n: None
    level = index.put()
    doomed = key_of(CHUNK, parse("raw"), False)
    if isinstance(index.tier.look([doomed + MARK])[0], int):
        index.tier.discard([doomed])  # its last request comes through
    index.check(level)
    index.sweep()
    index.check(level)
    index.named.clear()
    index.sweep()
    assert list(index.tier.keys()) == [f"index.{MINE}"]


def test_what_was_marked_a_while_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    index = lying(Shared())
    assert sweep(index.tier, index.marks, {MINE}, grace=60).waiting
    assert not sweep(index.tier, index.marks, {MINE}, grace=60).removed
    now = __import__("time").time
    monkeypatch.setattr("kvweave.store.collect.time.time", lambda: now() + 61)
    assert sweep(index.tier, index.marks, {MINE}, grace=60).removed
    assert list(index.tier.keys()) == [f"index.{MINE}"]


@pytest.mark.parametrize("said", [b'{"at": 4e9}', b'{"at": "noon"}', b"{", b"[]", b'{"at": NaN}'])
def test_a_mark_without_a_sensible_time_is_made_anew(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was ahead, or the mark is spoilt: waiting begins again, and ends."""
    index = lying(Shared())
    (record,) = (key for key in index.tier.keys() if digest_of(key))
    index.tier.put([Put(record + MARK, [memoryview(said)])])
    first = sweep(index.tier, index.marks, {MINE}, grace=60)
    assert first.waiting == [record] and record + MARK not in set(index.tier.keys())
    assert sweep(index.tier, index.marks, {MINE}, grace=60).waiting == [record]
    now = __import__("time").time
    monkeypatch.setattr("kvweave.store.collect.time.time", lambda: now() + 61)
    assert sweep(index.tier, index.marks, {MINE}, grace=60).removed == [record]
    assert list(index.tier.keys()) == [f"index.{MINE}"]


def test_an_index_that_was_not_given_stops_it() -> None:
    index = lying(Shared())
    register(index.tier, OTHER, "moon:/home", None)
    with pytest.raises(InvalidArgument, match=r"22222222 \(moon:/home"):
        index.sweep()
    assert len(list(index.tier.keys())) == 3
    retire(index.tier, OTHER)
    index.sweep()
    assert list(index.tier.keys()) == [f"index.{MINE}"]


def test_without_an_index_nothing_is_durable_there() -> None:
    level = Level(Shared(), parse("raw"), MODEL, LRU())
    assert level.put(1, about(ROWS), ROWS, durable=True).state == "failed"
    assert level.put(1, about(ROWS), ROWS).ok


@pytest.mark.parametrize("n_doomed", [1, 2])
def test_a_record_under_another_name_is_found_by_who_does_not_know_it(n_doomed: int) -> None:
    """Dead sweeps left marks: who put it used the next name, and whoever comes later finds that."""
    index = Index(Shared())
    names = [key_of(CHUNK, parse("raw"), False, g) for g in range(n_doomed + 1)]
    said = memoryview(b"{}")
    for name in names[:-1]:
        index.tier.put([Put(name + MARK, [said])])
    index.put()
    assert {key for key in index.tier.keys() if digest_of(key) and not key.endswith(MARK)} == {
        names[-1]
    }
    for believed in (False, True):  # or it believes that the record has its first name
        level = Level(index.tier, parse("raw"), MODEL, LRU(), index=(MINE, "here"))
        mover = Mover([level], lambda id: about(ROWS, CHUNK), is_pinned=lambda id: False)
        if believed:
            level.presume(1, CHUNK, 100)
        mover.find([1])
        found = mover.load([1])[1]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.k, ROWS.k, strict=True))
        assert mover.counts["lost"] == 0
