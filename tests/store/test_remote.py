"""Limits, slots, what goes together, and a server that is asked for a sign of life."""

from __future__ import annotations

import socket
import threading
import time
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store.values import aligned, content, filled

from kvweave.errors import StoreError
from kvweave.store.tier.base import PAGE, Get, Put
from kvweave.store.tier.limit import PAUSES, SLOWEST, Absence, Limit, TimeUp
from kvweave.store.tier.mooncake import Mooncake
from kvweave.store.tier.mooncake_cluster import Cluster
from kvweave.store.tier.ranges import GAP, ranges
from kvweave.store.tier.remote import Lost, RemoteCalls
from kvweave.store.tier.slots import ALIGN, KEPT, TOGETHER, Slot, Slots, batches, layout


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
    assert absence.left() == 0 and not absence.is_doubted
    absence.note()
    absence.note()
    assert absence.is_doubted
    assert 0 < absence.left() <= PAUSES[0], "failures of one time count once"
    pauses = []
    for _ in range(9):
        absence._ends = 0
        absence.note()
        pauses.append(absence._pause)
    assert pauses[:3] == [0.1, 0.2, 0.4] and pauses[-1] == PAUSES[1]
    absence.over()
    assert not absence.is_doubted
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
    with pytest.raises(TimeUp), slots.take(Limit(None, 10), 100) as slot:
        slot.run(soon(), lambda: go.wait(10))
    with pytest.raises(TimeUp), slots.take(soon()):
        raise AssertionError("it is busy")
    go.set()
    with slots.take(Limit(None, 10), 1 << 20) as again:
        assert again is slot
        assert again.memory.nbytes == 1 << 20 and len(registered) == 1
    with slots.take(Limit(None, 10), (1 << 20) + 1) as again:
        assert again.memory.nbytes == 1 << 21 and registered == [again.address]
    with slots.take(Limit(None, 10), KEPT + 1) as again:
        assert again.memory.nbytes == 2 * KEPT and len(registered) == 1
    assert registered == [], "so much is not kept"
    assert slots.close(Limit(None, 10)) and registered == []


