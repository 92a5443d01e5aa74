"""A method: one way to reuse chunks, a row of the suite's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from kvweave.errors import InvalidArgument
from kvweave.weave.repair import STRATEGIES, Strategy
from kvweave.weave.repair import strategy as known

Mode = Literal["forget", "evict", "never"]
Options = tuple[tuple[str, Any], ...]

# Strategies that choose the same rows whatever is asked: one weave serves all questions of a case.
BLIND = ("none", "random", "first_k", "deviation", "boundary", "deps", "full")
# Strategies that repair a share of the rows; the others repair none, or all.
SHARED = tuple(name for name in STRATEGIES if name not in ("none", "full"))
FULL = "full prefill"  # the label of the oracle's own outcomes


@dataclass(frozen=True, slots=True)
class Method:
    """A strategy, its share of the reused rows, and whether chunks were computed after the base.

    ``options`` go to the strategy, ``settings`` to the context. ``modes`` say how P5 (and P6)
    remove their notes: "never" is a context that did not have them.
    """

    strategy: str | Strategy = "none"
    share: float = 0.0
    base: bool = True
    options: Options = ()
    settings: Options = ()
    modes: tuple[Mode, ...] = ("forget", "never")

    @property
    def name(self) -> str:
        """The strategy with its options, as `parse` reads it."""
        if not isinstance(self.strategy, str):
            return self.strategy.name
        inside = ",".join(f"{k}={v}" for k, v in self.options)
        return f"{self.strategy}({inside})" if inside else self.strategy

    @property
    def label(self) -> str:
        """All that tells it from others, in a few words."""
        words = [self.name, f"{self.share:.0%}", *(f"{k}={v}" for k, v in self.settings)]
        return " ".join(words if self.base else [*words, "no-base"])

    @property
    def is_blind(self) -> bool:
        """Whether its choice of rows does not depend on the question."""
        return (self.strategy if isinstance(self.strategy, str) else self.strategy.name) in BLIND

    def build(self) -> Strategy:
        """Return the strategy. Raises InvalidArgument when there is none of that name."""
        if not isinstance(self.strategy, str):
            return self.strategy
        if not self.options:
            return known(self.strategy)
        made = known(self.strategy)
        return cast(Callable[..., Strategy], type(made))(**dict(self.options))


def parse(text: str) -> tuple[str, Options]:
    """Return name and options of ``deviation(layer=1,what=k)``. Raises InvalidArgument."""
    name, bracket, inside = text.strip().partition("(")
    if bracket and not inside.endswith(")"):
        raise InvalidArgument("strategy", f"{text!r} has no closing bracket")
    options: list[tuple[str, Any]] = []
    for word in filter(None, inside.removesuffix(")").split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            raise InvalidArgument("strategy", f"{word!r} in {text!r}", "write name=value")
        options.append((key.strip(), int(value) if value.strip().isdecimal() else value.strip()))
    known(name)
    return name, tuple(options)


def methods(strategies: Sequence[str], shares: Sequence[float]) -> list[Method]:
    """Return every strategy at every share; those without a share once. Raises InvalidArgument."""
    made = []
    for text in strategies:
        name, options = parse(text)
        try:
            Method(name, 0.0, options=options).build()
        except TypeError as error:
            raise InvalidArgument("strategy", f"{text!r}: {error}") from error
        used = [s for s in shares if s > 0] if name in SHARED else [float(name == "full")]
        made += [Method(name, share, options=options) for share in used]
    return made
