"""What is remembered of a namespace is pushed out by nobody else's."""

from __future__ import annotations

import random

from kvweave.serve.reuse.latest import LatestOfEach


def test_of_one_namespace_it_forgets_what_a_list_in_order_of_use_would() -> None:
    made, draw = LatestOfEach[int, int](12), random.Random(3)
    twin: list[tuple[int, int]] = []
    for step in range(5000):
        key = draw.randrange(20)
        known = next((each for each in twin if each[0] == key), None)
        twin = [each for each in twin if each != known]
        if draw.random() < 0.5:
            made.note("anna", key, step)
            twin = [*twin, (key, step)][-12:]
        else:
            assert made.find("anna", key) == (known[1] if known else None)
            twin += [known] if known else []
        assert len(made) == len(twin)


def test_who_talks_much_forgets_his_own() -> None:
    made = LatestOfEach[str, int](10)
    made.note("anna", "mine", 1)
    for i in range(1000):
        made.note("berta", f"{i}", i)
    assert made.find("anna", "mine") == 1 and made.find("berta", "999") == 999
    assert made.find("berta", "3") is None and len(made) == 10
    made.expire(0.0)
    assert len(made) == 10
    made.expire(float("inf"))
    assert len(made) == 0 and made.find("anna", "mine") is None
