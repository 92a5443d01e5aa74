"""What a ranking of pages is: asked before each step, shown the step afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvweave.probe.trace import Bools, PageMass

Scores = NDArray[np.float64]


class PageRanking(ABC):
    """Scores pages [head, page] by what was seen; the higher, the sooner they are wanted."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        self.step = 0  # steps that were seen
        self.shape = n_heads, n_pages

    @abstractmethod
    def scores(self) -> Scores:
        """Return [head, page] for the step to come."""

    def see(self, mass: PageMass, access: Bools) -> None:
        """Take [head, page] of the step that came; pages may be fewer than there will be."""
        self._see(mass, access)
        self.step += 1

    def _see(self, mass: PageMass, access: Bools) -> None:  # noqa: B027
        """Take them."""

    def foresee(self, mass: PageMass) -> None:  # noqa: B027
        """Be told what is to come; only the oracle listens."""
