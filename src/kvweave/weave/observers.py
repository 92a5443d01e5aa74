"""Several observers of the same rows as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvweave.run.base import Observer


class Observers(Observer):
    """Shows the same rows to several observers, to each those that it wants."""

    def __init__(self, several: Sequence[Observer]) -> None:
        self._several = several
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self.asks = any(each.asks for each in several)
        self.sees = any(each.sees for each in several)
        self.packs = all(each.packs for each in several)

    def rows(self, layer: int, n: int) -> tuple[int, int]:
        """The rows that any of them wants, and those between."""
        wanted = [each.rows(layer, n) if each.sees else (0, 0) for each in self._several]
        self._ranges[layer] = wanted
        some = [(first, last) for first, last in wanted if first < last]
        return (min(f for f, _ in some), max(s for _, s in some)) if some else (0, 0)

    def begin(self) -> None:
        """A pass begins."""
        for each in self._several:
            each.begin()

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        """Show each its own."""
        for each, a, b in self._own(layer, first, weights.shape[1]):
            each.see(layer, first + a, begin, weights[:, a:b])

    def see_kept(self, layer: int, first: int, stop: int, weights: Tensor, slots: Tensor) -> None:
        """Show each its own, if all take it so."""
        for each, a, b in self._own(layer, first, weights.shape[1]):
            each.see_kept(layer, first + a, stop, weights[:, a:b], slots)

    def _own(self, layer: int, first: int, n: int) -> Iterator[tuple[Observer, int, int]]:
        """Yield who wants some of ``n`` rows from ``first`` on, and which of these."""
        for each, (start, stop) in zip(self._several, self._ranges[layer], strict=True):
            a, b = max(0, start - first), min(n, stop - first)
            if a < b:
                yield each, a, b

    def ask(self, layer: int, first: int, queries: Tensor) -> None:
        """Show those who ask."""
        for each in self._several:
            if each.asks:
                each.ask(layer, first, queries)

    def end(self) -> None:
        """The pass is over."""
        for each in self._several:
            each.end()
