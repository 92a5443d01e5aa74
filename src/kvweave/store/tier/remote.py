"""What tiers behind a network share: calls that end in time, and a server that is left alone.

Every call runs aside, in a slot (`kvweave.store.tier.slots`); who has waited long enough leaves. What the
next caller finds then::

    it answered      calls go through
    in doubt         a sign of life is asked for first, aside; a caller waits at most `SIGN` for it
    left alone       calls fail at once, for a pause that grows; then it is in doubt

So a server that takes connections and never answers costs one call its time, and those behind it
little.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any, TypeVar

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier.base import Get, Outcome, OutcomeState, Put
from kvweave.store.tier.keys import check_keys, n_bytes_of, pages
from kvweave.store.tier.limit import Absence, Limit, TimeUp
from kvweave.store.tier.slots import Slot, Slots, batches

T = TypeVar("T")
_Item = TypeVar("_Item")

SIGN = 0.25  # seconds a caller waits for a sign of life
KEYS = 1000  # of one look or discard
CLOSING = 1.0  # seconds that closing gives to calls that are under way


class Lost(Exception):
    """The server does not answer, or not as one; the text is for people."""


class RemoteCalls:
    """The way to a server, for any thread. ``name`` is what people are told.

    ``ping`` asks for a sign of life and raises Lost without one; ``give_up`` is told the slot of a
    call that was left, and may end it.
    """

    def __init__(
        self,
        name: str,
        slots: Slots,
        ping: Callable[[], object],
        give_up: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        self.name = name
        self._slots, self._ping, self._give_up = slots, ping, give_up
        self._absence = Absence()
        self._pinger = Slot()
        self._sign: Future[None] | None = None
        self._lock = threading.Lock()
        self.is_closed = False

    @contextlib.contextmanager
    def take(self, limit: Limit, n_bytes: int = 0) -> Iterator[Slot]:
        """Lend a slot with ``n_bytes`` of memory; raise TimeUp, or Lost if nobody may ask now."""
        limit.left()
        if self.is_closed:
            raise Lost("the tier is closed")
        if self._absence.is_doubted:
            self._look_for_a_sign(limit)
        with self._slots.take(limit, n_bytes) as slot:
            yield slot

    def run(self, slot: Slot, limit: Limit, call: Callable[[], T]) -> T:
        """Return what ``call`` returns or raise what it raises; TimeUp while it still runs."""
        try:
            answer = slot.run(limit, call)
        except TimeUp:
            self._give_up(slot)
            self._absence.doubt()
            raise
        except Lost:
            self._absence.note()
            raise
        self._absence.over()
        return answer

    def ask(self, limit: Limit, call: Callable[[Slot], T]) -> T:
        """Take a slot and run ``call`` with it. Raises TimeUp and Lost."""
        with self.take(limit) as slot:
            return self.run(slot, limit, lambda: call(slot))

    def close(self, limit: Limit) -> bool:
        """Refuse calls from here on; say whether none is under way any more."""
        self.is_closed = True
        self._pinger.stop()
        return self._slots.close(limit)

    def _look_for_a_sign(self, limit: Limit) -> None:
        if wait := self._absence.left():
            raise Lost(f"{self.name} is lost; next try in {wait:.2f} s")
        with self._lock:
            sign, patience = self._sign, 0.0
            if sign is None or sign.done():
                sign = self._sign = self._pinger.start(self._alive)
                patience = min(SIGN, limit.left())
        try:
            sign.result(patience)
        except (TimeoutError, Lost) as error:
            self._absence.note()
            raise Lost(str(error) or f"{self.name} does not answer") from error

    def _alive(self) -> None:
        self._ping()
        self._absence.over()  # also when nobody waits for it any more


class Remote:
    """A tier behind a `RemoteCalls`: what is said of each batch is left to the kinds."""

    name: str
    shared = True
    _link: RemoteCalls
    _timeout: float
    _largest: int
    """Bytes of a value."""

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        """Create values; ``durable`` changes nothing: they are kept as the server keeps them."""
        check_keys(put.key for put in puts)
        sizes = [n_bytes_of(put.data) for put in puts]
        limit = Limit(deadline, self._timeout, sum(sizes))
        why = f"a value has 1 to {self._largest} bytes"
        outcomes = [
            Outcome("failed", f"{p.key}: {n} bytes, {why}")
            for p, n in zip(puts, sizes, strict=True)
        ]
        fit = [i for i, n in enumerate(sizes) if 0 < n <= self._largest]
        groups = batches([puts[i] for i in fit], [sizes[i] for i in fit])
        for i, outcome in zip(fit, self._each(groups, self._put, limit), strict=True):
            outcomes[i] = outcome
        return outcomes

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        check_keys(get.key for get in gets)
        sizes = [n_bytes_of(get.into) for get in gets]
        limit = Limit(deadline, self._timeout, sum(sizes))
        return self._each(batches(gets, sizes), self._get, limit)

    def look(self, keys: Sequence[str], *, deadline: float | None = None) -> list[int | Outcome]:
        check_keys(keys)
        return self._each(pages(keys, KEYS), self._look, Limit(deadline, self._timeout))

    def discard(self, keys: Sequence[str], *, deadline: float | None = None) -> list[Outcome]:
        """Remove values where they rest."""
        check_keys(keys)
        return self._each(pages(keys, KEYS), self._discard, Limit(deadline, self._timeout))

    def keys(self) -> Iterator[str]:
        """Yield the keys that the server has. Raises StoreError."""
        for page in self._listing():
            yield from page

    @property
    def n_bytes(self) -> int:
        """Bytes of all values, asked of the server. Raises StoreError."""
        total = 0
        for page in self._listing():
            total += sum(n for n in page.values() if n is not None)
            unknown = [key for key, n in page.items() if n is None]
            for n in self.look(unknown):
                if isinstance(n, int):
                    total += n
                elif n.state != "missing":
                    raise self._error(n.why)
        return total

    def check_integrity(self) -> None:
        """Do nothing: no accounts are kept here that could differ from what is there."""

    def close(self) -> None:
        """Let go of connections; calls from here on are refused."""
        if not self._link.is_closed:
            self._link.close(Limit(None, CLOSING))

    def _put(self, puts: Sequence[Put], limit: Limit) -> list[Outcome]:
        raise NotImplementedError

    def _get(self, gets: Sequence[Get], limit: Limit) -> list[Outcome]:
        raise NotImplementedError

    def _look(self, keys: Sequence[str], limit: Limit) -> list[int | Outcome]:
        raise NotImplementedError

    def _discard(self, keys: Sequence[str], limit: Limit) -> list[Outcome]:
        raise NotImplementedError

    def _list(self) -> Iterator[dict[str, int | None]]:
        """Yield pages of keys, with their bytes where a listing tells them; runs aside."""
        raise NotImplementedError

    def _each(
        self,
        groups: Iterable[Sequence[_Item]],
        call: Callable[[Sequence[_Item], Limit], list[T]],
        limit: Limit,
    ) -> list[T | Outcome]:
        """Return what ``call`` says of each group, or for all of it why nobody could be asked."""
        found: list[T | Outcome] = []
        for group in groups:
            try:
                found += call(group, limit)
            except TimeUp:
                found += [limit.outcome()] * len(group)
            except Lost as error:
                found += [Outcome("failed", str(error))] * len(group)
        return found

    def _listing(self) -> Iterator[dict[str, int | None]]:
        pages = self._list()
        while True:
            limit = Limit(None, self._timeout)
            try:
                page = self._link.ask(limit, lambda slot: next(pages, None))
            except (TimeUp, Lost) as error:
                raise self._error(str(error) or limit.outcome().why) from error
            if page is None:
                return
            yield page

    def _error(self, why: str) -> StoreError:
        hint = "is the server up and reachable? nothing was changed; try again then"
        return StoreError(f"{self.name} cannot say what it keeps: {why}", hint=hint)


def library(name: str, extra: str, *parts: str, needs: str = "") -> Any:
    """Return an optional library, with ``parts`` of it loaded too. Raises InvalidArgument."""
    try:
        found = import_module(name)
        for part in parts:
            import_module(f"{name}.{part}")
    except (ImportError, OSError) as error:
        hint = f"pip install 'kvweave[{extra}]'{needs}"
        raise InvalidArgument("tier", f"{name} cannot be loaded: {error}", hint) from error
    return found


def judged(state: OutcomeState, key: str, why: object) -> Outcome:
    """Return an outcome with what the server said of one key."""
    return Outcome(state, f"{key}: {why}")
