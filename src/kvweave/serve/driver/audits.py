"""What is done while nothing else is: audits of answers (`kvweave.weave.shadow`), behind what may rest."""

from __future__ import annotations

from kvweave.engine import Engine
from kvweave.serve.driver.tasks import Tasks
from kvweave.serve.driver.work import Rest


class IdleAudits:
    """One audit at a time, in the background of the loop. Touched in the driver's thread only."""

    def __init__(self, engine: Engine) -> None:
        self._shadow, self._loop = engine.shadow, engine.loop
        self._tasks = Tasks(engine.loop)
        self.before: Rest | None = None  # set before the driver starts

    def __len__(self) -> int:
        return len(self._tasks)

    def is_due(self) -> bool:
        """Tell whether an audit is under way or one may begin, or something else may be done."""
        return bool(self.n_before) or bool(self._tasks) or self._shadow.is_due(self._loop)

    def begin(self) -> None:
        """Do a step of what may rest; else begin an audit, if one is due and none is under way."""
        if self.before is not None and self.n_before:
            self.before.rest()
        elif not self._tasks and self._shadow.is_due(self._loop):
            self._tasks.begin(self._shadow.audit(self._loop))

    @property
    def n_before(self) -> int:
        """1 where something else may be done."""
        return int(self.before is not None and self.before.is_due())

    def go_on(self) -> None:
        """Go on with what has been computed."""
        self._tasks.go_on()

    def stop(self, error: Exception) -> None:
        """Give up what is under way."""
        self._tasks.fail(error)
