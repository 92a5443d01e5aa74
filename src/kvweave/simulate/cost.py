"""What prefill, repair and tiers cost: a model with few parameters, all of them stated.

Prefill of n tokens behind p others takes ``seconds * n * (1 + (p + n / 2) / doubles_at)``: linear in
the tokens, and attention to what stands before. A load takes bytes over the tier's bandwidth. A chunk
that is placed somewhere new is repaired, which takes a part of its prefill.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

from kvweave.config import n_bytes
from kvweave.errors import InvalidArgument

GB = 10**9
HOURS = 730  # of a month, as clouds bill it
YEARS = 5  # for which a drive's writes a day are rated


class Typical(NamedTuple):
    """A tier that is not described further. Prices are list prices of clouds, rounded."""

    bandwidth: float  # bytes a second
    price: float  # $ per GB and month
    reads: float = 0.0  # $ per million
    writes: float = 0.0
    drive_writes: float = inf  # a day, over the years it is rated for


TYPICAL = {
    "gpu": Typical(1e12, 20.0),
    "ram": Typical(20e9, 3.0),
    "disk": Typical(3e9, 0.08, drive_writes=1.0),
    "remote": Typical(1e9, 0.023, reads=0.4, writes=5.0),
}


@dataclass(frozen=True)
class Cost:
    """An 8 B model with grouped-query attention on one GPU, unless told otherwise."""

    seconds: float = 1 / 8000  # of prefill, per token
    doubles_at: int = 32_768  # tokens before a token that double what it takes
    token_bytes: int = 131_072  # KV of a token: 32 layers x (k, v) x 8 heads x 128 x 2 bytes
    repair: float = (
        0.1  # of the prefill of placed chunks: `auto` at 5 % of the rows (bench/prune.py)
    )
    overlap: float = 0.0  # the part of loads that computing hides, of what it could hide
    decode: float = 0.02  # seconds per token of an answer
    fixed: float = 0.0  # seconds of any request

    def prefill(self, before: int, n: int) -> float:
        """Return seconds to compute ``n`` tokens behind ``before`` others."""
        return self.seconds * n * (1 + (before + n / 2) / self.doubles_at)

    def together(self, computing: float, loading: float) -> float:
        """Return seconds to the first token when nobody else is served."""
        return self.fixed + computing + loading - self.overlap * min(computing, loading)


DEFAULT = Cost()


@dataclass(frozen=True)
class Tier:
    """One tier of a node: what it holds, how fast it is, and what it costs."""

    name: str
    budget: int  # bytes
    bandwidth: float  # bytes a second
    price: float  # $ per GB and month
    ttl: float = inf  # seconds without a use after which a chunk is deleted
    egress: float = 0.0  # $ per GB read
    reads: float = 0.0  # $ per million
    writes: float = 0.0  # $ per million
    drive_writes: float = inf  # rated writes of the whole tier a day

    @property
    def monthly(self) -> float:
        """$ a month for the room."""
        return self.budget / GB * self.price


def tier(text: str, all_bytes: int) -> Tier:
    """Return the tier that ``name:size[:bandwidth[:price[:ttl[:egress]]]]`` names.

    Sizes are ``10%`` of ``all_bytes``, or ``2GiB``; what is empty is typical. Raises InvalidArgument.
    """
    name, *rest = text.split(":")
    if name not in TYPICAL or not 1 <= len(rest) <= 5:
        hint = "write NAME:SIZE[:BANDWIDTH[:PRICE[:TTL[:EGRESS]]]], NAME one of "
        raise InvalidArgument("tiers", f"{text!r} is no tier", hint + ", ".join(TYPICAL))
    size_, bandwidth, price, ttl, egress = (*rest, *[""] * (5 - len(rest)))
    typical = TYPICAL[name]
    made = Tier(
        name,
        size(size_, all_bytes),
        float(n_bytes(bandwidth)) if bandwidth else typical.bandwidth,
        _number(price, "$ per GB and month: 0.08") if price else typical.price,
        _number(ttl, "seconds: 300") if ttl else inf,
        _number(egress, "$ per GB read: 0.09") if egress else 0.0,
        typical.reads,
        typical.writes,
        typical.drive_writes,
    )
    if made.bandwidth <= 0:
        raise InvalidArgument("tiers", f"{text!r} loads nothing", "write a bandwidth as 3GB")
    return made


def _number(text: str, hint: str) -> float:
    if re.fullmatch(r"\d*\.?\d+", text) is None or float(text) <= 0:
        raise InvalidArgument("tiers", f"{text!r} is no number over 0", hint)
    return float(text)


def size(text: str, all_bytes: int) -> int:
    """Return bytes of ``10%`` (of ``all_bytes``) or ``2GiB``. Raises InvalidArgument."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())
    if share is None:
        return n_bytes(text)
    if not 0 < float(share[1]) <= 100:
        raise InvalidArgument("tiers", f"{text!r} is not in 0..100 %", "write 10% or 2GiB")
    return max(1, int(all_bytes * float(share[1]) / 100))


def tiers(texts: Sequence[str], all_bytes: int) -> list[Tier]:
    """Return tiers, fastest first. Raises InvalidArgument for none, or one twice."""
    made = [tier(text, all_bytes) for text in texts]
    if not made or len({each.name for each in made}) < len(made):
        raise InvalidArgument("tiers", "each tier once, and one at least", "write ram:10%,disk:50%")
    for above, below in pairwise(made):
        if list(TYPICAL).index(above.name) > list(TYPICAL).index(below.name):
            raise InvalidArgument("tiers", f"{above.name} before {below.name}", "fastest first")
    return made
