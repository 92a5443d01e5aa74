"""Look through the directories of a home: every record read, every checksum compared.

Needs neither the model nor an open engine. What it finds:

    spoilt     a record that does not verify, or is not what its name says
    strays     whole records of chunks that the index does not know
    missing    chunks that the index says are on disk, and are not
    unfinished files that a crash left half written
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvweave.chunk.identity import ModelFingerprint
from kvweave.errors import KVWeaveError, StoreError
from kvweave.store.record.layout import Head
from kvweave.store.record.transfer import digest_of, verify
from kvweave.store.tier.base import PAGE
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.owner import FILE, claim, mend

DIRECTORIES = ("kv", "files")  # of a home: the kinds disk and files without path=
UNFINISHED = re.compile(r"~[0-9a-f]{32}|.+\.\d+\.tmp")


@dataclass(slots=True)
class Found:
    """What one directory holds; ``repaired`` is what was done about it."""

    directory: str
    n_records: int = 0
    n_bytes: int = 0
    spoilt: dict[str, str] = field(default_factory=dict)
    """Key -> what is wrong with it."""
    strays: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Digests; their chunks are computed again when they are wanted."""
    unfinished: list[str] = field(default_factory=list)
    owner: str = ""
    """What is wrong with owner.json, if anything is."""
    repaired: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.spoilt or self.missing or self.owner)

    def to_dict(self) -> dict[str, object]:
        """Return the fields, JSON-ready."""
        return asdict(self) | {"ok": self.ok}


def check(
    directory: Path, model: str | None, chunks: dict[str, tuple[int, bool]], uuid: str, repair: bool
) -> Found:
    """Look through one directory.

    ``model`` is the home's fingerprint's digest (hex; None when it is not known), ``chunks`` maps
    digests to (tokens, whether the index says it is on disk). With ``repair`` spoilt records and
    what is unfinished are removed, strays kept. Raises StoreError.
    """
    found = Found(str(directory))
    if repair and mend(directory, uuid):
        found.repaired.append(f"{FILE}: written anew")
    try:
        claim(directory, uuid, shared=False, inside=True).close()
    except KVWeaveError as error:
        found.owner = str(error)
    disk = Disk(directory, shared=True)
    try:
        keys = [key for key in disk.keys() if digest_of(key)]
        for key in keys:
            why = _fault(disk, key, model, chunks.get(digest_of(key)))
            if why:
                found.spoilt[key] = why
            elif digest_of(key) not in chunks:
                found.strays.append(key)
        found.n_records, found.n_bytes = len(keys), disk.n_bytes
        there = {digest_of(key) for key in keys if key not in found.spoilt}
        found.missing = sorted(d for d, (_, on) in chunks.items() if on and d not in there)
        old = time.time() - 3600
        for path in directory.iterdir():
            if UNFINISHED.fullmatch(path.name) and path.stat().st_mtime < old:
                found.unfinished.append(path.name)
        if repair:
            for key, outcome in zip(found.spoilt, disk.discard([*found.spoilt]), strict=True):
                found.repaired.append(f"{key}: {'removed' if outcome.ok else outcome.why}")
            for name in found.unfinished:
                (directory / name).unlink(missing_ok=True)
                found.repaired.append(f"{name}: removed")
    finally:
        disk.close()
    return found


def _fault(disk: Disk, key: str, model: str | None, known: tuple[int, bool] | None) -> str:
    """Return what is wrong with a record, "" if nothing is."""
    head = _head(disk, key)
    if isinstance(head, str):
        return head
    if head.chunk != digest_of(key):
        return f"it is of the chunk {head.chunk[:12]}"
    if model is not None and head.model != model:
        return f"it is of the model {head.model[:12]}"
    if known is not None and head.n_tokens != known[0]:
        return f"it has {head.n_tokens} tokens, the index says {known[0]}"
    size = disk.look([key])[0]
    if size != head.n_bytes:
        return f"it is {size} bytes long, not {head.n_bytes}"
    outcome = verify(disk, key, head, None)
    return "" if outcome.ok else outcome.why


def _head(disk: Disk, key: str) -> Head | str:
    """Return the head of a record, whatever it is of, or why it cannot be read."""
    try:
        with disk.path(key).open("rb") as file:
            return Head.parse(file.read(Head.needs(file.peek(PAGE), key)), key)
    except (StoreError, OSError) as error:
        return str(error)


def model_of(home: Path) -> str | None:
    """Return the digest of the model a home is of, None when that cannot be read."""
    try:
        said = json.loads((home / "model.json").read_text())
        return ModelFingerprint.from_dict(said).digest().hex()
    except (OSError, ValueError, TypeError, KeyError, KVWeaveError):
        return None


def directories(home: Path) -> Iterable[Path]:
    """Return the directories of a home that hold values."""
    return [home / name for name in DIRECTORIES if (home / name).is_dir()]
