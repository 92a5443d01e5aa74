"""What every tier must do with bytes that it keeps: give them back, whole or in part, or not at all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import xxhash
from store import records
from store.hooks import Hooks
from store.values import aligned, asking, assert_gone, assert_holds, content, cut, filled, store

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import Get, Outcome, Put, Tier


class Reading(Hooks):
    """Bytes that go in come out, whole or in part, or not at all."""

    @pytest.mark.parametrize("n", [1, 8, 4095, 4096, 4097, 65_536, 1_000_003])
    def test_round_trip(self, tier: Tier, n: int) -> None:
        data = content("a", n)
        store(tier, "a", data)
        assert_holds(tier, "a", data)
        assert list(tier.keys()) == ["a"]
        assert tier.n_bytes >= n

    def test_a_chunk_of_which_rows_are_gone(self, tier: Tier) -> None:
        kv = records.thinned(300, 90)
        found = records.load(tier, records.store(tier, kv), records.about(kv))
        assert not isinstance(found, Outcome), found
        assert found.kept is not None and np.array_equal(found.kept, kv.kept)
        assert all(
            torch.equal(a, b) for a, b in zip((*found.k, *found.v), (*kv.k, *kv.v), strict=True)
        )

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
