"""Tiers, budget and eviction: python -m pytest tests/store"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store.records import MODEL, about, load

from kvweave.errors import InvalidArgument, NoSpace, OverBudget
from kvweave.keep import LRU
from kvweave.store.codec import parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.shelf import Shelf
from kvweave.store.tier.base import Outcome, Put
from kvweave.store.tier.disk import Disk

SHAPES = [LayerShape(2, 4, 2, 4)] * 3
ROW = 3 * 2 * 2 * 4 * 4  # bytes of one token: layers x (k, v) x heads x dim x float32
CPU = torch.device("cpu")


def kv(n: int, seed: int = 0) -> KV:
    torch.manual_seed(seed)
    made = KV.empty(SHAPES, n, torch.float32, CPU)
    for tensor in (*made.k, *made.v):
        tensor.normal_()
    return made


def same(a: KV | None, b: KV | None) -> bool:
    assert a is not None and b is not None
    return all(torch.equal(x, y) for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True))


def test_least_recently_used_goes_first() -> None:
    shelf = Shelf(30 * ROW, LRU())
    moves: list[tuple[int, str, int]] = []
    for key in (1, 2, 3):
        shelf.put(key, kv(10))
    shelf.on_tier = lambda *args: moves.append(args)
    shelf.get(1)
    shelf.put(4, kv(5))
    assert [shelf.tier(k) for k in (1, 2, 3, 4)] == ["ram", "none", "ram", "ram"]
    assert moves == [(2, "none", 0), (4, "ram", 5 * ROW)]
    assert shelf.n_bytes == 25 * ROW
    shelf.check_integrity()


def test_only_as_many_are_looked_at_as_must_go() -> None:
    class Counting(LRU):
        n = 0

        def victims(self):
            for key in super().victims():
                self.n += 1
                yield key

    policy = Counting()
    shelf = Shelf(100 * ROW, policy)
    for key in range(100):
        shelf.put(key, kv(1))
    assert policy.n == 0
    shelf.put(100, kv(3))
    assert policy.n == 3 and [shelf.tier(k) for k in (2, 3)] == ["none", "ram"]
    shelf.check_integrity()


def test_pinned_and_busy_chunks_stay_and_nothing_goes_in_vain() -> None:
    shelf = Shelf(30 * ROW, LRU(), is_pinned=lambda key: key == 1)
    for key in (1, 2, 3):
        shelf.put(key, kv(10))
    shelf.busy([2])
    with pytest.raises(OverBudget) as error:
        shelf.put(4, kv(11))
    assert (error.value.needed, error.value.evictable) == (41 * ROW, 10 * ROW)
    assert [shelf.tier(k) for k in (1, 2, 3)] == ["ram"] * 3
    shelf.put(4, kv(10))
    assert [shelf.tier(k) for k in (1, 2, 3, 4)] == ["ram", "ram", "none", "ram"]


def test_in_context_kv_goes_before_canonical_kv() -> None:
    shelf = Shelf(30 * ROW, LRU())
    shelf.put(1, kv(10))
    shelf.put_in_context(1, ((7, -3),), kv(10, 1))
    assert same(shelf.in_context(1, ((7, -3),)), kv(10, 1))
    assert shelf.in_context(1, ((7, -4),)) is None, "another place is another computation"
    shelf.put(2, kv(15))
    assert shelf.in_context(1, ((7, -3),)) is None and shelf.tier(1) == "ram"
    shelf.put_in_context(2, (), kv(20))
    assert shelf.in_context(2, ()) is None, "no room: not kept"


def test_rows_of_contexts_count() -> None:
    shelf = Shelf(30 * ROW, LRU())
    shelf.put(1, kv(10))
    shelf.charge("chat", 15 * ROW)
    shelf.charge("chat", 20 * ROW)
    assert shelf.n_bytes == 30 * ROW
    shelf.charge("chat", 21 * ROW)
    assert shelf.tier(1) == "none"
    with pytest.raises(OverBudget):
        shelf.charge("other", 10 * ROW)
    shelf.charge("chat", 0)
    assert shelf.n_bytes == 0


def on_files(directory: Path, budget: int | None = None) -> Mover:
    level = Level(Disk(directory), parse("raw"), MODEL, LRU(), budget)
    return Mover([level], lambda id: about(kv(10), f"{id:032x}"))


def test_full_memory_spills_to_disk_and_comes_back(tmp_path: Path) -> None:
    mover = on_files(tmp_path)
    shelf = Shelf(20 * ROW, LRU(), mover)
    for key in (1, 2, 3):
        shelf.put(key, kv(10, key))
    assert [shelf.tier(k) for k in (1, 2, 3)] == ["disk", "ram", "ram"]
    assert same(shelf.get(1), kv(10, 1))
    assert [shelf.tier(k) for k in (1, 2, 3)] == ["ram", "disk", "ram"]
    shelf.place(3, "disk")
    assert shelf.tier(3) == "disk"
    key = f"{3:032x}.raw"
    found = load(mover.levels[0].tier, key)
    assert isinstance(found, KV) and same(found, kv(10, 3))
    shelf.place(3, "none")
    assert shelf.tier(3) == "none" and not (tmp_path / f"{key}.kv").exists()
    with pytest.raises(InvalidArgument, match="ram, disk or none"):
        shelf.place(1, "moon")
    shelf.check_integrity()
    mover.close()


def test_memory_is_named_after_the_device(tmp_path: Path) -> None:
    mover = on_files(tmp_path)
    shelf = Shelf(20 * ROW, LRU(), mover, memory="gpu")
    shelf.put(1, kv(10, 1))
    assert shelf.tier(1) == "gpu" and shelf.place(1, "disk") and shelf.tier(1) == "disk"
    assert shelf.place(1, "gpu") == 10 * ROW and shelf.tier(1) == "gpu"
    assert shelf.levels() == [("gpu", 10 * ROW, 20 * ROW), ("disk", 0, None)]
    with pytest.raises(InvalidArgument, match="gpu, disk or none"):
        shelf.place(1, "ram")
    mover.close()


def test_a_level_that_takes_nothing_loses_only_what_had_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = on_files(tmp_path)
    shelf = Shelf(20 * ROW, LRU(), mover)
    shelf.put(1, kv(10, 1))

    def full(self: Disk, puts: list[Put], **how: object) -> list[Outcome]:
        return [Outcome("full", "no space left") for _ in puts]

    monkeypatch.setattr(Disk, "put", full)
    with pytest.raises(NoSpace):
        shelf.place(1, "disk")
    assert shelf.tier(1) == "ram" and same(shelf.get(1), kv(10, 1))
    shelf.put(2, kv(15, 2))
    assert [shelf.tier(k) for k in (1, 2)] == ["none", "ram"], "it is computed again one day"
    shelf.check_integrity()
    mover.close()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "drop", "context", "charge"]),
            st.integers(0, 5),
            st.integers(1, 12),
        ),
        max_size=30,
    )
)
def test_the_budget_always_holds(ops: list[tuple[str, int, int]]) -> None:
    shelf = Shelf(25 * ROW, LRU(), is_pinned=lambda key: key == 0)
    for op, key, n in ops:
        before = shelf.n_bytes
        try:
            if op == "put":
                shelf.put(key, kv(n, key))
            elif op == "context":
                shelf.put_in_context(key, (), kv(n, key))
            elif op == "charge":
                shelf.charge(f"c{key}", (n - 1) * ROW)
            elif op == "drop":
                shelf.drop(key)
            elif (found := shelf.get(key)) is not None:
                assert same(found, kv(found.n_tokens, key))
        except OverBudget:
            assert shelf.n_bytes == before, "refused, so nothing changed"
        shelf.check_integrity()
