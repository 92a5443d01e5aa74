"""Levels below memory: what goes down, what comes up, what is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvweave.errors import LoadFailed, OverBudget
from kvweave.keep import LRU
from kvweave.store import mover as mover_module
from kvweave.store.arriving import Arriving
from kvweave.store.codec import parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.shelf import Shelf
from kvweave.store.tier.base import Get, Outcome, Put, Tier
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.memory import Arena

SHAPES = [LayerShape(2, 4, 2, 4), LayerShape(1, 8, 3, 4), LayerShape(2, 4, 2, 4)]
CPU = torch.device("cpu")
PER_ROW = sum(s.k_heads * s.k_dim + s.v_heads * s.v_dim for s in SHAPES) * 4  # bytes


def kv(n: int, seed: int = 0) -> KV:
    generator = torch.Generator().manual_seed(seed)
    made = KV.empty(SHAPES, n, torch.float32, CPU)
    for tensor in (*made.k, *made.v):
        tensor.normal_(generator=generator)
    return made


def same(a: KV | None, b: KV) -> bool:
    assert a is not None
    return all(torch.equal(x, y) for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True))


def level(tier: Tier, budget: int | None = None, codec: str = "raw") -> Level:
    return Level(tier, parse(codec), "model", LRU(), budget)


class Held(Arena):
    """Writes wait for `open`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.open = threading.Event()

    def put(
        self, puts: list[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        assert self.open.wait(20)
        return super().put(puts, durable=durable, deadline=deadline)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Mover]:
    """A small level over a large one."""
    mover = Mover([level(Arena(1 << 20), 100_000), level(Disk(tmp_path))], str)
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
    two.save(0, kv(20))  # content never changes: where it is, is where it stays
    assert all(same(two.load([i])[i], kv(20, i)) for i in range(10))


def test_behind_the_last_level_chunks_are_lost_and_pinned_ones_stay(tmp_path: Path) -> None:
    mover = Mover([level(Disk(tmp_path), 100_000)], str, is_pinned=lambda id: id < 2)
    lost: list[int] = []
    mover.on_tier = lambda id, place, n: lost.append(id)
    for i in range(6):
        mover.save(i, kv(20, i))
    assert 0 in mover.levels[0] and 1 in mover.levels[0] and 5 in mover.levels[0]
    assert lost and not {0, 1} & set(lost) and mover.levels[0].n_bytes <= 100_000
    mover.check_integrity()
    mover.close()


def test_what_no_level_takes_is_refused(tmp_path: Path) -> None:
    mover = Mover([level(Arena(4096))], str)
    with pytest.raises(OverBudget):
        mover.save(1, kv(100))
    assert mover.level_of(1) is None
    mover.check_integrity()
    mover.close()


def test_writing_behind_is_bounded_and_what_is_dropped_meanwhile_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = Held(1 << 20)
    mover = Mover([level(tier)], str)
    one = kv(10)
    monkeypatch.setattr(mover_module, "BEHIND", 3 * one.n_bytes)
    assert [mover.clean(i, kv(10, i)) for i in (1, 2, 3, 4)] == [True, True, True, False]
    assert not mover.clean(1, one), "it waits already"
    mover.drop(2)
    tier.open.set()
    mover.settle()
    assert sorted(mover.levels[0].held) == [1, 3] and sorted(tier.keys()) == ["1", "3"]
    assert not mover.clean(1, one), "it is there"
    assert same(mover.load([3])[3], kv(10, 3))
    mover.check_integrity()
    mover.close()


def test_nearly_full_memory_is_written_behind_so_that_letting_go_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mover = Mover([level(Arena(1 << 20))], str)
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

    monkeypatch.setattr(Arena, "put", refuse)
    shelf.reserve(20 * PER_ROW)
    assert [i for i in range(10) if i in shelf.ram] == [0, 3, 4, 5, 6, 7, 8, 9]
    shelf.check_integrity()


def test_a_failed_load_is_a_chunk_that_is_not_there(
    two: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(1 << 20, LRU(), two)
    told: list[tuple[int, str, int]] = []
    for i in (1, 2):
        shelf.put(i, kv(10, i))
        two.save(i, kv(10, i))
        shelf._let_go(i)
    shelf.on_tier = lambda *how: told.append(how)
    get = Arena.get

    def late(self: Arena, gets: list[Get], *, deadline: float | None = None) -> list[Outcome]:
        found = get(self, gets, deadline=deadline)
        return [Outcome("late", "slow") if g.key == "1" and g.offset else o
                for g, o in zip(gets, found, strict=True)]  # fmt: skip

    monkeypatch.setattr(Arena, "get", late)
    assert shelf.get(1) is None and shelf.tier(1) == "none"
    assert same(shelf.get(2), kv(10, 2)) and shelf.tier(2) == "ram"
    assert told[-1][:2] == (2, "ram") and (1, "none", 0) in told
    assert (two.counts["late"], two.counts["lost"]) == (1, 0)
    shelf.check_integrity()


def test_asking_for_a_layer_that_fails_says_which_chunk(two: Mover) -> None:
    two.save(7, kv(10))
    two.levels[0].head(7, None)
    two.levels[0].tier.delete(["7"])
    arriving = two.load([7])[7]
    with pytest.raises(LoadFailed) as error:
        arriving.k[2]
    assert error.value.id == 7 and "missing" in str(error.value)


def test_what_another_process_stored_is_found(tmp_path: Path) -> None:
    tier = Disk(tmp_path)
    for i in range(4):
        assert level(tier).put(i, f"d{i}", kv(10, i)).ok
    mover = Mover([level(tier)], lambda id: f"d{id}")
    assert mover.level_of(1) is None
    mover.find([1, 8])
    assert mover.level_of(1) is not None and mover.level_of(8) is None
    mover.levels[0].keep_only({"d1": 1, "d2": 2})
    assert sorted(mover.levels[0].held) == [1, 2] and sorted(tier.keys()) == ["d1", "d2"]
    mover.check_integrity()
    mover.close()


def test_a_chunk_may_be_coded_otherwise_than_its_level(two: Mover) -> None:
    one = kv(64)
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
    mover = Mover([level(Arena(1 << 20), 60_000), level(Arena(1 << 20), 140_000)], str)
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
