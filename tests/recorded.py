"""CUDA graphs without a GPU: to play a recording runs the pass that was recorded once more, over the
numbers uploaded since; what a later pass decides on the host does not reach it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvweave.run import attention
from kvweave.run.graphs import Graphs, P, Recorded


class Played(Graphs):
    """Recordings without a GPU."""

    def record(self, batch: P, call: Callable[[P], Tensor]) -> Recorded:
        made = Recorded(lambda: None, call(batch).clone(), batch.beside)

        def play() -> None:
            batch.forget()
            token = attention.current.set(batch)  # type: ignore[arg-type]
            try:
                made.logits.copy_(call(batch))
            finally:
                attention.current.reset(token)
            made.beside = batch.beside

        made.play = play
        return made
