"""S3-FIFO: a small queue lets what comes once go soon, a big one keeps the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvweave.keep.base import UNKNOWN, Deaf, Facts
from kvweave.keep.ranks import Queue

SMALL = 10  # the small queue takes one part in so many
MANY = 3  # uses are counted up to here
PROMOTED = 2  # uses after the first that lead from the small queue to the big one


class _Step(NamedTuple):
    """What the hands of the two queues meet next."""

    key: int
    goes: bool  # or it stays, at the end of the big queue
    uses: int


class S3FIFO(Deaf):
    """Three queues, first in first out: small, big, and the keys that went out of small.

    Reads only count. ``victims`` shows what the two hands would meet; ``evicted`` moves them there.
    """

    name = "s3fifo"

    def __init__(self, budget: int = 0) -> None:
        self._budget = budget
        self._small, self._big, self._gone = Queue(), Queue(), Queue()
        self._uses: dict[int, int] = {}
        self._full = False  # something went before

    @property
    def _room(self) -> int:
        return max(self._budget, self._small.n_bytes + self._big.n_bytes)

    @property
    def _room_small(self) -> int:
        return self._room // SMALL

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Count a use, or put a new key into its queue."""
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, MANY)
            return
        self._uses[key] = 0
        early = not self._full and self._budget and self._small.n_bytes >= self._room_small
        if self._gone.pop(key) or early:
            self._big.push(key, n_bytes)
        else:
            self._small.push(key, n_bytes)

    def evicted(self, key: int) -> None:
        """Do what the hands would have done before they met ``key``, then let it go."""
        if key not in self._uses:
            return
        self._full = True
        done: list[_Step] = []
        for step in self._steps():
            if step.goes and step.key == key:
                break
            if not step.goes:
                done.append(step)
        room = self._room
        for step in done:
            n_bytes = self._small.pop(step.key) or self._big.pop(step.key)
            self._big.push(step.key, n_bytes)
            self._uses[step.key] = step.uses
        if key in self._small:
            self._gone.push(key, self._small.pop(key))
            self._gone.trim(room - room // SMALL)
        self._big.pop(key)
        del self._uses[key]

    def dropped(self, key: int) -> None:
        """Forget ``key`` everywhere."""
        for queue in (self._small, self._big, self._gone):
            queue.pop(key)
        self._uses.pop(key, None)

    def victims(self) -> Iterator[int]:
        """Yield keys as the hands meet them with no use left."""
        for step in self._steps():
            if step.goes:
                yield step.key

    def _steps(self) -> Iterator[_Step]:
        """Yield what happens until all has gone."""
        small = Walk(self._small, self._uses)
        big = Walk(self._big, self._uses)
        n_big, most = self._big.n_bytes, self._room - self._room_small
        while small.left or big.left:
            if big.left and (n_big > most or not small.left):
                key, uses, n_bytes = big.next()
                if uses:
                    big.add(key, uses - 1, n_bytes)
                    yield _Step(key, False, uses - 1)
                else:
                    n_big -= n_bytes
                    yield _Step(key, True, 0)
            else:
                key, uses, n_bytes = small.next()
                if uses >= PROMOTED:
                    n_big += n_bytes
                    big.add(key, uses, n_bytes)
                    yield _Step(key, False, uses)
                else:
                    yield _Step(key, True, 0)

    def check_integrity(self) -> None:
        """Raise AssertionError when a key is in two queues or bytes are wrong."""
        for queue in (self._small, self._big, self._gone):
            queue.check_integrity()
        held = set(self._small) | set(self._big)
        assert held == set(self._uses), "keys with uses and keys in memory"
        assert len(held) == len(self._small) + len(self._big), "a key in two queues"
        assert not held & set(self._gone), "a key in memory and gone"


class Walk:
    """A queue as it would be after steps that are not done: nothing of it is copied."""

    def __init__(self, queue: Queue, uses: dict[int, int]) -> None:
        self._queue, self._uses = iter(queue.sizes.items()), uses
        self._added: deque[tuple[int, int, int]] = deque()
        self._n_first, self.left = len(queue), len(queue)

    def next(self) -> tuple[int, int, int]:
        """Return (key, uses, bytes) of the oldest and take it out."""
        self.left -= 1
        if self._n_first:
            self._n_first -= 1
            key, n_bytes = next(self._queue)
            return key, self._uses[key], n_bytes
        return self._added.popleft()

    def add(self, key: int, uses: int, n_bytes: int) -> None:
        """Put a key at the end."""
        self._added.append((key, uses, n_bytes))
        self.left += 1
