"""Special tokens, and text that only looks like them.

A tokenizer makes ``<|system|>`` one token wherever it stands. In text of somebody who must not change
roles, which is `PlainText`, it stays the characters it is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Extent = tuple[int, int]


class PlainText(str):
    """Text in which no special token can be written."""

    __slots__ = ()


class Special:
    """The special tokens of a tokenizer; none without one."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        texts = {str(token) for token in added.values() if token.special}
        texts |= set(getattr(tokenizer, "all_special_tokens", ()))
        self.ids = frozenset(getattr(tokenizer, "all_special_ids", ())) | frozenset(
            id for id, token in added.items() if token.special
        )
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        # a tokenizer may find normalised ones in other case too; more than there are does no harm
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)

    def find(self, text: str, start: int = 0, stop: int | None = None) -> list[Extent]:
        """Return where ``text`` spells special tokens, from ``start`` to ``stop`` of it."""
        found = self._pattern.finditer(text, start, len(text) if stop is None else stop)
        return [match.span() for match in found]

    def masked(self, text: str, mark: Callable[[str], str]) -> str:
        """Return ``text`` with ``mark(name)`` for each special token it spells."""
        return self._pattern.sub(lambda match: mark(match[0]), text)

    def runs(self, text: str, plain: Sequence[Extent]) -> Iterator[str]:
        """Yield ``text`` in runs, `PlainText` where it has a span of ``plain``, which are in order.

        Runs meet at special tokens outside those spans, so no token but these ends at a seam.
        """
        bounds, at = [0], 0
        for start, stop in [*plain, (len(text), len(text))]:
            bounds += [place for span in self.find(text, at, start) for place in span]
            at = stop
        bounds.append(len(text))
        at = 0
        for start, _ in plain:
            if start < at:  # in the run before
                continue
            i = bisect_right(bounds, start)
            if at < bounds[i - 1]:
                yield text[at : bounds[i - 1]]
            at = bounds[i]
            yield PlainText(text[bounds[i - 1] : at])
        if at < len(text):
            yield text[at:]
