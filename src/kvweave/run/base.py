"""The contract between weaving and the engine below it: what a backend gives.

Nothing above this file knows which engine runs. `run/model.py` is the one over transformers; the
tests have another in plain torch (`tests/reference.py`). Add one by implementing `Backend` and
`Rows`, and give it to the suite (`BACKENDS` in `tests/run/backend.py`).

Host and device are kept apart. What decides (tokens, slots, positions, masks) is numpy on the
host and goes up once a pass; what is computed (keys, values, attention, logits) stays on the
device, and comes down where somebody has to choose by it: that is a sync, and they are counted
(`tests/device`).

::

    slot       0    1    2    3    4    5   ...  n-1 |  free up to capacity
    position   0    1    2    7    8    9   ...      |  strictly increasing
    a query at slot 4 sees the interval of slots [begin, 4]: begin is 0, or where its mask begins

The mask is exact whatever rows a pass computes: ``key_position <= query_position``, and since slots
are sorted by position, that is an interval of slots for each query.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.chunk.identity import ModelFingerprint
from kvweave.run.capability import Capability as Capability
from kvweave.run.handing import Handing
from kvweave.run.latent import Latent
from kvweave.run.mixer import Mixer
from kvweave.run.rotary import Rotation
from kvweave.store.kv import KV, LayerShape

Ints = NDArray[np.int64]
NO_SLOTS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Mask:
    """Which of the keys up to its own position a query sees; all by default.

    ``window`` counts positions, the query's included; ``chunk`` cuts positions into aligned runs of
    which a query sees only its own.
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, positions: Ints) -> Ints | None:
        """Return the first position each query [row] may see; None when it is all of them."""
        if self.window is not None:
            return positions - (self.window - 1)
        if self.chunk is not None:
            return positions - positions % self.chunk
        return None


ALL = Mask()


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """What one layer caches, how it moves, and what its queries see."""

    shape: LayerShape
    rotation: Rotation
    mask: Mask = ALL
    group: int = 1  # query heads to a kv head
    query: Rotation | None = None  # how queries turn, where they do not as keys do
    latent: Latent | None = None  # what heads make of rows that are latents
    mixer: Mixer | None = None  # whose input these rows are: nothing attends to them
    handed: Handing | None = None  # to attention of the model's own
    # numbers by which the model calls the layers that attend to these rows: first the one that
    # writes them; none: as many rows as layers, in their order
    readers: tuple[int, ...] = ()

    @property
    def n_queries(self) -> int:
        """Query heads."""
        return self.group * self.shape.k_heads

    @property
    def attends(self) -> bool:
        """Whether these are keys and values of attention."""
        return self.mixer is None and (self.handed is None or self.handed.attends)


def fixed_from(infos: Sequence[LayerInfo]) -> int | None:
    """Return the number that a model's own positions begin with, where its rows hold their position
    and cannot be moved; None: they can."""
    return next((x.rotation.fixed for x in infos if x.rotation.fixed is not None), None)


def gapless(infos: Sequence[LayerInfo]) -> bool:
    """Tell whether a model goes by the number of a row, so that contexts have no gaps."""
    return any(info.handed is not None and info.handed.gapless for info in infos)


def readers_of(infos: Sequence[LayerInfo]) -> dict[int, int]:
    """Return whose rows (an index of ``infos``) each layer of a model attends to."""
    return {at: i for i, info in enumerate(infos) if info.attends for at in info.readers or (i,)}


def n_numbers(infos: Sequence[LayerInfo]) -> int:
    """Return how many layers the cache of a model has."""
    mixers = [info.mixer.number for info in infos if info.mixer is not None]
    return 1 + max([*readers_of(infos), *mixers])


@dataclass(frozen=True, slots=True)
class AddedUp:
    """What an observer adds up: of each head, from layer ``first_layer`` on, what every row pays to
    every slot, or its square, times the row's weight."""

    weights: NDArray[np.float64]  # [row of the work]
    first_layer: int
    squared: bool


