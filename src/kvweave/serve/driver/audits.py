"""What is done while nothing else is: what may rest, then audits of answers (`kvweave.weave.shadow`), then
rows that are not exact (`kvweave.weave.refining`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.engine import Engine
from kvweave.serve.driver.refining import IdleRefining
from kvweave.serve.driver.tasks import Tasks
from kvweave.serve.driver.work import Rest


class IdleAudits:
    """One audit or context at a time, in the background of the loop. Touched in the driver's thread only."""

    def __init__(self, engine: Engine) -> None:
        self._shadow, self._loop = engine.shadow, engine.loop
        self._tasks, self._refining = Tasks(engine.loop), IdleRefining(engine)
        self.before: Sequence[Rest] = ()  # set before the driver starts

    def __len__(self) -> int:
        return len(self._tasks)

    def is_due(self) -> bool:
        """Tell whether an audit is under way or one may begin, or something else may be done."""
        due = self._shadow.is_due(self._loop) or self._refining.is_due
        return bool(self.n_before) or bool(self._tasks) or due

    def touched(self) -> None:
        """Contexts may have changed."""
        self._refining.touched()

    def begin(self) -> None:
        """Do a step of what may rest; else begin an audit that is due, or refine rows, where neither is
        under way."""
        if not self._tasks and (first := self._first()) is not None:
            if (step := first.rest()) is not None:
                self._tasks.begin(step)
            self.touched()
        elif not self._tasks and self._shadow.is_due(self._loop):
            self._tasks.begin(self._shadow.audit(self._loop))
        elif not self._tasks and (task := self._refining.next()) is not None:
            self._tasks.begin(task)

    @property
    def n_before(self) -> int:
        """1 where something else may be done."""
        return int(self._first() is not None)

    def _first(self) -> Rest | None:
        return next((rest for rest in self.before if rest.is_due()), None)

    def go_on(self) -> None:
        """Go on with what has been computed."""
        self._tasks.go_on()

    def stop(self, error: Exception) -> None:
        """Give up what is under way."""
        self._tasks.fail(error)
