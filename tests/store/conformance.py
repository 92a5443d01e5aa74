"""What every tier must do (`kvweave.store.tier.base`): derive a test class and say how to make one.

::

    class TestMine(Conformance):         # from store.conformance import Conformance
        @pytest.fixture
        def make(self, tmp_path):
            return lambda capacity=None: Mine(tmp_path, capacity)   # empty; capacity in bytes

`store.hooks` has what else may be said of a tier; hooks that are left as they are skip the tests that
need them. What goes wrong is asked about in `store.doubts`.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import xxhash
from store.doubts import Doubts
from store.hooks import Hooks, Make
from store.values import (
    aligned,
    asking,
    assert_gone,
    assert_holds,
    content,
    cut,
    filled,
    put_one,
    store,
    together,
)

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import Get, Outcome, Put, Tier

__all__ = ["Conformance", "Make"]


class Reading(Hooks):
    """Bytes that go in come out, whole or in part, or not at all."""

    @pytest.mark.parametrize("n", [1, 8, 4095, 4096, 4097, 65_536, 1_000_003])
    def test_round_trip(self, tier: Tier, n: int) -> None:
        data = content("a", n)
        store(tier, "a", data)
        assert_holds(tier, "a", data)
        assert list(tier.keys()) == ["a"]
        assert tier.n_bytes >= n

    @pytest.mark.parametrize(
        "sizes", [(4096, 8192), (1,), (100, 5000, 4096), (4096, 4096, 1), (12_288, 77)]
    )
    @pytest.mark.parametrize("shift", [0, 1, 64])
    def test_several_buffers(self, tier: Tier, sizes: tuple[int, ...], shift: int) -> None:
        data = content("many", 40_000)
        parts = cut(data, sizes)
        sources = [aligned(part.nbytes, shift) for part in parts]
        for source, part in zip(sources, parts, strict=True):
            source[:] = part
        assert tier.put([Put("many", sources)]) == [("done", "")]
        into = [aligned(part.nbytes, shift) for part in cut(data, sizes[::-1])]
        sums = [xxhash.xxh3_64_intdigest(part) for part in cut(data, sizes[::-1])]
        get = Get("many", 0, into, sums)
        (outcome,) = tier.get([get])
        assert outcome.ok, outcome
        assert filled(get) == data

    @pytest.mark.parametrize("shift", [0, 3])
    @pytest.mark.parametrize(
        ("offset", "n"),
        [
            (0, 1),
            (1, 1),
            (4095, 2),
            (4096, 4096),
            (4096, 5000),
            (8191, 70_000),
            (99_999, 1),
            (7, 0),
        ],
    )
    def test_ranges(self, tier: Tier, offset: int, n: int, shift: int) -> None:
        data = content("r", 100_000)
        store(tier, "r", data)
        get = asking("r", data, offset, n, shift)
        (outcome,) = tier.get([get])
        assert outcome.ok, outcome
        assert filled(get) == data[offset : offset + n]

    def test_a_range_into_several_buffers(self, tier: Tier) -> None:
        data = content("r", 100_000)
        store(tier, "r", data)
        sizes = [4096, 1, 10_000, 8192]
        into = [aligned(n) for n in sizes]
        ends = 4097 + np.cumsum([0, *sizes])
        wanted = [data[a:b] for a, b in itertools.pairwise(ends)]
        get = Get("r", 4097, into, [xxhash.xxh3_64_intdigest(part) for part in wanted])
        (outcome,) = tier.get([get])
        assert outcome.ok, outcome
        assert [bytes(buffer) for buffer in into] == wanted

    def test_nothing_is_written_beside_the_buffer(self, tier: Tier) -> None:
        data = content("a", 10_000)
        store(tier, "a", data)
        space = bytearray(b"\xa5" * 20_000)
        (outcome,) = tier.get([Get("a", 3, [memoryview(space)[5000:14_000]])])
        assert outcome.ok, outcome
        assert space[5000:14_000] == data[3:9003]
        assert set(space[:5000]) == set(space[14_000:]) == {0xA5}

    def test_a_batch_with_bad_ones(self, tier: Tier) -> None:
        values = {f"k{i}": content(f"k{i}", 3000 * i) for i in range(1, 6)}
        puts = [Put(key, [memoryview(data)]) for key, data in values.items()]
        assert all(outcome.ok for outcome in tier.put(puts))
        gets = [asking(key, data) for key, data in values.items()]
        gets.insert(2, Get("nobody", 0, [aligned(100)]))
        gets.insert(4, Get("k1", 0, [aligned(100_000)]))
        gets.append(Get("k2", 0, [aligned(100)], [1]))
        outcomes = tier.get(gets)
        states = [outcome.state for outcome in outcomes]
        assert states == ["done", "done", "missing", "done", "wrong", "done", "done", "wrong"]
        assert all(outcome.why for outcome in outcomes if not outcome.ok)
        for get, outcome in zip(gets, outcomes, strict=True):
            assert not outcome.ok or filled(get) == values[get.key]

    def test_empty_batches(self, tier: Tier) -> None:
        assert tier.put([]) == tier.get([]) == tier.look([]) == tier.discard([]) == []

    def test_wrong_sums(self, tier: Tier) -> None:
        data = content("a", 9000)
        store(tier, "a", data)
        right = [xxhash.xxh3_64_intdigest(part) for part in cut(data, [4096])]
        for sums in ([right[0] ^ 1, right[1]], [right[0], right[1] ^ (1 << 63)]):
            (outcome,) = tier.get([Get("a", 0, [aligned(4096), aligned(4904)], sums)])
            assert outcome.state == "wrong", outcome
        assert_holds(tier, "a", data)

    @pytest.mark.parametrize(
        ("offset", "n"), [(0, 5001), (5000, 1), (4999, 2), (1 << 40, 1), (-1, 2)]
    )
    def test_a_range_outside(self, tier: Tier, offset: int, n: int) -> None:
        store(tier, "a", content("a", 5000))
        store(tier, "b", content("b", 50_000))
        (outcome,) = tier.get([Get("a", offset, [aligned(n)])])
        assert outcome.state == "wrong", outcome

    def test_unknown_keys(self, tier: Tier) -> None:
        assert_gone(tier, "nobody")
        assert tier.get([Get("nobody", 0, [])])[0].state == "missing"
        assert list(tier.keys()) == [] and tier.n_bytes == 0

    @pytest.mark.parametrize("key", ["", "A", "a/b", "a b", "ä", "a\n", "x" * 201, "a\x00", "*"])
    def test_keys_that_are_not_allowed(self, tier: Tier, key: str) -> None:
        good = Put("good", [memoryview(b"123")])
        with pytest.raises(InvalidArgument):
            tier.put([good, Put(key, [memoryview(b"123")])])
        with pytest.raises(InvalidArgument):
            tier.get([Get(key, 0, [aligned(3)])])
        with pytest.raises(InvalidArgument):
            tier.look(["good", key])
        with pytest.raises(InvalidArgument):
            tier.discard(["good", key])
        assert list(tier.keys()) == [], "refused before any state changes"

    @pytest.mark.parametrize("key", ["x" * 200, "..", "-", "a.b-c_9", "0", "kv.kv"])
    def test_keys_that_are(self, tier: Tier, key: str) -> None:
        store(tier, key, content(key, 100))
        assert_holds(tier, key, content(key, 100))
        assert list(tier.keys()) == [key]

    def test_many_are_looked_for_in_one_call(self, tier: Tier) -> None:
        sizes = {f"k{i}": 1 + i for i in range(0, 300, 7)}
        puts = [Put(key, [memoryview(content(key, n))]) for key, n in sizes.items()]
        assert all(outcome.ok for outcome in tier.put(puts))
        asked = [f"k{i}" for i in range(299, -1, -1)]
        found = [n.state if isinstance(n, Outcome) else n for n in tier.look(asked)]
        assert found == [sizes.get(key, "missing") for key in asked]

    def test_neighbours_of_one_value(self, tier: Tier) -> None:
        data = content("a", 3_000_000)
        store(tier, "a", data)
        places = [(0, 5000), (5000, 4096), (9096, 1_200_000), (1_213_192, 10), (2_999_999, 1)]
        gets = [asking("a", data, offset, n) for offset, n in places]
        gets.insert(3, Get("a", 2_999_000, [aligned(1001)]))
        gets.insert(0, asking("a", data))
        states = [outcome.state for outcome in tier.get(gets)]
        assert states == ["done", "done", "done", "done", "wrong", "done", "done"]
        assert filled(gets[0]) == data
        for get, (offset, n) in zip([*gets[1:4], *gets[5:]], places, strict=True):
            assert filled(get) == data[offset : offset + n]


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
                assert {o.state for o in tier.put(puts)} <= {"done", "exists"}
                outcomes = tier.discard(some[:1])
                assert outcomes[0].ok or "read" in outcomes[0].why, outcomes

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