class Observer:
    """Sees the attention that the rows of one `Work` pay; derive, and override what is needed.

    A work may be run in several passes, and a pass that failed is run again: what is added up goes
    to where `begin` can take it back, until `end` says that the pass is over.
    """

    asks = False  # whether it is shown queries
    sees = True  # whether it is shown attention
    packs = False  # whether it takes `see_kept`, where heads keep slots of their own
    sums: AddedUp | None = None  # nothing but these is wanted: heads may be shown some at a time

    def rows(self, layer: int, n: int) -> tuple[int, int]:
        """Return the half-open range of rows wanted in ``layer``; (0, 0): none.

        Rows are numbered as in the whole work, of which ``n`` have been run when this pass is over:
        those of a part are ``work.at`` and on, and a backend cuts the range to them.
        """
        return 0, n

    def begin(self) -> None:
        """A pass begins; what the last one added without an `end` does not count."""

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        """Take ``weights`` [head, row, key], float32 at least: each row's attention sums to 1, less
        where a model has sinks. Layers that attend to another's rows are not shown.

        The rows are those of the whole work from ``first`` on, the keys the slots from ``begin``
        on; a layer may be shown in several pieces. The layer `Work.last` is not seen. Of who only wants
        ``sums`` a piece may be of some heads, and written over once this returns."""

    def see_kept(self, layer: int, first: int, stop: int, weights: Tensor, slots: Tensor) -> None:
        """Take the same of keys at ``slots`` [kv_head, key] before ``stop``; weights of padding are 0."""

    def add(self, found: Tensor) -> None:
        """Take these ``sums`` [slot], zeros behind the last, of a pass that shows nothing else."""

    def ask(self, layer: int, first: int, queries: Tensor) -> None:
        """Take unrotated ``queries`` [row, head, dim] of the rows from ``first`` on, numbered as in
        `see`, where ``asks``; of every layer up to the last that is wanted. Of latents: dims
        that meet rows' keys in front of the others, as `Latent.expanded` gives keys."""

    def end(self) -> None:
        """The pass is over."""


@dataclass(slots=True)
class Work:
    """Rows of one context for a pass: written to their slots, seeing what stands before them.

    Slots are reserved, and stand before ``rows.n`` or follow it without a hole; ``rows`` gets their
    positions in the pass. None is a slot freed in some layer.
    ``tokens`` is a tensor where only the device knows them (a draft), else host integers.
    """

    rows: Rows
    tokens: Ints | Tensor  # [n]
    slots: Ints  # [n] strictly increasing
    positions: Ints  # [n] strictly increasing
    # indices 0..n-1 of the rows whose logits are returned, increasing
    want: Ints = field(default_factory=lambda: NO_SLOTS)
    raw: KV | None = None  # unrotated keys and values go here, from row `at` on
    observer: Observer | None = None
    last: int | None = None  # last layer that is written, those above stay; then no logits
    at: int = 0  # number of the first row, where this is a part of a larger work
    waits: bool = False  # of no rows: over when all chunks of `rows` have arrived, and are written

    @property
    def n(self) -> int:
        return len(self.slots)

    def part(self, start: int, stop: int) -> Work:
        """Return rows ``[start, stop)`` of this work."""
        wanted = self.want[(self.want >= start) & (self.want < stop)] - start
        return replace(
            self,
            tokens=self.tokens[start:stop],
            slots=self.slots[start:stop],
            positions=self.positions[start:stop],
            want=wanted,
            at=self.at + start,
        )


T = TypeVar("T")
# A job cut where it needs the model: yields a work, is sent its logits [len(want), vocab], returns T.
# `LoadFailed` is thrown into it when chunks to be placed did not arrive.
Steps = Generator[Work, Tensor, T]


