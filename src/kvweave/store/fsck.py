"""Look through the directories of a home: every record read, every checksum compared.

Needs neither the model nor an open engine. What it finds:

    spoilt     a record that does not verify, or is not what its name says
    strays     whole records of chunks that the index does not know
    foreign    whole records of its chunks that say another model than ``model.json``: one of the two is
               wrong, and nothing in a record can be, as it has a checksum
    missing    chunks that the index says are on disk, and are not
    unfinished files that a crash left half written
    unread     records that the device refuses to read now: that says nothing of them, and they stay

Records that a later version of kvweave wrote are none of that, and are left alone. In a directory that is
not this home's alone, whatever was said of it, records stay.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

from kvweave.chunk.guard import lost_of
from kvweave.chunk.identity import ModelFingerprint
from kvweave.chunk.place import place_of
from kvweave.chunk.rebuild import there, write_json
from kvweave.errors import FormatTooNew, InvalidArgument, KVWeaveError, StoreError
from kvweave.store.collect import REGISTERED
from kvweave.store.record.layout import Head
from kvweave.store.record.transfer import digest_of, verify
from kvweave.store.spec import parse
from kvweave.store.tier.base import PAGE, Outcome
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.owner import FILE, claim, disown, owner_of

DIRECTORIES = ("kv", "files")  # of a home: the kinds disk and files without path=
Chunks: TypeAlias = dict[str, tuple[int, bool]]
UNFINISHED = re.compile(r"~[0-9a-f]{32}|.+\.\d+\.tmp")


@dataclass(slots=True)
class Found:
    """What one directory holds; ``repaired`` is what was done about it."""

    directory: str
    n_records: int = 0
    n_bytes: int = 0
    spoilt: dict[str, str] = field(default_factory=dict)
    """Key -> what is wrong with it."""
    unread: dict[str, str] = field(default_factory=dict)
    """Key -> why it could not be read."""
    strays: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    n_ours: int = 0
    """Whole records of the index's chunks that say the model of ``model.json``."""
    missing: list[str] = field(default_factory=list)
    """Digests; their chunks are computed again when they are wanted."""
    unfinished: list[str] = field(default_factory=list)
    owner: str = ""
    """What is wrong with owner.json, if anything is."""
    repaired: list[str] = field(default_factory=list)
    there: set[str] = field(default_factory=set, repr=False)
    """Digests of the chunks that have a good record here, or may have."""

    @property
    def ok(self) -> bool:
        return not (self.spoilt or self.unread or self.foreign or self.missing or self.owner)

    def to_dict(self) -> dict[str, object]:
        """Return the fields, JSON-ready."""
        told = asdict(self) | {"ok": self.ok}
        del told["there"], told["n_ours"]
        return told


@dataclass(frozen=True, slots=True)
class Known:
    """What a home says of what ought to be in its tiers."""

    index: Path
    uuid: str
    chunks: Chunks
    """Digest -> tokens, and whether the index says that its KV is on disk."""
    model: str | None = None
    """The fingerprint's digest, hex; None when it cannot be read."""
    was: Collection[str] = ()
    """The uuids of the indexes that ours is a copy of."""

    def has(self, directory: Path) -> bool:
        """Tell whether a directory lies in the home itself, and no link leads out of it."""
        return directory.resolve().parent == self.index.parent.resolve()


def check(
    directory: Path,
    known: Known,
    *,
    repair: bool = False,
    discard_strays: bool = False,
    take_over: bool = False,
) -> Found:
    """Look through one directory.

    With ``repair`` spoilt records and what is unfinished are removed; strays are kept unless
    ``discard_strays`` says otherwise. An ``owner.json`` that is damaged, or in the home of another
    index, is written anew; so is that of the home that this one is a copy of, to ``take_over`` what is
    its. Then engines keep the strays too, and so does this run, of a directory elsewhere. Raises
    StoreError, OSError.
    """
    found = Found(str(directory))
    inside = known.has(directory)
    if repair and _is_to_be_ours(directory, known, take_over):
        discard_strays &= inside  # what of others is here, whoever it was asks for a second time
        inside = _disown(directory, known)
        found.repaired.append(f"{FILE}: written anew")
    is_ours = False
    try:
        at = place_of(known.index.parent)
        made = claim(directory, known.uuid, shared=False, inside=inside, was=known.was, at=at)
        is_ours = made.relation == "mine"
        made.close()
    except KVWeaveError as error:
        found.owner = str(error)
        if not known.has(directory):
            return found  # another home's, as far as anybody knows
    disk = Disk(directory, shared=True)
    try:
        _look_through(found, disk, known if is_ours or found.owner else None)
        on_disk = {digest for digest, (_, on) in known.chunks.items() if on}
        found.missing = sorted(on_disk - found.there)
        if is_ours or found.owner:
            _tidy(found, disk, repair, discard_strays)
    finally:
        disk.close()
    return found


def _tidy(found: Found, disk: Disk, repair: bool, discard_strays: bool) -> None:
    old = time.time() - 3600
    for path in disk.directory.iterdir():
        if UNFINISHED.fullmatch(path.name) and path.stat().st_mtime < old:
            found.unfinished.append(path.name)
    if repair:
        gone = [*found.spoilt, *(found.strays if discard_strays else ())]
        for key, outcome in zip(gone, disk.discard(gone), strict=True):
            found.repaired.append(f"{key}: {'removed' if outcome.ok else outcome.why}")
        for name in found.unfinished:
            (disk.directory / name).unlink(missing_ok=True)
            found.repaired.append(f"{name}: removed")


