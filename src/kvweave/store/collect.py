"""Mark and sweep for tiers that engines share: nothing that an index names is ever removed.

::

    sweep                                    an engine that puts a chunk durably
    1  which records do no indexes name?     a  commit the chunk's row
    2  mark them:  KEY.doomed                b  is KEY marked? then use another name (KEY.1)
    3  read the indexes again                c  create KEY, or find it
    4  unmark what is named now
    5  remove what was marked long enough    so: b before 2, then a before 3, and 4 saves KEY;
    6  remove its mark                           b after 2, then KEY is not relied on

That every index which relies on the tier was read is checked too, before 1 and again behind 3: each
registers on it (``index.UUID``) before b. A second sweep would remove at 4 or 6 marks that the first one
relies on, so each registers too (``index.sweep.UUID``), and goes only where no other does.
A sweep writes before it removes: for a tier that is full whoever registers leaves it room (`SPARE`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from uuid import uuid4

from kvweave.chunk.rebuild import is_process
from kvweave.chunk.seal import boot_id
from kvweave.errors import InvalidArgument, KVWeaveError, StoreError
from kvweave.store.record.transfer import MARK, digest_of
from kvweave.store.tier.base import Get, Outcome, Put, Tier
from kvweave.store.tier.keys import is_key, pages

REGISTERED = "index."
SWEEPING = "sweep."  # behind it: a sweep
SPARE, ROOM = "spare", 1 << 16  # bytes that a sweep may take where there is no other room
LONGEST = 86400.0  # seconds; a sweep of elsewhere that is older is over
TOGETHER = 500  # keys of one request
SECONDS = 60.0  # of one request
LEAVING = 2.0  # seconds: a server that failed is left alone, and what stays holds up other machines
log = logging.getLogger("kvweave.store")
_under_way: set[str] = set()  # sweeps of this process


@dataclass(slots=True)
class Swept:
    """What a sweep found and did; with ``dry_run`` what it would have done."""

    n_records: int = 0
    n_named: int = 0
    n_bytes: int = 0
    """Of what was removed."""
    removed: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Named by nobody, marked, and not long enough yet."""
    failed: list[str] = field(default_factory=list)
    """What could not be marked or removed now: the next sweep tries it again. The log says why."""

    def fail(self, key: str, outcome: Outcome) -> None:
        """Note that a record stays."""
        log.warning("%s stays for now: %s", key, outcome.why or outcome.state)
        self.failed.append(key)

    def to_dict(self) -> dict[str, object]:
        """Return the fields, JSON-ready."""
        return asdict(self)


def register(tier: Tier, index: str, where: str, deadline: float | None) -> Outcome:
    """Say on a tier that an index relies on it; doing it again changes nothing."""
    said = memoryview(json.dumps({"where": where}).encode())
    (outcome,) = tier.put([Put(REGISTERED + index, [said])], durable=True, deadline=deadline)
    if outcome.state in ("done", "exists"):
        _spare(tier, deadline)
    return outcome


def _spare(tier: Tier, deadline: float | None) -> None:
    """Keep some room for sweeps, if there is any; where that fails there is none."""
    (there,) = tier.look([SPARE], deadline=deadline)
    if isinstance(there, Outcome) and there.state == "missing":
        tier.put([Put(SPARE, [memoryview(bytes(ROOM))])], deadline=deadline)


def _written(tier: Tier, puts: Sequence[Put], *, durable: bool = False) -> list[Outcome]:
    """Create what a sweep has to say, on a full tier in the room that is kept for it."""
    outcomes = tier.put(puts, durable=durable, deadline=_soon())
    left = [i for i, outcome in enumerate(outcomes) if outcome.state == "full"]
    if left:
        tier.discard([SPARE], deadline=_soon())
        again = tier.put([puts[i] for i in left], durable=durable, deadline=_soon())
        for i, outcome in zip(left, again, strict=True):
            outcomes[i] = outcome
    return outcomes


def _registered(tier: Tier, index: str) -> str:
    """Return the key of an index. Raises InvalidArgument for what begins none, or several."""
    there = [key for key in tier.keys() if index and key.startswith(REGISTERED + index)]
    if len(there) != 1:
        several = ", ".join(key.removeprefix(REGISTERED) for key in there)
        hint = "a sweep that was not given all indexes says which are registered"
        raise InvalidArgument("retire", f"{index!r} is {several or 'no index here'}", hint)
    return there[0]


