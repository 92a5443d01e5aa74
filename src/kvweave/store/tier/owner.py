"""Whose directory it is: who may remove values, and who may not even write.

::

    owner.json   {"format": 1, "owner": "3f9c...", "shared": false}      the uuid of an index

    mine     the index that has this uuid has it open: what it does not know is left of it
    cache    nobody's: engines without a home use it one after the other, or several at a time;
             values may go when room is needed, none is durable
    shared   of several engines by their users' wish: only `kvweave sweep` removes
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Literal

from kvweave.chunk.rebuild import write_json
from kvweave.errors import InvalidArgument, StoreError, of_system

Relation = Literal["mine", "cache", "shared"]
FILE = "owner.json"


class Claim:
    """A directory that is open, and what it is to whoever opened it."""

    def __init__(self, relation: Relation, lock: int = -1) -> None:
        self.relation = relation
        self._lock, self._pid = lock, os.getpid()

    def close(self) -> None:
        """Let the directory go; doing it twice does nothing."""
        if self._lock >= 0:
            if os.getpid() == self._pid:  # forks have a copy, which would keep it
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1


def claim(directory: Path, index: str | None, *, shared: bool, inside: bool) -> Claim:
    """Make ``directory`` that of ``index`` (its uuid; None without a home), or find what it is.

    ``inside`` a home it is taken over with what is in it. Raises InvalidArgument when it is another
    index's, or open elsewhere as its owner's; StoreError when it cannot be read or written.
    """
    try:
        return _claim(directory, index, shared, inside)
    except OSError as error:
        raise of_system(error, "claim", directory) from error


def _claim(directory: Path, index: str | None, shared: bool, inside: bool) -> Claim:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILE
    said = _read(file)
    owner, is_shared = said.get("owner"), bool(said.get("shared"))
    if is_shared or (shared and owner is None):
        if not is_shared:
            write_json(file, {"format": 1, "owner": None, "shared": True})
        return Claim("shared")
    if owner is not None and (owner != index or shared):
        raise InvalidArgument(
            "tier",
            f"{directory} belongs to another home",
            "give another path=, or make one that several may use with shared=yes",
        )
    if index is None:
        return Claim("cache")
    if owner is None and not inside and any(p.suffix == ".kv" for p in directory.iterdir()):
        return Claim("cache")  # somebody's values are there: they are not left-overs of ours
    lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if owner is None:
            write_json(file, {"format": 1, "owner": index, "shared": False})
    except BlockingIOError as error:
        os.close(lock)
        raise InvalidArgument(
            "tier",
            f"{directory} is open in another process",
            "stop that, or give another path=",
        ) from error
    except BaseException:
        os.close(lock)
        raise
    return Claim("mine", lock)


def owner_of(directory: Path) -> str | None:
    """Return the uuid that a directory's ``owner.json`` says, None when it says none.

    Raises StoreError when it cannot be understood, OSError.
    """
    owner = _read(directory / FILE).get("owner")
    return None if owner is None else str(owner)


def disown(directory: Path) -> None:
    """Have ``owner.json`` written anew by the next `claim`. Raises OSError."""
    (directory / FILE).unlink(missing_ok=True)


def _read(file: Path) -> dict[str, object]:
    try:
        said = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        said = None
    if not isinstance(said, dict) or said.get("format") != 1:
        raise StoreError(
            f"{file} does not say whose directory this is",
            hint="`kvweave fsck --repair` writes it anew; until then nothing here is touched",
            path=str(file),
        )
    return said
