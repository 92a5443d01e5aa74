"""What tiers and prefill cost: a model with few parameters, all of them stated.

Prefill of n tokens behind p others takes ``seconds * n * (1 + (p + n / 2) / doubles_at)``: linear in
the tokens, and attention to what stands before. A load takes bytes over the tier's bandwidth.
Nothing overlaps and nobody waits in a queue.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvweave.config import n_bytes
from kvweave.errors import InvalidArgument

GIB = 2**30
# bytes per second, and price of a GiB relative to memory of the host: orders of magnitude
DEFAULTS = {
    "gpu": (1e12, 10.0),
    "ram": (20e9, 1.0),
    "disk": (3e9, 0.05),
    "remote": (1e9, 0.02),
}


@dataclass(frozen=True)
class Cost:
    """An 8 B model with grouped-query attention on one GPU, unless told otherwise."""

    seconds: float = 1 / 8000  # of prefill, per token
    doubles_at: int = 32_768  # tokens before a token that double what it takes
    token_bytes: int = 131_072  # KV of a token: 32 layers x (k, v) x 8 heads x 128 x 2 bytes

    def prefill(self, before: int, n: int) -> float:
        """Return seconds to compute ``n`` tokens behind ``before`` others."""
        return self.seconds * n * (1 + (before + n / 2) / self.doubles_at)


DEFAULT = Cost()


@dataclass(frozen=True)
class Tier:
    """One tier: bytes it holds, bytes per second it loads with, relative price of a GiB."""

    name: str
    budget: int
    bandwidth: float
    price: float

    @property
    def cost(self) -> float:
        return self.budget / GIB * self.price


def tier(text: str, all_bytes: int) -> Tier:
    """Return the tier that ``name:size[:bandwidth[:price]]`` names.

    Sizes are ``10%`` of ``all_bytes``, or ``2GiB``; an empty bandwidth is the default one. Raises
    InvalidArgument.
    """
    name, *rest = text.split(":")
    if name not in DEFAULTS or not 1 <= len(rest) <= 3:
        hint = f"write NAME:SIZE[:BANDWIDTH[:PRICE]], NAME one of {', '.join(DEFAULTS)}"
        raise InvalidArgument("tiers", f"{text!r} is no tier", hint)
    bandwidth, price = DEFAULTS[name]
    if rest[1:] and rest[1]:
        bandwidth = float(n_bytes(rest[1]))
    if rest[2:]:
        price = _price(rest[2])
    if bandwidth <= 0:
        raise InvalidArgument("tiers", f"{text!r} loads nothing", "write a bandwidth as 3GB")
    return Tier(name, size(rest[0], all_bytes), bandwidth, price)


def _price(text: str) -> float:
    if re.fullmatch(r"\d*\.?\d+", text) is None or float(text) <= 0:
        raise InvalidArgument("tiers", f"{text!r} is no price", "of a GiB of host memory: 0.05")
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
        if list(DEFAULTS).index(above.name) > list(DEFAULTS).index(below.name):
            raise InvalidArgument("tiers", f"{above.name} before {below.name}", "fastest first")
    return made