def _is_to_be_ours(directory: Path, known: Known, take_over: bool) -> bool:
    try:
        owner = owner_of(directory)
    except StoreError as error:  # a later kvweave's is another home's, unless it is in ours
        return not isinstance(error, FormatTooNew) or known.has(directory)
    if owner in known.was and take_over:
        return True
    return owner not in (None, known.uuid, *known.was) and known.has(directory)


def _disown(directory: Path, known: Known) -> bool:
    """Have ``owner.json`` written anew: as ours, unless indexes are registered there; then it is shared.
    Return whether it is to be ours."""
    if not known.has(directory) and any(directory.glob(f"{REGISTERED}*")):
        disown(directory)
        claim(directory, None, shared=True, inside=False).close()
        return False
    if not there(lost_of(known.index)):
        write_json(lost_of(known.index), {"taken_over": str(directory)})
    disown(directory)
    return True


def _look_through(found: Found, disk: Disk, known: Known | None) -> None:
    """Read all records; ``known`` is what the home says of them where the directory is its own."""
    keys = [key for key in disk.keys() if digest_of(key)]
    for key in keys:
        about = None if known is None else known.chunks.get(digest_of(key))
        try:
            head, why = _fault(disk, key, about)
        except OSError as error:
            found.unread[key] = str(error)
            continue
        if why:
            found.spoilt[key] = why
        elif known is not None and about is None:
            found.strays.append(key)
        elif known is not None and head is not None and known.model is not None:
            is_ours = head.model == known.model
            found.n_ours += is_ours
            found.foreign += [] if is_ours else [key]
    found.n_records, found.n_bytes = len(keys), disk.n_bytes
    found.there = {digest_of(key) for key in keys if key not in found.spoilt}


def _fault(disk: Disk, key: str, about: tuple[int, bool] | None) -> tuple[Head | None, str]:
    """Return what a record says, None where a later version wrote it, and what is wrong with it, "" if
    nothing is. Raises OSError where it cannot be read."""
    try:
        head = _head(disk, key)
    except FormatTooNew:
        return None, ""
    except StoreError as error:
        return None, str(error)
    if head.chunk != digest_of(key):
        return head, f"it is of the chunk {head.chunk[:12]}"
    if about is not None and head.n_tokens != about[0]:
        return head, f"it has {head.n_tokens} tokens, the index says {about[0]}"
    size = disk.look([key])[0]
    if isinstance(size, Outcome):
        raise OSError(size.why)
    if size != head.n_bytes:
        return head, f"it is {size} bytes long, not {head.n_bytes}"
    outcome = verify(disk, key, head, None)
    if outcome.state in ("done", "wrong"):
        return head, outcome.why
    raise OSError(outcome.why)


def _head(disk: Disk, key: str) -> Head:
    """Return the head of a record, whatever it is of. Raises StoreError, OSError."""
    with disk.path(key).open("rb") as file:
        return Head.parse(file.read(Head.needs(file.peek(PAGE), key)), key)


def model_of(home: Path) -> str | None:
    """Return the digest of the model a home is of, None where nothing says it. Raises FormatTooNew, OSError."""
    try:
        said = json.loads((home / "model.json").read_text())
        return ModelFingerprint.from_dict(said).digest().hex()
    except (FileNotFoundError, ValueError, TypeError, InvalidArgument):
        return None


def directories(home: Path, specs: Iterable[str]) -> list[Path]:
    """Return the directories of values that are a home's own: those in it, and those of tiers.

    Raises InvalidArgument for a spec that means nothing.
    """
    found = {path.parent for path in home.glob(f"*/{FILE}")}
    found |= {home / name for name in DIRECTORIES if (home / name).is_dir()}
    found |= _paths(specs, shared=False)
    return sorted(path for path in found if path.is_dir())


def check_shared(specs: Iterable[str], *, repair: bool = False) -> list[Found]:
    """Look through the directories among ``specs`` that engines share.

    Spoilt records stay: engines pass them over. With ``repair`` an ``owner.json`` that is damaged is
    written anew. Raises InvalidArgument for a spec that means nothing, StoreError, OSError.
    """
    checked = []
    for directory in sorted(path for path in _paths(specs, shared=True) if path.is_dir()):
        found = Found(str(directory))
        checked.append(found)
        try:
            owner_of(directory)
        except StoreError as error:
            if repair and not isinstance(error, FormatTooNew):
                disown(directory)
                claim(directory, None, shared=True, inside=False).close()
                found.repaired.append(f"{FILE}: written anew")
            else:
                found.owner = str(error)
        disk = Disk(directory, shared=True)
        _look_through(found, disk, None)
        disk.close()
    return checked


def compare(checked: Sequence[Found]) -> None:
    """Have `missing` what none of these directories has, once: a home may have several levels on disk."""
    known = set[str]().union(*(each.there for each in checked))
    for found in checked:
        found.missing = [digest for digest in found.missing if digest not in known]
        known |= set(found.missing)


def _paths(specs: Iterable[str], *, shared: bool) -> set[Path]:
    said = [words for kind, words in map(parse, specs) if kind in ("disk", "files")]
    here = [words for words in said if (words.get("shared") == "yes") == shared]
    return {Path(words["path"]) for words in here if "path" in words}
