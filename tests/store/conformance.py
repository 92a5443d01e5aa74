"""What every tier must do (`kvweave.store.tier.base`): derive a test class and say how to make one.

::

    class TestMine(Conformance):         # from store.conformance import Conformance
        @pytest.fixture
        def make(self, tmp_path):
            return lambda capacity=None: Mine(tmp_path, capacity)   # empty; capacity in bytes

`store.hooks` has what else may be said of a tier; hooks that are left as they are skip the tests that
need them. `store.reading` asks about bytes that are there, `store.doubts` about what goes wrong.
"""

from __future__ import annotations

import random

import pytest
from store.doubts import Doubts
from store.hooks import Hooks, Make
from store.reading import Reading
from store.values import (
    aligned,
    asking,
    assert_gone,
    assert_holds,
    content,
    filled,
    put_one,
    store,
    together,
)

from kvweave.store.tier.base import Get, Outcome, Put, Tier

__all__ = ["Conformance", "Make"]


class Creating(Hooks):
    """A value is created once and stays what it is until it is discarded."""

    def test_the_first_put_stays(self, tier: Tier) -> None:
        first = content("a", 5000)
        store(tier, "a", first)
        for n in (10, 5000, 300_000):
            assert put_one(tier, "a", content("a", n, 1)).state == "exists"
            assert put_one(tier, "a", content("a", n, 1), durable=True).state == "exists"
        assert_holds(tier, "a", first)
        assert tier.n_bytes == (self.taken(5000) or tier.n_bytes)
        assert list(tier.keys()) == ["a"]

    def test_the_same_key_twice_in_a_batch(self, tier: Tier) -> None:
        puts = [Put("a", [memoryview(content("a", n))]) for n in (700, 900, 800)]
        puts.insert(1, Put("b", [memoryview(b"other")]))
        outcomes = tier.put(puts)
        states = [outcomes[i].state for i in (0, 2, 3)]
        assert sorted(states) == ["done", "exists", "exists"] and outcomes[1].ok
        made = puts[(0, 2, 3)[states.index("done")]].data[0]
        assert_holds(tier, "a", bytes(made))

    def test_an_empty_value_is_refused(self, tier: Tier) -> None:
        empty = [Put("a", []), Put("b", [memoryview(b"")]), Put("c", [memoryview(b"x")])]
        outcomes = tier.put(empty)
        assert [outcome.state for outcome in outcomes] == ["failed", "failed", "done"]
        assert list(tier.keys()) == ["c"]

    @pytest.mark.parametrize("where", ["one instance", "two instances"])
    def test_one_of_those_who_race_wins(self, tier: Tier, where: str) -> None:
        other = tier if where == "one instance" else self.beside(tier)
        n = 50_000
        for step in range(15):
            key = f"k{step}"
            said: dict[int, Outcome] = {}

            def put(i: int, tier: Tier, key: str = key, said: dict[int, Outcome] = said) -> None:
                said[i] = put_one(tier, key, content(key, n, i))
                get = Get(key, 0, [aligned(n)])
                assert tier.get([get])[0].ok, "whole from here on"
                assert filled(get) in (content(key, n, 0), content(key, n, 1))

            together([lambda put=put: put(0, tier), lambda put=put: put(1, other)])
            states = [said[0].state, said[1].state]
            assert sorted(states) in (["done", "exists"], ["done", "done"]), said
            assert "exists" in states or not self.tells_who_won
            winners = [i for i in (0, 1) if said[i].ok]
            get = Get(key, 0, [aligned(n)])
            assert tier.get([get])[0].ok
            assert filled(get) in [content(key, n, i) for i in winners]
            assert_holds(other, key, filled(get))
        if other is not tier:
            other.close()

    def test_discard(self, tier: Tier) -> None:
        for key in ("a", "b", "c"):
            store(tier, key, content(key, 6000))
        assert [o.state for o in tier.discard(["a", "nobody", "c"])] == ["done"] * 3
        assert sorted(tier.keys()) == ["b"]
        assert_gone(tier, "a")
        assert [o.state for o in tier.discard(["a", "b", "b"])] == ["done"] * 3
        assert list(tier.keys()) == [] and tier.n_bytes == 0
        store(tier, "a", content("a", 7000, 1))
        assert_holds(tier, "a", content("a", 7000, 1))

    def test_discard_while_others_read_and_put(self, tier: Tier) -> None:
        keys, n = [f"k{i}" for i in range(5)], 60_000
        known = {key: {content(key, n, v) for v in range(30)} for key in keys}
        seen = 0

        def read(seed: int) -> None:
            nonlocal seen
            rng = random.Random(seed)
            for _ in range(40):
                gets = [
                    Get(key, 0, [aligned(32_768), aligned(n - 32_768)])
                    for key in rng.sample(keys, 3)
                ]
                for get, outcome in zip(gets, tier.get(gets), strict=True):
                    assert outcome.state in ("done", "missing"), outcome
                    if outcome.ok:
                        assert filled(get) in known[get.key], f"not a value of {get.key}"
                        seen += 1

        def change(seed: int) -> None:
            rng = random.Random(seed)
            for version in range(30):
                some = rng.sample(keys, 2)
                puts = [Put(key, [memoryview(content(key, n, version))]) for key in some]
                outcomes = tier.put(puts)
                assert {o.state for o in outcomes} <= {"done", "exists"}, outcomes
                outcomes = tier.discard(some[:1])
                busy = ("read", "somebody is writing")  # by another thread
                assert outcomes[0].ok or any(why in outcomes[0].why for why in busy), outcomes

        together([*(lambda s=s: change(s) for s in (1, 2)), *(lambda s=s: read(s) for s in (3, 4))])
        assert seen, "nothing was read"
        assert all(outcome.ok for outcome in tier.discard(keys))
        assert list(tier.keys()) == [] and tier.n_bytes == 0

    def test_many_write_at_once(self, tier: Tier) -> None:
        def write(worker: int) -> None:
            for i in range(20):
                own, shared = f"own-{worker}-{i}", f"shared-{i % 5}"
                store(tier, own, content(own, 5000 + i))
                assert put_one(tier, shared, content(shared, 9000)).state in ("done", "exists")
                if i % 3 == 0:
                    assert tier.discard([own])[0].ok

        together([lambda worker=worker: write(worker) for worker in range(4)])
        kept = [f"own-{w}-{i}" for w in range(4) for i in range(20) if i % 3]
        assert sorted(tier.keys()) == sorted([*kept, *(f"shared-{i}" for i in range(5))])
        for w in range(4):
            assert_holds(tier, f"own-{w}-19", content(f"own-{w}-19", 5019))
        assert_holds(tier, "shared-0", content("shared-0", 9000))

    def test_full(self, make: Make) -> None:
        tier = self.limited(make)
        old = content("old", self.room // 4)
        store(tier, "old", old)
        assert put_one(tier, "large", content("x", 4 * self.room)).state == "full"
        assert_gone(tier, "large")
        assert put_one(tier, "old", content("x", 4 * self.room)).state in ("exists", "full")
        states = [put_one(tier, f"k{i}", content(f"k{i}", self.room // 8)).state for i in range(40)]
        assert set(states) == {"done", "full"} and states[0] == "done"
        assert_holds(tier, "old", old)
        assert len(list(tier.keys())) == 1 + states.count("done")
        assert tier.discard(["k0"])[0].ok
        store(tier, "again", content("again", self.room // 8))
        assert_holds(tier, "again", content("again", self.room // 8))
        tier.check_integrity()
        tier.close()

    @pytest.mark.parametrize("seed", range(3))
    def test_a_long_random_sequence_is_counted_exactly(self, tier: Tier, seed: int) -> None:
        rng = random.Random(seed)
        model: dict[str, bytes] = {}
        for step in range(150):
            key = f"k{rng.randrange(12)}"
            what = rng.choice(("put", "put", "get", "range", "discard"))
            if what == "put":
                data = content(key, rng.choice((1, 100, 4096, 5000, 40_000, 70_001)), step)
                outcome = put_one(tier, key, data, durable=rng.random() < 0.1)
                assert outcome.state == ("exists" if key in model else "done")
                model.setdefault(key, data)
            elif what == "discard":
                assert tier.discard([key])[0].ok
                model.pop(key, None)
            elif key not in model:
                assert_gone(tier, key)
            elif what == "get":
                assert_holds(tier, key, model[key])
            else:
                a, b = sorted(rng.randrange(len(model[key]) + 1) for _ in "ab")
                get = asking(key, model[key], a, b - a)
                assert tier.get([get])[0].ok and filled(get) == model[key][a:b]
        assert sorted(tier.keys()) == sorted(model)
        taken = [self.taken(len(data)) for data in model.values()]
        if None in taken:
            assert tier.n_bytes >= sum(map(len, model.values()))
        else:
            assert tier.n_bytes == sum(n for n in taken if n is not None)
        tier.check_integrity()
        for key, data in model.items():
            assert_holds(tier, key, data)
        assert all(outcome.ok for outcome in tier.discard(list(model)))
        assert tier.n_bytes == 0 and list(tier.keys()) == []


class Conformance(Reading, Creating, Doubts):
    """The whole suite."""
