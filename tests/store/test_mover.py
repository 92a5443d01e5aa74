"""Levels below memory: what goes down, what comes up, what is lost."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvweave.errors import LoadFailed, OverBudget, StoreError
from kvweave.keep import LRU
from kvweave.store import behind
from kvweave.store.arriving import Arriving
from kvweave.store.codec import parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record.transfer import Expected, key_of
from kvweave.store.shelf import Shelf
from kvweave.store.tier.base import Get, Outcome, Put, Tier
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.memory import Memory

SHAPES = [LayerShape(2, 4, 2, 4), LayerShape(1, 8, 3, 4), LayerShape(2, 4, 2, 4)]
CPU = torch.device("cpu")
PER_ROW = sum(s.k_heads * s.k_dim + s.v_heads * s.v_dim for s in SHAPES) * 4  # bytes


def kv(n: int, seed: int = 0) -> KV:
    SIZES[seed] = n
    generator = torch.Generator().manual_seed(seed)
    made = KV.empty(SHAPES, n, torch.float32, CPU)
    for tensor in (*made.k, *made.v):
        tensor.normal_(generator=generator)
    return made


def same(a: KV | None, b: KV) -> bool:
    assert a is not None
    return all(torch.equal(x, y) for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True))


def about(id: int) -> Expected:
    return Expected(f"{id:032x}", SIZES.get(id, 10), tuple(SHAPES), torch.float32)


SIZES: dict[int, int] = {}  # tokens of chunks: a chunk's id is the seed of its rows


def key(id: int) -> str:
    return key_of(about(id).digest, parse("raw"), False)


def level(tier: Tier, budget: int | None = None, codec: str = "raw") -> Level:
    return Level(tier, parse(codec), "model", LRU(), budget, index=("1" * 32, "here"))


class Held(Memory):
    """Writes wait for `open`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.open, self.begun = threading.Event(), False

    def put(
        self, puts: list[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        self.begun = True
        assert self.open.wait(20)
        return super().put(puts, durable=durable, deadline=deadline)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Mover]:
    """A small level over a large one."""
    mover = Mover([level(Memory(1 << 20), 100_000), level(Disk(tmp_path))], about)
    yield mover
    mover.check_integrity()
    mover.close()


def test_rows_of_what_arrives_are_those_of_what_was_saved(two: Mover) -> None:
    saved = {i: kv(10 + i, i) for i in range(4)}
    for i, one in saved.items():
        assert two.save(i, one).name == "ram"
    found = two.load([3, 1, 9])
    assert sorted(found) == [1, 3]
    for i, one in found.items():
        assert (one.n_tokens, one.n_bytes) == (saved[i].n_tokens, saved[i].n_bytes)
        part = one.rows(2, 7)
        assert isinstance(part, (Arriving, KV)) and part.n_tokens == 5
        assert same(part, saved[i].rows(2, 7)) and same(one, saved[i])
        assert same(one.rows(1, 9).rows(2, 4), saved[i].rows(3, 5))
    assert two.counts["loads"] == 2 and two.counts["bytes_read"] > 0


def test_a_full_level_moves_its_coldest_chunks_down_but_for_pinned_ones(two: Mover) -> None:
    moved: list[tuple[int, str, int]] = []
    two.on_tier = lambda *how: moved.append(how)
    two.is_pinned = lambda id: id == 0
    size = two.save(0, kv(20)).held[0].n_bytes
    for i in range(1, 10):
        two.save(i, kv(20, i))
        assert two.levels[0].n_bytes <= 100_000
    where = [[i for i in range(10) if i in each] for each in two.levels]
    assert sorted(where[0] + where[1]) == list(range(10)) and 9 in where[0]
    assert [id for id, *_ in moved] == where[1] and {place for _, place, _ in moved} == {"disk"}
    assert size * len(where[0]) == two.levels[0].n_bytes
    two.save(0, kv(20, 0))  # content never changes: where it is, is where it stays
    assert all(same(two.load([i])[i], kv(20, i)) for i in range(10))


def test_behind_the_last_level_chunks_are_lost_and_pinned_ones_stay(tmp_path: Path) -> None:
    mover = Mover([level(Disk(tmp_path), 100_000)], about, is_pinned=lambda id: id < 2)
    lost: list[int] = []
    mover.on_tier = lambda id, place, n: lost.append(id)
    for i in range(6):
        mover.save(i, kv(20, i))
    assert 0 in mover.levels[0] and 1 in mover.levels[0] and 5 in mover.levels[0]
    assert lost and not {0, 1} & set(lost) and mover.levels[0].n_bytes <= 100_000
    mover.check_integrity()
    mover.close()


class Below(Memory):
    """A tier of ours below another; puts to it are ``said`` to have gone so, where that is not done."""

    name = "disk"

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.said, self.durable = Outcome("done"), set[bool]()

    def put(
        self, puts: list[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        self.durable.add(durable)
        if not self.said.ok:
            return [self.said] * len(puts)
        return super().put(puts, durable=durable, deadline=deadline)


def kept(tier: Tier, budget: int | None) -> Level:
    one = level(tier, budget)
    one.relation, one.name = "mine", "disk"
    return one


def test_what_is_kept_goes_down_durably_and_the_last_budget_is_the_bound() -> None:
    below = Below()
    mover = Mover([kept(Memory(1 << 20), 60_000), kept(below, 60_000)], about)
    size = mover.save(0, kv(20), durable=True).held[0].n_bytes
    for i in range(1, 10):
        mover.save(i, kv(20, i), durable=True)
    assert below.durable == {True}
    # both are as full as they may be, with the newest above: room is made below before one goes there
    fit = 60_000 // size
    assert [sorted(each.held) for each in mover.levels] == [
        [*range(10 - fit, 10)], [*range(10 - 2 * fit, 10 - fit)],
    ]  # fmt: skip
    mover.check_integrity()
    mover.close()


@pytest.mark.parametrize("how", ["failed", "late", "full"])  # full, and not by what was declared
@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_kept_stays_where_the_level_below_fails(how: str, keeps: bool) -> None:
    below = Below()
    mover = Mover([kept(Memory(1 << 20), 60_000), kept(below, None)], about)
    if not keeps:
        mover.levels[0].name = "ram"  # nothing was acknowledged as durable here
    for i in range(4):
        mover.save(i, kv(20, i), on=mover.levels[0], durable=keeps)
    below.said = Outcome(how, "it is not well")  # type: ignore[arg-type]
    there = set(mover.levels[0].held)
    if keeps:
        with pytest.raises(OverBudget):
            mover.save(9, kv(20, 9), on=mover.levels[0], durable=True)
        assert set(mover.levels[0].held) == there
    else:
        mover.save(9, kv(20, 9), on=mover.levels[0])
        assert 9 in mover.levels[0].held
    mover.check_integrity()
    mover.close()


@pytest.mark.parametrize("how", ["failed", "late", "full"])
def test_what_is_kept_stays_where_a_level_further_below_fails(how: str) -> None:
    """The one in between is full then, as it may be: that is not what was declared of all three."""
    last = Below()
    mover = Mover([kept(Memory(1 << 20), 60_000) for _ in "ab"] + [kept(last, None)], about)
    for i in range(2, 20):
        mover.save(i, kv(20, i), durable=True)
    last.said = Outcome(how, "it is not well")  # type: ignore[arg-type]
    there = set().union(*(each.held for each in mover.levels))
    with pytest.raises(OverBudget):
        for i in range(20, 30):
            mover.save(i, kv(20, i), on=mover.levels[0], durable=True)
            there.add(i)
    assert there == set(range(2, 2 + len(there)))
    assert there == set().union(*(each.held for each in mover.levels))
    mover.check_integrity()
    mover.close()


def test_where_all_below_is_pinned_the_budgets_are_the_bound() -> None:
    mover = Mover([kept(Memory(1 << 20), 60_000), kept(Below(), 60_000)], about)
    size = mover.save(0, kv(20), durable=True).held[0].n_bytes
    fit = 60_000 // size
    for i in range(1, 2 * fit):
        mover.save(i, kv(20, i), durable=True)
    pinned = set(mover.levels[1].held)
    mover.is_pinned = lambda id: id in pinned
    for i in range(2 * fit, 3 * fit):
        mover.save(i, kv(20, i), durable=True)
    assert sorted(mover.levels[0].held) == [*range(2 * fit, 3 * fit)]
    assert set(mover.levels[1].held) == pinned and len(pinned) == fit
    mover.check_integrity()
    mover.close()


def test_moving_down_ends_with_the_put_that_wanted_room() -> None:
    """A level below that takes its time does so once, not once a chunk."""
    below = Below()
    mover = Mover([kept(Memory(1 << 20), 60_000), kept(below, None)], about, seconds=0.3)
    for i in range(4):
        mover.save(i, kv(20, i), durable=True)
    asked: list[float] = []

    def slow(*_: object, deadline: float, **__: object) -> list[Outcome]:
        asked.append(deadline)
        time.sleep(max(0.0, deadline - time.monotonic()))
        return [Outcome("late", "slow")]

    below.put = slow  # type: ignore[method-assign, assignment]
    begun = time.monotonic()
    with pytest.raises((OverBudget, StoreError)):
        mover.save(9, kv(20, 9), on=mover.levels[0], durable=True)
    assert len(asked) == 1 and asked[0] <= begun + 0.4
    mover.close()


def test_what_no_level_takes_is_refused(tmp_path: Path) -> None:
    mover = Mover([level(Memory(4096))], about)
    with pytest.raises(OverBudget):
        mover.save(1, kv(100))
    assert mover.level_of(1) is None
    mover.check_integrity()
    mover.close()


def test_writing_behind_is_bounded_and_what_is_dropped_meanwhile_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = Held(1 << 20)
    mover = Mover([level(tier)], about)
    one = kv(10)
    monkeypatch.setattr(behind, "MOST", 3 * one.n_bytes)
    assert [mover.clean(i, kv(10, i)) for i in (1, 2, 3, 4)] == [True, True, True, False]
    assert not mover.clean(1, one), "it waits already"
    mover.drop(2)
    tier.open.set()
    mover.settle()
    assert sorted(mover.levels[0].held) == [1, 3] and sorted(tier.keys()) == [key(1), key(3)]
    assert not mover.clean(1, one), "it is there"
    assert same(mover.load([3])[3], kv(10, 3))
    mover.check_integrity()
    mover.close()


def test_nearly_full_memory_is_written_behind_so_that_letting_go_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mover = Mover([level(Memory(1 << 20))], about)
    shelf = Shelf(100 * PER_ROW, LRU(), mover, is_pinned=lambda id: id == 0)
    for i in range(9):
        shelf.put(i, kv(10, i))
    mover.settle()
    assert not mover.levels[0].held, "90 % are no reason yet"
    shelf.put(9, kv(10, 9))
    mover.settle()
    assert sorted(mover.levels[0].held) == [1, 2], "down to 80 %, the oldest first, no pinned one"

    def refuse(*args: object, **how: object) -> list[Outcome]:
        raise AssertionError("nothing has to be written")

    monkeypatch.setattr(Memory, "put", refuse)
    shelf.reserve(20 * PER_ROW)
    assert [i for i in range(10) if i in shelf.ram] == [0, 3, 4, 5, 6, 7, 8, 9]
    shelf.check_integrity()


def test_what_was_loaded_and_let_go_of_is_gone_at_once(two: Mover) -> None:
    """Not when Python happens to look for circles, which a large process does seldom."""
    two.save(1, kv(10, 1))
    shelf = Shelf(100 * PER_ROW, LRU(), two)
    gc.disable()
    try:
        for get in (lambda: shelf.get(1), lambda: shelf.get(1, wait=False)):
            found = get()
            assert found is not None
            rows = [weakref.ref(x) for x in found.rows(2, 7).k]
            whole = [weakref.ref(found.k[i]) for i in range(len(SHAPES))]
            del found
            shelf.ram.pop(1)
            end = time.monotonic() + 5  # of the thread that read it
            while any(x() is not None for x in (*rows, *whole)) and time.monotonic() < end:
                time.sleep(0.001)
            assert all(x() is None for x in (*rows, *whole))
    finally:
        gc.enable()


def test_what_is_dropped_while_it_is_written_behind_is_in_the_budget_as_long_as_it_is_alive() -> (
    None
):
    tier = Held(1 << 20)
    shelf = Shelf(100 * PER_ROW, LRU(), Mover([level(tier)], about))
    for i in range(10):
        shelf.put(i, kv(10, i))
    while not tier.begun:
        time.sleep(0.001)
    rows = [[weakref.ref(x) for x in shelf.ram._held[i].k] for i in (0, 1)]
    for i in (0, 1):
        shelf.drop(i)
    assert all(x() is None for x in rows[1]), "its turn had not come"
    assert all(x() is not None for x in rows[0]), "it is being written"
    assert (shelf.n_bytes, shelf.room) == (90 * PER_ROW, 10 * PER_ROW)
    shelf.busy(range(10))
    threading.Timer(0.05, tier.open.set).start()
    shelf.reserve(20 * PER_ROW)  # waits for it
    assert shelf.n_bytes == 80 * PER_ROW and all(x() is None for x in rows[0])
    with pytest.raises(OverBudget):
        shelf.reserve(21 * PER_ROW)
    shelf.check_integrity()
    assert list(tier.keys()) == []
    shelf.mover.close()


Answer = Callable[[Get, Outcome], Outcome]


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    """Have memory say something else than it does."""
    get = Memory.get

    def said(self: Memory, gets: list[Get], *, deadline: float | None = None) -> list[Outcome]:
        found = get(self, gets, deadline=deadline)
        return [answer(g, o) for g, o in zip(gets, found, strict=True)]

    monkeypatch.setattr(Memory, "get", said)


@pytest.fixture
def shelf(two: Mover) -> Shelf:
    """Chunks 1 and 2, on the first level only."""
    made = Shelf(1 << 20, LRU(), two)
    for i in (1, 2):
        made.put(i, kv(10, i))
        two.save(i, kv(10, i))
        made._let_go(i)
    return made


@pytest.mark.parametrize("outcome", [Outcome("late", "slow"), Outcome("failed", "EIO")])
def test_what_is_in_doubt_stays_and_is_tried_again(
    shelf: Shelf, two: Mover, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    told: list[tuple[int, str, int]] = []
    shelf.on_tier = lambda *how: told.append(how)
    with monkeypatch.context() as patch:
        answering(patch, lambda g, o: outcome if g.key == key(1) and g.offset else o)
        assert shelf.get(1) is None and shelf.tier(1) == "none"
        assert (1, "none", 0) in told and two.levels[0].tier.look([key(1)])[0] > 0  # type: ignore[operator]
        n = int(outcome.state == "late")
        assert (two.counts["late"], two.counts["lost"]) == (n, 1 - n)
    monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + 100)
    assert same(shelf.get(1), kv(10, 1)) and same(shelf.get(2), kv(10, 2))
    shelf.check_integrity()


def test_wrong_bytes_are_read_twice_before_they_are_believed(
    shelf: Shelf, two: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    once: list[Get] = []

    def answer(get: Get, outcome: Outcome) -> Outcome:
        if get.key == key(1) and get.offset and not once:
            once.append(get)
            return Outcome("wrong", "a bit of the bus")
        return outcome

    with monkeypatch.context() as patch:
        answering(patch, answer)
        assert same(shelf.get(1), kv(10, 1)) and once
    tier = two.levels[0].tier
    assert isinstance(tier, Memory)
    tier._values[key(2)][-5] ^= 1
    assert shelf.get(2) is None and list(tier.keys()) == [key(1)], "verified twice: it goes"
    two.save(2, kv(10, 2))
    assert same(two.load([2])[2], kv(10, 2))


def test_what_is_missing_is_forgotten(shelf: Shelf, two: Mover) -> None:
    two.levels[0].tier.discard([key(1)])
    assert shelf.get(1) is None and 1 not in two.levels[0]
    shelf.check_integrity()


def test_asking_for_a_layer_that_fails_says_which_chunk(two: Mover) -> None:
    two.save(7, kv(10, 7))
    two.levels[0].tier.discard([key(7)])
    arriving = two.load([7])[7]
    with pytest.raises(LoadFailed) as error:
        arriving.k[2]
    assert error.value.id == 7 and "missing" in str(error.value)


def test_a_load_ends_though_its_reader_hangs(
    shelf: Shelf, two: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    def hang(get: Get, outcome: Outcome) -> Outcome:
        free.wait(20)
        return outcome

    answering(monkeypatch, hang)
    two.seconds = 0.3
    begin = time.monotonic()
    assert shelf.get(1) is None
    assert time.monotonic() - begin < 0.3 + 0.5
    free.set()


def test_no_byte_is_read_of_what_has_no_room(two: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(25 * PER_ROW, LRU(), two)
    for i in (1, 2, 3):
        two.save(i, kv(10, i))

    def refuse(g: Get, o: Outcome) -> Outcome:
        raise AssertionError("read")

    answering(monkeypatch, refuse)
    with pytest.raises(OverBudget):
        shelf.begin([1, 2, 3])
    assert shelf.n_bytes == 0 and two.counts["loads"] == 0


class Shared(Memory):
    """Memory that others use too."""

    shared = True


def test_what_another_process_stored_is_found_in_one_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = Shared(1 << 20)
    for i in range(4):
        assert level(tier).put(i, about(i), kv(10, i)).ok
    asked: list[int] = []
    look = Shared.look
    monkeypatch.setattr(
        Shared, "look", lambda self, keys, **how: asked.append(len(keys)) or look(self, keys, **how)
    )
    mover = Mover([level(tier)], about)
    assert mover.level_of(1) is None
    mover.find([1, 8, 2])
    assert mover.level_of(1) is not None and mover.level_of(8) is None and len(asked) == 1
    mover.drop(1)
    assert len(list(tier.keys())) == 4, "where others are, nothing is discarded"
    mover.check_integrity()
    mover.close()


def test_an_index_takes_over_its_directory_and_touches_nothing_else(tmp_path: Path) -> None:
    names = ("notes.kv", "~draft.txt", "seg-000001.slab", f"{0:031x}.raw.kv")
    for name in names:
        (tmp_path / name).write_text("a user's own")
    tier = Disk(tmp_path)
    for i in range(4):
        assert level(tier).put(i, about(i), kv(10, i)).ok
    known = {about(i).digest: i for i in (1, 2)}
    for relation, left in (("cache", 4), ("mine", 2)):
        mine = Level(tier, parse("raw"), "model", LRU(), relation=relation)
        mine.adopt(known)
        assert sorted(mine.held) == [1, 2] and len(list(tmp_path.glob("*.raw.kv"))) == left + 1
        mine.check_integrity()
    assert all((tmp_path / name).read_text() == "a user's own" for name in names)
    tier.close()


def test_the_same_text_put_again_keeps_what_an_old_write_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rm while it is written behind, then put again durably: the old write ends last."""
    tier = Held(1 << 20)
    mover = Mover([Level(tier, parse("raw"), "model", LRU(), relation="mine")], lambda id: about(1))
    assert mover.clean(5, kv(10, 1))
    while not tier.begun:
        time.sleep(0.001)
    mover.drop(5)
    threading.Timer(0.05, tier.open.set).start()
    mover.save(6, kv(10, 1), durable=True)
    mover.settle()
    assert 6 in mover.levels[0] and list(tier.keys()) == [key(1)]
    assert same(mover.load([6])[6], kv(10, 1))
    mover.check_integrity()
    mover.close()


def test_a_spoilt_record_where_others_are_is_passed_over() -> None:
    tier = Shared(1 << 20)
    first = level(tier)
    assert first.put(1, about(1), kv(10, 1)).ok
    tier._values[key(1)][-5] ^= 1
    second = level(tier)
    assert second.put(1, about(1), kv(10, 1), durable=True).ok
    assert second.held[1].key == f"{key(1)}.1" and len(list(tier.keys())) == 4
    third = Mover([level(tier)], about)
    third.find([1])
    shelf = Shelf(1 << 20, LRU(), third)
    assert shelf.get(1) is None
    third.find([1])
    assert same(shelf.get(1), kv(10, 1)), "the good one is found"


def test_what_was_spoilt_on_the_way_is_not_condemned_for_ever() -> None:
    """A proxy that garbles for a while, as often as there are names."""
    tier = Shared(1 << 20)
    one = level(tier)
    for name in (key(1), f"{key(1)}.1", f"{key(1)}.2"):
        assert one.put(1, about(1), kv(10, 1), durable=True).ok and one.held[1].key == name
        one.failed(1, Outcome("wrong", "garbled"))
    tier._values[key(1)][-5] ^= 1
    assert one.put(1, about(1), kv(10, 1)).ok and one.held[1].key == f"{key(1)}.1"
    assert one.records.spoilt == {key(1), f"{key(1)}.2"}


def test_what_turns_out_to_be_lossy_is_not_used_as_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart a shared record is believed to be there, and not to have lost anything."""
    tier, one = Shared(1 << 20), kv(10, 1)
    one.lossy = True
    assert level(tier).put(1, about(1), one).ok
    mover = Mover([level(tier)], about)
    mover.levels[0].presume(1, about(1).digest, 1000)
    shelf = Shelf(1 << 20, LRU(), mover)
    assert not shelf.is_lossy(1)
    assert shelf.get(1) is None, "what was planned with it was planned for exact rows"
    monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + 100)
    found = shelf.get(1)
    assert same(found, one) and found is not None and found.lossy and shelf.is_lossy(1)


def test_a_chunk_may_be_coded_otherwise_than_its_level(two: Mover) -> None:
    one = kv(64, 1)
    raw = two.save(1, one).held[1].n_bytes
    coded = two.save(1, one, on=two.levels[0], choice=parse("int8")).held[1].n_bytes
    assert coded < raw
    found = two.load([1])[1]
    error = max(
        float((a - b).abs().max())
        for a, b in zip((*found.k, *found.v), (*one.k, *one.v), strict=True)
    )
    assert 0 < error < 0.1


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "drop", "place", "charge"]),
            st.integers(0, 7),
            st.integers(1, 30),
        ),
        max_size=40,
    )
)
def test_budgets_hold_and_bytes_are_right_whatever_happens(
    ops: list[tuple[str, int, int]],
) -> None:
    mover = Mover([level(Memory(1 << 20), 60_000), level(Memory(1 << 20), 140_000)], about)
    mover.levels[1].name = "disk"
    shelf = Shelf(60 * PER_ROW, LRU(), mover, is_pinned=lambda id: id == 0)
    sizes: dict[int, int] = {}
    for op, id, n in ops:
        try:
            if op == "put" and id not in sizes:
                shelf.put(id, kv(n, id))
                sizes[id] = n
            elif op == "place" and shelf.tier(id) != "none":
                shelf.place(id, "disk" if n % 2 else "ram")
            elif op == "charge":
                shelf.charge(f"c{id}", n * PER_ROW // 3)
            elif op == "drop":
                shelf.drop(id)
                sizes.pop(id, None)
            elif (found := shelf.get(id)) is not None:
                assert same(found, kv(sizes[id], id))
        except OverBudget:
            pass
        for id in list(sizes):
            if shelf.tier(id) == "none":
                del sizes[id]
        mover.settle()
        shelf.check_integrity()
        for each in mover.levels:
            assert each.budget is not None and each.n_bytes <= each.budget
    mover.close()
