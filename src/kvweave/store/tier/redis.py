"""A tier in Redis or Valkey, through the library redis-py.

A value is one string under ``prefix`` + key, made by SET NX: it is whole or missing, and stays what it
is. Each slot (`kvweave.store.tier.slots`) has a client of its own; when a caller leaves, the sockets of
its slot are shut, so that no server keeps a thread waiting. What redis-py receives beyond a MiB at a
time it copies again and again, so values are asked for in pieces, one window of them on the way.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier.base import DONE, Get, Outcome, Put, checked
from kvweave.store.tier.buffers import copy_in, flat
from kvweave.store.tier.keys import absent, is_key, n_bytes_of, outside, present
from kvweave.store.tier.limit import SLOWEST, Limit, TimeUp
from kvweave.store.tier.ranges import PIECE, ranges
from kvweave.store.tier.remote import KEYS, Lost, Remote, RemoteCalls, judged, library
from kvweave.store.tier.slots import Slot, Slots, batches, layout

HINT = "use redis://host:6379/0, rediss://host (TLS), unix:///socket?db=0 or redis+cluster://host"

_Words = tuple[object, ...]


class Redis(Remote):
    """Values in a Redis or Valkey server or cluster, under keys that begin with ``prefix``."""

    name = "redis"
    _largest = 512 << 20  # bytes of a string, proto-max-bulk-len of the server

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "kvweave:",
        password: str = "",
        connections: int = 4,
        timeout: float = 5.0,
    ) -> None:
        """Connect to ``redis[s]://[user[:password]@]host[:port][/database]``, ``unix://PATH``, or with
        ``+cluster`` behind the scheme to any node of a cluster; ``?name=value`` is redis-py's.

        A call without a deadline takes at most ``timeout`` seconds and those of its bytes at
        8 MiB/s. Raises InvalidArgument for a bad address and where redis-py is missing, StoreError
        when the server does not answer or refuses us.
        """
        if connections < 1 or timeout <= 0:
            raise InvalidArgument("connections" if connections < 1 else "timeout", "must be over 0")
        self._api = library("redis", "redis", "backoff", "cluster", "retry")
        plain = re.sub(r"^(rediss?)\+cluster://", r"\1://", url)
        self._client_class = self._api.Redis if plain == url else self._api.RedisCluster
        self._url, self._server = plain, _server_of(self._api, plain)
        self._prefix = prefix.encode()
        self._password, self._timeout = password, timeout
        self._clients: dict[Slot, Any] = {}  # each used by who has the slot
        self._link = RemoteCalls(
            f"Redis at {self._server}", Slots(connections), self._ping, self._give_up
        )
        limit = Limit(None, timeout)
        try:
            self._link.ask(limit, lambda slot: self._ping())
        except (TimeUp, Lost) as error:
            why = str(error) or limit.outcome().why
            self._link.close(Limit(None, 0))
            hint = "is it running, and are address, user, password and database right?"
            raise StoreError(f"no way into {self._link.name}: {why}", hint=hint) from error

    def close(self) -> None:
        """Let go of connections; calls from here on are refused."""
        super().close()
        for slot in list(self._clients):
            self._give_up(slot)

    def _put(self, puts: Sequence[Put], limit: Limit) -> list[Outcome]:
        sizes = [n_bytes_of(put.data) for put in puts]
        starts, total = layout(sizes)
        with self._link.take(limit, total) as slot:
            requests: list[_Words] = []
            for put, start, n in zip(puts, starts, sizes, strict=True):
                value = slot.memory[start : start + n]  # what we leave may still be sent
                copy_in(put.data, flat(value))
                requests.append(("SET", self._name(put.key), value, "NX"))
            replies = self._talk(slot, limit, [requests])
            made = [self._created(put.key, reply) for put, reply in zip(puts, replies, strict=True)]
            if any(outcome.state == "full" for outcome in made):
                self._give_up(slot)  # what the server keeps for this connection counts too
        return made

    def _created(self, key: str, reply: object) -> Outcome:
        if isinstance(reply, self._api.exceptions.OutOfMemoryError):
            return judged("full", key, reply)
        if reply is True:
            return DONE
        return present(key) if reply is None else judged("failed", key, reply)

    def _get(self, gets: Sequence[Get], limit: Limit) -> list[Outcome]:
        wanted = ranges(gets)
        with self._link.take(limit) as slot:
            requests = [
                ("GETRANGE", self._name(each.key), each.start, each.end - 1) for each in wanted
            ]
            sizes = [each.end - each.start for each in wanted]
            replies = self._talk(slot, limit, batches(requests, sizes, PIECE))
        outcomes: dict[int, Outcome] = {}
        unclear = {i for i, get in enumerate(gets) if get.offset < 0 or not n_bytes_of(get.into)}
        for each, reply in zip(wanted, replies, strict=True):
            for part in each.parts:
                if not isinstance(reply, bytes) or len(reply) > each.end - each.start:
                    outcomes[part.i] = _refused(each.key, reply)
                elif not each.fill(part, reply):
                    unclear.add(part.i)
        asked = sorted(unclear)
        for i, n in zip(asked, self._look([gets[i].key for i in asked], limit), strict=True):
            outcomes.setdefault(i, n if isinstance(n, Outcome) else _short(gets[i], n))
        return [outcomes.get(i) or checked(get) for i, get in enumerate(gets)]

    def _look(self, keys: Sequence[str], limit: Limit) -> list[int | Outcome]:
        replies = self._each_key("STRLEN", keys, limit)
        return [_size(key, reply) for key, reply in zip(keys, replies, strict=True)]

    def _discard(self, keys: Sequence[str], limit: Limit) -> list[Outcome]:
        replies = self._each_key("UNLINK", keys, limit)
        return [
            DONE if isinstance(reply, int) else judged("failed", key, reply)
            for key, reply in zip(keys, replies, strict=True)
        ]

    def _each_key(self, word: str, keys: Sequence[str], limit: Limit) -> list[Any]:
        if not keys:
            return []
        with self._link.take(limit) as slot:
            return self._talk(slot, limit, [[(word, self._name(key)) for key in keys]])

    def _list(self) -> Iterator[dict[str, int | None]]:
        pattern = re.sub(rb"([][?*^\\-])", rb"\\\1", self._prefix) + b"*"
        seen: set[str] = set()  # SCAN may tell a key twice
        with self._lost_if_it_fails(), contextlib.closing(self._new_client()) as client:
            names = client.scan_iter(match=pattern, count=KEYS)
            while page := list(islice(names, KEYS)):
                keys = {name[len(self._prefix) :].decode("latin-1") for name in page} - seen
                seen |= keys
                yield {key: None for key in keys if is_key(key)}

    def _name(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _talk(self, slot: Slot, limit: Limit, windows: Any) -> list[Any]:
        """Return the replies to all requests, one window after the other; errors are replies too."""

        def call() -> list[Any]:
            client = self._clients.get(slot)
            with self._lost_if_it_fails():
                if client is None:
                    client = self._clients[slot] = self._new_client()
                replies: list[Any] = []
                for window in windows:
                    pipeline = client.pipeline(transaction=False)
                    for words in window:
                        pipeline.execute_command(*words)
                    replies += pipeline.execute(raise_on_error=False)
                return replies

        return self._link.run(slot, limit, call)

    def _new_client(self, patience: float | None = None) -> Any:
        """Return a client that tries nothing twice."""
        nothing = self._api.retry.Retry(self._api.backoff.NoBackoff(), 0)
        # A value is sent within one timeout; those who wait have a limit of their own.
        patience = self._timeout + self._largest / SLOWEST if patience is None else patience
        return self._client_class.from_url(
            self._url,
            protocol=2,
            retry=nothing,
            socket_timeout=patience,
            socket_connect_timeout=self._timeout,
            socket_read_size=PIECE,
            **({"password": self._password} if self._password else {}),
        )

    def _ping(self) -> None:
        with (
            self._lost_if_it_fails(),
            contextlib.closing(self._new_client(self._timeout)) as client,
        ):
            if not client.ping():
                raise Lost(f"{self._link.name} answers PING strangely")

    def _give_up(self, slot: Slot) -> None:
        client = self._clients.pop(slot, None)
        if client is None:
            return
        with contextlib.suppress(Exception):  # its own thread is in the middle of something
            if isinstance(client, self._api.Redis):
                client.connection_pool.disconnect()
            else:
                client.disconnect_connection_pools()

    @contextlib.contextmanager
    def _lost_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Lost:
            raise
        except Exception as error:  # what is no Redis makes the library raise anything
            raise Lost(f"{self._link.name}: {error or type(error).__name__}") from error


def _server_of(api: Any, url: str) -> str:
    """Return where a server is, without the password. Raises InvalidArgument."""
    try:
        words = api.connection.parse_url(url)
    except ValueError as error:
        raise InvalidArgument("url", "not the address of a Redis server", HINT) from error
    if "path" in words:
        return str(words["path"])
    return f"{words.get('host', 'localhost')}:{words.get('port', 6379)}"


def _size(key: str, reply: object) -> int | Outcome:
    if not isinstance(reply, int):
        return judged("failed", key, reply)
    return reply or absent(key)  # no value is empty


def _short(get: Get, size: int) -> Outcome:
    """Say why a range was not all there, of a value that has ``size`` bytes now."""
    if bad := outside(get, size):
        return bad
    return absent(get.key) if n_bytes_of(get.into) else DONE  # it was created meanwhile


def _refused(key: str, reply: object) -> Outcome:
    """Return the outcome of a read that the server refused, or answered with what is no value."""
    if isinstance(reply, Exception):
        return judged("wrong" if str(reply).startswith("WRONGTYPE") else "failed", key, reply)
    return judged("failed", key, "the server answers with something else")
