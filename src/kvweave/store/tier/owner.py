"""Whose directory it is: who may remove values, and who may not even write.

::

    owner.json   {"format": 1, "owner": "3f9c...", "shared": false, "place": "17:1795...", "home": ..., "sum": ...}
                 the uuid of an index, and where the directory and its home were (`kvweave.chunk.place`)

    mine     the index that has this uuid has it open: what it does not know is left of it
    cache    nobody's: engines without a home use it one after the other, or several at a time;
             values may go when room is needed, none is durable
    shared   of several engines by their users' wish: only `kvweave sweep` removes
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

from kvweave.chunk.place import is_at, place_of
from kvweave.chunk.rebuild import has_its_sum, with_sum, write_json
from kvweave.errors import FormatTooNew, InvalidArgument, StoreError, of_system

Relation = Literal["mine", "cache", "shared"]
FILE = "owner.json"
FORMAT = 1
PATIENCE = 0.3  # seconds that another may take to say whose a directory is


class Claim:
    """A directory that is open, and what it is to whoever opened it."""

    def __init__(self, relation: Relation, lock: int = -1) -> None:
        self.relation = relation
        self._lock, self._pid = lock, os.getpid()

    def close(self) -> None:
        """Let the directory go, whatever the disk says; doing it twice does nothing."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            if os.getpid() == self._pid:  # forks have a copy, which would keep it
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def claim(
    directory: Path,
    index: str | None,
    *,
    shared: bool,
    inside: bool,
    was: Collection[str] = (),
    at: str = "",
) -> Claim:
    """Make ``directory`` that of ``index`` (its uuid; None without a home), or find what it is.

    ``inside`` a home it is taken over with what is in it. One that ``was`` another's, of which our index
    is a copy, is ours if it was copied too, or claimed from where our home is ``at``. Raises InvalidArgument when it is another index's, or open
    elsewhere as its owner's; StoreError when it cannot be read or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        said = _read(directory / FILE)
        if said.get("shared"):
            return Claim("shared")
        owner = said.get("owner")
        if owner is not None and (shared or owner not in (index, *was)):
            raise _anothers(directory, owner in was)
        if not shared and owner is None and not _may_own(directory, index, inside):
            return Claim("cache")
        return _claim(directory, index, shared, inside, was, at)
    except FormatTooNew as error:
        if inside:  # a home: its index would say so too
            error.hint += ", or, if no later one was here, `kvweave fsck --repair` writes it anew"
        raise
    except OSError as error:
        raise of_system(error, "claim", directory) from error


def _may_own(directory: Path, index: str | None, inside: bool) -> bool:
    """Tell whether what is nobody's can be ours: somebody's values are not left-overs of ours."""
    return index is not None and (inside or all(p.suffix != ".kv" for p in directory.iterdir()))


def _claim(
    directory: Path,
    index: str | None,
    shared: bool,
    inside: bool,
    was: Collection[str],
    at: str,
) -> Claim:
    """Read again whose it is, now that nobody else can say that it is theirs, and say so."""
    lock, keeps = _locked(directory), False
    try:
        here = place_of(directory)
        said = _read(directory / FILE)
        owner, place = said.get("owner"), str(said.get("place", ""))
        if said.get("shared"):
            return Claim("shared")
        if owner is None and shared:
            _write(directory, {"owner": None, "shared": True})
            return Claim("shared")
        home = str(said.get("home", ""))
        is_copied = not is_at(place, here) if place else inside
        is_ours = owner in was and (is_copied or (home != "" and is_at(home, at)))
        if owner is not None and not (owner == index or is_ours):
            raise _anothers(directory, owner in was)
        if owner is None and not _may_own(directory, index, inside):
            return Claim("cache")
        if (owner, place, home) != (index, here, at):
            _write(directory, {"owner": index, "shared": False, "place": here, "home": at})
        keeps = True
        return Claim("mine", lock)
    finally:
        if not keeps:
            Claim("mine", lock).close()


def _locked(directory: Path) -> int:
    """Return the lock of a directory. Who only says whose it is has it for a moment. Raises
    InvalidArgument."""
    lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError as error:
            if time.monotonic() >= ends:
                os.close(lock)
                raise InvalidArgument(
                    "tier",
                    f"{directory} is open in another process",
                    "stop that, or give another path=",
                ) from error
            time.sleep(0.01)
        except BaseException:
            os.close(lock)
            raise


def _anothers(directory: Path, is_original: bool) -> InvalidArgument:
    if not is_original:
        hint = "give another path=, or make one that several may use with shared=yes"
        return InvalidArgument("tier", f"{directory} belongs to another home", hint)
    return InvalidArgument(
        "tier",
        f"{directory} belongs to the home that this one is a copy of",
        "give another path=; if there is no other any more, `kvweave fsck --repair --take-over` with"
        f" --tier 'disk path={directory}'",
    )


def owner_of(directory: Path) -> str | None:
    """Return the uuid that a directory's ``owner.json`` says, None when it says none.

    Raises StoreError when it cannot be understood, FormatTooNew, OSError.
    """
    owner = _read(directory / FILE).get("owner")
    return None if owner is None else str(owner)


def disown(directory: Path) -> None:
    """Have ``owner.json`` written anew by the next `claim`. Raises OSError, InvalidArgument when the
    directory is open in another process."""
    with closing(Claim("mine", _locked(directory))):
        (directory / FILE).unlink(missing_ok=True)


def _write(directory: Path, said: dict[str, object]) -> None:
    write_json(directory / FILE, with_sum({"format": FORMAT, **said}))


def _read(file: Path) -> dict[str, object]:
    try:
        said = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        said = None
    found = said.get("format") if isinstance(said, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise FormatTooNew(str(file), found, FORMAT)
    if not isinstance(said, dict) or found != FORMAT or not has_its_sum(said):
        raise StoreError(
            f"{file} does not say whose directory this is",
            hint="`kvweave fsck --repair` writes it anew; until then nothing here is touched",
            path=str(file),
        )
    return said
