"""Pages that will be read again, as a network learned it from chains of thought (`kvweave.keep.tokens.signals`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvweave.keep.tokens.access import Rule, by_page
from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.signals import KEPT, PageSignals, apply, shipped
from kvweave.keep.tokens.watch import BySlot, Tally, heads_of
from kvweave.run.base import Ints, LayerInfo
from kvweave.run.kernel import added
from kvweave.run.upload import up


class PageReads(Tally):
    """What rows read of each page, row by row, and the logits of pages by that.

    Of a prompt the last ``recent`` rows are steps, and all that are decoded. A page is a run of ``page``
    slots as they were numbered when they were computed.

    As long as all layers have seen the same steps, ``_whole`` has the heads of all; else ``_each`` has those
    of each layer.
    """

    sees = packs = True
    each = True

    def __init__(self, infos: Sequence[LayerInfo], page: int, recent: int) -> None:
        self.page, self.recent, self.rule = page, recent, Rule()
        self._whole: PageSignals | None = PageSignals()
        self._each: list[PageSignals] = []
        self._numbers: Tensor | None = None  # [slot] where slots were renumbered
        self._heads: tuple[Tensor, Tensor] | None = None  # of all layers, since the last step
        self._n_heads = heads_of(infos)
        cuts = [0, *accumulate(info.shape.k_heads for info in infos)]
        self._spans = [slice(*ends) for ends in pairwise(cuts)]

    def pages(self, n: int) -> Ints:
        """Return the page of each of ``n`` slots."""
        return self._numbers_of(n) // self.page

    def signals(self, layer: int) -> PageSignals:
        """Return what was seen of a layer's pages; nothing is to be seen there."""
        whole = self._whole
        return self._each[layer] if whole is None else whole.part(self._spans[layer])

    def logits(self, layer: int) -> Tensor | None:
        """Return [kv_head, page] how likely each page is read within the next steps; None before the first
        step."""
        mine = self.signals(layer)
        if not mine.n:
            return None
        if self._heads is None:
            near = [each.near() for each in self._all if each.n]
            ema, since = (torch.cat(each) for each in zip(*near, strict=True))
            self._heads = ema.mean(0), since.amin(0)
        return apply(shipped(), mine.rows(self._heads))

    def of_attention(self, layer: int, begin: int, weights: Tensor) -> object:
        """Add ``weights`` up by page."""
        n, stop = weights.shape[2], begin + weights.shape[3]
        mass = weights.mean(1)
        if self._numbers is None:
            return by_page(mass, begin, self.page), self._there(stop, n)
        pages = self.pages(stop)
        where = up(pages[begin:], mass.device).expand_as(mass)
        empty = mass.new_zeros(*mass.shape[:2], int(pages[-1]) + 1)
        return added(empty, where, mass), pages[stop - n :] + 1

    def of_kept(self, layer: int, stop: int, weights: Tensor, slots: Tensor) -> object:
        """The same, each where it belongs."""
        mass, where = weights.mean(1), slots[:, None].expand(-1, weights.shape[2], -1)
        n_pages = -(-stop // self.page)
        every = mass.new_zeros(*mass.shape[:2], n_pages * self.page).scatter_add_(2, where, mass)
        if self._numbers is not None:
            return self.of_attention(layer, 0, every[:, None, :, :stop])
        paged = every.view(*mass.shape[:2], n_pages, self.page)
        return paged.sum(-1), self._there(stop, mass.shape[1])

    def add(self, layer: int, found: object) -> None:
        """Go on step by step in one layer, whatever others have seen."""
        if self._whole is not None:
            self._each = [self._whole.part(span, copy=True) for span in self._spans]
            self._whole = None
        self._see(self._each[layer], found)

    def add_all(self, found: Sequence[tuple[int, object]]) -> None:
        """Go on in all layers at once, where all have seen the same rows."""
        several = [each for _, each in found if isinstance(each, tuple)]
        same = [layer for layer, _ in found] == list(range(len(self._spans)))
        if self._whole is None or len(several) < len(found) or not same:
            super().add_all(found)
            return
        masses, there = [mass for mass, _ in several], several[0][1]
        if len({(mass.shape[1:], mass.dtype) for mass in masses}) > 1:
            super().add_all(found)
            return
        self._see(self._whole, (torch.cat(masses), there))

    def _see(self, signals: PageSignals, found: object) -> None:
        assert isinstance(found, tuple)
        mass, there = found
        access = self.rule.read(mass)
        for row, n in enumerate(there):
            signals.see(mass[:, row, :n], access[:, row, :n])
        self._heads = None

    def compact(self, kept: Ints) -> None:
        """Renumber the slots; of pages at the end that have none left nothing is known."""
        if len(kept):
            numbers = self._numbers_of(int(kept[-1]) + 1)[kept]
            same = np.array_equal(numbers, np.arange(len(numbers)))
            self._numbers = None if same else torch.from_numpy(numbers)
        else:
            self._numbers = None
        left = int(self.pages(len(kept))[-1]) + 1 if len(kept) else 0
        for each in self._all:
            each.cut(min(left, each.n))
        self._heads = None
        if not left:
            self._whole, self._each = PageSignals(), []

    def held(self) -> Iterable[Tensor | None]:
        """The signals."""
        yield from (room for each in self._all for room in each.held())
        yield from (self._numbers, *(self._heads or ()))

    def bytes_for(self, n: int, n_rows: int) -> int:
        """Some numbers a page and head, when pages came, what all heads have, and the number of a slot."""
        heads, layers = KEPT * self._n_heads, len(self._spans)
        return (heads + layers + 2) * BySlot.bytes_for(n // self.page + 1) + 8 * n

    @property
    def _all(self) -> Sequence[PageSignals]:
        return self._each if self._whole is None else (self._whole,)

    def _there(self, stop: int, n: int) -> Ints:
        """Return how many pages there are for each of the last ``n`` rows before slot ``stop``."""
        return np.arange(stop - n, stop) // self.page + 1

    def _numbers_of(self, n: int) -> Ints:
        """Return what number each of ``n`` slots had at first."""
        if self._numbers is None:
            return np.arange(n)
        known: Ints = self._numbers.numpy()[:n]
        return np.concatenate((known, known[-1] + 1 + np.arange(n - len(known))))


@dataclass(frozen=True, slots=True)
class MilestoneRows(TokenPolicy):
    """Keep the pages that are likely read within the next steps, as `kvweave probe` ranks them.

    A row is worth its share of what its head will pay, as foretold. Of a prompt the newest ``recent`` rows
    are steps; a page that no step could read yet is worth as much as the best. ``page`` is what the network was
    taught with; sinks and window are the page in front and the newest two, as in the study.
    """

    name: ClassVar[str] = "milestone"
    needs: ClassVar[Need] = Need.ATTENTION
    some: ClassVar[tuple[str, ...]] = ("page",)
    decodes: ClassVar[bool] = True

    sinks: int = 8
    window: int = 16
    page: int = 8
    recent: int = 32

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Watch the reads of pages."""
        return TokenWatch(PageReads(infos, self.page, self.recent), infos)

    def scores(self, view: LayerView) -> Tensor:
        """The softmax of the logits of pages, over a head's rows."""
        reads = view.tally(PageReads)
        known = reads.logits(view.layer)
        if known is None:
            return view.of(None)
        pages = up(reads.pages(int(view.slots.max()) + 1), view.slots.device)
        where = pages[view.slots]
        logits = known.gather(1, where.clamp(max=known.shape[1] - 1))
        best = known.amax(1, keepdim=True)
        logits = torch.where(where < known.shape[1], logits, best)
        return logits.masked_fill(~view.there, -torch.inf).softmax(1)
