"""Work on the engine that waits for passes: it goes on between two steps, beside the answers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from kvweave.run.loop import Loop, Request, Task, goes_on
from kvweave.serve.driver.work import DriverCall, TaskWaiter


@dataclass(eq=False, slots=True)
class Running:
    """A task, what it waits for, and who waits for it; nobody for what the server does by itself."""

    task: Task[Any]
    request: Request
    call: TaskWaiter | None


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

    def begin(self, task: Task[Any], call: TaskWaiter | None = None) -> None:
        """Run a task up to its first request."""
        self._running += self._following(task, call, None)

    def go_on(self) -> None:
        """Go on with what no longer waits; close what nobody waits for any more."""
        for each in list(self._running):
            gone = each.call is not None and each.call.given_up
            if not gone and each.request.running:
                continue
            if gone:
                self._close(each)
            after = [] if gone else self._following(each.task, each.call, each.request)
            at = self._running.index(each)
            self._running[at : at + 1] = after  # at once: others count them
            if gone and each.call is not None:
                each.call.closed()

    def cancel(self, task: Task[Any]) -> None:
        """Give one of them up; nothing happens when it is over."""
        for each in [each for each in self._running if each.task is task]:
            self._running.remove(each)
            self._close(each)

    def drop(self) -> None:
        """Give up what nobody waits for."""
        for each in [each for each in self._running if each.call is None]:
            self.cancel(each.task)

    def fail(self, error: Exception) -> None:
        """Give all of them up."""
        left, self._running = self._running, []
        for each in left:
            self._close(each)
            if each.call is not None:
                each.call.tell(error)

    def _close(self, each: Running) -> None:
        others = (other.request for other in self._running if other is not each)
        if each.request not in others:
            self._loop.cancel(each.request.key)
        each.task.close()

    def _following(
        self, task: Task[Any], call: TaskWaiter | None, request: Request | None
    ) -> list[Running]:
        """Run a task up to its next request, if there is one."""
        try:
            following = next(task) if request is None else goes_on(task, request)
            self._add(following, call)
            while not following.running:  # nothing of it had to be run
                following = goes_on(task, following)
                self._add(following, call)
        except StopIteration as done:
            if call is not None:
                call.tell(None, done.value)
        except Exception as error:
            task.close()
            if call is not None:
                call.tell(error)
        else:
            return [Running(task, following, call)]
        return []

    def _add(self, request: Request, call: TaskWaiter | None) -> None:
        urgent = call is not None and call.urgent
        if request.key not in self._loop.requests:
            request.urgent = urgent
            self._loop.add(request)
        elif urgent and request.key in self._loop.schedule:  # another task waits for it too
            self._loop.schedule.job(request.key).urgent = True
