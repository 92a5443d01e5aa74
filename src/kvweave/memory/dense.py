"""Which items have to do with a question: by vectors, of an embedder that may be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol
from uuid import uuid4
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ChunkId
from kvweave.engine import Engine
from kvweave.errors import InvalidArgument
from kvweave.memory.grams import GramRanking, Ranking
from kvweave.weave.context import Context
from kvweave.weave.naming import vectors_holder, words_holder

Vector = NDArray[np.float32]


class Embedder(Protocol):
    """Makes a vector [d] of token ids; near vectors mean near texts."""

    def __call__(self, tokens: Sequence[int]) -> Vector:
        """Return the vector."""
        ...


class DenseRanking:
    """Ranks by the cosine of vectors, each dimension centred and scaled by how it varies over the
    items, without which most embeddings made of a model's rows all point one way. A question costs
    one product with all vectors: d x items."""

    def __init__(
        self, embed: Embedder, charge: Callable[[int], None] = lambda n_bytes: None
    ) -> None:
        """``charge`` is told the bytes of all vectors before they grow, and may refuse them."""
        self.embed, self.charge = embed, charge
        self._known: dict[str, ChunkId] = {}
        self._vectors: dict[str, Vector] = {}
        self._matrix: Vector | None = None  # [item, d] of these, until one changes

    def add(self, name: str, id: ChunkId, tokens: Sequence[int]) -> None:
        """Know an item, or what it says now. Raises InvalidArgument for a vector of another size,
        OverBudget."""
        vector = np.asarray(self.embed(tokens), np.float32)
        first = next(iter(self._vectors.values()), vector)
        if vector.ndim != 1 or vector.shape != first.shape or not np.isfinite(vector).all():
            raise InvalidArgument(
                "embed",
                f"it gave {vector.shape} values, or some not finite",
                "have embed() return one vector of finite numbers, always as long",
            )
        self.charge(self._bytes(len(self._vectors.keys() | {name}), vector))
        self._known[name], self._vectors[name], self._matrix = id, vector, None

    def remove(self, name: str) -> None:
        """Forget an item; one that is not known is none."""
        self._known.pop(name, None)
        gone = self._vectors.pop(name, None)
        if gone is not None:
            self._matrix = None
            self.charge(self._bytes(len(self._vectors), gone))

    def _bytes(self, n: int, vector: Vector) -> int:
        """Return the bytes of ``n`` vectors, each by itself and in the matrix."""
        return 2 * n * vector.nbytes

    def known(self) -> dict[str, ChunkId]:
        """Return the items and the chunks they were."""
        return self._known

    def rank(self, question: Sequence[int], n: int) -> list[tuple[str, float]]:
        """Return up to ``n`` items whose cosine is above 0."""
        if not self._vectors:
            return []
        if self._matrix is None:
            self._matrix = np.stack(list(self._vectors.values()))
        mean, spread = self._matrix.mean(0), self._matrix.std(0)
        scale = np.divide(1, spread, out=np.ones_like(spread), where=spread > 1e-6)
        if len(self._vectors) == 1:
            mean = np.zeros_like(mean)
        rows = (self._matrix - mean) * scale
        asked = (np.asarray(self.embed(question), np.float32) - mean) * scale
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(asked)
        scores = rows @ asked / np.maximum(lengths, 1e-9)
        order = np.argsort(-scores, kind="stable")[:n]
        names = list(self._vectors)
        return [(names[i], float(scores[i])) for i in order if scores[i] > 0]


def counted(engine: Engine, context: Context, embed: Embedder | None) -> Ranking:
    """Return a ranking by vectors, or by words, that counts in an engine's memory for as long as it is
    there."""
    of = words_holder if embed is None else vectors_holder
    key, shelf = of(uuid4().hex, context.namespace), engine.shelf
    charge = partial(shelf.charge, key)
    ranking = GramRanking(charge) if embed is None else DenseRanking(embed, charge)
    # not amid a verb that counts just then: the collector runs anywhere
    finalize(ranking, engine.gate.soon, partial(shelf.charge, key, 0)).atexit = False
    return ranking


class MeanRows:
    """The mean of a chunk's canonical values [heads x dim] at one layer, by default the middle one.

    Nothing but the model is needed. It tells what a text is about far worse than words do where
    words are shared, and finds little in a model as small as the bundled one (docs/memory.md has
    both). A text that has no KV yet is computed: one pass of its tokens.
    """

    def __init__(self, engine: Engine, context: Context, layer: int | None = None) -> None:
        n = len(engine.runner.layers)
        self.engine, self.context = engine, context
        self.layer = n // 2 if layer is None else layer
        if not 0 <= self.layer < n:
            raise InvalidArgument("layer", f"{layer} of {n}", f"give 0 to {n - 1}")

    def __call__(self, tokens: Sequence[int]) -> Vector:
        """Return the mean [heads x dim]. Raises OverBudget."""
        maker, table = self.engine.maker, self.engine.table
        base, space = self.context.snapshot().base, self.context.namespace
        id = maker.add(tokens, base=base, namespace=space)
        try:
            maker.canonicalise([id])
            kv = self.engine.shelf.get(id)
            if kv is None:
                raise InvalidArgument(
                    "embed", f"#{id} has no rows in memory", "raise budget=, then try again"
                )
            mean = kv.v[self.layer].float().mean(0).flatten()
            return np.array(mean.cpu().numpy(), np.float32)
        finally:
            if not table.is_kept(id):
                table.collect([id])