class Rows(Protocol):
    """The KV rows of one context, sorted by position, without holes in the slots."""

    n: int  # rows there are
    positions: Ints  # [>= n], those of slots 0..n-1 first

    @property
    def lossy(self) -> bool:
        """Whether what attention reads is not quite what was written (8-bit rows)."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes allocated, free slots included."""
        ...

    def bytes_for(self, n: int, exact: bool = False) -> int:
        """Return the bytes that will be allocated while ``n`` rows are reserved, with ``exact`` no
        more."""
        ...

    def bytes_back(self, stay: int) -> int:
        """Return the bytes that freed rows take again where rows from slot ``stay`` on are to be others."""
        ...

    def reserve(self, n: int, exact: bool = False) -> None:
        """Make room for ``n`` rows in all; keeps the rows there are. With ``exact`` for no more."""
        ...

    def truncate(self, n: int) -> None:
        """Forget rows ``[n, ...)``, also those that wait for `settle`."""
        ...

    def place(
        self, runs: Sequence[tuple[int, Sequence[KV]]], positions: Ints, exact: int | None = None
    ) -> None:
        """Write chunks one after the other from each run's first slot on; keys are turned to
        ``positions`` [slot, from 0]. Slots must have been reserved, runs stand in order and may
        leave gaps for rows computed later. There are then rows up to the end of the last run at
        least, all with these positions. From slot ``exact`` on they are approximate, and what they do
        to a state may be rounded; None: nowhere.

        Chunks still arriving are written when a pass comes to a layer, or by `settle`.
        """
        ...

    def put(self, slots: Ints, kv: KV) -> None:
        """Write unrotated rows [slot] to slots whose positions are known."""
        ...

    @property
    def pending(self) -> bool:
        """Whether rows of some layer wait for `settle`."""
        ...

    @property
    def arrived(self) -> bool:
        """Whether `settle` would wait for nothing."""
        ...

    def settle(self, layer: int | None = None) -> None:
        """Write what is still to be placed in a layer, by default in all. Raises LoadFailed."""
        ...

    def read(self, layer: int, slots: Ints | None = None) -> tuple[Tensor, Tensor]:
        """Return keys as rotated and values [slot, head, dim] of a layer, as attention reads them:
        copies for ``slots``, all rows by default."""
        ...

    def clone(self, layers: int | None = None) -> Rows:
        """Copy the rows there are; with ``layers``, share those of all layers from that one on."""
        ...

    def free(self, layer: int, head: int, slots: Ints) -> None:
        """Free the memory of rows of one layer and kv head: no query sees them from now on.

        What is computed over the others is approximate; they cannot come back but by `place`.
        """
        ...

    def kept(self, layer: int) -> list[Ints]:
        """Return the slots that each kv head of a layer keeps, increasing."""
        ...

    def packed(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [head, row, dim] of what each head keeps, in the order of
        `kept`; rows behind a head's last one are padding. Do not write there."""
        ...

    def keep(self, layer: int, slots: Sequence[Ints], ahead: int = 0) -> None:
        """Free all rows of a layer but each kv head's ``slots``; room for ``ahead`` rows to come may stay."""
        ...

    def code(self, layer: int, form: str, slots: Sequence[Ints], ahead: int = 0) -> None:
        """Have each kv head's ``slots``, of those that it keeps, rest in fewer bits, as ``form`` of
        `run/packed.py` says. Those that rest in as few or fewer stay as they are. Or, `below`: they
        rest below memory and are seen by no query, and all others that it keeps are in memory."""
        ...

    def below(self, layer: int) -> list[Ints]:
        """Return each kv head's slots that rest below memory, increasing."""
        ...

    @property
    def forms(self) -> dict[str, int]:
        """Forms in which rows rest that are not as they were computed, and how many do, summed over
        layers and heads."""
        ...

    def move(self, kept: Ints, positions: Ints) -> None:
        """Forget all rows but those of slots ``kept``, increasing: they become slots 0, 1, ..., and
        stand at ``positions`` [row], their keys turned there from the unrotated ones.

        Raises InvalidArgument for rows that were not made to be moved.
        """
        ...

    def unrotated(self, layer: int) -> Tensor | None:
        """Return unrotated keys [head, slot, dim] of the rows there are, None where none are kept;
        do not write there."""
        ...

    @property
    def n_freed(self) -> int:
        """Rows freed, summed over layers and heads."""
        ...

    def gone(self) -> Ints:
        """Return the slots, increasing, that no head of any layer keeps: to recompute them is vain."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless positions increase strictly and sizes agree."""
        ...


class Backend(Protocol):
    """An engine: a decoder whose passes write rows into contexts.

    ``can_run``: passes compute what the model computes. Where it is false ``layers`` is empty and
    only the reason is of use. ``can_move``: besides, rows may stand at other positions than where
    they were computed.
    """

    layers: list[LayerInfo]
    limit: int  # positions 0..limit-1 may be used
    ends: frozenset[int]  # tokens that end a reply
    n_vocab: int
    device: torch.device
    dtype: torch.dtype
    fingerprint: ModelFingerprint
    tokenizer: Any  # a transformers tokenizer, or None
    can_run: Capability
    can_move: Capability

    @property
    def row_bytes(self) -> int:
        """Bytes one token's keys and values take in all layers."""
        ...

    def require_run(self) -> None:
        """Raise CannotRun unless passes of this model can be run."""
        ...

    def require_move(self) -> None:
        """Raise CannotMove unless chunks of this model can be placed anywhere."""
        ...

    def new_rows(self, codec: str = "raw", moves: bool = False) -> Rows:
        """Return empty rows for one context, kept as ``codec`` says; those that can be moved keep
        their unrotated keys besides. Raises InvalidArgument."""
        ...

    def new_kv(self, n: int) -> KV:
        """Return uninitialised KV for ``n`` tokens."""
        ...

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Run works of different contexts in one pass; return each one's logits [want, vocab].

        Rows, ``raw`` and observers are written; running the same works again changes nothing else.
        Raises ContextTooLong before anything is written, LoadFailed when a chunk did not arrive.
        """
        ...