def test_errors_are_the_callers() -> None:
    slot = Slot()
    with pytest.raises(ZeroDivisionError):
        slot.run(Limit(None, 10), lambda: 1 // 0)

    def out_of_time() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        slot.run(Limit(None, 10), out_of_time)
    assert slot.run(Limit(None, 10), lambda: 7) == 7
    slot.stop()


def test_closing_does_not_wait_for_what_hangs() -> None:
    slots, _ = slots_of(2)
    go = threading.Event()
    with pytest.raises(TimeUp), slots.take(Limit(None, 10)) as slot:
        slot.run(soon(), lambda: go.wait(10))
    assert not slots.close(soon())
    go.set()


class Behind:
    """What a link talks to: it answers, hangs, or is not there."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.is_there = True
        self.pings = 0
        self.left: list[Slot] = []
        self.link = RemoteCalls("it", Slots(2), self.ping, self.left.append)

    def ping(self) -> None:
        self.pings += 1
        self.say()

    def say(self) -> int:
        self.answers.wait(10)
        if not self.is_there:
            raise Lost("gone")
        return 7

    def ask(self, seconds: float = 5.0) -> int:
        limit = Limit(time.monotonic() + seconds, 60)
        return self.link.ask(limit, lambda slot: self.say())

    def recovers(self) -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                assert self.ask() == 7
                return
            except Lost:
                time.sleep(0.01)
        raise AssertionError("it stays away")


def test_a_server_that_is_gone_is_left_alone() -> None:
    behind = Behind()
    assert behind.ask() == 7
    behind.is_there = False
    with pytest.raises(Lost, match="gone"):
        behind.ask()
    with pytest.raises(Lost, match="next try in"):
        behind.ask()
    assert behind.pings == 0 and behind.left == []
    behind.is_there = True
    behind.recovers()
    assert behind.pings == 1, "one sign of life is enough"
    assert behind.link.close(Limit(None, 1))
    with pytest.raises(Lost, match="closed"):
        behind.ask()


def test_a_server_that_hangs_is_waited_for_once() -> None:
    behind = Behind()
    behind.answers.clear()
    with pytest.raises(TimeUp):
        behind.ask(0.1)
    assert len(behind.left) == 1, "who holds the slot's connection is told"
    begin = time.monotonic()
    for _ in range(30):
        with pytest.raises(Lost):
            behind.ask(5.0)
        time.sleep(0.02)
    assert time.monotonic() - begin < 5.0
    assert behind.pings == 1, "who hangs is not asked again"
    behind.answers.set()
    behind.recovers()
    assert behind.link.close(Limit(None, 1))


def test_a_deadline_that_was_too_short_costs_the_next_one_nothing() -> None:
    behind = Behind()
    with pytest.raises(TimeUp):
        behind.link.ask(soon(), lambda slot: time.sleep(0.2))
    assert behind.ask() == 7, "it is there after all"
    assert behind.pings == 1
    assert behind.ask() == 7 and behind.pings == 1
    behind.link.close(Limit(None, 1))


def test_callers_who_wait_for_a_slot_do_not_doubt_the_server() -> None:
    behind = Behind()
    go = threading.Event()
    limit = Limit(None, 10)
    with behind.link.take(limit), behind.link.take(limit):
        with pytest.raises(TimeUp):
            behind.ask(0.1)
    assert behind.ask() == 7 and behind.pings == 0
    go.set()
    behind.link.close(Limit(None, 1))


@given(st.lists(st.integers(0, 2 * TOGETHER[1]), max_size=200))
def test_batches(sizes: list[int]) -> None:
    gets = [Get("a", i, []) for i in range(len(sizes))]
    found = list(batches(gets, sizes))
    assert [get for batch in found for get in batch] == gets
    for batch in found:
        n = sum(sizes[get.offset] for get in batch)
        assert 1 <= len(batch) <= TOGETHER[0]
        assert len(batch) == 1 or n <= TOGETHER[1]
    for one, other in pairwise(found):
        n = sum(sizes[get.offset] for get in (*one, other[0]))
        assert len(one) == TOGETHER[0] or n > TOGETHER[1], "as large as they may be"


def test_batches_of_small_ones() -> None:
    puts = [Put(f"k{i}", []) for i in range(130)]
    assert [len(batch) for batch in batches(puts, [5] * 130)] == [64, 64, 2]


@given(st.lists(st.integers(1, 300), max_size=20))
def test_a_layout(sizes: list[int]) -> None:
    starts, total = layout(sizes)
    assert all(start % ALIGN == 0 for start in starts) and len(starts) == len(sizes)
    for (start, after), n in zip(pairwise([*starts, total]), sizes, strict=True):
        assert start + n <= after


PIECE = 1 << 14  # instead of a MiB: the same, and faster
PLACES = st.tuples(
    st.sampled_from("ab"),
    st.integers(0, 3 * PIECE),
    st.lists(st.sampled_from([0, 1, 4096, 9000, PIECE - 1, PIECE, 2 * PIECE + 5]), max_size=3),
)


@mock.patch("kvweave.store.tier.ranges.PIECE", PIECE)
@given(st.lists(PLACES, max_size=6))
def test_ranges_bring_every_byte_to_its_place(places: list[tuple[str, int, list[int]]]) -> None:
    values = {key: content(key, 12 * PIECE) for key in "ab"}
    gets = [Get(key, offset, [aligned(n) for n in sizes]) for key, offset, sizes in places]
    for each in ranges(gets):
        assert each.start < each.end <= each.start + PIECE
        reply = values[each.key][each.start : each.end]
        assert all(each.fill(part, reply) for part in each.parts)
        assert not each.fill(each.parts[-1], reply[:-1]), "it is short"
    for get in gets:
        n = sum(buffer.nbytes for buffer in get.into)
        assert filled(get) == values[get.key][get.offset : get.offset + n]


def test_neighbours_are_one_range() -> None:
    places = [(0, 100), (100, 50), (150 + GAP, 10), (161 + 2 * GAP, 10), (5, 10)]
    gets = [Get("a", offset, [aligned(n)]) for offset, n in places]
    gets.append(Get("b", 15, [aligned(5)]))
    found = [(each.key, each.start, each.end) for each in ranges(gets)]
    far = 161 + 2 * GAP
    assert found == [
        ("a", 0, 160 + GAP),
        ("a", far, far + 10),
        ("a", 5, 15),
        ("b", 15, 20),
    ]
    assert GAP == PAGE and ranges([Get("a", -5, [aligned(10)]), Get("a", 0, [])]) == []


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\nk.a\nk.b", b"no HTTP\r\n\r\n", b""]
)
def test_a_list_of_mooncakes_master_that_is_cut_is_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once() -> None:
            caller, _ = server.accept()
            with caller:
                caller.recv(1 << 16)
                caller.sendall(answer)

        threading.Thread(target=once, daemon=True).start()
        tier = object.__new__(Mooncake)
        tier.cluster = Cluster("127.0.0.1:1", listing=f"127.0.0.1:{server.getsockname()[1]}")
        tier._prefix, tier._timeout = "k.", 5.0
        tier._link = RemoteCalls("Mooncake", Slots(1), lambda: None)
        with pytest.raises(StoreError) as caught:
            list(tier.keys())
        assert "try again" in caught.value.hint
