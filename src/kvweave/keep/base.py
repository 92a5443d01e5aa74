"""Which chunks to let go of when memory is short.

A policy sees uses and sizes, never tensors. Add one in its own file and register it in
`kvweave.keep.POLICIES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Policy(Protocol):
    """Orders chunks by how soon they may go.

    `used` and `dropped` mutate the policy; `victims` does not, and its iterator is valid until the
    next mutation.
    """

    name: str

    def used(self, key: int, n_bytes: int) -> None:
        """Note that ``key`` was stored or read."""
        ...

    def dropped(self, key: int) -> None:
        """Forget ``key``; unknown keys are ignored."""
        ...

    def victims(self) -> Iterator[int]:
        """Yield keys, the first to go first."""
        ...
