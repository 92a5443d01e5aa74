from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store.values import together

from kvweave.store.tier.base import Get, Put
from kvweave.store.tier.ledger import Ledger
from kvweave.store.tier.limit import PAUSES, SLOWEST, Absence, Limit, TimeUp
from kvweave.store.tier.slots import ALIGN, TOGETHER, Slot, Slots, Turns, batches, layout, scatter


def soon() -> Limit:
    return Limit(time.monotonic() + 0.05, 60)


def test_limits() -> None:
    now = time.monotonic()
    assert Limit(now + 5, 10, 0).is_deadline and not Limit(now + 50, 10, 0).is_deadline
    assert not Limit(None, 10).is_deadline
    assert Limit(None, 1, 3 * SLOWEST).patience == 4
    over = Limit(now - 1, 10)
    assert over.outcome().state == "late"
    with pytest.raises(TimeUp):
        over.left()
    assert Limit(None, 0).outcome().state == "failed"


def test_pauses_grow_and_end() -> None:
    absence = Absence()
    assert absence.left() == 0
    absence.note()
    absence.note()
    assert 0 < absence.left() <= PAUSES[0], "failures of one time count once"
    pauses = []
    for _ in range(9):
        absence._ends = 0
        absence.note()
        pauses.append(absence._pause)
    assert pauses[:3] == [0.1, 0.2, 0.4] and pauses[-1] == PAUSES[1]
    absence.over()
    absence._ends = 0
    absence.note()
    assert absence._pause == PAUSES[0]


def slots_of(n: int) -> tuple[Slots, list[int]]:
    registered: list[int] = []
    made = Slots(n, lambda address, n: registered.append(address), registered.remove)
    return made, registered


def test_who_is_late_leaves_and_the_slot_comes_back() -> None:
    slots, registered = slots_of(1)
    go = threading.Event()
    after: list[object] = []
    with pytest.raises(TimeUp), slots.take(Limit(None, 10), 100) as slot:
        try:
            slot.run(soon(), lambda: go.wait(10))
        finally:
            slot.when_done(lambda: after.append(slot.result))
    with pytest.raises(TimeUp), slots.take(soon()):
        raise AssertionError("it is busy")
    assert after == []
    go.set()
    with slots.take(Limit(None, 10), 1 << 20) as again:
        assert again is slot and after == [True]
        assert again.memory.nbytes == 1 << 20 and len(registered) == 1
    with slots.take(Limit(None, 10), (1 << 20) + 1) as again:
        assert again.memory.nbytes == 1 << 21 and registered == [again.address]
    assert slots.close(Limit(None, 10)) and registered == []


def test_errors_are_the_callers() -> None:
    slot = Slot()
    with pytest.raises(ZeroDivisionError):
        slot.run(Limit(None, 10), lambda: 1 // 0)
    assert slot.result is None
    assert slot.run(Limit(None, 10), lambda: 7) == 7
    slot.stop()


def test_closing_does_not_wait_for_what_hangs() -> None:
    slots, _ = slots_of(2)
    go = threading.Event()
    with pytest.raises(TimeUp), slots.take(Limit(None, 10)) as slot:
        slot.run(soon(), lambda: go.wait(10))
    assert not slots.close(soon())
    go.set()


def test_writers_are_alone() -> None:
    turns = Turns()
    value = {"a": 0, "b": 0}
    seen: set[int] = set()

    def write() -> None:
        for _ in range(100):
            turns.write(["a", "b"], Limit(None, 10))
            for key in value:
                value[key] += 1
                time.sleep(0)
            turns.wrote(["a", "b"])

    def read() -> None:
        for _ in range(200):
            with turns.reading(["a", "b"], Limit(None, 10)):
                seen.add(value["a"] - value["b"])

    together([write, write, read, read])
    assert seen == {0} and value == {"a": 200, "b": 200}
    assert not turns._readers and not turns._writers
    with turns.reading(["a"], soon()):
        with turns.reading(["a"], soon()):
            pass
        with pytest.raises(TimeUp):
            turns.write(["a", "c"], soon())
        turns.write(["c"], soon())
    with pytest.raises(TimeUp), turns.reading(["c"], soon()):
        raise AssertionError("somebody writes it")


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2 * TOGETHER[1])), max_size=200)
)
def test_batches(items: list[tuple[str, int]]) -> None:
    gets = [Get(key, i, []) for i, (key, _) in enumerate(items)]
    sizes = [n for _, n in items]
    found = list(batches(gets, sizes))
    assert [get for batch in found for get in batch] == gets
    for batch in found:
        n = sum(sizes[get.offset] for get in batch)
        assert len({get.key for get in batch}) == len(batch) <= TOGETHER[0]
        assert len(batch) == 1 or n <= TOGETHER[1]
        assert len(batch) == 1 or all(sizes[get.offset] for get in batch)


