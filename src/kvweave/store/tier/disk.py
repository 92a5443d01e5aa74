"""The disk tier: one file for each value, read and written past the page cache where that can be done.

::

    DIR/KEY.kv          the value's bytes and nothing else
    DIR/~RANDOM         being written, where files without a name cannot be made (`fsck` removes them)
    DIR/owner.json      whose it is (`kvweave.store.tier.owner`)

A value is written to a file without a name, synced if it is to be durable, and linked to its name,
which fails where that is taken: it appears whole, once, whoever writes at the same time. What else
lies in the directory is never touched. Nothing is remembered, so several processes may use one
directory. Blocking: what must end at a deadline whatever the device does is
`kvweave.store.tier.guarded`'s.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvweave.chunk.rebuild import fsync, there
from kvweave.errors import MANY_OPEN, StoreError, of_system
from kvweave.store.tier import aio, guarded
from kvweave.store.tier.base import DONE, LATE, Get, Outcome, Put, checked, refused
from kvweave.store.tier.buffers import runs
from kvweave.store.tier.files import FileRange, NewFile, OpenFile, Pending, taken
from kvweave.store.tier.keys import absent, check_keys, is_key, n_bytes_of, outside, present
from kvweave.store.tier.owner import Claim

SUFFIX = ".kv"
OPEN = 128  # files kept open for reading
TOGETHER = 1 << 22  # bytes of reads under way together whose checksums are worth another thread
T = TypeVar("T")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Disk:
    """Values as files of one directory."""

    name = "disk"

    def __init__(
        self,
        directory: Path,
        *,
        shared: bool = False,
        direct: bool = True,
        claimed: Claim | None = None,
    ) -> None:
        """Open or make the directory; ``claimed`` is let go of when it is closed.

        ``direct``: go past the page cache where that can be done. Raises StoreError.
        """
        self._claim = claimed
        self.directory, self.shared = directory, shared
        self._direct = direct
        self._prefix = os.path.join(directory, "")
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._closed = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # open, it has one inode, also where a file system numbers them as they are asked for
            self._pin: OpenFile | None = OpenFile(str(directory), False)
            self._identity = _identity(directory)
        except OSError as error:
            raise of_system(error, "open", directory) from error

    @property
    def apart(self) -> int:
        """Bytes of a batch that are worth a thread of their own (`kvweave.store.tier.guarded`)."""
        return TOGETHER if self._direct and aio.works() else guarded.APART

    def path(self, key: str) -> Path:
        """Return the file of a value."""
        return self.directory / f"{key}{SUFFIX}"

    # ---- writing

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        check_keys(put.key for put in puts)
        outcomes = [
            refused(self._closed, deadline) or self._put(put, durable, deadline) for put in puts
        ]
        if durable and any(o.state in ("done", "exists") for o in outcomes):
            why = self._sync_directory()
            if why:  # a name that may not be on the disk is taken back: nobody relies on it
                for put, outcome in zip(puts, outcomes, strict=True):
                    if outcome.ok:
                        self._remove(put.key)
                bad = Outcome("failed", why)
                return [bad if o.state in ("done", "exists") else o for o in outcomes]
        return outcomes

    def _put(self, put: Put, durable: bool, deadline: float | None) -> Outcome:
        path = self.path(put.key)
        if not n_bytes_of(put.data):
            return Outcome("failed", f"{put.key}: nothing is no value")
        if why := self._elsewhere():  # another directory is called what this one was: not ours
            return Outcome("failed", why)
        try:
            if there(path):
                return self._exists(path, durable)
            with self._spared(partial(NewFile, self.directory, self._direct)) as file:
                file.write(runs(put.data), deadline)
                if durable:
                    os.fsync(file.fd)
                done = file.link(path)
        except TimeoutError:
            return LATE
        except OSError as error:
            return Outcome("full" if error.errno in NO_ROOM else "failed", f"{put.key}: {error}")
        return DONE if done else self._exists(path, durable)

    def _exists(self, path: Path, durable: bool) -> Outcome:
        """Somebody has created it; have it on the disk too, if that is wanted."""
        try:
            if durable:
                fsync(path)
        except OSError as error:
            return Outcome("failed", f"{path.name}: {error}")
        return present(path.stem)

    def _sync_directory(self) -> str:
        """Have names on the disk; return "" or why they may not be."""
        try:
            fsync(self.directory)
        except OSError as error:
            return f"{self.directory}: {error}"
        return self._elsewhere()

    # ---- reading

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        check_keys(get.key for get in gets)
        wanted = [Pending(get) for get in gets]
        self._read(wanted, deadline)
        for each in wanted:
            if each.is_starved:  # the files of the others are closed by now, or can be
                self._read([each], deadline)
        return [each.outcome or checked(each.get) for each in wanted]

    def _read(self, wanted: Sequence[Pending], deadline: float | None) -> None:
        for piece, n in aio.read(self._pieces(wanted, deadline)):
            self._came(piece, n)

    def _pieces(self, wanted: Sequence[Pending], deadline: float | None) -> Iterator[FileRange]:
        """Open files, and yield what to read of them."""
        for each in wanted:
            each.outcome = refused(self._closed, deadline)
            pieces = self._begin(each) if each.outcome is None else []
            each.left = len(pieces)
            for piece in pieces:
                each.outcome = each.outcome or refused(False, deadline)
                if each.outcome is not None:
                    break
                yield piece

    def _begin(self, wanted: Pending) -> list[FileRange]:
        """Return what to read; nothing where there is an outcome already."""
        get = wanted.get
        try:
            file = self._opened(get.key)
        except FileNotFoundError:
            wanted.outcome = self._missing(get.key)
            return []
        except OSError as error:
            wanted.fail(error)
            return []
        wanted.outcome = outside(get, file.n)
        return [] if wanted.outcome is not None else wanted.ranges(file)

    def _came(self, piece: FileRange, n: int) -> None:
        """Read what is left of a piece, and compare the checksums of what is whole then."""
        each = piece.of
        try:
            if n < 0:
                raise OSError(-n, os.strerror(-n))
            if n < piece.n:
                self._spared(partial(piece.read, n))
        except OSError as error:
            self._forget(each.get.key)
            each.fail(error)
        each.left -= 1
        if not each.left:
            each.outcome = each.outcome or checked(each.get)

    def _opened(self, key: str) -> OpenFile:
        with self._lock:
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
                return found
        made = self._spared(partial(OpenFile, f"{self._prefix}{key}{SUFFIX}", self._direct))
        with self._lock:
            self._open[key] = made
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
        return made

    def _spared(self, opens: Callable[[], T]) -> T:
        """Make a call that opens a file; again without those that nobody reads, where there are too many."""
        try:
            return opens()
        except OSError as error:
            if error.errno not in MANY_OPEN:
                raise
        with self._lock:
            self._open.clear()
        return opens()

    def _forget(self, key: str) -> None:
        with self._lock:
            self._open.pop(key, None)

    def look(self, keys: Sequence[str], *, deadline: float | None = None) -> list[int | Outcome]:
        check_keys(keys)
        return [refused(self._closed, deadline) or self._look(key) for key in keys]

    def _look(self, key: str) -> int | Outcome:
        try:
            return self.path(key).stat().st_size
        except FileNotFoundError:
            return self._missing(key)
        except OSError as error:
            return Outcome("failed", f"{key}: {error}")

    def _missing(self, key: str) -> Outcome:
        """There is no such file; that says something only while this is the directory we opened."""
        why = self._elsewhere()
        return Outcome("failed", why) if why else absent(key)

    def _elsewhere(self) -> str:
        """Return why this is not the directory that was opened, or ""."""
        try:
            if _identity(self.directory) == self._identity:
                return ""
            why = "is another directory now; is it mounted?"
        except OSError as error:
            why = str(error)
        return f"{self.directory}: {why}"

    # ---- going

    def discard(self, keys: Sequence[str], *, deadline: float | None = None) -> list[Outcome]:
        check_keys(keys)
        return [refused(self._closed, deadline) or self._remove(key) for key in keys]

    def _remove(self, key: str) -> Outcome:
        self._forget(key)
        if why := self._elsewhere():
            return Outcome("failed", why)
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            there = self._missing(key)
            return DONE if there.state == "missing" else there
        except OSError as error:
            return Outcome("failed", f"{key}: {error}")
        return DONE

    def keys(self) -> Iterator[str]:
        return (key for key, _ in self._entries())

    def sizes(self) -> list[tuple[str, int]]:
        """Return keys with the bytes of their values. Raises StoreError."""
        found = []
        for key, entry in self._entries():
            try:
                found.append((key, entry.stat().st_size))
            except FileNotFoundError:
                continue  # it went meanwhile
            except OSError as error:
                raise self._unlisted(error) from error
        return found

    def _entries(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield the files of values, by key. Raises StoreError."""
        try:
            if self._closed or _identity(self.directory) != self._identity:
                raise OSError("the tier is closed" if self._closed else "it is another one now")
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    key = entry.name.removesuffix(SUFFIX)
                    if key != entry.name and is_key(key):
                        yield key, entry
        except OSError as error:
            raise self._unlisted(error) from error

    def _unlisted(self, error: OSError) -> StoreError:
        hint = "see whether the disk is there and mounted; nothing was changed"
        hint = MANY_OPEN.get(error.errno or 0, hint)
        return StoreError(f"cannot list {self.directory}: {error}", hint=hint)

    @property
    def n_bytes(self) -> int:
        return sum(taken(n) for _, n in self.sizes())

    def check_integrity(self) -> None:
        """Do nothing: no accounts are kept that could differ from the files."""

    def close(self) -> None:
        with self._lock:
            self._closed, self._pin = True, None
            self._open.clear()
        if self._claim is not None:
            self._claim.close()


def _identity(directory: Path) -> tuple[int, int]:
    found = directory.stat()
    return found.st_dev, found.st_ino
