"""Which chunks to let go of when memory is short.

A policy sees uses, sizes and what was declared, never tensors. Add one in its own file and register
it in `kvweave.keep.POLICIES`, which makes it from the bytes it is to fill.

::

    missed -> (victims, evicted)* -> used      a chunk comes to memory
    used                                       a chunk in memory is read
    pruned, ended                              hints: what will hardly be asked for again
    upcoming                                   hint: what will be asked for next
    dropped                                    it is gone for good
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol


class Facts(NamedTuple):
    """What is known of a chunk besides its size."""

    cost: float = 0.0
    """Seconds of prefill that holding it saves; 0 when nobody knows."""
    kind: str = ""
    session: str = ""
    """Whose use this was."""


UNKNOWN = Facts()


class Policy(Protocol):
    """Orders chunks by how soon they may go.

    All but `victims` and `check_integrity` mutate the policy; an iterator of victims is valid until
    the next mutation.
    """

    name: str

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Note that ``key`` was stored or read. Its size never changes."""
        ...

    def dropped(self, key: int) -> None:
        """Forget ``key``; unknown keys are ignored."""
        ...

    def victims(self) -> Iterator[int]:
        """Yield every key in memory once, the first to go first."""
        ...

    def missed(self, key: int, n_bytes: int) -> None:
        """Note that ``key`` is wanted and not in memory; room for it is made next."""
        ...

    def evicted(self, key: int) -> None:
        """Note that ``key`` left memory and may come back."""
        ...

    def pruned(self, key: int) -> None:
        """Note the declaration that ``key`` is not needed any more; it may still be in memory."""
        ...

    def ended(self, session: str) -> None:
        """Note the declaration that ``session`` is over."""
        ...

    def upcoming(self, keys: Sequence[int]) -> None:
        """Note what the waiting requests will use, soonest first; replaces what was noted before.

        Keys need not be in memory, nor known.
        """
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        ...


class Deaf:
    """For policies to start from: listens to none of the hints."""

    def missed(self, key: int, n_bytes: int) -> None:
        """Do nothing."""

    def pruned(self, key: int) -> None:
        """Do nothing."""

    def ended(self, session: str) -> None:
        """Do nothing."""

    def upcoming(self, keys: Sequence[int]) -> None:
        """Do nothing."""
