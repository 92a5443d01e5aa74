"""What a method computes: rows and passes, counted before the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvweave.run.base import Backend
from kvweave.suite.words import Paper
from kvweave.weave.recipes import PASS
from kvweave.weave.trying import Effort


class Computed(Effort):
    """What was computed of a paper."""

    def cost(self, paper: Paper, blind: bool) -> float:
        """Return what a weave took beyond the pass of its question, as a share of the context, if this is of
        all questions and of the replies that were forced behind them; a blind method weaves once for all."""
        n, asked = len(paper.questions), sum(len(q.asked) for q in paper.questions)
        replies = sum(len(q.expected) for q in paper.questions)
        rows, passes = self.rows - asked - replies, float(self.passes - n)
        if blind:
            rows, passes = rows + n, min(passes, 1)
        else:
            rows, passes = rows / n, passes / n - 1
        return max(0.0, rows / sum(len(t) for _, t in paper.notes)) + PASS * max(0.0, passes)


@contextmanager
def counted(backend: Backend) -> Iterator[Computed]:
    """Count what a backend runs meanwhile."""
    computed, run, own = Computed(), backend.forward, vars(backend).get("forward")

    def forward(works: Sequence[Any], *rest: Any, **named: Any) -> Any:
        for work in works:
            computed.add(work, len(backend.layers))
        return run(works, *rest, **named)

    backend.forward = forward  # type: ignore[method-assign]
    try:
        yield computed
    finally:
        if own is None:
            del backend.forward
        else:
            backend.forward = own  # type: ignore[method-assign]
