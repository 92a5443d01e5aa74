"""A strategy's options in its name, read off its constructor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, get_args, get_type_hints

from kvweave.errors import InvalidArgument
from kvweave.weave.repair.base import Strategy

_Strategy = TypeVar("_Strategy", bound=Strategy)


def made(kind: type[_Strategy], words: Sequence[str]) -> _Strategy:
    """Return a strategy with options given as words, in any order.

    A number goes to the next parameter that takes an int, a flag's name to that flag, another word
    to the next one that takes a str. Raises InvalidArgument for a word that fits none.
    """
    takes = {n: t for n, t in get_type_hints(kind.__init__).items() if n != "return"}
    given: dict[str, int | str | bool] = {}
    for word in words:
        value: int | str | bool = int(word) if word.isascii() and word.isdigit() else word
        if takes.get(word) is bool:
            fits, value = [word], True
        else:
            fits = [n for n in takes if n not in given and _takes(takes[n], value)]
        if not word or not fits or fits[0] in given:  # the last: a flag twice
            raise InvalidArgument(
                "repair", f"{kind.name} has no option {word!r}", _hint(kind, takes)
            )
        given[fits[0]] = value
    return kind(**given)


def _takes(parameter: object, value: int | str | bool) -> bool:
    return type(value) in (parameter, *get_args(parameter))


def _hint(kind: type[Strategy], takes: dict[str, object]) -> str:
    words = [f"its flag {n}" if t is bool else f"its {n}" for n, t in takes.items()]
    if not words:
        return f"{kind.name} takes no options"
    return f"behind '{kind.name}:' may stand {' @ '.join(words)}"
