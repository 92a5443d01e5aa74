"""Adaptive replacement (ARC): recency and frequency, by what would have been hit."""

from __future__ import annotations

from collections.abc import Iterator

from kvweave.keep.base import UNKNOWN, Deaf, Facts
from kvweave.keep.ranks import Queue


class ARC(Deaf):
    """Two queues in memory, each with a memory of what went out of it.

    ::

        gone_once | once    used once since it came          target: at most `goal` bytes
                    often | gone_often    used again         the rest

    A miss of a key in ``gone_once`` raises the goal, one in ``gone_often`` lowers it. Sizes are
    bytes throughout; with chunks of one size it is the published algorithm.
    """

    name = "arc"

    def __init__(self, budget: int = 0) -> None:
        self._budget = budget
        self._once, self._often = Queue(), Queue()
        self._gone_once, self._gone_often = Queue(), Queue()
        self._goal = 0.0
        self._favours_often = False  # the key that comes now was in gone_often

    @property
    def _room(self) -> int:
        """Bytes of memory: as told, or as many as it came to hold."""
        return max(self._budget, self._once.n_bytes + self._often.n_bytes)

    def missed(self, key: int, n_bytes: int) -> None:
        """Move the goal towards the queue that would have had ``key``."""
        once, often = self._gone_once.n_bytes, self._gone_often.n_bytes
        self._favours_often = key in self._gone_often
        if key in self._gone_once:
            self._goal = min(self._goal + n_bytes * max(often / once, 1), self._room)
        elif self._favours_often:
            self._goal = max(self._goal - n_bytes * max(once / often, 1), 0.0)

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Put a new key into the first queue, one that was seen before into the second."""
        known = False
        for queue in (self._once, self._often, self._gone_once, self._gone_often):
            known = known or key in queue
            queue.pop(key)
        (self._often if known else self._once).push(key, n_bytes)
        self._favours_often = False
        room = self._room
        self._gone_once.trim(max(0, room - self._once.n_bytes))
        others = self._once.n_bytes + self._often.n_bytes + self._gone_once.n_bytes
        self._gone_often.trim(max(0, 2 * room - others))

    def evicted(self, key: int) -> None:
        """Remember what ``key`` went out of."""
        if key in self._once:
            self._gone_once.push(key, self._once.pop(key))
        elif key in self._often:
            self._gone_often.push(key, self._often.pop(key))

    def dropped(self, key: int) -> None:
        """Forget ``key`` everywhere."""
        for queue in (self._once, self._often, self._gone_once, self._gone_often):
            queue.pop(key)

    def victims(self) -> Iterator[int]:
        """Yield from the queue that is over its goal, oldest first."""
        once, often = iter(self._once), iter(self._often)
        n_once, n_left = self._once.n_bytes, len(self._often)
        while n_once or n_left:
            over = n_once > self._goal or (self._favours_often and n_once == self._goal)
            if n_once and (over or not n_left):
                key = next(once)
                n_once -= self._once.sizes[key]
                yield key
            else:
                n_left -= 1
                yield next(often)

    def check_integrity(self) -> None:
        """Raise AssertionError when a key is in two queues or bytes are wrong."""
        queues = (self._once, self._often, self._gone_once, self._gone_often)
        for queue in queues:
            queue.check_integrity()
        assert sum(map(len, queues)) == len(set().union(*queues)), "a key in two queues"
        assert 0 <= self._goal, f"goal {self._goal}"
