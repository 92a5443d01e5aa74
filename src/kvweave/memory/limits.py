"""How much of a context each zone of a memory may take."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.chunk.identity import TierName
from kvweave.errors import InvalidArgument
from kvweave.verbs import checked


@checked
@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Tokens of each zone; raises InvalidArgument for what cannot be kept.

    ``window`` bounds the turns, and ``turns`` their number where it is given; when either is over,
    the oldest go until ``keep`` of it is left. ``summaries`` bounds all summaries together and
    ``summary`` each of them, its wrapping included. Items of ``warm`` tokens keep
    their KV in memory; the others lie on the tier ``cold`` (default: the first below memory, or
    tokens only where there is none).
    """

    window: int = 1024
    turns: int | None = None
    keep: float = 0.5  # of the window, 0..1
    summaries: int = 256
    summary: int = 96
    recalled: int = 512
    warm: int = 4096
    cold: TierName | None = None

    def __post_init__(self) -> None:
        for name in ("window", "summary", "summaries"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, f"{getattr(self, name)} tokens", "give 1 or more")
        if self.recalled < 0 or self.warm < 0:
            raise InvalidArgument(
                "recalled" if self.recalled < 0 else "warm", "it is negative", "give 0 or more"
            )
        if self.turns is not None and self.turns < 1:
            raise InvalidArgument(
                "turns", f"{self.turns} turns", "give 1 or more, or None for any number"
            )
        if not 0 <= self.keep <= 1:
            raise InvalidArgument("keep", f"{self.keep} is not between 0 and 1")
        if 2 * self.summary > self.summaries:
            reason = f"two of {self.summary} tokens are over the {self.summaries} of all summaries"
            raise InvalidArgument("summary", reason, "summary=, at most half of summaries=")

    def is_over(self, sizes: list[int]) -> bool:
        """Tell whether turns of these sizes [tokens] are too many."""
        return sum(sizes) > self.window or (self.turns is not None and len(sizes) > self.turns)

    def leaving(self, sizes: list[int]) -> int:
        """Return how many of the oldest turns go: the fewest that leave ``keep`` of the budget.
        The last turn stays."""
        if not self.is_over(sizes):
            return 0
        left, n = sum(sizes), 0
        most = None if self.turns is None else self.keep * self.turns
        while n < len(sizes) - 1 and (
            left > self.keep * self.window or (most is not None and len(sizes) - n > most)
        ):
            left -= sizes[n]
            n += 1
        return n

    def folding(self, sizes: list[int]) -> int:
        """Return how many of the oldest summaries become one; 0 where all are within the budget."""
        if sum(sizes) <= self.summaries:
            return 0
        left, n = sum(sizes), 0
        while n < len(sizes) and (n < 2 or left + self.summary > self.summaries):
            left -= sizes[n]
            n += 1
        return n
