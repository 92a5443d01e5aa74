"""How the conformance suite reaches behind a tier; what cannot be done there is left as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NoReturn

import pytest

from kvweave.store.tier.base import Tier

Make = Callable[..., Tier]


class Hooks:
    """Tiers that ``make`` returned are checked (`check_integrity`) and closed by the suite."""

    room = 1 << 20  # the capacity asked of ``make`` by the test of a full tier, bytes
    tells_who_won = True  # of puts at the same time, that all but one found the value there
    gives_back = True  # buffers of a call that was late are the caller's again
    hurry = 0.3  # seconds a call is given when what is behind the tier does not answer

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError("a fixture that returns make(capacity=None) -> an empty tier")

    @pytest.fixture
    def tier(self, make: Make) -> Iterator[Tier]:
        made = make()
        yield made
        made.check_integrity()
        made.close()

    def _cannot(self, what: str) -> NoReturn:
        pytest.skip(f"{type(self).__name__} has no way to {what}")

    def limited(self, make: Make) -> Tier:
        """Return a tier with room for about ``self.room`` bytes."""
        return make(self.room)

    def taken(self, n: int) -> int | None:
        """Return what a value of ``n`` bytes adds to ``n_bytes``, None if only at least ``n``."""
        return None

    def corrupt(self, tier: Tier, key: str) -> None:
        """Flip bytes in the second half of a value where it rests."""
        self._cannot("change bytes where they rest")

    def tear(self, tier: Tier, key: str) -> None:
        """Leave a value as a crash in the middle of writing it would."""
        self._cannot("tear a value")

    def slow(self, tier: Tier, seconds: float) -> AbstractContextManager[None]:
        """While inside, everything behind the tier takes ``seconds`` longer."""
        self._cannot("slow down what is behind it")

    def hang(self, tier: Tier) -> AbstractContextManager[None]:
        """While inside, nothing behind the tier answers."""
        self._cannot("hang what is behind it")

    def lose(self, tier: Tier) -> None:
        """Take away what is behind the tier: kill the server, remove the directory."""
        self._cannot("lose what is behind it")

    def reopen(self, tier: Tier) -> Tier:
        """Close the tier and open it again at the same place."""
        self._cannot("survive a restart")

    def beside(self, tier: Tier) -> Tier:
        """Return another one at the same place, as a second engine has it; closed by the test."""
        self._cannot("be shared")
