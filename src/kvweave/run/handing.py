"""What a layer stores where attention is the model's own (`run/handed.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GAPLESS = "it goes by the number of a row (pools, or ALiBi), so its contexts have no gaps"
HANDED_WHOLE = "attention of this model is its own, and is handed all rows"


class As(Enum):
    """What rows are to attention of the model's own (`run/handed.py`)."""

    ROWS = "keys and values"
    SWAPPED = "values and keys: what the model calls its values turns"
    ONE = "keys, which are the values too: what turns, then the rest"
    INDEX = "keys of an index: what turns, then the rest"
    POOLED = "what is pooled, and the weights of that"


@dataclass(frozen=True, slots=True)
class Handing:
    """How rows reach attention of the model's own."""

    what: As
    roll: int = 0  # dims that stand last in the model, and first here
    rate: int = 0  # rows that are pooled into one, by position
    name: str = ""  # of several that are pooled
    alone: bool = False  # attention is in the model's own code, no implementation can be set
    gapless: bool = False  # what is seen of a row goes by its number

    @property
    def attends(self) -> bool:
        """Whether these are keys and values of attention."""
        return self.what not in (As.INDEX, As.POOLED)
