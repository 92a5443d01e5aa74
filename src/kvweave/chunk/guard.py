"""What guards an index's file: its lock, its errors as ours, and a place for what is damaged."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvweave.chunk.format import damaged
from kvweave.errors import CorruptChunk, InvalidArgument, NoSpace, StoreError, is_full, of_system

_CORRUPT = (
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_TOOBIG,
)  # fmt: skip
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PIECE = 1 << 20

T = TypeVar("T")


@contextmanager
def as_ours(path: Path) -> Iterator[None]:
    """Raise SQLite's errors, and the system's, as ours."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise _explain(error, path) from error


def in_doubt(open_: Callable[[], T], *paths: Path) -> T:
    """Return what ``open_`` returns; where it finds these files damaged, read them and ask it once more:
    SQLite says that also of a read that was refused (SQLITE_IOERR_CORRUPTFS becomes SQLITE_CORRUPT).
    Raises OSError where they cannot be read now."""
    try:
        return open_()
    except (sqlite3.DatabaseError, CorruptChunk) as error:
        if isinstance(error, sqlite3.DatabaseError) and not _is_corrupt(error):
            raise
    _read(paths)
    return open_()


def doubt(error: sqlite3.Error, db: sqlite3.Connection | None, *paths: Path) -> None:
    """Raise OSError where these files, of which SQLite says in ``error`` that they are damaged, cannot be
    read now, and OperationalError where they are whole when they are read again."""
    if not _is_corrupt(error):
        return
    _read(paths)
    if db is not None and found_by(db, "integrity_check") == "ok":
        raise sqlite3.OperationalError("a read was refused, and is not now") from error


def _read(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
            while file.read(_PIECE):
                pass


def found_by(db: sqlite3.Connection, check: str, most: int = 1) -> str:
    """Return what SQLite's ``check`` finds in a file, "ok" if nothing. Raises OperationalError where it
    could not be read just now."""
    found = "; ".join(str(row[0]) for row in db.execute(f"PRAGMA {check}({most})"))
    code = re.search(r"error code=(\d+)", found)
    if code is not None and int(code[1]) & 0xFF != sqlite3.SQLITE_CORRUPT:
        raise sqlite3.OperationalError(found)
    return found


def _is_corrupt(error: Exception) -> bool:
    # the low byte is the error, the rest a refinement of it
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT


def _explain(error: Exception, path: Path) -> StoreError:
    if _is_corrupt(error) or "decode" in str(error):  # a text that is no UTF-8
        return damaged(path, str(error))
    if isinstance(error, OSError):
        return of_system(error, "use", path)
    where, code = {"path": str(path)}, getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _BUSY:
        hint = "close the program that has it open, then try again; nothing was changed"
        return StoreError(f"{path} is locked by another program", hint=hint, **where)
    if is_full(error):
        return NoSpace(f"cannot write {path}", str(path))
    if code == sqlite3.SQLITE_READONLY:
        return of_system(PermissionError(errno.EACCES, "it may only be read"), "write", path)
    hint = "look at the device, then try again; nothing was changed"
    if code == sqlite3.SQLITE_CANTOPEN:
        hint = "see its path and its rights, and whether too many files are open (`ulimit -n`)"
    return StoreError(f"cannot use {path}: {error}", hint=hint, **where)


def unsynced(error: Exception, path: Path) -> StoreError:
    """Return the error for an index of which nobody knows what would survive a power cut."""
    if is_full(error):
        return NoSpace(f"cannot sync {path}", str(path))
    hint = "mend or change the disk, then try again: all is written anew before it is confirmed"
    return StoreError(f"cannot sync {path}: {error}", hint=hint, path=str(path))


def take_lock(path: Path) -> int:
    """Return the locked file descriptor. Raises InvalidArgument naming the pid that holds it, StoreError
    where the system gives no lock, OSError."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    with ExitStack() as failing:
        failing.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise InvalidArgument(
                "home",
                f"{path.parent} is open in process {pid}",
                hint="stop that process, talk to its server, or give another home",
            ) from error
        except OSError as error:
            raise of_system(error, "lock", f"{path}.lock") from error
        failing.pop_all()
    with suppress(OSError):  # the text is for people; a full disk has no room for it
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def give_lock(lock: int) -> None:
    """Let a lock go, whatever the disk says; also of forks, which have a copy of it that keeps it.
    A fork itself only closes its copy."""
    with suppress(OSError):
        if os.pread(lock, 32, 0).strip() == str(os.getpid()).encode():
            with suppress(OSError):
                os.ftruncate(lock, 0)
            fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def lost_of(index: Path) -> Path:
    """Return the file that says what an index lost when it was salvaged.

    While it is there nobody removes KV because the index does not know it: its chunk may be among
    the lost ones, and come back with an older copy of the index, or when its text is put again.
    """
    return index.with_name(index.name + ".lost")


def free_name(path: Path, end: str = "") -> Path:
    """Return a name for a damaged file to be kept under: ``index.sqlite.damaged-1``, the first free."""
    n = 1
    while (found := path.with_name(f"{path.name}.damaged-{n}{end}")).exists():
        n += 1
    return found
