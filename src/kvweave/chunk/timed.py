"""A connection to PostgreSQL whose waits end."""

from __future__ import annotations

import time
from typing import Any

import psycopg


class TimedConnection(psycopg.Connection[Any]):
    """A connection that is closed when an answer has not come by ``ends``, whatever the server does."""

    ends = float("inf")

    def wait(self, gen: Any, *args: Any, **words: Any) -> Any:
        """Wait as psycopg does, and no longer than until `ends`."""
        return super().wait(self._ending(gen), *args, **words)

    def _ending(self, gen: Any) -> Any:
        try:
            ready = yield next(gen)
            while True:
                if not ready and time.monotonic() > self.ends:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("no answer in time")
                ready = yield gen.send(ready)
        except StopIteration as end:
            return end.value
