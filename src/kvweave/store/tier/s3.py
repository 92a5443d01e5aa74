"""A tier in object storage (S3, Google, Azure, a directory, memory), through obstore.

A value is one object, ``PREFIX/KEY.kv``, put on condition that there is none; object stores make it
whole or not at all. Requests of a batch run at the same time, aside (`kvweave.store.tier.slots`), on
copies: who is late leaves, and what is under way is called off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier.base import DONE, Get, Outcome, Put, checked
from kvweave.store.tier.buffers import copy_out, flat
from kvweave.store.tier.keys import absent, is_key, n_bytes_of, outside, present
from kvweave.store.tier.limit import Limit, TimeUp
from kvweave.store.tier.remote import KEYS, Lost, Remote, RemoteCalls, judged, library
from kvweave.store.tier.slots import Slots

SUFFIX = ".kv"  # no object may be called "..", a key may
AT_ONCE = 16  # requests of a batch
HUGE = 1 << 50  # bytes that no store has in an object: the index would not take them
TRIES = 10  # of a put that finds a value which is not there: others put and discard it in turn
NO_ROOM = (
    "(os error 28)",
    "(os error 122)",
    "QuotaExceeded",
    "InsufficientStorage",
    "status code: 507",  # a port or a duration may be 507 too
)
NO_PLACE = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")  # of no object
NO_OBJECT = ("NoSuchKey", "BlobNotFound", "PathNotFound", "No such object")  # of an object
WHOLE = "non-partial response"  # what has no ranges, or none of an object without bytes
NO_RANGE = ("status code: 416", "Requested range was invalid", "Invalid range:")  # it is shorter

_Call = Callable[[], Awaitable[Any]]


class Archive(Remote):
    """Values as objects of any store that obstore has."""

    name = "s3"
    _largest = 5 << 30  # bytes of an object that is put by one request

    def __init__(
        self, store: Any, *, prefix: str = "kvweave", timeout: float = 30.0, slots: int = 4
    ) -> None:
        """Keep values in an `obstore.store` below ``prefix``.

        A call without a deadline takes at most ``timeout`` seconds and those of its bytes at
        8 MiB/s. Raises InvalidArgument where obstore is missing.
        """
        self._api = library("obstore", "archive")
        self._store = store
        self._prefix = prefix.strip("/")
        self._timeout = timeout
        self._link = RemoteCalls("the object store", Slots(slots), self._ping)

    @classmethod
    def at(cls, url: str, *, prefix: str = "kvweave") -> Archive:
        """Open ``s3://bucket``, ``file:///directory`` or another address that obstore knows;
        credentials are those of the environment. Raises InvalidArgument."""
        api = library("obstore", "archive")
        try:
            store = api.store.from_url(url)
        except (ValueError, api.exceptions.BaseError) as error:
            raise InvalidArgument(
                "tier",
                f"{url}: {str(error).splitlines()[0]}",
                "write s3://BUCKET or file:///DIRECTORY",
            ) from error
        return cls(store, prefix=prefix)

    def path(self, key: str) -> str:
        """Return the object of a value."""
        return f"{self._prefix}/{key}{SUFFIX}" if self._prefix else f"{key}{SUFFIX}"

    def _put(self, puts: Sequence[Put], limit: Limit) -> list[Outcome]:
        create = partial(self._api.put_async, self._store, mode="create")
        taken = (self._api.exceptions.AlreadyExistsError, FileExistsError)
        outcomes: dict[int, Outcome] = {}
        left = list(range(len(puts)))
        for _ in range(TRIES):
            calls = [partial(create, self.path(puts[i].key), b"".join(puts[i].data)) for i in left]
            found = dict(zip(left, self._do(calls, limit), strict=True))
            seen = [i for i in left if isinstance(found[i], taken)]
            outcomes |= {i: _created(puts[i].key, found[i]) for i in left if i not in seen}
            left = []
            # S3 also says so (409) where something else came in between: then it need not be there
            for i, n in zip(seen, self._look([puts[i].key for i in seen], limit), strict=True):
                outcomes[i] = present(puts[i].key) if isinstance(n, int) else n
                if outcomes[i].state == "missing":
                    outcomes[i] = judged("failed", puts[i].key, _said(found[i]))
                    left.append(i)
        return [outcomes[i] for i in range(len(puts))]

    def _get(self, gets: Sequence[Get], limit: Limit) -> list[Outcome]:
        groups: dict[str, list[int]] = {}  # key -> which gets
        for i, get in enumerate(gets):
            if n_bytes_of(get.into) and get.offset >= 0:
                groups.setdefault(get.key, []).append(i)
        calls = [partial(self._read, [gets[i] for i in group]) for group in groups.values()]
        outcomes: dict[int, Outcome] = {}
        errors: dict[int, Exception] = {}
        for group, found in zip(groups.values(), self._do(calls, limit), strict=True):
            for i, result in zip(group, found, strict=True):
                if _is_absent(result):
                    outcomes[i] = absent(gets[i].key)
                elif isinstance(result, Exception):
                    errors[i] = result
                elif len(result) == n_bytes_of(gets[i].into):
                    copy_out(flat(memoryview(result)), gets[i].into)
                    outcomes[i] = checked(gets[i])
        unclear = [i for i in range(len(gets)) if i not in outcomes]
        for i, n in zip(unclear, self._look([gets[i].key for i in unclear], limit), strict=True):
            outcomes[i] = n if isinstance(n, Outcome) else _odd(gets[i], n, errors.get(i))
        return [outcomes[i] for i in range(len(gets))]

    async def _read(self, gets: Sequence[Get]) -> list[Any]:
        """Return the bytes for each get of one key, or the exception: all in one request, but each
        alone where that fails, since one range outside fails those beside it."""
        starts, lengths = [get.offset for get in gets], [n_bytes_of(get.into) for get in gets]
        path = self.path(gets[0].key)
        try:
            return list(
                await self._api.get_ranges_async(self._store, path, starts=starts, lengths=lengths)
            )
        except FileNotFoundError as error:
            return [error] * len(gets)
        except Exception as error:  # of this object alone
            if len(gets) == 1:
                return [error]
        return [(await self._read([get]))[0] for get in gets]

    def _look(self, keys: Sequence[str], limit: Limit) -> list[int | Outcome]:
        if not keys:
            return []
        found = self._do([partial(self._size, self.path(key)) for key in keys], limit)
        return [
            _failed(key, each) if isinstance(each, Exception) else each
            for key, each in zip(keys, found, strict=True)
        ]

    async def _size(self, path: str) -> int:
        """Return the bytes of an object by reading its first one: answers to HEAD have no text, so nobody
        knows what it is that is not there."""
        try:
            found = await self._api.get_async(self._store, path, options={"range": (0, 1)})
            await found.bytes_async()  # or the connection is not used again
            size = int(found.meta["size"])
        except Exception as error:
            if not (_is_shorter(error) or WHOLE in str(error)):
                raise
            size = int((await self._api.head_async(self._store, path))["size"])
        if size > HUGE:
            raise ValueError(f"it is said to have {size} bytes")
        return size

    def _discard(self, keys: Sequence[str], limit: Limit) -> list[Outcome]:
        delete = partial(self._api.delete_async, self._store)
        paths = [self.path(key) for key in keys]
        (of_all,) = self._do([partial(delete, paths)], limit)
        if not isinstance(of_all, Exception):
            return [DONE] * len(keys)
        found = self._do([partial(delete, path) for path in paths], limit)  # who of them it was
        return [
            _failed(key, each) if isinstance(each, Exception) and not _is_absent(each) else DONE
            for key, each in zip(keys, found, strict=True)
        ]

    def _list(self) -> Iterator[dict[str, int | None]]:
        seen: set[str] = set()  # a list may tell an object twice, or begin anew and never end
        try:
            for page in self._api.list(self._store, self._prefix or None, chunk_size=KEYS):
                new = {meta["path"]: meta["size"] for meta in page if meta["path"] not in seen}
                if page and not new:
                    hint = (
                        "nothing was changed; does what is in front of the store pass on its pages?"
                    )
                    raise StoreError(f"the list of {self._link.name} goes in circles", hint=hint)
                seen |= new.keys()
                places = [(path.rpartition("/"), size) for path, size in new.items()]
                yield {
                    key: size
                    for (folder, _, name), size in places
                    if folder == self._prefix
                    and name.endswith(SUFFIX)
                    and is_key(key := name.removesuffix(SUFFIX))
                }
        except self._api.exceptions.InvalidPathError as error:
            hint = "such an object hides those behind it: remove it, or take another prefix="
            raise StoreError(f"{self._link.name}: {_said(error)}", hint=hint) from error
        except (OSError, self._api.exceptions.BaseError) as error:
            raise Lost(_said(error)) from error

    def _do(self, calls: Sequence[_Call], limit: Limit) -> list[Any]:
        """Return results and exceptions of the calls. Raises TimeUp and Lost."""
        if not calls:
            return []
        return self._link.ask(limit, lambda slot: asyncio.run(_together(calls, limit)))

    def _ping(self) -> None:
        head = partial(self._api.head_async, self._store, self.path("none"))
        try:
            (found,) = asyncio.run(_together([head], Limit(None, self._timeout)))
        except TimeUp as error:
            raise Lost("the object store does not answer") from error
        if isinstance(found, Exception) and not isinstance(found, FileNotFoundError):
            raise Lost(_said(found))


async def _together(calls: Sequence[_Call], limit: Limit) -> list[Any]:
    """Await the calls, a few at a time; call off what is under way when time is up."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: _Call) -> Any:
        async with gate:
            try:
                return await call()
            except Exception as error:  # of this request alone
                return error

    try:
        async with asyncio.timeout(limit.left()):
            return await asyncio.gather(*(one(call) for call in calls))
    except TimeoutError as error:
        raise TimeUp from error


