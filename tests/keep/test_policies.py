"""Eviction orders worked by hand, and what holds for every policy: python -m pytest tests/keep"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import OverBudget
from kvweave.keep import (
    ARC,
    GDSF,
    LFU,
    LRU,
    POLICIES,
    S3FIFO,
    UNKNOWN,
    Belady,
    Facts,
    Future,
    Policy,
)
from kvweave.keep.ranks import Queue, Ranks
from kvweave.store.kv import KV, LayerShape
from kvweave.store.shelf import Shelf


class Memory:
    """What a policy decides about, kept the plain way."""

    def __init__(self, policy: Policy, budget: int, pinned: Iterable[int] = ()) -> None:
        self.policy, self.budget, self.pinned = policy, budget, frozenset(pinned)
        self.held: dict[int, int] = {}
        self.went: list[int] = []
        self.hits = 0

    def use(self, key: int, n_bytes: int = 1, facts: Facts = UNKNOWN) -> None:
        if key in self.held:
            self.hits += 1
            self.policy.used(key, n_bytes, facts)
            return
        self.policy.missed(key, n_bytes)
        while sum(self.held.values()) + n_bytes > self.budget:
            victim = next((k for k in self.policy.victims() if k not in self.pinned), None)
            if victim is None:
                return
            self.policy.evicted(victim)
            del self.held[victim]
            self.went.append(victim)
        self.held[key] = n_bytes
        self.policy.used(key, n_bytes, facts)

    def check(self) -> None:
        self.policy.check_integrity()
        order = list(self.policy.victims())
        assert sorted(order) == sorted(self.held)
        assert order == list(self.policy.victims()), "looking at the victims changed them"


def went(policy: Policy, budget: int, keys: Sequence[int]) -> list[int]:
    memory = Memory(policy, budget)
    for key in keys:
        memory.use(key)
    memory.check()
    return memory.went


def test_lru_lets_the_longest_unused_go() -> None:
    assert went(LRU(3), 3, [1, 2, 3, 1, 4, 5, 1, 6]) == [2, 3, 4]


def test_lfu_ages() -> None:
    # 2 goes at rank 1, so 3 comes at rank 2, as much as two uses of 1, which came before: it goes
    assert went(LFU(2), 2, [1, 1, 2, 3, 4, 5]) == [2, 1, 3]


def test_gdsf_by_hand() -> None:
    # cost / size: 2, 1, 3; key 2 goes at rank 1, so 4 gets 1 + 2; 1 goes at 2, so 5 gets 2.5
    memory = Memory(GDSF(4), 4)
    uses = [(1, 2, 4.0), (2, 1, 1.0), (3, 1, 3.0), (4, 1, 2.0), (5, 1, 0.5), (6, 1, 1.0)]
    for key, n_bytes, cost in uses:
        memory.use(key, n_bytes, Facts(cost))
    assert memory.went == [2, 1]
    memory.use(7, 1, Facts(1.0))
    memory.use(8, 1, Facts(1.0))  # 3, 4 and 6 all have rank 3: the first goes
    assert memory.went == [2, 1, 5, 3]
    memory.check()


def test_gdsf_with_unknown_costs_is_lfu() -> None:
    keys = [1, 2, 3, 1, 4, 2, 5, 1, 6, 3, 2, 1, 7, 5, 4]
    assert went(GDSF(3), 3, keys) == went(LFU(3), 3, keys)


def test_arc_by_hand() -> None:
    # 1 2 1: once [2], often [1]. 3: goal 0, so 2 goes. 2 was gone from once: goal 1, so 1 goes.
    # 1 was gone from often: goal 0, so 3 goes. 4: once is empty, so 2, the oldest of often, goes.
    assert went(ARC(2), 2, [1, 2, 1, 3, 2, 1, 4]) == [2, 1, 3, 2]


def test_arc_keeps_what_is_used_often_through_a_scan() -> None:
    assert went(ARC(4), 4, [1, 2, 1, 2, *range(10, 20)]) == list(range(10, 18))


def test_s3fifo_by_hand() -> None:
    # Room for 10: one in small, nine in big. 1 fills small, 2..10 fill big. 11 and 12 pass through
    # small; 1 returns from the gone into big, which is then over: 2 has a use and stays, 3 goes.
    policy = S3FIFO(10)
    first = [*range(1, 11), 2, 11, 12, 1, 13]
    assert went(policy, 10, first) == [1, 11, 12, 3]
    # 13 has two more uses: it moves to big, which is over again, and 4 goes.
    assert went(S3FIFO(10), 10, [*first, 13, 13, 14]) == [1, 11, 12, 3, 4]


def test_belady_on_the_textbook_example() -> None:
    keys = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1]
    memory, future = follow(keys, 3)
    assert memory.hits == 11  # 9 faults, as every textbook counts
    assert future.now == len(keys) - 1


def follow(keys: Sequence[int], budget: int) -> tuple[Memory, Future]:
    future = Future(keys)
    memory = Memory(Belady(future), budget)
    for key in keys:
        future.step()
        memory.use(key)
        memory.check()
    return memory, future


@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 3))
def test_belady_has_the_most_hits_there_can_be(keys: list[int], room: int) -> None:
    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(keys):
            return 0
        if keys[at] in held:
            return 1 + best(at + 1, held)
        more = held | {keys[at]}
        if len(more) <= room:
            return best(at + 1, more)
        return max(best(at + 1, more - {victim}) for victim in held)

    assert follow(keys, room)[0].hits == best(0, frozenset())


def test_belady_weighs_by_size() -> None:
    keys = [1, 2, 3, 3, 2, 1]
    future = Future(keys)
    policy = Belady(future)
    for key, n_bytes in ((1, 1), (2, 8), (3, 1)):
        future.step()
        policy.used(key, n_bytes)
    assert list(policy.victims()) == [2, 1, 3]  # 2 uses x 8 bytes, 3 x 1, 1 x 1


facts = st.builds(
    Facts,
    cost=st.sampled_from([0.5, 1.0, 4.0]),
    kind=st.sampled_from(["", "tool", "thinking"]),
    session=st.sampled_from(["", "a", "b"]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 15), facts),
        st.tuples(st.just("drop"), st.integers(0, 15), facts),
        st.tuples(st.just("prune"), st.integers(0, 15), facts),
        st.tuples(st.just("end"), st.integers(0, 15), facts),
        st.tuples(st.just("wait"), st.integers(0, 15), facts),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=steps, budget=st.integers(4, 24), pinned=st.sets(st.integers(0, 15), max_size=3))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_the_order_is_of_what_is_held(
    name: str, steps: list[tuple[str, int, Facts]], budget: int, pinned: set[int]
) -> None:
    memory = Memory(POLICIES[name](budget), budget, pinned)
    for what, key, about in steps:
        if what == "use":
            memory.use(key, 1 + key % 4, about)
        elif what == "drop":
            memory.policy.dropped(key)
            memory.held.pop(key, None)
        elif what == "prune":
            memory.policy.pruned(key)
        elif what == "wait":
            memory.policy.upcoming([key, 15 - key, key])
        else:
            memory.policy.ended(about.session)
        memory.check()
    assert not pinned & set(memory.went)


SHAPES = [LayerShape(1, 1, 1, 1)]
ROW = 8  # bytes of one token: (k, v) x float32


@pytest.mark.parametrize("name", POLICIES)
@given(keys=st.lists(st.integers(0, 9), max_size=30), pinned=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_the_shelf_lets_go_of_no_more_than_it_needs(
    name: str, keys: list[int], pinned: int
) -> None:
    budget = 8 * ROW
    shelf = Shelf(budget, POLICIES[name](budget), is_pinned=lambda key: key == pinned)
    gone: list[int] = []
    shelf.on_tier = lambda key, tier, n: gone.append(key) if tier == "none" else None
    for key in keys:
        gone.clear()
        before = {k: kv.n_bytes for k in range(10) if (kv := shelf.ram.get(k)) is not None}
        shelf.busy([keys[0]])
        if shelf.get(key) is None:
            try:
                shelf.put(key, KV.empty(SHAPES, 1 + key % 3, torch.float32, torch.device("cpu")))
            except OverBudget:
                assert not gone
        assert not {pinned, keys[0]} & set(gone)
        if gone:
            assert shelf.n_bytes + before[gone[-1]] > budget, "the last one could have stayed"
        shelf.check_integrity()
        shelf.policy.check_integrity()
        assert set(shelf.policy.victims()) == {k for k in range(10) if shelf.tier(k) == "ram"}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=300))
def test_ranks_are_in_order_whatever_changes(changes: list[tuple[int, int]]) -> None:
    ranks, model = Ranks(), dict[int, tuple[int, int]]()
    for serial, (key, rank) in enumerate(changes):
        if rank == 4:
            ranks.pop(key)
            model.pop(key, None)
        else:
            ranks.set(key, rank)
            model[key] = (rank, serial)
        ranks.check_integrity()
        assert list(ranks) == sorted(model, key=model.__getitem__)


def test_a_queue_knows_its_bytes() -> None:
    queue = Queue()
    for key, n_bytes in ((1, 5), (2, 7), (1, 6)):
        queue.push(key, n_bytes)
    assert (list(queue), queue.n_bytes) == ([2, 1], 13)
    queue.trim(12)
    assert (list(queue), queue.n_bytes, queue.pop(2)) == ([1], 6, 0)
