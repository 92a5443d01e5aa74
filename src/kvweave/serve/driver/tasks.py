"""Work on the engine that waits for passes: it goes on between two steps, beside the answers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from kvweave.run.loop import Loop, Request, Task, goes_on
from kvweave.serve.driver.work import DriverCall


@dataclass(eq=False, slots=True)
class Running:
    """A task, what it waits for, and who waits for it; nobody for what the server does by itself."""

    task: Task[Any]
    request: Request
    call: DriverCall | None


class Tasks:
    """The tasks of one loop that are under way. Touched in the driver's thread only."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: list[Running] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def n_own(self) -> int:
        """How many of them nobody waits for."""
        return sum(each.call is None for each in self._running)

    def take(self, result: object, call: DriverCall) -> None:
        """Tell a call's result; a task is begun, and told when it ends."""
        if isinstance(result, Generator):
            self.begin(result, call)
        else:
            call.tell(None, result)

    def begin(self, task: Task[Any], call: DriverCall | None = None) -> None:
        """Run a task up to its first request."""
        self._go_on(task, call, None)

    def go_on(self) -> None:
        """Go on with what no longer waits; close what nobody waits for any more."""
        for each in list(self._running):
            gone = each.call is not None and each.call.future.cancelled()
            if not gone and each.request.running:
                continue
            self._running.remove(each)
            if gone:
                self._close(each)
            else:
                self._go_on(each.task, each.call, each.request)

    def cancel(self, task: Task[Any]) -> None:
        """Give one of them up; nothing happens when it is over."""
        for each in [each for each in self._running if each.task is task]:
            self._running.remove(each)
            self._close(each)

    def fail(self, error: Exception) -> None:
        """Give all of them up."""
        left, self._running = self._running, []
        for each in left:
            self._close(each)
            if each.call is not None:
                each.call.tell(error)

    def _close(self, each: Running) -> None:
        self._loop.cancel(each.request.key)
        each.task.close()

    def _go_on(self, task: Task[Any], call: DriverCall | None, request: Request | None) -> None:
        try:
            following = next(task) if request is None else goes_on(task, request)
            self._loop.add(following)
            while not following.running:  # nothing of it had to be run
                following = goes_on(task, following)
                self._loop.add(following)
        except StopIteration as done:
            if call is not None:
                call.tell(None, done.value)
        except Exception as error:
            task.close()
            if call is not None:
                call.tell(error)
        else:
            self._running.append(Running(task, following, call))
