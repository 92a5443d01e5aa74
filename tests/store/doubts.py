"""What goes wrong is an outcome: never an exception, never wrong bytes, never too late.

``missing`` and ``exists`` are knowledge. Whatever happens behind a tier, it may say ``late`` and
``failed``, but not that a value is gone that may be there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from store.hooks import Hooks, Make
from store.values import (
    PATIENCE,
    SLACK,
    aligned,
    asking,
    assert_holds,
    assert_untouched,
    content,
    ends_by,
    filled,
    in_time,
    put_one,
    store,
)

from kvweave.errors import StoreError
from kvweave.store.tier.base import Get, Outcome, Put, Tier

DOUBTS = {"late", "failed"}


def states(outcomes: Sequence[int | Outcome]) -> list[str]:
    """Return what was said; sizes as ``done``."""
    return ["done" if isinstance(found, int) else found.state for found in outcomes]


def use(tier: Tier, seconds: float | None, gives_back: bool = True) -> dict[str, list[str]]:
    """Call everything, each time with as many seconds, and return what was said.

    ``a`` and ``b`` are there, 100,000 bytes each; what else is asked for is not.
    """
    said: dict[str, list[str]] = {}
    asked = [asking("a", content("a", 100_000)), Get("b", 5, [aligned(9)])]
    calls = {
        "get": lambda end: tier.get(asked, deadline=end),
        "look": lambda end: tier.look(["a", "b"], deadline=end),
        "look for others": lambda end: tier.look(["nobody"], deadline=end),
        "put": lambda end: tier.put([Put("c", [memoryview(b"value")])], deadline=end),
        "put durably": lambda end: tier.put(
            [Put("c", [memoryview(b"value")])], durable=True, deadline=end
        ),
        "put again": lambda end: tier.put([Put("a", [memoryview(b"other")])], deadline=end),
        "discard": lambda end: tier.discard(["d", "e"], deadline=end),
    }
    for name, call in calls.items():
        end = None if seconds is None else time.monotonic() + seconds
        if end is None:
            found = in_time(lambda call=call, end=end: call(end))
        else:
            with ends_by(end):
                found = call(end)
        said[name] = states(found)  # type: ignore[arg-type]
    if gives_back:
        assert_untouched(asked, 0.2)
    return said


class Wrong(Hooks):
    """Bytes that are not what they were."""

    def test_flipped_bytes(self, tier: Tier) -> None:
        for key in ("a", "b"):
            store(tier, key, content(key, 20_000))
        self.corrupt(tier, "a")
        (outcome,) = tier.get([asking("a", content("a", 20_000))])
        assert outcome.state == "wrong", outcome
        assert_holds(tier, "b", content("b", 20_000))
        assert tier.discard(["a"])[0].ok
        store(tier, "a", content("a", 20_000, 1))
        assert_holds(tier, "a", content("a", 20_000, 1))

    def test_a_torn_value(self, tier: Tier) -> None:
        data = content("a", 200_000)
        store(tier, "a", data)
        store(tier, "b", content("b", 20_000))
        self.tear(tier, "a")
        (outcome,) = tier.get([asking("a", data)])
        assert outcome.state in ("wrong", "missing", "failed"), outcome
        assert_holds(tier, "b", content("b", 20_000))
        assert tier.discard(["a"])[0].ok


class Slow(Hooks):
    """What takes too long, or for ever."""

    def test_a_deadline_in_the_past(self, tier: Tier) -> None:
        data = content("a", 50_000)
        store(tier, "a", data)
        before = time.monotonic() - 1
        gets = [asking("a", data), asking("a", data, 77, 1000)]
        assert states(tier.get(gets, deadline=before)) == ["late", "late"]
        assert_untouched(gets)
        assert put_one(tier, "b", data, deadline=before).state == "late"
        assert put_one(tier, "a", b"other", deadline=before).state == "late"
        assert states(tier.look(["a", "nobody"], deadline=before)) == ["late", "late"]
        assert states(tier.discard(["a"], deadline=before)) == ["late"]
        assert_holds(tier, "a", data)

    def test_a_deadline_far_away(self, tier: Tier) -> None:
        data = content("a", 2_500_000)
        deadline = time.monotonic() + 2 * PATIENCE
        assert put_one(tier, "a", data, deadline=deadline).ok
        gets = [asking("a", data), asking("a", data, 7, 1000), Get("x", 0, [aligned(9)])]
        assert states(tier.get(gets, deadline=deadline)) == ["done", "done", "missing"]
        assert [filled(get) for get in gets[:2]] == [data, data[7:1007]]
        assert states(tier.look(["a", "x"], deadline=deadline)) == ["done", "missing"]
        assert states(tier.discard(["x"], deadline=deadline)) == ["done"]

    def test_slow(self, tier: Tier) -> None:
        values = {f"k{i}": content(f"k{i}", 1_500_000) for i in range(4)}
        for key, data in values.items():
            store(tier, key, data)
        gets = [asking(key, data, shift=i) for i, (key, data) in enumerate(values.items())]
        with self.slow(tier, 0.4):
            with ends_by(time.monotonic() + 0.1):
                outcomes = tier.get(gets, deadline=time.monotonic() + 0.1)
            assert states(outcomes) == ["late"] * 4
            if self.gives_back:
                assert_untouched(gets)
        self.wait_for(tier)
        for key, data in values.items():
            assert_holds(tier, key, data)

    def test_nothing_answers(self, tier: Tier) -> None:
        for key in ("a", "b"):
            store(tier, key, content(key, 100_000))
        with self.hang(tier):
            said = use(tier, self.hurry, self.gives_back)
        assert {state for some in said.values() for state in some} <= DOUBTS, said
        self.wait_for(tier)
        for key in ("a", "b"):
            assert_holds(tier, key, content(key, 100_000))
        state = put_one(tier, "c", b"value").state
        assert state in ("done", "exists"), "what was late may have come to be"
        assert_holds(tier, "c", b"value")

    def test_a_late_put_is_whole_or_not_at_all(self, tier: Tier) -> None:
        data = content("a", 3_000_000)
        source = bytearray(data)
        with self.hang(tier):
            end = time.monotonic() + self.hurry
            with ends_by(end):
                outcome = tier.put([Put("a", [memoryview(source)])], deadline=end)[0]
            assert outcome.state in DOUBTS, outcome
            if self.gives_back:
                source[:] = bytes(len(data))
        self.wait_for(tier)
        time.sleep(0.3)
        if states(tier.look(["a"])) == ["missing"]:
            store(tier, "a", data)
        assert_holds(tier, "a", data)

    def wait_for(self, tier: Tier) -> None:
        """Wait until what did not answer is asked again, and answers."""
        end = time.monotonic() + PATIENCE
        while states(tier.look(["nobody"])) != ["missing"]:
            assert time.monotonic() < end, "it stays away"
            time.sleep(0.02)


class Lost(Hooks):
    """What is behind a tier is gone, or the tier is closed."""

    def test_lost(self, make: Make) -> None:
        tier = make()
        for key in ("a", "b"):
            store(tier, key, content(key, 100_000))
        self.lose(tier)
        for seconds in (None, 1.0):
            said = use(tier, seconds, self.gives_back)
            self.check_lost({state for some in said.values() for state in some})
        with pytest.raises(StoreError) as caught:
            list(tier.keys())
        assert caught.value.hint
        with pytest.raises(StoreError) as caught:
            print(tier.n_bytes)
        assert caught.value.hint
        in_time(tier.close)

    def check_lost(self, said: set[str]) -> None:
        """What a lost tier may say."""
        assert said <= DOUBTS, said

    def test_closing(self, make: Make) -> None:
        tier = make()
        store(tier, "a", content("a", 100_000))
        store(tier, "b", content("b", 100_000))
        in_time(tier.close)
        in_time(tier.close)
        said = use(tier, 5.0)
        assert {state for some in said.values() for state in some} == {"failed"}, said
        assert "closed" in tier.get([Get("a", 0, [aligned(9)])])[0].why
        with pytest.raises(StoreError):
            list(tier.keys())
        with pytest.raises(StoreError):
            print(tier.n_bytes)

    def test_reopening(self, make: Make) -> None:
        tier = make()
        values = {f"k{i}": content(f"k{i}", 1 + 4000 * i) for i in range(10)}
        for i, (key, data) in enumerate(values.items()):
            store(tier, key, data, durable=i % 2 == 0)
        assert all(outcome.ok for outcome in tier.discard(["k4", "k5"]))
        again = self.reopen(tier)
        try:
            del values["k4"], values["k5"]
            assert sorted(again.keys()) == sorted(values)
            again.check_integrity()
            for key, data in values.items():
                assert_holds(again, key, data)
            taken = [self.taken(len(data)) for data in values.values()]
            assert None in taken or again.n_bytes == sum(n or 0 for n in taken)
            assert put_one(again, "k3", b"other", durable=True).state == "exists"
            store(again, "new", content("new", 5000))
            assert_holds(again, "new", content("new", 5000))
            assert all(outcome.ok for outcome in again.discard(list(again.keys())))
            assert again.n_bytes == 0
        finally:
            again.close()


class Doubts(Wrong, Slow, Lost):
    """All of it."""


class Stalling(Hooks):
    """For tiers behind a network: a server that does not answer is not waited for again and again."""

    def test_who_comes_after_the_first_does_not_wait(self, tier: Tier) -> None:
        store(tier, "a", b"value")
        get = Get("a", 0, [aligned(5)])
        with self.hang(tier):
            begin = time.monotonic()
            said = []
            for _ in range(40):
                with ends_by(time.monotonic() + 1):
                    said += states(tier.get([get], deadline=time.monotonic() + 1))
                time.sleep(0.05)
            waited = time.monotonic() - begin - 40 * 0.05
        assert set(said) <= DOUBTS and said[0] == "late"
        assert waited < 1 + 2 * 0.25 + SLACK, f"{waited:.1f} s"
