"""Which rows stay inside a run of tokens: what a policy declares, sees and answers.

A policy is one idea in one file: how much each row of one layer is worth to each kv head. How many
stay, which are never let go of (sinks, pins, the newest), who runs the model and who frees memory
is not its business (`kvweave.weave.keeping`). Add one in its own file and register it in
`kvweave.keep.tokens.POLICIES`.

::

    rows are computed      TokenWatch.see, TokenWatch.ask        what they attended to, what they asked for
    rows have to go        TokenPolicy.worth(view)     scores [kv_head, row], the highest stay
    that was a choice      TokenWatch.chosen                windows begin anew
    slots are renumbered   TokenWatch.compact               statistics of the rows that are left

Rows are shown packed: of each head those that are there, in the order of their slots. Of latents, which
all heads share, a policy is shown what each head makes of them, as if that were stored; a row is worth
the mean over heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Flag, auto
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.keep.tokens.watch import Tally as Tally
from kvweave.keep.tokens.watch import TokenWatch as TokenWatch
from kvweave.run.base import LayerInfo
from kvweave.run.handing import HANDED_WHOLE
from kvweave.run.rotary import Angles
from kvweave.store.kv import LayerShape

T = TypeVar("T", bound=Tally)
MOST = 1 << 20  # of an option: nobody means more, and memory may go by it


class Need(Flag):
    """What a policy has to be shown besides slots and positions."""

    NOTHING = 0
    KEYS = auto()  # keys and values of the rows
    ATTENTION = auto()  # what rows attend to while they are computed
    QUERIES = auto()  # unrotated queries of rows while they are computed
    REPLAY = auto()  # what the same tokens attend to when they are read a second time


@dataclass(frozen=True, slots=True)
class LayerView:
    """The rows of one layer, packed by head; rows where ``there`` is false are padding."""

    layer: int
    info: LayerInfo
    slots: Tensor  # [kv_head, row] int64, increasing; where statistics are found; padding: any
    there: Tensor  # [kv_head, row] bool
    positions: Tensor  # [kv_head, row] int64
    keys: Tensor | None = None  # [kv_head, row, dim] as rotated; with KEYS
    values: Tensor | None = None  # [kv_head, row, dim]; with KEYS
    watch: TokenWatch | None = None  # what `TokenPolicy.watch` made
    shared: bool = False  # heads have keys of their own, and the rows of these in common

    @property
    def shape(self) -> tuple[int, int]:
        """kv heads and rows."""
        return self.slots.shape[0], self.slots.shape[1]

    def by_head(self) -> LayerView:
        """Return, of latents with their keys, the same rows as each query head sees them: unrotated dims
        behind those that turn, as `TokenWatch.ask` is shown queries; of others this view."""
        latent = self.info.latent
        if latent is None or self.keys is None or self.values is None:
            return self
        keys, values = latent.expanded(latent.wide(self.keys), latent.wide(self.values))
        n = len(keys)
        slots, there, positions = (
            t.expand(n, -1) for t in (self.slots, self.there, self.positions)
        )
        shape = LayerShape(n, keys.shape[2], n, values.shape[2])
        info = replace(self.info, shape=shape, group=self.info.n_queries // n, latent=None)
        return LayerView(
            self.layer, info, slots, there, positions, keys, values, self.watch, shared=True
        )

    def of(self, statistic: Tensor | None) -> Tensor:
        """Return [kv_head, row] of a ``statistic`` [kv_head, slot] or [1, slot], which all heads
        share; 0 for padding and for slots that it has not."""
        if statistic is None or not statistic.shape[-1]:
            return torch.zeros(self.shape, device=self.slots.device)
        n = statistic.shape[-1]
        found = statistic.expand(self.shape[0], n).gather(-1, self.slots.clamp(max=n - 1))
        return found.masked_fill(~self.there | (self.slots >= n), 0)

    def wide(self, rows: Tensor | None) -> Tensor:
        """Return its ``keys`` or ``values`` in float32 at least, 0 where they are padding; do not write
        there."""
        assert rows is not None, "the policy was not shown keys and values"
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return rows if self.there.all() else rows.masked_fill(~self.there[..., None], 0)

    def front(self, n: int) -> Tensor:
        """Tell [kv_head, row] which are the first ``n`` rows of each head."""
        return self.there & (self.there.cumsum(-1) <= n)

    def newest(self, n: int) -> Tensor:
        """Tell [kv_head, row] which are the last ``n`` rows of each head."""
        return self.there & (self.there.flip(-1).cumsum(-1).flip(-1) <= n)

    def ahead(self, steps: Tensor) -> Angles:
        """Return cos and sin [1, width] of how keys turn ``steps`` [n] positions behind the last
        row's, the mean over these."""
        last = self.positions.masked_fill(~self.there, 0).max()
        cos, sin = self.info.rotation.angles(last + steps)
        return cos.mean(0, keepdim=True), sin.mean(0, keepdim=True)

    def tally(self, kind: type[T]) -> T:
        """Return what the policy's watch has counted. Raises AssertionError where none is there."""
        found = None if self.watch is None else self.watch.tally
        assert isinstance(found, kind), f"{kind.__name__} was not kept"
        return found


