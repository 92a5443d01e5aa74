"""What every tier must do (`kvweave.store.tier.base`): derive a test class and say how to make one.

::

    class TestMine(Conformance):         # from store.conformance import Conformance
        @pytest.fixture
        def make(self, tmp_path):
            return lambda capacity=None: Mine(tmp_path, capacity)   # empty; capacity in bytes

Each hook below that a tier cannot do stays as it is and skips the tests that need it. Tiers that
``make`` returned are checked (`check_integrity`) and closed by the suite.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NoReturn

import numpy as np
import pytest
import xxhash
from store.values import (
    PATIENCE,
    aligned,
    asking,
    assert_holds,
    assert_untouched,
    content,
    cut,
    filled,
    in_time,
    put_one,
    store,
    together,
)

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import Get, Put, Tier

Make = Callable[..., Tier]


class Hooks:
    """How to reach behind a tier; what cannot be done there is left as it is."""

    room = 1 << 20  # the capacity asked of ``make`` by the test of a full tier, bytes

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError("a fixture that returns make(capacity=None) -> an empty tier")

    @pytest.fixture
    def tier(self, make: Make) -> Iterator[Tier]:
        made = make()
        yield made
        made.check_integrity()
        made.close()

    def _cannot(self, what: str) -> NoReturn:
        pytest.skip(f"{type(self).__name__} has no way to {what}")

    def limited(self, make: Make) -> Tier:
        """Return a tier with room for about ``self.room`` bytes."""
        return make(self.room)

    def settle(self, tier: Tier) -> None:
        """Wait until what was deleted is no longer counted in ``n_bytes``."""

    def taken(self, n: int) -> int | None:
        """Return what a value of ``n`` bytes adds to ``n_bytes``, None if only at least ``n``."""
        return None

    def corrupt(self, tier: Tier, key: str) -> None:
        """Flip bytes in the second half of a value where it rests."""
        self._cannot("change bytes where they rest")

    def tear(self, tier: Tier, key: str) -> None:
        """Leave a value as a crash in the middle of writing it would."""
        self._cannot("tear a value")

    def slow(self, tier: Tier, seconds: float) -> AbstractContextManager[None]:
        """While inside, everything behind the tier takes ``seconds`` longer."""
        self._cannot("slow down what is behind it")

    def lose(self, tier: Tier) -> None:
        """Take away what is behind the tier: kill the server, remove the directory."""
        self._cannot("lose what is behind it")

    def reopen(self, tier: Tier) -> Tier:
        """Close the tier and open it again at the same place."""
        self._cannot("survive a restart")


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
        assert tier.put([]) == [] and tier.get([]) == []
        tier.delete([])

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
        (outcome,) = tier.get([Get("nobody", 0, [aligned(10)])])
        assert outcome.state == "missing"
        assert tier.size("nobody") is None
        assert list(tier.keys()) == [] and tier.n_bytes == 0

    @pytest.mark.parametrize("key", ["", "A", "a/b", "a b", "ä", "a\n", "x" * 201, "a\x00", "*"])
    def test_keys_that_are_not_allowed(self, tier: Tier, key: str) -> None:
        good = Put("good", [memoryview(b"123")])
        with pytest.raises(InvalidArgument):
            tier.put([good, Put(key, [memoryview(b"123")])])
        with pytest.raises(InvalidArgument):
            tier.get([Get(key, 0, [aligned(3)])])
        assert list(tier.keys()) == [], "refused before any state changes"

    @pytest.mark.parametrize("key", ["x" * 200, "..", "-", "a.b-c_9", "0", "kv.kv"])
    def test_keys_that_are(self, tier: Tier, key: str) -> None:
        store(tier, key, content(key, 100))
        assert_holds(tier, key, content(key, 100))
        assert list(tier.keys()) == [key]


class Changing(Hooks):
    """Replacing and deleting, alone and while others read."""

    @pytest.mark.parametrize("n", [10, 5000, 300_000])
    def test_replace(self, tier: Tier, n: int) -> None:
        store(tier, "a", content("a", 5000))
        store(tier, "a", content("a", n, 1))
        assert_holds(tier, "a", content("a", n, 1))
        self.settle(tier)
        assert tier.n_bytes == (self.taken(n) or tier.n_bytes)
        assert list(tier.keys()) == ["a"]

    def test_delete(self, tier: Tier) -> None:
        for key in ("a", "b", "c"):
            store(tier, key, content(key, 6000))
        tier.delete(["a", "nobody", "c"])
        assert sorted(tier.keys()) == ["b"]
        assert tier.size("a") is None
        (outcome,) = tier.get([Get("a", 0, [aligned(10)])])
        assert outcome.state == "missing", outcome
        tier.delete(["a"])
        tier.delete(iter(["b", "b"]))
        assert list(tier.keys()) == []
        self.settle(tier)
        assert tier.n_bytes == 0
        store(tier, "a", content("a", 7000, 1))
        assert_holds(tier, "a", content("a", 7000, 1))

    def test_delete_while_others_read(self, tier: Tier) -> None:
        keys, n, rounds = [f"k{i}" for i in range(6)], 60_000, 40
        known = {key: {content(key, n, v) for v in range(rounds + 1)} for key in keys}
        stop = threading.Event()
        seen: list[str] = []

        def read(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                chosen = rng.sample(keys, 3)
                gets = [Get(key, 0, [aligned(32_768), aligned(n - 32_768)]) for key in chosen]
                for get, outcome in zip(gets, tier.get(gets), strict=True):
                    assert outcome.state in ("done", "missing"), outcome
                    if outcome.ok:
                        assert filled(get) in known[get.key], f"not a value of {get.key}"
                        seen.append(get.key)

        def change() -> None:
            rng = random.Random(9)
            try:
                end = time.monotonic() + PATIENCE
                for step in itertools.count():
                    if step >= rounds and (len(seen) > 20 or time.monotonic() > end):
                        break
                    version = 1 + step % rounds
                    gone = rng.sample(keys, 2)
                    tier.delete(gone)
                    back = [Put(key, [memoryview(content(key, n, version))]) for key in gone]
                    assert all(outcome.ok for outcome in tier.put(back))
                    other = rng.choice(keys)
                    store(tier, other, content(other, n, version))
            finally:
                stop.set()

        puts = [Put(key, [memoryview(content(key, n))]) for key in keys]
        assert all(outcome.ok for outcome in tier.put(puts))
        together([change, *(lambda seed=seed: read(seed) for seed in range(4))])
        assert seen, "nothing was read"

    def test_many_write_at_once(self, tier: Tier) -> None:
        def write(worker: int) -> None:
            for i in range(20):
                own, shared = f"own-{worker}-{i}", f"shared-{i % 5}"
                store(tier, own, content(own, 5000 + i))
                store(tier, shared, content(shared, 9000))
                if i % 3 == 0:
                    tier.delete([own])

        together([lambda worker=worker: write(worker) for worker in range(4)])
        kept = [f"own-{w}-{i}" for w in range(4) for i in range(20) if i % 3]
        assert sorted(tier.keys()) == sorted([*kept, *(f"shared-{i}" for i in range(5))])
        for w in range(4):
            assert_holds(tier, f"own-{w}-19", content(f"own-{w}-19", 5019))
        assert_holds(tier, "shared-0", content("shared-0", 9000))

    def test_full_leaves_the_old_value(self, make: Make) -> None:
        tier = self.limited(make)
        old = content("old", self.room // 4)
        store(tier, "old", old)
        assert put_one(tier, "old", content("x", 4 * self.room)).state == "full"
        assert_holds(tier, "old", old)
        states = [put_one(tier, f"k{i}", content(f"k{i}", self.room // 8)).state for i in range(40)]
        assert set(states) == {"done", "full"} and states[0] == "done"
        assert_holds(tier, "old", old)
        assert len(list(tier.keys())) == 1 + states.count("done")
        tier.delete(["k0"])
        self.settle(tier)
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
            what = rng.choice(("put", "put", "get", "range", "delete"))
            if what == "put":
                data = content(key, rng.choice((1, 100, 4096, 5000, 40_000, 70_001)), step)
                store(tier, key, data, durable=rng.random() < 0.1)
                model[key] = data
            elif what == "delete":
                tier.delete([key])
                model.pop(key, None)
            elif key not in model:
                assert tier.get([Get(key, 0, [aligned(1)])])[0].state == "missing"
            elif what == "get":
                assert_holds(tier, key, model[key])
            else:
                a, b = sorted(rng.randrange(len(model[key]) + 1) for _ in "ab")
                get = asking(key, model[key], a, b - a)
                assert tier.get([get])[0].ok and filled(get) == model[key][a:b]
            assert tier.size(key) == (len(model[key]) if key in model else None)
        assert sorted(tier.keys()) == sorted(model)
        self.settle(tier)
        taken = [self.taken(len(data)) for data in model.values()]
        if None in taken:
            assert tier.n_bytes >= sum(map(len, model.values()))
        else:
            assert tier.n_bytes == sum(n for n in taken if n is not None)
        tier.check_integrity()
        for key, data in model.items():
            assert_holds(tier, key, data)
        tier.delete(list(model))
        self.settle(tier)
        assert tier.n_bytes == 0 and list(tier.keys()) == []


class Failing(Hooks):
    """What goes wrong is an outcome: never an exception, never wrong bytes, never too late."""

    def test_flipped_bytes(self, tier: Tier) -> None:
        for key in ("a", "b"):
            store(tier, key, content(key, 20_000))
        self.settle(tier)
        self.corrupt(tier, "a")
        (outcome,) = tier.get([asking("a", content("a", 20_000))])
        assert outcome.state == "wrong", outcome
        assert_holds(tier, "b", content("b", 20_000))
        store(tier, "a", content("a", 20_000, 1))
        assert_holds(tier, "a", content("a", 20_000, 1))

    def test_a_torn_value(self, tier: Tier) -> None:
        data = content("a", 200_000)
        store(tier, "a", data)
        store(tier, "b", content("b", 20_000))
        self.settle(tier)
        self.tear(tier, "a")
        (outcome,) = tier.get([asking("a", data)])
        assert outcome.state in ("wrong", "missing", "failed"), outcome
        assert_holds(tier, "b", content("b", 20_000))
        tier.delete(["a"])
        self.settle(tier)

    def test_a_deadline_in_the_past(self, tier: Tier) -> None:
        data = content("a", 50_000)
        store(tier, "a", data)
        gets = [asking("a", data), asking("a", data, 77, 1000)]
        outcomes = tier.get(gets, deadline=time.monotonic() - 1)
        assert [outcome.state for outcome in outcomes] == ["late", "late"]
        assert_untouched(gets)
        new = Put("a", [memoryview(content("a", 60_000, 1))])
        assert tier.put([new], deadline=time.monotonic() - 1)[0].state == "late"
        assert_holds(tier, "a", data)

    def test_a_deadline_far_away(self, tier: Tier) -> None:
        data = content("a", 2_500_000)
        deadline = time.monotonic() + 2 * PATIENCE
        assert put_one(tier, "a", data, deadline=deadline).ok
        gets = [asking("a", data), asking("a", data, 7, 1000), Get("x", 0, [aligned(9)])]
        outcomes = tier.get(gets, deadline=deadline)
        assert [outcome.state for outcome in outcomes] == ["done", "done", "missing"]
        assert [filled(get) for get in gets[:2]] == [data, data[7:1007]]

    def test_slow(self, tier: Tier) -> None:
        values = {f"k{i}": content(f"k{i}", 1_500_000) for i in range(4)}
        for key, data in values.items():
            store(tier, key, data)
        gets = [asking(key, data, shift=i) for i, (key, data) in enumerate(values.items())]
        with self.slow(tier, 0.4):
            outcomes = tier.get(gets, deadline=time.monotonic() + 0.1)
            assert [outcome.state for outcome in outcomes] == ["late"] * 4
            assert_untouched(gets)
        for key, data in values.items():
            assert_holds(tier, key, data)

    def test_lost(self, make: Make) -> None:
        tier = make()
        for key in ("a", "b"):
            store(tier, key, content(key, 100_000))
        self.lose(tier)

        def use() -> list[str]:
            deadline = time.monotonic() + 3
            states = [o.state for o in tier.get([asking("a", content("a", 100_000))] * 2)]
            states += [o.state for o in tier.get([Get("b", 5, [aligned(9)])], deadline=deadline)]
            for options in ({}, {"durable": True}, {"deadline": deadline}):
                states.append(put_one(tier, "c", content("c", 5000), **options).state)
            tier.delete(["a", "nobody"])
            tier.size("b"), list(tier.keys()), tier.n_bytes
            return states

        states = in_time(use)
        assert isinstance(states, list)
        self.check_lost(states)
        in_time(tier.close)

    def check_lost(self, states: list[str]) -> None:
        """What the three gets and three puts of a lost tier may say."""
        assert set(states[:3]) <= {"failed", "missing", "late"}, states
        assert set(states[3:]) <= {"failed", "full", "late"}, states


class Staying(Hooks):
    """What a tier that outlives its process finds again."""

    def test_reopening(self, make: Make) -> None:
        tier = make()
        values = {f"k{i}": content(f"k{i}", 1 + 4000 * i) for i in range(10)}
        for i, (key, data) in enumerate(values.items()):
            store(tier, key, data, durable=i % 2 == 0)
        store(tier, "k3", content("k3", 9000, 1))
        tier.delete(["k4", "k5"])
        again = self.reopen(tier)
        try:
            del values["k4"], values["k5"]
            values["k3"] = content("k3", 9000, 1)
            assert sorted(again.keys()) == sorted(values)
            again.check_integrity()
            for key, data in values.items():
                assert_holds(again, key, data)
            self.settle(again)
            taken = [self.taken(len(data)) for data in values.values()]
            assert None in taken or again.n_bytes == sum(n or 0 for n in taken)
            store(again, "new", content("new", 5000))
            assert_holds(again, "new", content("new", 5000))
            again.delete(list(again.keys()))
            self.settle(again)
            assert again.n_bytes == 0
        finally:
            again.close()

    def test_closing_twice(self, make: Make) -> None:
        tier = make()
        store(tier, "a", content("a", 100))
        tier.close()
        tier.close()


class Conformance(Reading, Changing, Failing, Staying):
    """The whole suite."""
