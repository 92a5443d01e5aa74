"""How much is computed beside answers that are under way, so that their readers do not notice."""

from __future__ import annotations

from kvweave.run.schedule import Schedule

SLOWER = 2.5  # a step may take so many times as long as one that only decodes
FIRST, LEAST = 16, 4  # rows
LOOK = 16  # steps after which one is left to those that decode, to see how long that takes
FORGETS = 0.2

STEP = 0.05  # seconds that a step takes where others may come
COSTS = 4.0  # steps that only decode: a step is not shorter than so many, or it is mostly overhead
MANY, FEW = 128, 32  # rows: the first guess, and the fewest


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
    def alone(self) -> float:
        """Seconds of a step that only decodes; 0 while that is not known."""
        return self._alone or 0.0

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


class Slices:
    """Finds by trying how many rows a step may have where somebody may come at any moment: he
    waits for its end, whatever it does.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._rows = float(min(MANY, most))

    @property
    def rows(self) -> int:
        return int(self._rows)

    def note(self, seconds: float, n_rows: int, alone: float) -> None:
        """Tell how long a step of so many rows took, and one that only decodes (0: not known)."""
        if seconds > max(STEP, COSTS * alone):
            if n_rows > FEW:
                self._rows = max(min(FEW, self.most), self._rows * 0.75)
        elif n_rows >= int(self._rows):
            self._rows = min(self.most, self._rows * 1.25)


class Sizing:
    """Sets how large the steps of a schedule are, and learns from how long they took."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._pace, self._slices = Pace(schedule.max_rows), Slices(schedule.max_rows)

    def plan(self, others: bool) -> None:
        """Before a step; ``others`` tells whether somebody may come who would wait for its end."""
        self._schedule.beside = self._pace.rows
        self._schedule.most = self._slices.rows if others else self._schedule.max_rows

    def note(self, seconds: float) -> None:
        """Behind a step, tell how long it took."""
        self._pace.note(seconds, *self._schedule.rows)
        self._slices.note(seconds, sum(self._schedule.rows), self._pace.alone)
