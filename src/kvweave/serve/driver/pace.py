"""How much is computed beside answers that are under way, so that their readers do not notice."""

from __future__ import annotations

SLOWER = 2.5  # a step may take so many times as long as one that only decodes
FIRST, LEAST = 16, 4  # rows
LOOK = 16  # steps after which one is left to those that decode, to see how long that takes
FORGETS = 0.2


class Pace:
    """Finds the number of rows by trying: a quarter fewer after a slow step, a quarter more after
    a quick one.

    ``rows`` are for the next step; none where it has to be seen how long decoding takes alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._rows = float(min(FIRST, most))
        self._alone: float | None = None  # seconds
        self._n_beside = 0  # steps since decoding was seen alone

    @property
    def rows(self) -> int:
        return 0 if self._alone is None or self._n_beside >= LOOK else int(self._rows)

    def note(self, seconds: float, n_decoding: int, n_beside: int, n_urgent: int) -> None:
        """Tell how long a step took, and its rows: that decoded, beside these, and others."""
        if not n_decoding or n_urgent:
            return
        if not n_beside:
            old = seconds if self._alone is None else self._alone
            self._alone, self._n_beside = old + FORGETS * (seconds - old), 0
            return
        self._n_beside += 1
        assert self._alone is not None, "rows were granted before decoding was seen alone"
        if seconds > SLOWER * self._alone:
            self._rows = max(LEAST, self._rows * 0.75)
        elif n_beside >= int(self._rows):
            self._rows = min(self.most, self._rows * 1.25)
