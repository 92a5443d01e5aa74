"""How much of the model each tenant had lately, so that who asks little is not slowed by who asks much."""

from __future__ import annotations

from collections.abc import Collection, Iterable

FORGETS = 0.02  # of what was had, in each step
LITTLE = 0.5  # of a fair share: who had less is let through


class Ledger:
    """Rows that each tenant had, the older the less they count."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}

    def note(self, rows: Iterable[tuple[str, int]]) -> None:
        """Take down the rows of one step."""
        for tenant in list(self._had):
            self._had[tenant] *= 1 - FORGETS
            if self._had[tenant] < 1:
                del self._had[tenant]
        for tenant, n in rows:
            self._had[tenant] = self._had.get(tenant, 0.0) + n

    def greedy(self, present: Collection[str]) -> set[str]:
        """Return the tenants that had their share, if there are others that had little."""
        fair = sum(self._had.get(tenant, 0.0) for tenant in present) / max(1, len(present))
        much = {tenant for tenant in present if self._had.get(tenant, 0.0) > LITTLE * fair}
        return much if len(much) < len(present) else set()