@dataclass(frozen=True, slots=True)
class TokenPolicy(ABC):
    """How much rows are worth; fields are its options, with the paper's values as defaults.

    ``sinks`` rows in front and the newest ``window`` rows stay whatever the scores say.
    """

    name: ClassVar[str]
    needs: ClassVar[Need] = Need.NOTHING
    moves: ClassVar[bool] = False  # rows of all layers and heads go, and the others close up
    more: ClassVar[Mapping[str, str]] = {}  # forms of fewer bits and their budgets, by default
    splits: ClassVar[tuple[str, ...]] = ()  # forms among which it divides the rows itself
    some: ClassVar[tuple[str, ...]] = ()  # options that are 1 at least
    decodes: ClassVar[bool] = False  # goes by what decoding reads: not for chunks

    sinks: int = 4
    window: int = 32

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Return empty statistics for one context; None where nothing is watched."""
        return None

    @abstractmethod
    def scores(self, view: LayerView) -> Tensor:
        """Return [kv_head, row], float: the higher, the longer a row stays. Values of padding do
        not count; equal scores: the newer row stays."""

    def judged(self, view: LayerView) -> tuple[Tensor, Tensor | None]:
        """Return `scores`, and [kv_head] bool which heads are to keep all rows as they are: as many as
        others of the layer can spare, or with `exceeds` whatever the budget; None: none."""
        return self.scores(view), None

    @property
    def exceeds(self) -> bool:
        """Whether heads that are to keep all rows may do so beyond the budget."""
        return False

    def worth(self, view: LayerView) -> tuple[Tensor, Tensor | None]:
        """Return what `judged` says of rows as they are kept: of latents the mean over heads."""
        each = view.by_head()
        scores, whole = self.judged(each)
        if not each.shared:
            return scores, whole
        return scores.mean(0, keepdim=True), None if whole is None else whole.all(0, keepdim=True)

    def levels(self, view: LayerView, scores: Tensor, n: int) -> Tensor:
        """Return [kv_head, row] of ``n`` that there were, by their `scores`: 0 for a row that rests as it
        is, ``i`` for one in the form ``splits[i - 1]``, more for one that goes. For policies with
        ``splits``."""
        raise NotImplementedError


def may_let_go(infos: Sequence[LayerInfo]) -> bool:
    """Tell whether rows may go at all: not where a layer keeps a state, or hands all rows to a model's own
    attention."""
    return all(info.mixer is None and info.handed is None for info in infos)


def require_rows(infos: Sequence[LayerInfo]) -> None:
    """Raise InvalidArgument where a layer keeps a state, or hands its rows to attention of the model's own:
    no row of these may go."""
    if any(info.mixer is not None for info in infos):
        some = "contexts without keep; chunks can be dropped by name"
        raise InvalidArgument(
            "keep", "this model keeps states, which have seen every row and let go of none", some
        )
    if any(info.handed is not None for info in infos):
        raise InvalidArgument("keep", HANDED_WHOLE, "contexts without keep")


def made(kind: type[TokenPolicy], options: Mapping[str, str]) -> TokenPolicy:
    """Return a policy with ``options``, which it has, read as the types of its fields. Raises
    InvalidArgument for what cannot be read; what is no option is refused before
    (`kvweave.keep.tokens.spec.Keep.parse`)."""
    defaults = {f.name: f.default for f in fields(kind)}
    given: dict[str, object] = {}
    for key, text in options.items():
        default = defaults[key]
        try:
            given[key] = _read(text, default, key in kind.some)
        except ValueError:
            raise InvalidArgument(
                "keep", f"{key}={text!r} of {kind.name}", f"such as {key}={default}"
            ) from None
    return kind(**given)  # type: ignore[arg-type]


def _read(text: str, default: object, some: bool) -> object:
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if isinstance(default, int):
        number = int(text)
        if not some <= number <= MOST:
            raise ValueError(text)
        return number
    if isinstance(default, float):
        real = float(text)
        if not abs(real) <= MOST:  # nor is it a number
            raise ValueError(text)
        return real
    return text
