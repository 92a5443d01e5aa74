from __future__ import annotations

import numpy as np
import pytest
from store.conformance import Conformance, Make
from store.values import aligned, assert_holds, content, put_one, store

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import Tier
from kvweave.store.tier.buffers import address, flat, runs
from kvweave.store.tier.memory import Memory


class TestMemory(Conformance):
    @pytest.fixture
    def make(self) -> Make:
        return lambda capacity=None: Memory(capacity or 16 << 20)

    def taken(self, n: int) -> int:
        return n

    def corrupt(self, tier: Tier, key: str) -> None:
        value = tier._values[key]  # type: ignore[attr-defined]
        value[value.size * 3 // 4] ^= 0x10


def test_to_the_last_byte() -> None:
    tier = Memory(10_000)
    store(tier, "a", content("a", 9_000))
    refused = put_one(tier, "b", content("b", 1_001))
    assert refused.state == "full" and "1000 of 10000" in refused.why
    store(tier, "b", content("b", 1_000))
    assert tier.n_bytes == 10_000
    tier.discard(["a"])
    store(tier, "c", content("c", 9_000))
    tier.check_integrity()


def test_what_the_caller_changes_afterwards_is_not_the_value() -> None:
    tier = Memory(1 << 20)
    source = bytearray(content("a", 5_000))
    store(tier, "a", source)  # type: ignore[arg-type]
    source[:] = bytes(5_000)
    assert_holds(tier, "a", content("a", 5_000))


def test_capacity_must_be_something() -> None:
    with pytest.raises(InvalidArgument):
        Memory(0)


def test_buffers_that_follow_each_other_are_one_run() -> None:
    space = aligned(10_000)
    parts = [space[0:64], space[64:64], space[64:5000], space[5000:6000], space[7000:7100]]
    found = runs(parts)
    start = address(flat(space))
    assert [(run.address - start, run.n) for run in found] == [(0, 6000), (7000, 100)]
    found[0].array(60, 10)[:] = 7
    assert bytes(space[58:72]) == b"\xa5\xa5" + bytes([7] * 10) + b"\xa5\xa5"
    assert runs([]) == [] == runs([memoryview(b"")])


def test_values_of_other_types() -> None:
    tier = Memory(1 << 20)
    words = np.arange(100, dtype=np.uint32)
    store(tier, "a", words.data)  # type: ignore[arg-type]
    assert_holds(tier, "a", words.tobytes())
