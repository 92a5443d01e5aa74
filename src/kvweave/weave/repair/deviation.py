"""Rows that changed most."""

from __future__ import annotations

from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints, Steps
from kvweave.weave.repair.base import Strategy, View, best


class Deviation(Strategy):
    """Rows whose keys or values change most at a check layer (CacheBlend, arXiv 2405.16444, 4.3).

    The original ranks by values, LMCache by keys: ``what`` is "v", "k" or "kv". All candidates are
    recomputed up to ``layer``, so it costs about (layer + 1) / n_layers of a full prefill.
    """

    name = "deviation"

    def __init__(self, layer: int = 1, what: str = "v") -> None:
        if what not in ("k", "v", "kv"):
            raise InvalidArgument("what", f"{what!r} is none of k, v, kv")
        self.layer, self.what = layer, what

    @property
    def copies(self) -> int:
        """As many as are recomputed."""
        return self.layer + 1

    def choose(self, view: View) -> Steps[Ints]:
        """Return the ``budget`` rows that deviate most."""
        return best(view, (yield from view.deviation(self.layer, self.what)))
