"""What a policy counts while rows are computed, and the observer that shows it to the policy.

::

    a pass runs        TokenWatch.see, TokenWatch.ask     each is reduced at once: Tally.of_attention, of_queries
    it went through    TokenWatch.end                Tally.add, Tally.add_all
    it failed          TokenWatch.begin of the next  what it found is forgotten

What is kept while a pass runs is one number a slot, never one a row and key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvweave.run.base import Ints, LayerInfo, Observer
from kvweave.run.upload import up

ROOM = 64  # slots that there is room for at first
WIDTH = 4  # bytes of a number; more where the model computes in more


def heads_of(infos: Sequence[LayerInfo]) -> int:
    """Return the kv heads of all layers."""
    return sum(info.shape.k_heads for info in infos)


def key_shape(info: LayerInfo) -> tuple[int, int]:
    """Return how many heads have keys of their own in a layer, and how wide these are: of latents, which
    all heads share, each head has."""
    if info.latent is None:
        return info.shape.k_heads, info.shape.k_dim
    return info.n_queries, len(info.latent.dims)


class BySlot:
    """Numbers [head, slot], 0 where nothing was written; room doubles, so a row more is no copy."""

    @staticmethod
    def bytes_for(n: int) -> int:
        """Return the bytes of one head's room for ``n`` slots, at most."""
        return WIDTH * max(2 * n, ROOM)

    def __init__(self) -> None:
        self.n = 0
        self._room: Tensor | None = None

    @property
    def written(self) -> Tensor | None:
        """[head, slot] of the slots up to the last that was written; None: nothing was."""
        return None if self._room is None else self._room[..., : self.n]

    @property
    def room(self) -> Tensor | None:
        """[head, slot] with those that there is room for besides."""
        return self._room

    def upto(self, n: int, like: Tensor) -> Tensor:
        """Return slots ``[0, n)`` to write to, of as many heads and the type that ``like`` has."""
        room = self._room
        if room is None or room.shape[-1] < n:
            grown = like.new_zeros(*like.shape[:-1], max(n, 2 * self.n, ROOM))
            if room is not None:
                grown[..., : self.n] = room[..., : self.n]
            room = self._room = grown
        self.n = max(self.n, n)
        return room[..., :n]

    def compact(self, kept: Ints) -> None:
        """Slot ``i`` is what slot ``kept[i]`` was."""
        if self._room is not None:
            kept = kept[kept < self.n]
            self._room, self.n = self._room[..., up(kept, self._room.device)], len(kept)

    def share(self, other: BySlot, heads: slice, copy: bool = False) -> None:
        """Have ``other`` show those of some heads, or have a copy of them."""
        room = None if self._room is None else self._room[heads]
        other.n, other._room = self.n, room.clone() if copy and room is not None else room

    def clear(self) -> None:
        """Forget everything."""
        self.n, self._room = 0, None


class Tally:
    """What a policy counts of one context or chunk; derive, and override what is needed.

    ``recent`` is how many rows before a choice count; None: all. With ``each`` it is of a prompt's rows, and of
    those that are decoded all count.
    """

    sees = False  # whether it is shown attention
    asks = False  # whether it is shown queries
    packs = False  # whether it has `of_kept`
    recent: int | None = None
    each = False

    def of_attention(self, layer: int, begin: int, weights: Tensor) -> object:
        """Return what is to be added of ``weights`` [kv_head, group, row, key], float32 at least:
        keys are the slots from ``begin`` on, rows the last of them. It changes nothing."""

    def of_kept(self, layer: int, stop: int, weights: Tensor, slots: Tensor) -> object:
        """Return the same of keys at ``slots`` [kv_head, key] before ``stop``, in any order; weights of
        padding are 0. Only where ``packs``."""

    def of_queries(self, layer: int, slot: int, queries: Tensor) -> object:
        """Return the same of unrotated ``queries`` [row, head, dim] of the slots from ``slot`` on,
        which are slots only as far as `TokenWatch.start` was told. A view of them does not outlive the pass."""

    def add(self, layer: int, found: object) -> None:
        """Add what one of those returned: its pass went through."""

    def add_all(self, found: Sequence[tuple[int, object]]) -> None:
        """Add what a pass returned that went through, with the layer of each."""
        for layer, each in found:
            if each is not None:
                self.add(layer, each)

    def chosen(self) -> None:
        """A choice was made: windows begin anew."""

    def compact(self, kept: Ints) -> None:
        """Slots were renumbered: slot ``i`` is what slot ``kept[i]`` was, the others are gone."""

    def held(self) -> Iterable[Tensor | None]:
        """Return all that was counted."""
        return ()

    def bytes_for(self, n: int, n_rows: int) -> int:
        """Return the bytes of what is `held` once there are ``n`` slots, of which a head has ``n_rows``
        rows, at most, in numbers of `WIDTH`."""
        return 0


class TokenWatch(Observer):
    """Shows a ``tally`` what the rows of one context or chunk pay and ask while they are computed.

    Rows are numbered as works number them. Whoever runs them sets ``until`` to the number of the
    row at which the next choice is due, so that only those before it are shown that count; where it
    is 0, every row is. ``start`` is the slot of the row with number 0; ``decoding`` says that the rows to
    come are decoded.
    """

    def __init__(self, tally: Tally, infos: Sequence[LayerInfo]) -> None:
        self.tally = tally
        self.asks, self.packs = tally.asks, tally.packs
        self.until = self.start = 0
        self.decoding = False
        self._kv_heads = [info.shape.k_heads for info in infos]
        self._now: list[tuple[int, object]] = []

    @property
    def n_bytes(self) -> int:
        """Bytes of what was counted."""
        return sum(each.nbytes for each in self.tally.held() if each is not None)

    def rows(self, layer: int, n: int) -> tuple[int, int]:
        """All rows, or the last before the next choice; none while the tally sees nothing."""
        if not self.tally.sees:
            return 0, 0
        recent = None if self.decoding and self.tally.each else self.tally.recent
        first = 0 if recent is None else max(0, self.until - recent)
        return first, min(n, self.until) if self.until else n

    def begin(self) -> None:
        """Forget what a pass left that did not end."""
        self._now.clear()

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        """Reduce ``weights`` [head, row, key]."""
        folded = weights.reshape(self._kv_heads[layer], -1, *weights.shape[1:])
        self._now.append((layer, self.tally.of_attention(layer, begin, folded)))

    def see_kept(self, layer: int, first: int, stop: int, weights: Tensor, slots: Tensor) -> None:
        """Reduce ``weights`` [head, row, key] of each head's own ``slots`` [kv_head, key]."""
        folded = weights.reshape(self._kv_heads[layer], -1, *weights.shape[1:])
        self._now.append((layer, self.tally.of_kept(layer, stop, folded, slots)))

    def ask(self, layer: int, first: int, queries: Tensor) -> None:
        """Reduce ``queries`` [row, head, dim]."""
        self._now.append((layer, self.tally.of_queries(layer, self.start + first, queries)))

    @torch.inference_mode()
    def end(self) -> None:
        """Add what the pass has left."""
        self.tally.add_all(self._now)
        self._now.clear()

    def chosen(self) -> None:
        """A choice was made: rows are about to go, and the next choice is ahead."""
        self.tally.chosen()

    def compact(self, kept: Ints) -> None:
        """Slots were renumbered: slot ``i`` is what slot ``kept[i]`` was, the others are gone. With
        ``kept`` = 0..n-1 the rows from ``n`` on are forgotten, before others take their slots."""
        self.tally.compact(kept)
