"""How much of something each tenant had lately, so that who asks little is not slowed by who asks much."""

from __future__ import annotations

from collections.abc import Collection, Iterable

FORGETS = 0.02  # of what was had, in each step
LITTLE = 0.5  # of a fair share: who had less is let through


class Ledger:
    """Rows (or milliseconds) that each tenant had, the older the less they count."""

    def __init__(self, much: float) -> None:
        self._much = much  # nobody is greedy below that
        self._had: dict[str, float] = {}

    def note(self, rows: Iterable[tuple[str, float]]) -> None:
        """Take down what was had in one step."""
        for tenant in list(self._had):
            self._had[tenant] *= 1 - FORGETS
            if self._had[tenant] < 1:
                del self._had[tenant]
        for tenant, n in rows:
            self._had[tenant] = self._had.get(tenant, 0.0) + n

    def greedy(self, present: Collection[str]) -> set[str]:
        """Return the tenants that had their share, if there are others that had little."""
        fair = sum(self._had.get(tenant, 0.0) for tenant in present) / max(1, len(present))
        bound = max(self._much, LITTLE * fair)
        much = {tenant for tenant in present if self._had.get(tenant, 0.0) > bound}
        return much if len(much) < len(present) else set()
