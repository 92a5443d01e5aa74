"""Numbers of the host on the device: all integers of a pass at once, and nobody waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.store.staging import PAGEABLE


def up(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on ``device``; on a CPU they share the memory."""
    there = torch.from_numpy(numbers)
    if device.type == "cpu":
        return there
    return _pinned(there, device).to(device, non_blocking=True)


def _pinned(there: Tensor, device: torch.device) -> Tensor:
    return there if device.type in PAGEABLE else there.pin_memory()


class Upload:
    """Gathers integers; after `go` each run of them is a view of one tensor on the device."""

    def __init__(self) -> None:
        self._runs: list[Ints] = []
        self._n = 0
        self._there: Tensor | None = None

    def add(self, ints: Ints) -> slice:
        """Add a run, of any shape; returns where it will be."""
        self._runs.append(ints.reshape(-1))
        start, self._n = self._n, self._n + ints.size
        return slice(start, self._n)

    def go(self, device: torch.device, kept: dict[int, Tensor] | None = None) -> None:
        """Copy to the device; with ``kept``, to the tensor that the last upload of this size used:
        its addresses stay what they were."""
        host = np.concatenate(self._runs)
        if kept is None:
            self._there = up(host, device)
            return
        if len(host) not in kept:
            kept[len(host)] = torch.empty(len(host), dtype=torch.int64, device=device)
        # pinned memory comes from a cache that gives none back before its copy is over
        self._there = kept[len(host)].copy_(
            _pinned(torch.from_numpy(host), device), non_blocking=True
        )

    def __getitem__(self, run: slice) -> Tensor:
        assert self._there is not None, "nothing is there before `go`"
        return self._there[run]
