"""A method: one way to reuse chunks, a row of the suite's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvweave.weave.repair import Strategy, strategy

Pruning = Literal["forget", "evict", "never"]

# Strategies that choose the same rows whatever is asked: one weave serves all questions of a case.
BLIND = ("none", "random", "first_k", "deviation", "deps", "patch", "full")
FULL = "full prefill"  # the label of the oracle's own outcomes


@dataclass(frozen=True, slots=True)
class Method:
    """A strategy, its share of the reused rows, and whether chunks were computed after the base.

    ``before`` names a strategy under which the same notes were woven once, wholly repaired, in
    another context: what `deps` and `patch` learn from. ``settings`` go to the context. ``modes``
    say how P5 and P6 remove their notes: "never" is a context that did not have them.
    """

    strategy: str | Strategy = "none"  # a name may have options: deviation:k@2
    share: float = 0.0
    base: bool = True
    before: str = ""
    settings: tuple[tuple[str, Any], ...] = ()
    modes: tuple[Pruning, ...] = ("forget", "never")

    @property
    def name(self) -> str:
        """The strategy, options included."""
        name = self.strategy if isinstance(self.strategy, str) else self.strategy.name
        return f"{name} seen" if self.before else name

    @property
    def label(self) -> str:
        """All that tells it from others, in a few words."""
        words = [self.name, f"{self.share:.0%}", *(f"{k}={v}" for k, v in self.settings)]
        return " ".join(words if self.base else [*words, "no-base"])

    @property
    def is_blind(self) -> bool:
        """Whether its choice of rows does not depend on the question."""
        return self.build().name in BLIND

    def build(self) -> Strategy:
        """Return the strategy. Raises InvalidArgument when there is none of that name."""
        return strategy(self.strategy)


def methods(strategies: Sequence[str], shares: Sequence[float]) -> list[Method]:
    """Return every strategy at every share; those without a share once. Raises InvalidArgument."""
    made = []
    for text in strategies:
        name = Method(text).build().name
        before = "full:records" if name == "deps" else ""
        used = [s for s in shares if s > 0] if name not in ("none", "full") else [0.0]
        made += [Method(text, share, before=before) for share in used]
    return made
