"""The tier in a Mooncake Store, against a real master and a real node."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from store import servers
from store.conformance import Conformance, Make
from store.doubts import Stalling
from store.mooncake_behind import LEASE, Behind
from store.values import (
    aligned,
    asking,
    assert_gone,
    assert_holds,
    assert_untouched,
    content,
    put_one,
    store,
)

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier import mooncake
from kvweave.store.tier.base import DONE, Get, Outcome, Put, Tier
from kvweave.store.tier.limit import Limit
from kvweave.store.tier.mooncake import Cluster, Mooncake

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    made = Behind(tmp_path_factory.mktemp("mooncake"))
    yield made
    made.stop()


@pytest.fixture
def one_member(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the cluster takes a second: all tiers are one member that stays."""
    monkeypatch.setattr(mooncake, "join", behind.join)


def comes_back(tier: Mooncake) -> None:
    """Wait until the master is asked again, and answers."""
    end = time.monotonic() + 10
    while not isinstance(tier.look(["nobody"])[0], Outcome) or (
        tier.look(["nobody"])[0].state != "missing"  # type: ignore[union-attr]
    ):
        assert time.monotonic() < end
        time.sleep(0.05)


@servers.needs_mooncake
@pytest.mark.usefixtures("one_member")
class TestMooncake(Conformance, Stalling):
    tells_who_won = False  # a put that lost says 0 too

    @pytest.fixture
    def make(self, behind: Behind) -> Make:
        self.behind = behind

        def make(capacity: int | None = None) -> Tier:
            return Mooncake(behind.cluster, prefix=f"t{next(NUMBERS)}.")

        return make

    def limited(self, make: Make) -> Tier:
        self._cannot("be full: it evicts")

    def taken(self, n: int) -> int:
        return n

    def corrupt(self, tier: Tier, key: str) -> None:
        assert isinstance(tier, Mooncake)
        (size,) = tier.look([key])
        assert isinstance(size, int)
        data = bytearray(size)
        assert tier.get([Get(key, 0, [memoryview(data)])])[0].ok
        data[size * 3 // 4] ^= 0x10
        with tier._link.take(Limit(None, 10), size) as slot:
            slot.memory[:size] = data
            words = [tier._prefix + key], [slot.address], [size], tier._config
            assert tier._store.batch_upsert_from(*words) == [0]

    def slow(self, tier: Tier, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.behind.master.frozen(seconds)

    def hang(self, tier: Tier) -> contextlib.AbstractContextManager[None]:
        return self.behind.master.frozen()

    def lose(self, tier: Tier) -> None:
        self.behind.master.kill()

    def reopen(self, tier: Tier) -> Tier:
        tier.close()
        return self.beside(tier)

    def beside(self, tier: Tier) -> Tier:
        assert isinstance(tier, Mooncake)
        return Mooncake(self.behind.cluster, prefix=tier._prefix)


@pytest.fixture
def tier(behind: Behind, one_member: None) -> Iterator[Mooncake]:
    made = Mooncake(behind.cluster, prefix=f"t{next(NUMBERS)}.")
    yield made
    made.close()


@servers.needs_mooncake
def test_what_was_read_is_removed_when_its_lease_ends(tier: Mooncake) -> None:
    data = content("a", 5000)
    store(tier, "a", data)
    assert_holds(tier, "a", data)
    assert tier._store.batch_remove([f"{tier._prefix}a"]) == [-706], "there is a lease to wait for"
    (outcome,) = tier.discard(["a"], deadline=time.monotonic() + LEASE / 4000)
    assert outcome.state in ("failed", "late")
    assert tier.discard(["a", "nobody"]) == [DONE, DONE]
    assert_gone(tier, "a")
    assert tier.n_bytes == 0


@servers.needs_mooncake
def test_a_value_that_somebody_else_is_writing(tier: Mooncake) -> None:
    real, seen = tier._store, [[0], [0], [0], [1]]

    class Busy:
        """The master says that it is not there, then that it is being written, then that it is."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def batch_is_exist(self, names: list[str]) -> list[int]:
            return seen.pop(0) if seen else real.batch_is_exist(names)

        def batch_put_from(self, *args: Any) -> list[int]:
            return [0]

    tier._store = Busy()
    assert put_one(tier, "a", b"value").ok and not seen
    seen += [[0]] * 1000
    (outcome,) = tier.put([Put("b", [memoryview(b"x")])], deadline=time.monotonic() + 0.3)
    assert outcome.state in ("missing", "failed", "late") and not outcome.ok
    tier._store = real


@servers.needs_mooncake
def test_what_a_late_get_brings_stays_in_its_slot(behind: Behind, tier: Mooncake) -> None:
    data = content("a", 3_000_000)
    store(tier, "a", data)
    gets = [asking("a", data) for _ in range(2)]
    with behind.master.frozen():
        for _ in range(3):
            outcomes = tier.get(gets, deadline=time.monotonic() + 0.05)
            assert {outcome.state for outcome in outcomes} <= {"late", "failed"}
    assert_untouched(gets, 0.5)
    comes_back(tier)
    assert_holds(tier, "a", data)
    assert tier._link._slots._free.qsize() == 4, "every slot came back"


@servers.needs_mooncake
@pytest.mark.usefixtures("one_member")
def test_without_a_deadline_nobody_waits_for_ever(behind: Behind) -> None:
    tier = Mooncake(behind.cluster, prefix=f"t{next(NUMBERS)}.", timeout=0.2, slots=2)
    store(tier, "a", b"value")
    with behind.master.frozen():
        states = [tier.get([Get("a", 0, [aligned(5)])])[0].state for _ in range(4)]
        assert states == ["failed"] * 4
        assert put_one(tier, "b", b"x").state == "failed"
    comes_back(tier)
    assert_holds(tier, "a", b"value")
    tier.close()


@servers.needs_mooncake
@pytest.mark.slow
def test_a_killed_node(behind: Behind) -> None:
    behind.stop()
    tier = Mooncake(behind.cluster, prefix=f"t{next(NUMBERS)}.")
    values = {f"k{i}": content(f"k{i}", 100_000) for i in range(8)}
    for key, data in values.items():
        store(tier, key, data)
    behind.up[1].kill()
    gets = [asking(key, data) for key, data in values.items()]
    outcomes = tier.get(gets, deadline=time.monotonic() + 1)
    assert {outcome.state for outcome in outcomes} <= {"failed", "late", "missing"}
    assert put_one(tier, "new", b"x").state in ("failed", "full")
    behind.up[1] = behind.node()
    end = time.monotonic() + 20
    while put_one(tier, "new", b"x").state != "done" and time.monotonic() < end:
        time.sleep(0.1)
    assert_holds(tier, "new", b"x")
    states = {o.state for o in tier.get(gets, deadline=time.monotonic() + 0.5)}
    assert states <= {"missing", "failed", "late"}, "they went with the node"
    tier.close()


@servers.needs_mooncake
def test_no_master() -> None:
    for master in (f"127.0.0.1:{servers.free_port()}", "nowhere", ""):
        with pytest.raises(StoreError, match="no way into Mooncake") as caught:
            Mooncake(Cluster(master))
        assert "mooncake_master" in caught.value.hint


@servers.needs_mooncake
def test_values_that_are_not_taken(tier: Mooncake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mooncake, "_largest", 4000)
    puts = [Put(f"k{n}", [memoryview(bytes(n))]) for n in (0, 1, 4000, 4001, 2)]
    outcomes = tier.put(puts)
    assert [o.state for o in outcomes] == ["failed", "done", "done", "failed", "done"]
    assert sorted(tier.keys()) == ["k1", "k2", "k4000"]


@servers.needs_mooncake
def test_without_an_address_that_lists(behind: Behind, one_member: None) -> None:
    tier = Mooncake(Cluster(behind.cluster.master), prefix=f"t{next(NUMBERS)}.")
    store(tier, "a", b"value")
    with pytest.raises(StoreError) as caught:
        list(tier.keys())
    assert "listing=" in caught.value.hint
    assert_holds(tier, "a", b"value")
    tier.close()


@servers.needs_mooncake
def test_ranges_of_one_value_are_one_request(tier: Mooncake) -> None:
    data = content("a", 50_000)
    store(tier, "a", data)
    real, asked = tier._store, []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(real, name)

    tier._store = Counting()
    gets = [asking("a", data, offset, 100) for offset in (0, 40_000, 7)]
    assert [outcome.state for outcome in tier.get(gets)] == ["done"] * 3
    assert [bytes(get.into[0]) for get in gets] == [data[0:100], data[40_000:40_100], data[7:107]]
    assert asked == ["get_into_ranges"]
    tier._store = real


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(InvalidArgument, match="cannot be loaded") as caught:
        Mooncake(Cluster())
    assert "kvweave[mooncake]" in caught.value.hint


@servers.needs_mooncake
def test_a_read_that_outlasts_its_lease_is_done_again(tier: Mooncake) -> None:
    data = content("a", 5000)
    store(tier, "a", data)
    real, codes = tier._store, [-707, -703, -800]

    class Odd:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def get_into_ranges(self, *args: Any) -> Any:
            return [[[codes.pop()]]] if codes else real.get_into_ranges(*args)

    tier._store = Odd()
    assert_holds(tier, "a", data)
    assert codes == []
    codes += [-707] * 99
    (outcome,) = tier.get([asking("a", data)], deadline=time.monotonic() + 0.4)
    assert outcome.state in ("late", "failed") and len(codes) < 99
    tier._store = real