def _odd(get: Get, size: int, error: Exception | None) -> Outcome:
    """Say why a get went wrong of a value that has ``size`` bytes, or that it has no bytes to read."""
    if error is not None and not _is_shorter(error):
        return _failed(get.key, error)
    if bad := outside(get, size):
        return bad
    if error is not None:
        return _failed(get.key, error)
    if n_bytes_of(get.into):
        return judged("failed", get.key, "the store gave fewer bytes than it has")
    return DONE


def _created(key: str, result: Any) -> Outcome:
    if isinstance(result, FileNotFoundError):  # its bucket
        return judged("failed", key, _said(result))
    return _failed(key, result) if isinstance(result, Exception) else DONE


def _is_absent(result: Any) -> bool:
    """Tell whether the store said that there is no such object. Without its bucket it says nothing; what
    stands in front of it, and is not well, may say 404 to everything."""
    if not isinstance(result, FileNotFoundError):
        return False
    said = str(result)
    if "status code: 404" in said and not any(mark in said for mark in NO_OBJECT):
        return False
    return not any(mark in said for mark in NO_PLACE)


def _is_shorter(error: Exception) -> bool:
    """Tell whether the store said that an object does not go as far as was asked."""
    return any(mark in str(error) for mark in NO_RANGE)


def _failed(key: str, error: Exception) -> Outcome:
    """Return what an exception of the store means for a value."""
    if _is_absent(error):
        return absent(key)
    full = any(mark in str(error) for mark in NO_ROOM)
    return judged("full" if full else "failed", key, _said(error))


def _said(error: Exception) -> str:
    return str(error).split("\n\n")[0][:300]