def sweep(
    tier: Tier,
    marks: Callable[[], set[str]],
    indexes: set[str],
    *,
    grace: float = 0.0,
    dry_run: bool = False,
    retired: Sequence[str] = (),
) -> Swept:
    """Remove the records whose chunk no index names, and that have been marked for ``grace`` seconds.

    ``marks`` reads the digests (hex) that the indexes name now, ``indexes`` are their uuids; those that
    are ``retired`` first, each by its uuid or how that begins, are no more. Raises InvalidArgument, with
    nothing changed, when that is of none or several, or another index is registered; StoreError when another
    sweep is under way, or the tier cannot be read.
    """
    gone = {_registered(tier, each) for each in retired}
    if dry_run:
        return _would(tier, marks, indexes, gone)
    with _alone(tier) as mine:
        keys = [key for key in _listed(tier, mine) if key not in gone]
        _require_alone(tier, keys, mine)
        _require_known(tier, keys, indexes)
        _done(tier.discard(sorted(gone), deadline=_soon()))
        return _sweep(
            tier, marks, lambda: _require_known(tier, _listed(tier, mine), indexes), keys, grace
        )


def _listed(tier: Tier, mine: str) -> list[str]:
    """Return all keys. Raises StoreError where the list is older than we are, or was cut before sweeps."""
    keys = sorted(set(tier.keys()))
    if mine not in keys:
        hint = "nothing was removed; try again, or see whether all of it comes through"
        raise StoreError("the list of what is there lacks what was put just now", hint=hint)
    return keys


def _would(tier: Tier, marks: Callable[[], set[str]], indexes: set[str], gone: set[str]) -> Swept:
    keys = [key for key in tier.keys() if key not in gone]
    _require_known(tier, keys, indexes)
    found, unnamed = _unnamed(keys, marks())
    sizes = [n for batch in pages(unnamed, TOGETHER) for n in tier.look(batch, deadline=_soon())]
    found.n_bytes, found.removed = sum(n for n in sizes if isinstance(n, int)), unnamed
    return found


def _unnamed(keys: Sequence[str], named: set[str]) -> tuple[Swept, list[str]]:
    records = [key for key in keys if digest_of(key) and is_key(key + MARK)]
    unnamed = [key for key in records if digest_of(key) not in named]
    return Swept(len(records), len(records) - len(unnamed)), unnamed


def _sweep(
    tier: Tier,
    marks: Callable[[], set[str]],
    nobody_came: Callable[[], None],
    keys: Sequence[str],
    grace: float,
) -> Swept:
    found, unnamed = _unnamed(keys, marks())
    marked = {key.removesuffix(MARK) for key in keys if key.endswith(MARK)}
    made: list[str] = []
    for batch in pages([key for key in unnamed if key not in marked], TOGETHER):
        said = memoryview(json.dumps({"at": time.time()}).encode())
        puts = [Put(key + MARK, [said]) for key in batch]
        for key, outcome in zip(batch, _written(tier, puts, durable=True), strict=True):
            made += [key] if outcome.ok else []
            if outcome.state not in ("done", "exists"):
                found.fail(key, outcome)
    named = marks()  # whoever did not see a mark had committed his row before: it is read now
    records = {key for key in keys if digest_of(key)}
    gone_before = marked - records  # an earlier sweep ended between 5 and 6
    alive = {key for key in [*unnamed, *marked] if digest_of(key) in named}
    doomed = [key for key in unnamed if key not in alive and key not in found.failed]
    if doomed:
        try:  # or his index was not registered when we looked
            nobody_came()
        except KVWeaveError:
            _unmark(tier, made, found)
            raise
    _unmark(tier, sorted(alive), found)
    _remove(tier, doomed, marked, grace, found)
    _unmark(tier, sorted({*found.removed, *(gone_before - alive)}), found)
    return found


@contextmanager
def _alone(tier: Tier) -> Iterator[str]:
    """Register as a sweep; yield the key."""
    said = {"at": time.time(), "pid": os.getpid(), **_here()}
    said["where"] = f"a sweep, {said['host']}:{said['pid']}"
    key = f"{REGISTERED}{SWEEPING}{uuid4().hex}"
    _under_way.add(key)
    try:
        _done(_written(tier, [Put(key, [memoryview(json.dumps(said).encode())])]))
        yield key
    finally:
        _under_way.discard(key)  # then it is over, also where that cannot be said now
        ends = time.monotonic() + LEAVING
        while not (gone := tier.discard([key], deadline=_soon())[0]).ok and time.monotonic() < ends:
            time.sleep(LEAVING / 20)
        if gone.ok:
            _spare(tier, _soon())
        else:
            log.warning("%s stays for now: %s", key, gone.why or gone.state)


