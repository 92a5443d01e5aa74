"""The latest queries, for the policies that go by what these would look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvweave.keep.tokens.alike import Likeness
from kvweave.keep.tokens.watch import WIDTH, Tally, key_shape
from kvweave.run.base import LayerInfo


class Latest(Tally):
    """The last ``n`` unrotated queries of each layer: ``queries[layer]`` is [row, head, dim]; and what a
    policy that remembers ``row_bytes`` of each head's rows found at the last choice, ``known[layer]``."""

    asks = True

    def __init__(self, infos: Sequence[LayerInfo], n: int, row_bytes: int = 0) -> None:
        self.n, self._row_bytes = n, row_bytes
        self.queries: list[Tensor | None] = [None] * len(infos)
        self.known: list[Likeness | None] = [None] * len(infos)
        self._heads = sum(key_shape(info)[0] for info in infos)
        self._room = n * sum(info.n_queries * key_shape(info)[1] for info in infos)

    def of_queries(self, layer: int, slot: int, queries: Tensor) -> object:
        """Copy the last ones."""
        return queries[max(0, len(queries) - self.n) :].clone()

    def add(self, layer: int, found: object) -> None:
        """Put them behind those there are."""
        assert isinstance(found, Tensor)
        old = self.queries[layer]
        both = found if old is None else torch.cat([old, found])
        self.queries[layer] = both[max(0, len(both) - self.n) :].clone()

    def held(self) -> Iterable[Tensor | None]:
        """Queries, and what is known of rows."""
        known = (each for each in self.known if each is not None)
        return (*self.queries, *(t for each in known for t in each.tensors))

    def bytes_for(self, n: int, n_rows: int) -> int:
        """Those of the window and of the rows there are."""
        return WIDTH * self._room + self._row_bytes * self._heads * n_rows
