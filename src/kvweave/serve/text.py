"""Tokenise what clients send, without spending seconds on what is far too long."""

from __future__ import annotations

from kvweave.engine import Engine
from kvweave.errors import ContextTooLong
from kvweave.weave.maker import Text

PROBE = 8  # characters a token of the limit: of a longer text the front is tokenised first
SLACK = 16  # tokens at the end of a piece of text that differ from those of the whole


def tokens_of(engine: Engine, text: Text) -> list[int]:
    """Return token ids as `Maker.tokens`. Raises ContextTooLong, as early as it is sure."""
    limit = engine.runner.limit
    n = PROBE * limit
    while isinstance(text, str) and n < len(text):
        n_tokens = len(engine.maker.tokens(text[:n]))
        if n_tokens > limit + SLACK:
            raise ContextTooLong(n_tokens * len(text) // n, limit)
        n *= 4
    return engine.maker.tokens(text)
