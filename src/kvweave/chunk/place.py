"""Where a directory is: how what is a copy is told from what it is a copy of.

A copy has all that its original has, whose it is too. What it has not is the directory itself: its inode,
and when that was made, which renaming keeps and no program that copies files can give to another. So
whatever says whose it is says also where it was; elsewhere it is a copy. Copies of a whole device (clones
of volumes and of machines) cannot be told apart in this way.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from pathlib import Path

from kvweave.chunk.rebuild import fsync, put_in_place, there

_LIBC = ctypes.CDLL(None)
_HERE, _BORN = -100, 0x800  # AT_FDCWD, STATX_BTIME
Inode = tuple[int, int]


def place_of(directory: Path) -> str:
    """Return what tells a directory from all others: ``INODE:BIRTH``, 0 where nobody knows when that
    was. Raises OSError."""
    found = directory.stat()
    born = getattr(found, "st_birthtime", None)
    return f"{found.st_ino}:{_born(directory) if born is None else int(born * 1e9)}"


def is_at(place: str, here: str) -> bool:
    """Tell whether two places may be the same one."""
    inode, _, born = place.partition(":")
    other, _, when = here.partition(":")
    return inode == other and (born == when or "0" in (born, when))


def inode_of(path: Path) -> Inode:
    """Return what is called ``path`` now. Raises OSError."""
    found = path.stat()
    return found.st_dev, found.st_ino


def is_still(path: Path, inode: Inode | None) -> bool:
    """Tell whether ``path`` is still what was opened, as far as anybody can tell; None: nobody knows what was."""
    try:
        return inode is None or inode_of(path) == inode
    except FileNotFoundError:
        return False
    except OSError:
        return True


def is_inside(directory: Path, home: Path) -> bool:
    """Tell whether a directory is in a home, and no link leads out of it. Raises OSError."""
    return directory.resolve().is_relative_to(home.resolve())


def part(path: Path) -> None:
    """Have a file that has other names too (`cp -al`) be our own: it is going to be changed in place.
    Raises OSError."""
    if not there(path) or path.stat().st_nlink == 1:
        return
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    try:
        with path.open("rb") as old, new.open("xb") as file:
            shutil.copymode(path, new)
            shutil.copyfileobj(old, file, 1 << 20)
        fsync(new)
        put_in_place(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _born(path: Path) -> int:
    """Return when a file was made, in ns; 0 where nobody knows."""
    buffer = ctypes.create_string_buffer(256)
    statx = getattr(_LIBC, "statx", None)
    if statx is None or statx(_HERE, os.fsencode(path), 0, _BORN, buffer):
        return 0
    (mask,) = struct.unpack_from("=I", buffer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    return seconds * 10**9 + nanoseconds if mask & _BORN else 0
