"""Sweeping a tier that engines share: every place where one can be in the middle of the other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from store.records import MODEL, about, load
from store.test_record import make_kv
from store.values import small_device

from kvweave.errors import InvalidArgument, StoreError
from kvweave.keep import LRU
from kvweave.store import collect
from kvweave.store.codec import parse
from kvweave.store.collect import REGISTERED, ROOM, SPARE, register, sweep
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record.transfer import MARK, digest_of, key_of
from kvweave.store.tier.base import PAGE, Put
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.memory import Memory

MINE, OTHER = "1" * 32, "2" * 32
GONE = 2**22 + 1  # no process has such an id
ROWS = make_kv(20)
CHUNK = "0c" * 16


class Shared(Memory):
    """Calls ``before`` with the number of each operation. What is kept for sweeps is not among its keys."""

    shared = True

    def keys(self) -> Iterator[str]:
        return (key for key in super().keys() if key != SPARE)

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

    def sweep(self, **how: object) -> None:
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


@pytest.mark.parametrize(
    "said",
    [b'{"at": 4e9}', b'{"at": "noon"}', b"{", b"[]", b'{"at": NaN}', b'{"at": 1%s}' % (b"0" * 400)],
)
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
    index.sweep(retired=[OTHER])
    assert list(index.tier.keys()) == [f"index.{MINE}"]


def of_another(tier: Shared) -> Level:
    """Where an index that the sweep was not given has just put the chunk, durably."""
    level = Level(tier, parse("raw"), MODEL, LRU(), index=(OTHER, "there"))
    outcome = level.put(1, about(ROWS, CHUNK), ROWS, durable=True)
    assert outcome.ok, outcome
    return level


@pytest.mark.parametrize("step", range(n_steps(Index.sweep)))
def test_an_index_that_registers_in_the_middle_of_a_sweep_stops_it(step: int) -> None:
    """It was not there when the sweep looked, and relies on a record that is there."""
    index = lying(Shared())
    made: list[Level] = []

    def between(n: int) -> None:
        if n == step:
            made.append(of_another(index.tier))

    index.tier.before = between
    with suppress(InvalidArgument):
        index.sweep()
    index.tier.before = lambda n: None
    for level in made:
        index.check(level)
    marked = [key for key in index.tier.keys() if key.endswith(MARK)]
    assert not marked or not made, "who was refused leaves no mark"


@pytest.mark.parametrize("step", [0, 1])  # he looks, he registers
def test_who_is_not_known_to_a_tier_any_more_relies_on_nothing_that_is_marked(step: int) -> None:
    """A server that evicts has forgotten him, and a sweep that went before he registered anew goes on."""
    index = lying(Shared())
    level = of_another(index.tier)
    doomed = level.held[1].key
    index.tier.discard([REGISTERED + OTHER])

    def between(n: int) -> None:
        if n == step:
            index.tier.put([Put(doomed + MARK, [memoryview(b"{}")])], durable=True)

    index.tier.n, index.tier.before = 0, between
    assert level.put(1, about(ROWS, CHUNK), ROWS, durable=True).ok
    index.tier.before = lambda n: None
    assert level.held[1].key == doomed + ".1"
    assert isinstance(index.tier.look([REGISTERED + OTHER])[0], int)


@pytest.mark.parametrize("step", range(n_steps(Index.sweep)))
@pytest.mark.parametrize("marked", [False, True])
def test_of_two_sweeps_at_once_one_goes(step: int, marked: bool) -> None:
    """A mark that one relies on the other would remove; and who puts then sees none."""
    index = lying(Shared())
    if marked:  # by one that died
        index.tier.put([Put(key_of(CHUNK, parse("raw"), False) + MARK, [memoryview(b"{}")])])
    made: list[Level] = []
    refused: list[StoreError] = []

    def between(n: int) -> None:
        if n == step:
            try:
                index.sweep()
            except StoreError as error:
                refused.append(error)
            made.append(index.put())

    index.tier.n, index.tier.before = 0, between
    with suppress(StoreError):
        index.sweep()
    index.tier.before = lambda n: None
    for level in made:
        index.check(level)
    for error in refused:
        assert "another sweep is under way here: sweep." in str(error) and "--retire" in error.hint
    assert refused or step == 0 or step >= n_steps(Index.sweep) - 2 - marked
    index.sweep()
    index.named.clear()
    index.sweep()
    assert list(index.tier.keys()) == [f"index.{MINE}"]


@pytest.mark.parametrize(
    ("said", "over"),
    [
        ({}, False),
        ({"pid": 0}, False),  # nobody of ours has it, and it is some process
        ({"pid": GONE}, True),
        ({"pid": GONE, "host": "moon"}, False),
        ({"pid": GONE, "boot": "ab" * 16}, False),
        (
            {"pid": GONE, "pids": "pid:[1]"},
            False,
        ),  # another container of this machine, and its name
        ({"pid": os.getpid(), "pids": "pid:[1]"}, False),
        ({"pid": GONE, "pids": None}, False),  # of a kvweave that did not say
        ({"host": "moon", "at": -86401}, True),
        ({"host": "moon", "at": "noon"}, False),
    ],
)
def test_a_sweep_that_died_holds_up_nobody(said: dict[str, Any], over: bool) -> None:
    """Where that can be known; of elsewhere it takes a day, or somebody who says so."""
    index = lying(Shared())
    told = {**collect._here(), "pid": os.getppid(), "at": 0} | said
    if isinstance(told["at"], int):
        told["at"] += time.time()
    index.tier.put([Put(f"index.sweep.{OTHER}", [memoryview(json.dumps(told).encode())])])
    if not over:
        with pytest.raises(StoreError, match=r"another sweep .* sweep\.22222222 \(") as caught:
            index.sweep()
        assert len(list(index.tier.keys())) == 3 and "--retire sweep.22222222" in caught.value.hint
        assert sweep(index.tier, index.marks, {MINE}, retired=["sweep.2222"]).removed
    else:
        index.sweep()
    assert list(index.tier.keys()) == [f"index.{MINE}"]


@pytest.mark.parametrize("which", [1, 2])
def test_a_list_that_is_cut_or_older_sweeps_nothing(which: int) -> None:
    """Some stores end a page where there is more, and do not say how to go on: who else relies on them is
    not in it."""
    index = lying(Shared())
    whole, n = index.tier.keys, 0

    def keys() -> Iterator[str]:
        nonlocal n
        n += 1
        found = sorted(whole())
        return iter(found[:1] if n == which else found)

    of_another(index.tier)
    before = set(whole())
    index.tier.keys = keys  # type: ignore[method-assign]
    with pytest.raises((StoreError, InvalidArgument)) as caught:
        sweep(index.tier, index.marks, {MINE} if which == 1 else {MINE, OTHER})
    assert "lacks what was put just now" in str(caught.value) and caught.value.hint
    assert set(whole()) == before


def test_a_dry_run_and_who_is_refused_retire_nobody() -> None:
    index = lying(Shared())
    for uuid in (OTHER, third := "3" * 32):
        register(index.tier, uuid, "moon:/home", None)
    with pytest.raises(InvalidArgument, match="33333333"):
        sweep(index.tier, index.marks, {MINE}, retired=[OTHER])
    with pytest.raises(InvalidArgument, match="no index"):
        sweep(index.tier, index.marks, {MINE}, retired=[OTHER, "4"])
    both = [OTHER, third]
    assert len(sweep(index.tier, index.marks, {MINE}, dry_run=True, retired=both).removed) == 1
    assert len(list(index.tier.keys())) == 4
    assert len(sweep(index.tier, index.marks, {MINE}, retired=both).removed) == 1
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


def full_of_nobodys(tier: Memory | Disk) -> list[str]:
    """A tier that an index is registered on, filled by records that it does not name."""
    assert register(tier, MINE, "here", None).ok
    made = []
    while tier.put([Put(key := f"{len(made):032x}.raw", [memoryview(bytes(PAGE))])])[0].ok:
        made.append(key)
    return made


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_full_tier_is_swept_in_the_room_that_is_kept_for_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 64 * PAGE
    tier = Memory(n) if kind == "memory" else Disk(tmp_path / "t", shared=True)
    small_device(monkeypatch, tmp_path / "t", n)
    made, removed = full_of_nobodys(tier), list[str]()
    assert len(made) > 16 and SPARE in set(tier.keys())
    for _ in range(len(made)):  # as many marks as there is room for, each time
        swept = sweep(tier, set, {MINE})
        removed += swept.removed
        assert swept.removed
        if not swept.failed:
            break
    assert sorted(removed) == made and sorted(tier.keys()) == [REGISTERED + MINE, SPARE]
    assert tier.look([SPARE]) == [ROOM]


def test_a_full_tier_without_such_room_says_so() -> None:
    tier = Memory(64 * PAGE)
    made = full_of_nobodys(tier)
    tier.discard([SPARE])
    tier.put([Put("rest", [memoryview(bytes(tier.capacity - tier.n_bytes))])])
    with pytest.raises(StoreError) as caught:
        sweep(tier, set, {MINE})
    assert "free" in caught.value.hint and len(set(tier.keys())) == len(made) + 2
