"""What a remote tier remembers: the sizes of its values, and the ones it still has to remove.

A delete is done for us when the key is in the ledger as doomed: it is not read and not listed any
more. A thread removes it where it rests, again and again with growing pauses while that fails (the
server is lost, or gives a reader more time).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvweave.store.tier.limit import Limit

TOGETHER = 500  # keys removed in one request
PAUSES = (0.05, 5.0)  # seconds: after the first failure, and at most


class Ledger:
    """Sizes by key; ``remove`` takes keys and returns those that are gone, and may be slow.

    ``remove`` is called from one thread of the ledger's own, never twice at the same time.
    """

    def __init__(self, remove: Callable[[Sequence[str]], Iterable[str]]) -> None:
        self._remove = remove
        self._changed = threading.Condition()
        self._sizes: dict[str, int] = {}
        self._doomed: dict[str, int] = {}
        self._in_flight: set[str] = set()
        self._unsure: set[str] = set()
        self._n_bytes = 0
        self.n_stored = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def n_bytes(self) -> int:
        """Bytes of all values, those that are still to be removed included."""
        return self._n_bytes

    def size(self, key: str) -> int | None:
        """Return the bytes of a value that is known."""
        return self._sizes.get(key)

    def keys(self) -> list[str]:
        """Return the keys of the values that are known."""
        with self._changed:
            return list(self._sizes)

    def doomed(self) -> set[str]:
        """Return the keys that are still to be removed."""
        with self._changed:
            return set(self._doomed)

    def is_doomed(self, key: str) -> bool:
        """Say whether the value was deleted, whatever the server still has."""
        return key in self._doomed

    def claim(self, keys: Iterable[str], limit: Limit) -> set[str]:
        """Call off the removal of keys that are about to be written; return those that were doomed.

        Waits for a removal that has begun. Raises TimeUp, with nothing changed.
        """
        wanted = set(keys)
        with self._changed:
            while wanted & self._in_flight:
                self._changed.wait(limit.left())
            doomed = wanted & self._doomed.keys()
            for key in doomed:
                self._n_bytes -= self._doomed.pop(key)
            return doomed

    def stored(self, key: str, n: int) -> None:
        """Note a value of ``n`` bytes."""
        with self._changed:
            self.n_stored += 1
            self._n_bytes += n - self._sizes.get(key, 0)
            self._sizes[key] = n
            self._unsure.discard(key)

    def unsure(self, key: str) -> None:
        """Note that the server may have taken a value or not."""
        with self._changed:
            self._unsure.add(key)

    def lost(self, keys: Iterable[str], n_stored: int) -> None:
        """Note that the server does not have values any more.

        Nothing is noted if something was stored since it was asked, when ``n_stored`` was read: it
        may have been one of these. The next reader sees it again.
        """
        with self._changed:
            if n_stored == self.n_stored:
                for key in keys:
                    self._n_bytes -= self._sizes.pop(key, 0)
                    self._unsure.discard(key)

    def learn(self, sizes: Mapping[str, int]) -> None:
        """Take over what the server has and is not known here."""
        with self._changed:
            for key, n in sizes.items():
                if key not in self._sizes and key not in self._doomed:
                    self._sizes[key] = n
                    self._n_bytes += n

    def doom(self, keys: Iterable[str]) -> None:
        """Let go of values: at once here, soon where they rest."""
        with self._changed:
            for key in keys:
                self._doomed[key] = self._sizes.pop(key, self._doomed.get(key, 0))
                self._unsure.discard(key)
            if self._doomed and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is doomed any more; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._doomed, seconds)

    def compare(self, there: Mapping[str, int]) -> None:
        """Raise AssertionError unless what the server has, is what is known here.

        What it has lost meanwhile (eviction, restart) is forgotten; what others put there is learnt.
        """
        with self._changed:
            for key in [key for key in self._sizes if key not in there]:
                self._n_bytes -= self._sizes.pop(key)
            for key in self._unsure & there.keys() & self._sizes.keys():
                self._n_bytes += there[key] - self._sizes[key]
                self._sizes[key] = there[key]
            self._unsure.clear()
            wrong = {k: (n, there[k]) for k, n in self._sizes.items() if n != there[k]}
            assert not wrong, f"sizes (known, there) differ: {wrong}"
            counted = sum(self._sizes.values()) + sum(self._doomed.values())
            assert counted == self._n_bytes, f"{self._n_bytes} bytes counted, {counted} listed"
            both = self._sizes.keys() & self._doomed.keys()
            assert not both, f"alive and doomed: {both}"
        self.learn(there)

    def close(self, seconds: float) -> None:
        """Give what is doomed ``seconds`` to go, then stop."""
        self.settle(seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _work(self) -> None:
        pause = PAUSES[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._doomed or self._closed)
                if self._closed:
                    return
                batch = list(self._doomed)[:TOGETHER]
                self._in_flight.update(batch)
            gone = set(self._remove(batch))
            with self._changed:
                self._in_flight.clear()
                for key in gone:
                    self._n_bytes -= self._doomed.pop(key, 0)
                for key in set(batch) - gone:  # to the end, so that others have their turn
                    self._doomed[key] = self._doomed.pop(key)
                self._changed.notify_all()
                if gone:
                    pause = PAUSES[0]
                    continue
                self._changed.wait_for(lambda: self._closed, pause)
                pause = min(2 * pause, PAUSES[1])


class Remembering:
    """What the remote tiers have in common: what their ledger and a look at the other side tell."""

    _ledger: Ledger
    _learnt = False  # whether the ledger knows what was there before us

    def delete(self, keys: Iterable[str]) -> None:
        """Let go of values; at once for us, soon where they rest."""
        self._ledger.doom(keys)

    def keys(self) -> Iterator[str]:
        """Yield the keys on the other side; those known from before when it does not answer."""
        found = self._listed()
        return iter(self._ledger.keys() if found is None else found)

    @property
    def n_bytes(self) -> int:
        """Bytes of the values: those stored here since, and those there when first asked."""
        if not self._learnt:
            there = self._there()
            self._learnt = there is not None
            self._ledger.learn(there or {})
        return self._ledger.n_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError when a value that is known has another size there."""
        there = self._there()
        if there is not None:
            self._ledger.compare(there)

    def settle(self, seconds: float) -> bool:
        """Wait until what was deleted is gone on the other side too; say whether it is."""
        return self._ledger.settle(seconds)

    def _there(self) -> dict[str, int] | None:
        """Return the bytes of all values, None when the other side does not answer."""
        raise NotImplementedError

    def _listed(self) -> Iterable[str] | None:
        return self._there()
