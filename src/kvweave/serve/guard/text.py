"""Tokenise what clients send, without spending seconds on what is far too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvweave.engine import Engine
from kvweave.errors import ContextTooLong
from kvweave.weave.parts import TextOrTokens
from kvweave.weave.special import Extent, PlainText
from kvweave.weave.template import Hole, Template

MOST = 64  # characters that a token has at most, on the average of a long text
PROBE = 8  # characters a token of the limit: of a longer text the front is tokenised first
SLACK = 16  # tokens at the end of a piece of text that differ from those of the whole


def tokens_of(engine: Engine, text: TextOrTokens) -> list[int]:
    """Return token ids as `Maker.tokens`, of `PlainText` text too. Raises ContextTooLong, as early as it is sure."""
    limit = engine.runner.limit
    if not isinstance(text, str) and len(text) > limit:
        raise ContextTooLong(len(text), limit)
    n, kind = PROBE * limit, PlainText if isinstance(text, PlainText) else str
    while isinstance(text, str) and n < len(text):
        n_tokens = len(engine.maker.tokens(kind(text[:n])))
        if n_tokens > limit + SLACK:
            raise ContextTooLong(n_tokens * len(text) // n, limit)
        n *= 4
    return engine.maker.tokens(text)


def tokens_of_mixed(engine: Engine, text: str, plain: Sequence[Extent]) -> list[int]:
    """Return token ids of text in whose ``plain`` spans no special token can be written.

    Raises ContextTooLong as `tokens_of`.
    """
    ids: list[int] = []
    for run in engine.maker.special.runs(text, plain):
        ids += tokens_of(engine, run)
        if len(ids) > engine.runner.limit:
            raise ContextTooLong(len(ids), engine.runner.limit)
    return ids


def sizes_of(engine: Engine, values: Iterable[str | list[str]]) -> list[int]:
    """Return the tokens of each text among texts and lists of chunk names.

    Raises ContextTooLong, also for a list of more chunks than a context has positions.
    """
    sizes = []
    for value in values:
        if isinstance(value, str):
            sizes.append(len(tokens_of(engine, value)))
        elif len(value) > engine.runner.limit:
            raise ContextTooLong(len(value), engine.runner.limit)
    return sizes


def check_filled(engine: Engine, template: str, values: Mapping[str, str | list[str]]) -> None:
    """Raise ContextTooLong for a template that values would make far too long, before it is filled."""
    limit = engine.runner.limit
    n_chars = n_chunks = 0
    holes = Counter(part.name for part in Template(template).parse() if isinstance(part, Hole))
    for name, value in values.items():
        if isinstance(value, str):
            n_chars += holes[name] * len(value)
        else:
            n_chunks += holes[name] * len(value)
    if n_chunks > limit:
        raise ContextTooLong(n_chunks, limit)
    if n_chars > MOST * limit:
        raise ContextTooLong(n_chars // MOST, limit)


def plain(values: Mapping[str, str | list[str]]) -> dict[str, str | list[str]]:
    """Return values whose text cannot have special tokens in it."""
    return {k: PlainText(value) if isinstance(value, str) else value for k, value in values.items()}
