"""Several observers of the same rows as one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvweave.run.base import Observer


class Observers(Observer):
    """Shows the same rows to several observers, to each those that it wants."""

    def __init__(self, several: Sequence[Observer]) -> None:
        self._several = several
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self.asks = any(each.asks for each in several)
        self.sees = any(each.sees for each in several)

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
        last = first + weights.shape[1]
        for each, (start, stop) in zip(self._several, self._ranges[layer], strict=True):
            a, b = max(first, start), min(last, stop)
            if a < b:
                each.see(layer, a, begin, weights[:, a - first : b - first])

    def ask(self, layer: int, first: int, queries: Tensor) -> None:
        """Show those who ask."""
        for each in self._several:
            if each.asks:
                each.ask(layer, first, queries)

    def end(self) -> None:
        """The pass is over."""
        for each in self._several:
            each.end()
