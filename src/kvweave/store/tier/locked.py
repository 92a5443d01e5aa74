"""One process for each directory: a file held with flock, its text the pid of the holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvweave.errors import InvalidArgument


class Hold:
    """An open lock file; ``file`` is -1 once it was let go."""

    def __init__(self, file: int) -> None:
        self.file = file


def hold(path: Path) -> Hold:
    """Take the lock; raise InvalidArgument naming the process that has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        pid = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise InvalidArgument(
            "directory",
            f"{path.parent} is open in process {pid}",
            hint="stop that process, or give another directory",
        ) from error
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return Hold(file)


def let_go(held: Hold) -> None:
    """Give the lock back; doing it twice does nothing."""
    if held.file >= 0:
        os.ftruncate(held.file, 0)
        os.close(held.file)
        held.file = -1
