"""What the answers of one conversation cost in nats, and the edits before them. No torch.

::

    version 8    drop docs/a, message u-003   answer a-003    at most 0.4 nats, 0.3 more than before
    version 10   message u-004                answer a-004    0.1 nats, as an audit found

An answer's cost is the KL of all its tokens to what a full prefill would have said: the drift of one
token, times the tokens. Costs of answers add up. What is not known is None, and never counted as 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MOST_COSTS = 256  # answers of one context whose costs are listed


@dataclass(slots=True)
class AnswerCost:
    """What one answer cost, at ``version`` of its context; ``at`` in seconds since 1970.

    ``drift`` bounds the mean KL (nats) of its ``n_tokens`` tokens, by ``drift_by``; ``measured`` is
    what an audit found. ``edits`` were made since the answer before it; ``more`` nats than that one
    it costs a token, by what is known of both: what the edits cost.
    """

    version: int
    edits: tuple[str, ...]
    n_tokens: int
    drift: float | None
    drift_by: str | None
    measured: float | None = None
    more: float | None = None
    at: float = field(default_factory=time.time)

    @property
    def a_token(self) -> float | None:
        """Nats of one token: as measured, else at most."""
        return self.drift if self.measured is None else self.measured

    @property
    def nats(self) -> float | None:
        """Nats of all its tokens: as measured, else at most."""
        return None if self.a_token is None else self.a_token * self.n_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return it, JSON-ready."""
        return {
            "version": self.version,
            "at": self.at,
            "edits": list(self.edits),
            "n_tokens": self.n_tokens,
            "drift": self.drift,
            "drift_by": self.drift_by,
            "measured": self.measured,
            "nats": self.nats,
            "more": self.more,
        }


class Costs:
    """The ledger of one context: the costs of its last answers, and the sum of all."""

    def __init__(self) -> None:
        self._costs: deque[AnswerCost] = deque()
        self._n_gone = self._n_unknown = 0  # of those that are not listed any more
        self._nats = 0.0

    def __iter__(self) -> Iterator[AnswerCost]:
        return iter(self._costs)

    def add(self, cost: AnswerCost) -> None:
        """Note an answer's cost; the oldest is added up, and not listed any more."""
        last = self._costs[-1].a_token if self._costs else 0.0
        if cost.drift is not None and last is not None:
            cost.more = cost.drift - last
        self._costs.append(cost)
        while len(self._costs) > MOST_COSTS:
            old = self._costs.popleft()
            self._n_gone, self._n_unknown = self._n_gone + 1, self._n_unknown + (old.nats is None)
            self._nats += old.nats or 0.0

    def copy(self) -> Costs:
        """Return what a fork begins with."""
        twin = Costs()
        twin._costs, twin._nats = self._costs.copy(), self._nats
        twin._n_gone, twin._n_unknown = self._n_gone, self._n_unknown
        return twin

    @property
    def last_version(self) -> int:
        """The version of the last answer; -1 before the first."""
        return self._costs[-1].version if self._costs else -1

    def totals(self) -> dict[str, int | float]:
        """Return how many answers there were, of how many the cost is unknown, and the nats of the
        others together."""
        known = [cost.nats for cost in self._costs]
        return {
            "answers": self._n_gone + len(known),
            "unknown": self._n_unknown + known.count(None),
            "nats": self._nats + sum(nats for nats in known if nats is not None),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the whole ledger, the newest answer first, JSON-ready."""
        return self.totals() | {"data": [cost.to_dict() for cost in reversed(self._costs)]}
