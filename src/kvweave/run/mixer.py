"""Modules that keep a state: linear attention, state spaces, short convolutions.

What such a mixer makes of a row depends on its input rows up to there, and on nothing else. These
inputs are what a chunk keeps of it: rows like any others, the first half of each as a key that does
not turn, the rest as its value. A state is what all rows up to a slot come to. It is made again from
the rows (`run/replay.py`), and kept in front of some slots (`run/states.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kvweave.store.kv import LayerShape


@dataclass(frozen=True, slots=True)
class MixerState:
    """What a mixer keeps of the rows it has seen: by number, [batch, ...]; none of no rows."""

    convs: Mapping[int, Tensor] = field(default_factory=dict)  # tails of its convolutions
    sums: Mapping[int, Tensor] = field(default_factory=dict)  # its recurrent states

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for each in (self.convs, self.sums) for t in each.values())

    def __bool__(self) -> bool:
        return bool(self.convs or self.sums)


EMPTY = MixerState()


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """A module that keeps a state: learned by `run/stateful.py`, never read from a model's code."""

    forward: Callable[..., Any]
    number: int  # of the layer of the model's cache in which it keeps its states
    n_states: int  # that layer has room for
    places: tuple[int | str, ...]  # where it is given rows
    widths: tuple[int, ...]  # of these
    n_bytes: int  # of a state
    border: int  # rows in front of a row that its convolutions reach over
    sums: bool = True  # whether its state is more than the tails of its convolutions
    stepwise: bool = False  # from a state on it takes one row a call (Mamba 1 in transformers)
    form: str | None = None  # of what rows do to its state (`run/carry.py`)
    behind: tuple[nn.Linear, ...] = ()  # projections that its state does not depend on

    @property
    def shape(self) -> LayerShape:
        """How a row is stored."""
        width = sum(self.widths)
        return LayerShape(1, width // 2, 1, width - width // 2)
