"""Costs come back from a log that was made with them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from kvweave.errors import InvalidArgument
from kvweave.simulate.calibrate import entry, fit, parse_log
from kvweave.simulate.cost import Cost, Tier
from kvweave.weave.plan import Plan, Span

TRUE = Cost(seconds=2e-4, doubles_at=5000, fixed=0.03)
DISK = 1.5e9  # bytes a second


def log(n: int, noise: float) -> list[dict[str, Any]]:
    rng, rows = Random(1), []
    for _ in range(n):
        before, new = rng.randint(0, 9000), rng.randint(1, 3000)
        loaded = {"disk": rng.randint(0, 10**9)}
        seconds = TRUE.together(TRUE.prefill(before, new), loaded["disk"] / DISK)
        seconds *= rng.lognormvariate(0, noise)
        attended = new * (before + new / 2)
        rows.append({"seconds": seconds, "computed": new, "attended": attended, "loaded": loaded})
    return rows


def test_an_exact_log_gives_the_costs_back() -> None:
    found = fit(parse_log(map(json.dumps, log(40, 0.0))))
    cost = found.cost(Cost(repair=0.3))
    assert cost.seconds == pytest.approx(TRUE.seconds) and cost.doubles_at == TRUE.doubles_at
    assert cost.fixed == pytest.approx(TRUE.fixed) and cost.repair == 0.3
    assert found.error < 1e-9 and found.n == 40
    ram, disk = found.tiers([Tier("ram", 1, 20e9, 1.0), Tier("disk", 1, 3e9, 1.0)])
    assert disk.bandwidth == pytest.approx(DISK) and ram.bandwidth == 20e9


def test_a_noisy_log_gives_them_about_and_says_how_far_off() -> None:
    found = fit(log(400, 0.1))
    assert found.cost().seconds == pytest.approx(TRUE.seconds, rel=0.1)
    assert 1 / found.byte["disk"] == pytest.approx(DISK, rel=0.1)
    assert found.error == pytest.approx(0.067, rel=0.3)  # the median of |exp(N(0, 0.1)) - 1|


def test_nothing_costs_less_than_nothing() -> None:
    rows = [
        {"seconds": 1.0 + i / 10, "computed": 100 * i, "attended": 0.0, "loaded": {"ram": 1000 - i}}
        for i in range(1, 20)
    ]
    found = fit(rows)
    assert min(found.fixed, found.token, found.attended, *found.byte.values()) >= 0
    assert found.cost().doubles_at == 10**9 and found.error < 0.01
    with pytest.raises(InvalidArgument, match="tokens cost nothing"):
        fit([row | {"computed": 0} for row in rows]).cost()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2"),
        ('{"seconds": 1, "computed": 2, "attended": 3}', "line 2: no 'loaded'"),
        ('{"seconds": 0, "computed": 2, "attended": 3, "loaded": {}}', "line 2: a number"),
        ('{"seconds": 1, "computed": -2, "attended": 3, "loaded": {}}', "line 2: a number"),
        ('{"seconds": 1, "computed": 2, "attended": NaN, "loaded": {}}', "line 2: a number"),
    ],
)
def test_what_is_no_log_is_refused(line: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        parse_log([json.dumps(log(1, 0.0)[0]), line])


def test_a_short_log_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="7 answers are too few"):
        fit(log(7, 0.0))


def test_a_plan_becomes_a_line() -> None:
    def span(how: str, at: int, n: int, **more: Any) -> Span:
        return Span("x", 1, n, how, more.pop("tier", "-"), more.pop("n_bytes", 0), at, 0, **more)  # type: ignore[arg-type]

    plan = Plan(
        (
            span("prefix", 0, 10),
            span("repair", 10, 20, tier="disk", n_bytes=640, n_repaired=4, placed=True),
            span("reuse", 30, 5, tier="ram", n_bytes=160, placed=True),
            span("reuse", 35, 5, tier="disk", n_bytes=160, placed=True),
            span("prefill", 40, 6, n_prefilled=6),
        ),
        "auto",
    )
    assert entry(plan, 0.5) == {
        "seconds": 0.5, "computed": 10, "attended": 4 * 20 + 6 * 43,
        "loaded": {"disk": 800, "ram": 160},
    }  # fmt: skip
