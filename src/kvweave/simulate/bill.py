"""What serving costs: nodes by the hour, tiers by the month, egress by the GB, requests to stores by
the million; and how long drives last."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvweave.simulate.cost import GB, HOURS, YEARS
from kvweave.simulate.replaying import Result
from kvweave.simulate.store import Moved

DAY = 86_400


@dataclass(frozen=True)
class Prices:
    """Besides those of tiers."""

    node: float = 2.5  # $ an hour


def bill(result: Result, rate: float, nodes: int, prices: Prices) -> dict[str, float]:
    """Return $ an hour by what for, and $ per thousand requests, at ``rate`` requests a second."""
    an_hour = rate * 3600
    egress = requests = 0.0
    for tier in result.tiers:
        moved = result.moved.get(tier.name, Moved())
        egress += moved.read / GB * tier.egress
        requests += (moved.n_reads * tier.reads + moved.n_writes * tier.writes) / 1e6
    hourly = {
        "nodes": nodes * prices.node,
        "tiers": nodes * result.monthly / HOURS,
        "egress": egress / result.requests * an_hour,
        "requests": requests / result.requests * an_hour,
    }
    total = sum(hourly.values())
    return {name: round(value, 6) for name, value in hourly.items()} | {
        "per_hour": round(total, 6),
        "per_thousand_requests": round(total / an_hour * 1000, 6),
    }


def wear(result: Result, rate: float, nodes: int) -> dict[str, dict[str, float | None]]:
    """Return, for tiers that wear out, drive writes a day and years until the rated ones are used;
    null where nothing is written.

    The drive is taken to be as big as the tier; a bigger one lasts longer in proportion.
    """
    found: dict[str, dict[str, float | None]] = {}
    for tier in result.tiers:
        moved = result.moved.get(tier.name)
        if moved is None or tier.drive_writes == inf:
            continue
        a_day = moved.written / result.requests * rate / nodes * DAY / tier.budget
        found[tier.name] = {
            "drive_writes_a_day": round(a_day, 3),
            "rated": tier.drive_writes,
            "years": round(YEARS * tier.drive_writes / a_day, 3) if a_day else None,
        }
    return found
