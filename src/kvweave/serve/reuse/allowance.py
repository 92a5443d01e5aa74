"""What may be spent on one prompt, so that nobody can write one that takes minutes."""

from __future__ import annotations

from collections.abc import Sequence

SEARCHED = 64  # so often the whole text may be searched in vain, and FREE_SEARCHED characters more
FREE_SEARCHED = 1 << 24


class Allowance:
    """What may be spent on one prompt."""

    def __init__(self, n: int) -> None:
        self.n = n

    def spend(self, n: int) -> bool:
        """Take ``n``; tell whether it was there."""
        self.n -= n
        return self.n >= 0


class TextSearch:
    """Looks for one of several texts, in vain only for so long."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.left = Allowance(SEARCHED * len(body) + FREE_SEARCHED)
        self.trimmed = False  # whether the last one found was: then the next one probably is

    def first(self, texts: Sequence[str], at: int) -> int | None:
        """Return where the first of ``texts`` that occurs from ``at`` on does."""
        for text in reversed(texts) if self.trimmed else texts:
            if self.left.n < 0:
                break
            place = self.body.find(text, at)
            if place >= 0:
                self.trimmed = text is not texts[0]
                return place
            self.left.spend(len(self.body) - at)
        return None
