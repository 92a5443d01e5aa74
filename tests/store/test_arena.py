from __future__ import annotations

import gc
import threading
import warnings

import numpy as np
import pytest
import torch
import xxhash
from store.conformance import Conformance, Make
from store.values import aligned, asking, assert_holds, content, filled, put_one, store, together

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import PAGE, Get, Put, Tier
from kvweave.store.tier.buffers import address, flat, runs
from kvweave.store.tier.memory import Arena


class TestArena(Conformance):
    @pytest.fixture
    def make(self) -> Make:
        return lambda capacity=None: Arena(capacity or 16 << 20, segment=4 << 20)

    def taken(self, n: int) -> int:
        return -(-n // 64) * 64

    def corrupt(self, tier: Tier, key: str) -> None:
        held = tier._held[key]  # type: ignore[attr-defined]
        held.array[held.array.size * 3 // 4] ^= 0x10


@pytest.fixture
def arena() -> Arena:
    return Arena(1 << 20, segment=1 << 18)


def tensor(view: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8)


def test_memory_is_taken_in_segments_up_to_the_capacity(arena: Arena) -> None:
    assert arena.stats()["mapped"] == 0
    store(arena, "a", content("a", 100))
    assert arena.stats()["mapped"] == 1 << 18
    store(arena, "big", content("big", 300_000))
    assert arena.stats()["mapped"] == (1 << 18) + 303_104  # a segment of its own, in whole pages
    assert put_one(arena, "c", content("c", 600_000)).state == "full"
    for key in ("c", "d", "e"):
        assert put_one(arena, key, content(key, 200_000)).ok
    assert arena.stats()["mapped"] == 1 << 20  # the last one is smaller
    assert put_one(arena, "f", content("f", 200_000)).state == "full"
    arena.check_integrity()


def test_large_values_begin_at_pages(arena: Arena) -> None:
    for i in range(20):
        store(arena, f"small-{i}", content("s", 100 + i))
        store(arena, f"large-{i}", content("l", PAGE + 17 * i))
    for i in range(20):
        view = arena.view(f"large-{i}")
        assert view is not None and address(flat(view)) % PAGE == 0
        small = arena.view(f"small-{i}")
        assert small is not None and address(flat(small)) % 64 == 0
    arena.check_integrity()


def test_a_view_is_the_value_and_cannot_be_written(arena: Arena) -> None:
    store(arena, "a", content("a", 5000))
    view = arena.view("a")
    assert view is not None and view.readonly and view == content("a", 5000)
    with pytest.raises(TypeError):
        view[0] = 1
    assert arena.view("nobody") is None
    again = arena.view("a")
    assert again is not None and address(flat(again)) == address(flat(view))


@pytest.mark.parametrize("what", ["view", "slice", "cast", "array", "array of a slice", "tensor"])
@pytest.mark.parametrize("how", ["delete", "replace"])
def test_a_view_keeps_the_bytes_until_it_dies(arena: Arena, what: str, how: str) -> None:
    old = content("a", 8192)
    store(arena, "a", old)
    made = {
        "view": lambda v: v,
        "slice": lambda v: v[:],
        "cast": lambda v: v.cast("H"),
        "array": lambda v: np.frombuffer(v, np.uint8),
        "array of a slice": lambda v: np.asarray(v[:8000])[5:][:],
        "tensor": lambda v: tensor(v).view(torch.int16)[2:],
    }[what](arena.view("a"))
    before = bytes(np.asarray(made).tobytes())
    if how == "delete":
        arena.delete(["a"])
        assert arena.size("a") is None and arena.n_bytes == 8192
    else:
        store(arena, "a", content("a", 8192, 1))
        assert arena.n_bytes == 2 * 8192
    for i in range(40):  # would be written into the extent if it were free
        store(arena, f"k{i}", content("k", 8192))
    arena.check_integrity()
    assert bytes(np.asarray(made).tobytes()) == before
    assert arena.stats()["deleted_in_use"] == 1
    del made
    gc.collect()
    assert arena.stats()["deleted_in_use"] == 0
    assert arena.n_bytes == (41 if how == "replace" else 40) * 8192
    arena.check_integrity()


def test_views_survive_the_arena() -> None:
    arena = Arena(1 << 20)
    store(arena, "a", content("a", 5000))
    view = arena.view("a")
    arena.close()
    del arena
    gc.collect()
    assert view == content("a", 5000)


def test_memory_to_fill(arena: Arena) -> None:
    store(arena, "a", content("a", 5000))
    memory = arena.allocate("a", 9000)
    assert memory is not None and not memory.readonly and memory.nbytes == 9000
    assert address(flat(memory)) % PAGE == 0
    assert arena.allocate("a", 10) is None, "somebody fills it"
    assert_holds(arena, "a", content("a", 5000))
    memory[:] = content("a", 9000, 1)
    arena.commit("a")
    assert_holds(arena, "a", content("a", 9000, 1))
    assert arena.n_bytes == 9024
    with pytest.raises(InvalidArgument):
        arena.commit("a")
    assert arena.allocate("b", 2 << 20) is None
    with pytest.raises(InvalidArgument):
        arena.allocate("B", 10)
    arena.check_integrity()


def test_memory_that_was_abandoned_is_not_reused_while_somebody_may_write(arena: Arena) -> None:
    memory = arena.allocate("a", 8192)
    assert memory is not None
    arena.abandon("a")
    arena.abandon("a")
    store(arena, "b", content("b", 8192))
    memory[:] = bytes(8192)
    assert_holds(arena, "b", content("b", 8192))
    assert arena.n_bytes == 2 * 8192
    del memory
    assert arena.n_bytes == 8192
    assert arena.size("a") is None
    arena.check_integrity()


def test_an_empty_value(arena: Arena) -> None:
    assert arena.put([Put("a", [])])[0].ok
    assert arena.size("a") == 0 and arena.view("a") == b""
    assert arena.get([Get("a", 0, [])])[0].ok
    arena.check_integrity()


def test_views_while_others_delete_and_put(arena: Arena) -> None:
    n = 8192
    stop = threading.Event()

    def change() -> None:
        try:
            for i in range(300):
                arena.delete([f"k{i % 5}"])
                outcome = put_one(arena, f"k{i % 5}", content(f"k{i % 5}", n))
                assert outcome.ok, outcome
        finally:
            stop.set()

    def look() -> None:
        kept: list[tuple[str, memoryview]] = []
        while not stop.is_set():
            for i in range(5):
                view = arena.view(f"k{i}")
                if view is not None:
                    kept.append((f"k{i}", view))
            for key, view in kept:
                assert view == content(key, n), key
            del kept[:-5]

    together([change, look, look])
    gc.collect()
    arena.check_integrity()
    assert arena.n_bytes == 5 * n


def test_capacity_must_be_something() -> None:
    with pytest.raises(InvalidArgument):
        Arena(0)


def test_buffers_that_follow_each_other_are_one_run() -> None:
    space = aligned(10_000)
    parts = [space[0:64], space[64:64], space[64:5000], space[5000:6000], space[7000:7100]]
    found = runs(parts)
    start = address(flat(space))
    assert [(run.address - start, run.n) for run in found] == [(0, 6000), (7000, 100)]
    found[0].array(60, 10)[:] = 7
    assert bytes(space[58:72]) == b"\xa5\xa5" + bytes([7] * 10) + b"\xa5\xa5"
    assert runs([]) == [] == runs([memoryview(b"")])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_memory_is_page_locked_where_cuda_is() -> None:
    arena = Arena(1 << 20, segment=1 << 18)
    data = content("a", 100_000)
    store(arena, "a", data)
    assert arena.stats()["pinned"] == arena.stats()["mapped"] == 1 << 18
    view = arena.view("a")
    assert view is not None
    shown = tensor(view)
    assert shown.is_pinned()
    assert xxhash.xxh3_64_intdigest(shown.cuda().cpu().numpy()) == xxhash.xxh3_64_intdigest(data)
    del view, shown
    arena.close()
    gc.collect()
    get = asking("a", data)
    assert filled(get) != data