def test_batches_are_as_large_as_they_may() -> None:
    puts = [Put(f"k{i}", []) for i in range(130)]
    assert [len(batch) for batch in batches(puts, [5] * 130)] == [64, 64, 2]


@given(st.lists(st.integers(1, 300), max_size=20))
def test_a_layout_holds_what_is_scattered(sizes: list[int]) -> None:
    starts, total = layout(sizes)
    memory = memoryview(bytearray(total))
    values = [bytes([i + 1]) * n for i, n in enumerate(sizes)]
    for start, value in zip(starts, values, strict=True):
        assert start % ALIGN == 0
        scatter(memory[start:], [memoryview(value[:7]), memoryview(value[7:])], into=False)
    for start, value in zip(starts, values, strict=True):
        space = [
            memoryview(bytearray(len(value) // 2)),
            memoryview(bytearray(len(value) - len(value) // 2)),
        ]
        scatter(memory[start:], space, into=True)
        assert b"".join(space) == value


def test_a_ledger_tries_again_and_counts() -> None:
    refuse = {"b"}
    asked: list[list[str]] = []

    def remove(keys: object) -> list[str]:
        asked.append(sorted(keys))  # type: ignore[call-overload]
        return [key for key in asked[-1] if key not in refuse]

    ledger = Ledger(remove)
    for key in "abc":
        ledger.stored(key, 10)
    ledger.doom(["a", "b", "nobody"])
    assert not ledger.settle(0.2)
    assert (ledger.n_bytes, ledger.keys(), ledger.doomed()) == (20, ["c"], {"b"})
    assert ledger.is_doomed("b") and not ledger.is_doomed("a")
    refuse.clear()
    assert ledger.settle(10) and ledger.n_bytes == 10
    assert asked[0] == ["a", "b", "nobody"] and ["b"] in asked
    ledger.compare({"c": 10, "d": 5})
    assert ledger.n_bytes == 15 and sorted(ledger.keys()) == ["c", "d"]
    ledger.unsure("d")
    ledger.compare({"d": 6})
    assert (ledger.n_bytes, ledger.keys()) == (6, ["d"])
    with pytest.raises(AssertionError, match=r"'d': \(6, 7\)"):
        ledger.compare({"d": 7})
    n_stored = ledger.n_stored
    ledger.stored("d", 8)
    ledger.lost(["d"], n_stored)
    assert ledger.size("d") == 8, "stored since it was asked"
    ledger.lost(["d"], ledger.n_stored)
    assert ledger.size("d") is None and ledger.n_bytes == 0
    ledger.close(1)


def test_a_claim_waits_for_a_removal_that_has_begun() -> None:
    began, go = threading.Event(), threading.Event()

    def remove(keys: object) -> object:
        began.set()
        go.wait(10)
        return keys

    ledger = Ledger(remove)  # type: ignore[arg-type]
    ledger.stored("a", 10)
    ledger.doom(["a"])
    assert began.wait(10)
    ledger.doom(["b"])
    assert ledger.claim(["b"], soon()) == {"b"}
    with pytest.raises(TimeUp):
        ledger.claim(["a"], soon())
    threading.Timer(0.05, go.set).start()
    assert ledger.claim(["a"], Limit(None, 10)) == set(), "it is removed by now"
    assert ledger.n_bytes == 0
    ledger.close(1)
