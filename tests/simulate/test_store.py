"""The simulator's store is the engine's: the same operations leave the same chunks in the same places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import OverBudget
from kvweave.keep import POLICIES, Facts
from kvweave.simulate.cost import Tier
from kvweave.simulate.store import Moved, SizedStore
from kvweave.store.codec import parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record.transfer import Expected
from kvweave.store.shelf import Shelf
from kvweave.store.tier.memory import Memory

UNIT = (
    1 << 18
)  # bytes; a record's head and padding, 4 to 8 KiB, change no decision at these budgets
SHAPE = LayerShape(1, 32, 1, 32)
ROWS = UNIT // 256
MEMORY, DISK, REMOTE = (int(n * UNIT) for n in (5.2, 7.5, 12.5))


def memory(name: str) -> Memory:
    """Return a tier with real bytes in memory."""
    made = Memory(1 << 40)
    made.name = name
    return made


class Settled(Mover):
    """The engine's mover, waiting for what is written behind: when it is there is not a question."""

    def clean(self, id: int, kv: KV) -> bool:
        waits = super().clean(id, kv)
        self.settle()
        return waits


class Real:
    """The engine's shelf over two levels, with KV."""

    def __init__(self, policy: str) -> None:
        self.facts = Facts()
        self.units: dict[int, int] = {}
        self.levels = [
            Level(tier, parse("raw"), "m", POLICIES[policy](budget), budget)
            for tier, budget in ((memory("disk"), DISK), (memory("remote"), REMOTE))
        ]
        self.shelf = Shelf(MEMORY, POLICIES[policy](MEMORY), Settled(self.levels, self.about))
        self.shelf.facts = lambda id: self.facts

    def about(self, id: int) -> Expected:
        return Expected(f"{id:032x}", self.units[id] * ROWS, (SHAPE,), torch.float32)

    def use(self, id: int, units: int, facts: Facts) -> None:
        self.facts = facts
        self.units[id] = units
        try:
            if self.shelf.get(id) is None:
                kv = KV.empty([SHAPE], units * ROWS, torch.float32, torch.device("cpu"))
                for tensor in (*kv.k, *kv.v):
                    tensor.zero_()
                self.shelf.put(id, kv)
        except OverBudget:
            pass


def tiers() -> list[Tier]:
    budgets = {"ram": MEMORY, "disk": DISK, "remote": REMOTE}
    return [Tier(name, budget, 1.0, 1.0) for name, budget in budgets.items()]


steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "use", "use", "prune", "end", "soon"]),
        st.lists(st.integers(0, 11), min_size=1, max_size=3, unique=True),
        st.sampled_from("ab"),
    ),
    min_size=15, max_size=40,
)  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["lru", "declared", "s3fifo", "dead_first"])
@given(steps=steps)
@settings(max_examples=15, deadline=None)
def test_the_same_chunks_are_in_the_same_places(policy: str, steps: list) -> None:
    real, sized = Real(policy), SizedStore(tiers(), POLICIES[policy])
    for what, ids, session in steps:
        for shelf in (real.shelf, sized.shelf):
            if what == "use":
                shelf.busy(ids, session)
            elif what == "prune":
                shelf.pruned(ids)
            elif what == "end":
                shelf.ended(session)
            else:
                shelf.upcoming(ids)
        for id in ids if what == "use" else ():
            facts = Facts(1.0, "tool" if id % 2 else "user", session)
            real.use(id, 1 + id % 3, facts)
            sized.use(id, (1 + id % 3) * UNIT, facts)
        assert set(real.shelf.ram) == set(sized.shelf.ram)
        for theirs, ours in zip(real.levels, sized.levels, strict=True):
            assert set(theirs.held) == set(ours.held), theirs.name
        assert [real.shelf.tier(id) for id in range(12)] == [sized.where(id) for id in range(12)]
        sized.check_integrity()
    real.shelf.mover.close()
    sized.close()


def test_levels_are_inclusive() -> None:
    store = SizedStore([Tier("ram", 2 << 20, 1.0, 1.0), Tier("disk", 9 << 20, 1.0, 1.0)], POLICIES["lru"])  # fmt: skip
    for id in (1, 2, 3):
        store.begin([id], "")
        assert store.use(id, 1 << 20, Facts()) == "none"
    assert store.where(1) == "disk"
    store.begin([1], "")
    assert store.use(1, 1 << 20, Facts()) == "disk"
    assert store.where(1) == "ram" and 1 in store.levels[0], "it was copied, not moved"
    before = store.moved()["disk"]
    for id in (2, 3):
        store.begin([id], "")
        store.use(id, 1 << 20, Facts())
    # 1 went from memory once more, and was not written again
    assert store.where(1) == "disk"
    assert store.moved()["disk"].n_writes - before.n_writes <= 1
    assert before.n_reads == 1 and before.read == (1 << 20) + (2 << 12)
    assert Moved() == (0, 0, 0, 0)
    store.close()


def test_what_is_unused_for_longer_than_the_ttl_goes() -> None:
    ram, disk = Tier("ram", 3 << 20, 1.0, 1.0, ttl=10), Tier("disk", 9 << 20, 1.0, 1.0, ttl=60)
    store = SizedStore([ram, disk], POLICIES["lru"])
    for id in range(4):
        store.at(float(id))
        store.begin([id], "")
        store.use(id, 1 << 20, Facts())
    assert [store.where(id) for id in range(4)] == ["disk", "ram", "ram", "ram"]
    store.at(11.5)
    assert store.where(1) in ("disk", "none") and store.where(2) == "ram", "1 was used at 1 s"
    store.use(2, 1 << 20, Facts())
    store.at(20.0)
    assert store.where(2) == "ram" and store.where(0) == "disk"
    store.at(60.5)
    assert store.where(0) == "none"
    store.check_integrity()
    store.close()


def test_what_does_not_fit_beside_what_is_used_is_counted() -> None:
    store = SizedStore([Tier("ram", 2 << 20, 1.0, 1.0)], POLICIES["lru"])
    store.begin([1, 2, 3], "")
    assert [store.use(id, 1 << 20, Facts()) for id in (1, 2, 3)] == ["none"] * 3
    assert store.refused == 1 and store.where(3) == "none"
    store.close()
