"""Which of many cases a run asks that does not ask all of them: others each day.

``KVWEAVE_DAY`` numbers the day. `.ci/run` sets it by the date and says it: with the same number the same
cases are asked again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

DAY = int(os.environ.get("KVWEAVE_DAY", "0"))


def one_in(step: int, n: int, more: int = 0) -> range:
    """Every ``step``-th number below ``n``, one at least where there are any; in ``step`` days it was each.
    With ``more`` from another one on."""
    step = max(1, min(step, n))
    return range((DAY + more) % step, n, step)


def some(n: int, cases: Sequence[T]) -> list[T]:
    """Return ``n`` of these, or all; in as many days as that takes each was among them."""
    return [cases[(DAY * n + i) % len(cases)] for i in range(min(n, len(cases)))]
