"""Audits of answers while nothing else is there to do: see `kvweave.weave.shadow`."""

from __future__ import annotations

from kvweave.engine import Engine
from kvweave.serve.driver.tasks import Tasks


class IdleAudits:
    """One audit at a time, in the background of the loop. Touched in the driver's thread only."""

    def __init__(self, engine: Engine) -> None:
        self._shadow, self._loop = engine.shadow, engine.loop
        self._tasks = Tasks(engine.loop)

    def __len__(self) -> int:
        return len(self._tasks)

    def is_due(self) -> bool:
        """Tell whether an audit is under way, or one may begin."""
        return bool(self._tasks) or self._shadow.is_due(self._loop)

    def begin(self) -> None:
        """Begin an audit, if one is due and none is under way."""
        if not self._tasks and self._shadow.is_due(self._loop):
            self._tasks.begin(self._shadow.audit(self._loop))

    def go_on(self) -> None:
        """Go on with what has been computed."""
        self._tasks.go_on()

    def stop(self, error: Exception) -> None:
        """Give up what is under way."""
        self._tasks.fail(error)
