"""Reuse times by kind, and what is declared: python -m pytest tests/keep/test_reuse.py"""

from __future__ import annotations

from math import exp

import pytest

from kvweave.keep import LRU, DeadFirst, Declared, Facts, Policy, ReuseTime
from kvweave.keep.reuse import Reuse

KEYS = [1, 2, 3, 1, 4, 2, 5, 1, 6, 3, 2, 1, 7, 5, 4]


def evictions(policy: Policy, room: int, keys: list[int]) -> list[int]:
    went: list[int] = []
    held: set[int] = set()
    for key in keys:
        if key not in held:
            policy.missed(key, 1)
            if len(held) == room:
                went.append(next(policy.victims()))
                policy.evicted(went[-1])
                held.remove(went[-1])
        held.add(key)
        policy.used(key, 1)
        policy.check_integrity()
    return went


@pytest.mark.parametrize("made", [ReuseTime(), Declared()])
def test_with_one_kind_it_is_lru(made: Policy) -> None:
    assert evictions(made, 3, KEYS) == evictions(LRU(), 3, KEYS) != []


def test_declared_weighs_sizes_only_when_something_was_told() -> None:
    policy = Declared()
    for _ in range(3):
        for key, n_bytes in ((1, 10), (2, 1000), (3, 10)):
            policy.used(key, n_bytes)
    assert list(policy.victims()) == [1, 2, 3], "least recently used first"
    policy.used(4, 10, Facts(session="a"))
    assert next(policy.victims()) == 2, "the biggest"
    policy.check_integrity()


def test_rates_by_hand() -> None:
    assert Reuse(uses=5).rate(3) == 0.0
    always = Reuse(uses=4, returns=4, waited=40)
    assert always.rate(0) == always.rate(1000) == pytest.approx(1 / 10)
    half = Reuse(uses=4, returns=2, waited=20)  # after 10 uses on average, or never
    assert half.rate(0) == pytest.approx(1 / 20)
    assert half.rate(10) == pytest.approx(exp(-1) / (exp(-1) + 1) / 10)
    # a third returns after 10, a third is declared dead after 20, a third waits
    three = Reuse(uses=6, returns=2, waited=20, deaths=2, lingered=40)
    assert three.rate(0) == pytest.approx(1 / 30)
    assert three.rate(20) == pytest.approx(exp(-2) / (exp(-2) + exp(-1) + 1) / 10)
    assert three.rate(10**9) == 0.0


def test_a_prior_speaks_until_there_are_uses() -> None:
    others = Reuse(uses=100, returns=50, waited=1000, deaths=10, lingered=300)
    assert Reuse().with_prior(others, 10) == Reuse(10, 5, 100, 1, 30)
    own = Reuse(uses=1000, returns=1000, waited=5000)
    assert own.with_prior(others, 10).rate(0) == pytest.approx(1 / 5, rel=0.03)


def uses(policy: Policy) -> None:
    """Six documents come back every 12 uses; a thought is used once."""
    for at in range(60):
        policy.used(at % 6, 1, Facts(kind="document"))
        policy.used(100 + at, 1, Facts(kind="thinking"))


@pytest.mark.parametrize("made", [ReuseTime(), Declared()])
def test_a_kind_that_never_comes_back_goes_before_older_ones_that_do(made: Policy) -> None:
    uses(made)
    order = list(made.victims())
    assert order.index(159) < order.index(0), "the newest thought before the oldest document"
    assert sorted(order[-6:]) == [0, 1, 2, 3, 4, 5]
    made.check_integrity()


def test_what_returns_after_it_went_is_counted() -> None:
    policy = ReuseTime()
    policy.used(9, 100)
    for at in range(40):
        policy.used(1, 1, Facts(kind="tool"))
        policy.evicted(1)
        policy.used(50 + at, 1, Facts(kind="user"))
    policy.used(1, 1, Facts(kind="tool"))
    policy.used(99, 1, Facts(kind="user"))
    assert list(policy.victims())[-1] == 1, "the tool's chunk is not the last used"
    policy.check_integrity()


def test_what_went_long_ago_is_forgotten() -> None:
    policy = Declared()
    for key in range(100):
        policy.used(key, 1, Facts(session=f"s{key}"))
        if key >= 10:
            policy.evicted(key - 10)
    policy.check_integrity()
    assert len(policy._last) == len(policy._users) == len(policy._used_by) == 10 + 4 * 10


def test_hints_mean_nothing_to_reuse() -> None:
    policy = ReuseTime()
    for key in (1, 2, 3):
        policy.used(key, 1, Facts(session="a"))
    policy.pruned(3)
    policy.ended("a")
    policy.upcoming([1])
    assert list(policy.victims()) == [1, 2, 3]