def _require_alone(tier: Tier, keys: Sequence[str], mine: str) -> None:
    """Raise StoreError while another sweep is under way."""
    for key in (key for key in keys if key != mine and key.startswith(REGISTERED + SWEEPING)):
        name = key.removeprefix(REGISTERED)
        if not _is_over(key, _read(tier, key)):
            raise StoreError(
                f"another sweep is under way here: {name[:14]} ({_where(tier, name)})",
                hint=f"let it end; if it is no more, give --retire {name[:14]}",
            )
        _done(tier.discard([key], deadline=_soon()))


def _here() -> dict[str, str]:
    """Return where the number of a process means that process: in another container it is another's."""
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        pids = ""
    return {"host": socket.gethostname(), "boot": boot_id().hex(), "pids": pids}


def _is_over(key: str, said: dict[str, object]) -> bool:
    """Tell whether a sweep surely is no more; nothing is known where it cannot be read."""
    at = said.get("at")
    if key in _under_way or not isinstance(at, int | float):
        return False
    if all(said.get(name) == value for name, value in _here().items()) and any(boot_id()):
        return said.get("pid") == os.getpid() or not is_process(str(said.get("pid")))
    return at < time.time() - LONGEST


def _require_known(tier: Tier, keys: Sequence[str], known: set[str]) -> None:
    """Raise InvalidArgument where an index is registered that is not ``known``."""
    there = {key.removeprefix(REGISTERED) for key in keys if key.startswith(REGISTERED)}
    others = {each for each in there - known if not each.startswith(SWEEPING)}
    if others:
        some = ", ".join(f"{uuid[:8]} ({_where(tier, uuid)})" for uuid in sorted(others))
        hint = "give --index for each of them, or --retire UUID for one that is no more"
        raise InvalidArgument("index", f"others keep chunks here too: {some}", hint)


def _remove(tier: Tier, doomed: list[str], marked: set[str], grace: float, found: Swept) -> None:
    now = time.time()
    for batch in pages(doomed, TOGETHER):
        old = batch  # what was marked just now has no time to wait, unless there is a grace
        if grace > 0:
            at = {key: _marked_at(tier, key) for key in batch if key in marked}
            old = [key for key, then in at.items() if then <= now - grace]
            # marks of a clock that was ahead, or that are spoilt: the next sweep makes them anew
            _unmark(tier, [key for key, then in at.items() if then > now], found)
        found.waiting += [key for key in batch if key not in old]
        sizes = tier.look(old, deadline=_soon())
        for key, size, outcome in zip(old, sizes, tier.discard(old, deadline=_soon()), strict=True):
            if outcome.ok:
                found.removed.append(key)
                found.n_bytes += size if isinstance(size, int) else 0
            else:
                found.fail(key, outcome)


def _unmark(tier: Tier, keys: Sequence[str], found: Swept) -> None:
    for batch in pages(keys, TOGETHER):
        outcomes = tier.discard([key + MARK for key in batch], deadline=_soon())
        for key, outcome in zip(batch, outcomes, strict=True):
            if not outcome.ok:
                found.fail(key, outcome)


def _read(tier: Tier, key: str) -> dict[str, object]:
    n = tier.look([key], deadline=_soon())[0]
    if isinstance(n, Outcome) or n > ROOM:  # larger than anything that is said here
        return {}
    data = bytearray(n)
    _done(tier.get([Get(key, 0, [memoryview(data)])], deadline=_soon()))
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _marked_at(tier: Tier, key: str) -> float:
    at = _read(tier, key + MARK).get("at")
    return float(at) if isinstance(at, int | float) and abs(at) < 1e15 else math.inf


def _where(tier: Tier, uuid: str) -> str:
    return str(_read(tier, REGISTERED + uuid).get("where", "nobody knows where"))


def _done(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if not outcome.ok:
            full = outcome.state == "full"
            hint = "a sweep writes first: free a page there" if full else "nothing was removed"
            raise StoreError(outcome.why, hint=f"{hint}; try again")


def _soon() -> float:
    return time.monotonic() + SECONDS