def test_declared_lets_the_dead_go_first() -> None:
    policy = Declared()
    for key, session in ((1, "a"), (2, "a"), (3, "b"), (4, "b"), (1, "b"), (5, "c")):
        policy.used(key, 1, Facts(session=session))
    policy.pruned(5)
    policy.ended("a")  # 1 is b's too
    policy.ended("nobody")
    assert list(policy.victims())[:2] == [5, 2]
    assert sorted(policy.victims()) == [1, 2, 3, 4, 5]
    policy.used(5, 1, Facts(session="c"))  # it was asked for after all
    assert next(policy.victims()) == 2
    policy.ended("c")
    assert list(policy.victims())[:2] == [2, 5]
    policy.evicted(5)
    policy.ended("c")
    policy.pruned(5)
    assert next(policy.victims()) == 2 and 5 not in set(policy.victims())
    policy.check_integrity()


def test_dead_first_is_lru_behind_the_dead() -> None:
    policy = DeadFirst()
    for key, session in ((1, "a"), (2, "a"), (3, "b"), (1, "b"), (4, "b")):
        policy.used(key, 1, Facts(session=session))
    assert list(policy.victims()) == [2, 3, 1, 4]
    policy.pruned(4)
    policy.pruned(9)
    policy.ended("a")  # the last use of 1 was b's
    assert list(policy.victims()) == [4, 2, 3, 1]
    policy.used(4, 1, Facts(session="b"))
    assert list(policy.victims()) == [2, 3, 1, 4], "asked for after all"
    assert evictions(DeadFirst(), 3, KEYS) == evictions(LRU(), 3, KEYS) != []
    policy.check_integrity()


def test_what_one_of_several_sessions_prunes_stays() -> None:
    policy = Declared()
    for key, session in ((1, "a"), (1, "b"), (2, "a")):
        policy.used(key, 1, Facts(session=session))
    policy.pruned(1)
    assert not policy._dead
    policy.ended("b")
    policy.pruned(1)
    assert list(policy.victims()) == [1, 2]
    policy.check_integrity()


def test_what_nobody_named_used_does_not_go_with_a_session() -> None:
    policy = Declared()
    policy.used(1, 1, Facts(session="a"))
    policy.used(1, 1)
    policy.used(2, 1, Facts(session="a"))
    policy.ended("a")
    assert list(policy.victims()) == [2, 1]
    policy.check_integrity()


def test_declared_keeps_what_waiting_requests_use() -> None:
    policy = Declared()
    for key in (1, 2, 3, 4):
        policy.used(key, 1)
    policy.pruned(3)
    policy.upcoming([3, 1, 9, 3, 1])
    assert list(policy.victims()) == [2, 4, 1, 3], "what is used next goes last, dead or not"
    policy.check_integrity()
    policy.upcoming([])
    assert list(policy.victims()) == [3, 1, 2, 4]


def test_of_equally_likely_chunks_the_bigger_goes() -> None:
    policy = Declared()
    for _ in range(3):
        for key, n_bytes in ((1, 10), (2, 1000), (3, 10)):
            policy.used(key, n_bytes, Facts(session="a"))
    assert list(policy.victims()) == [2, 1, 3]


def test_big_chunks_that_come_back_sooner_stay() -> None:
    policy = Declared()
    for at in range(200):
        policy.used(1, 1000, Facts(session="a"))
        policy.used(2, 1000)
        if at % 40 == 39:
            policy.used(3, 10)
            policy.used(4, 10)
    assert set(list(policy.victims())[:2]) == {3, 4}


def test_what_several_live_sessions_use_comes_back_sooner() -> None:
    policy = Declared()
    for at in range(60):
        policy.used(1, 1, Facts(0.0, "document", "ab"[at % 2]))
        if at % 10 == 9:
            policy.used(2 + at // 10 % 2, 1, Facts(0.0, "document", "c"))
    order = list(policy.victims())
    assert order[-1] == 1
    policy.ended("a")
    policy.check_integrity()
    policy.ended("b")
    policy.check_integrity()
    assert 1 in set(policy.victims()) and policy._place[1].sessions == 0


def test_groups_are_weighed_for_many_victims_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, in_order = [], ReuseTime._in_order
    monkeypatch.setattr(ReuseTime, "_in_order", lambda self: drawn.append(1) or in_order(self))
    policy = Declared(1 << 40)
    for i in range(3000):
        policy.used(i, 100 + i, Facts(0.01, ("document", "tool")[i % 2], f"s{i % 100}"))
    went = []
    for i in range(3000, 3320):
        fresh = next(in_order(policy))
        goes = next(policy.victims())
        went.append(goes == fresh)
        policy.evicted(goes)
        policy.used(i, 100, Facts(0.01, "document", f"s{i % 100}"))
    assert len(drawn) <= 320 / 16 + 1
    assert sum(went) > 250, "and what goes is nearly always what would go if each were weighed"
    policy.used(7, 107, Facts(0.01, "tool", "s7"))
    policy.pruned(7)
    assert next(policy.victims()) == 7, "what was declared dead does not wait for the next draw"
    policy.check_integrity()
