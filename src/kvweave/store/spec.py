"""Levels from words: ``disk size=50GiB codec=int8``, ``redis url=redis://127.0.0.1:6379``.

::

    KIND [size=SIZE] [codec=CODEC] [what the kind takes]
    ram                         memory, coded; where the device is a GPU, the host's
    disk   [path=DIR] [shared=yes]   a directory, in the home or elsewhere; half of what is free
    files  [path=DIR] [shared=yes]   another one
    redis  url=URL [prefix=P]   Redis or Valkey
    mooncake master=HOST:PORT [listing=HOST:PORT] [segment=SIZE] [prefix=P]   Mooncake Store
    s3     url=URL [prefix=P]   whatever `obstore` reaches: s3://bucket, file:///archive, ...
"""

from __future__ import annotations

import shlex
import shutil
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from kvweave.chunk.place import is_inside, place_of
from kvweave.chunk.rebuild import there
from kvweave.config import Config, n_bytes
from kvweave.errors import InvalidArgument
from kvweave.keep import POLICIES
from kvweave.keep.base import Policy
from kvweave.store import codec
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record.transfer import Expected
from kvweave.store.shelf import Shelf
from kvweave.store.tier import old_slab
from kvweave.store.tier.base import Tier
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.files import taken
from kvweave.store.tier.guarded import Guarded, in_time, listed
from kvweave.store.tier.memory import Memory
from kvweave.store.tier.mooncake import Mooncake
from kvweave.store.tier.mooncake_cluster import Cluster
from kvweave.store.tier.owner import Claim, Relation, claim
from kvweave.store.tier.redis import Redis
from kvweave.store.tier.s3 import Archive

HUGE = 1 << 50  # bytes: as much as the disk has
_Words = dict[str, str]


def open_shelf(
    config: Config,
    home: Path | None,
    index: Sequence[str] | None,
    model: tuple[str, torch.device],
    about: Callable[[int], Expected],
    is_pinned: Callable[[int], bool],
) -> Shelf:
    """Return a shelf with the levels of ``config``; ``model`` is a fingerprint's digest and where
    the model runs, ``index`` the uuid of the index of ``home``, and those of the ones that it is a copy of.
    Raises as `open_levels`."""
    digest, device = model
    policy, budget = POLICIES[config.policy], n_bytes(config.budget)
    specs = ("disk",) if config.tiers is None and home is not None else config.tiers or ()
    uuid, *was = (None,) if index is None else index
    levels = open_levels(specs, home, digest, policy, uuid, was)
    with ExitStack() as failing:
        for level in levels:
            failing.callback(level.close)
        mover = Mover(
            levels, about, is_pinned=is_pinned, device=device, seconds=config.load_seconds
        )
        on = "gpu" if device.type == "cuda" else "ram"
        shelf = Shelf(budget, policy(budget), mover, is_pinned, on)
        failing.pop_all()
    return shelf


def open_levels(
    specs: Sequence[str],
    home: Path | None,
    model: str,
    policy: Callable[[int], Policy],
    index: str | None = None,
    was: Collection[str] = (),
) -> list[Level]:
    """Open the tiers of ``specs``, fastest first; ``model`` is the fingerprint's hex digest.

    ``policy`` makes the order of leaving from a budget in bytes, ``index`` is the uuid of the
    home's, ``was`` are those of which it is a copy. Raises InvalidArgument for words that mean nothing, or a directory that is another
    home's, StoreError for one that cannot be opened; what was opened is closed again then.
    """
    mine = None if index is None else (index, f"{socket.gethostname()}:{home}")
    levels: list[Level] = []
    with ExitStack() as failing:
        for spec in specs:
            kind, words = parse(spec)
            size = n_bytes(words.pop("size")) if "size" in words else None
            choice = codec.parse(words.pop("codec", "raw"))
            opened = KINDS[kind](words, Site(size, home, index, was))
            failing.callback(opened.tier.close)
            budget = opened.budget
            made = policy(budget or HUGE)
            level = Level(
                opened.tier, choice, model, made, budget, relation=opened.relation, index=mine
            )
            level.name = kind
            levels.append(level)
            if words:
                raise InvalidArgument(
                    "tier", f"{kind} does not take {', '.join(words)}", "leave that out"
                )
        failing.pop_all()
    return levels


class Site(NamedTuple):
    """What a kind is told besides its words."""

    size: int | None  # bytes
    home: Path | None
    uuid: str | None  # of the home's index
    was: Collection[str] = ()


class OpenTier(NamedTuple):
    """A tier, what it may take in bytes, and what it is to us."""

    tier: Tier
    budget: int | None
    relation: Relation = "shared"


def open_shared(spec: str) -> Tier:
    """Open the tier of one spec, which must be one that engines share. Raises InvalidArgument."""
    kind, words = parse(spec)
    words.pop("size", None)
    words.pop("codec", None)
    if kind in ("disk", "files"):
        words["shared"] = "yes"
    opened = KINDS[kind](words, Site(None, None, None))
    if opened.relation != "shared" or words:
        opened.tier.close()
        hint = "a home looks after its own; `kvweave fsck` checks it"
        raise InvalidArgument("tier", f"{spec!r} is not a tier that engines share", hint)
    return opened.tier


def parse(spec: str) -> tuple[str, _Words]:
    """Return the kind and the words of a spec. Raises InvalidArgument."""
    kind, *rest = shlex.split(spec) or [""]
    if kind not in KINDS:
        raise InvalidArgument("tier", f"no tier {kind!r}", f"one of {', '.join(KINDS)}")
    words = {}
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals:
            raise InvalidArgument("tier", f"{word!r} in {spec!r}", "write name=value")
        words[name] = value
    return kind, words


def _ram(words: _Words, site: Site) -> OpenTier:
    if site.size is None:
        raise InvalidArgument("tier", "ram has no size", "write: ram size=4GiB")
    return OpenTier(Memory(site.size), site.size, "mine")


def _directory(name: str) -> _Open:
    """Return what opens a directory of values; without ``size=`` it may take half of what is free."""

    def open_disk(words: _Words, site: Site) -> OpenTier:
        path, shared = words.pop("path", None), _yes(words)
        if path is None and site.home is None:
            raise InvalidArgument(
                "tier", f"{name} has no directory", "pass home=, or path=DIR here"
            )
        directory = Path(path) if path is not None else Path(str(site.home)) / name
        directory = in_time(directory.absolute, directory, bool)  # a program may go elsewhere

        def take() -> Claim:
            home = site.home
            inside = home is not None and is_inside(directory, home)
            at = "" if home is None or not there(home) else place_of(home)
            return claim(directory, site.uuid, shared=shared, inside=inside, was=site.was, at=at)

        def look() -> tuple[Disk, bool, int]:
            disk = Disk(directory, shared=relation == "shared", claimed=claimed)
            return disk, old_slab.is_in(directory), shutil.disk_usage(directory).free

        claimed = in_time(take, directory, Claim.close)
        relation = claimed.relation
        try:
            disk, has_slab, free = in_time(look, directory, lambda made: made[0].close())
            if has_slab and relation == "mine":
                old_slab.move(directory, disk)
            guarded = Guarded(disk, disk.apart)
            size = site.size
            if size is None:
                size = (free + sum(taken(n) for _, n in listed(guarded) if isinstance(n, int))) // 2
        except BaseException:
            claimed.close()
            raise
        return OpenTier(guarded, size, relation)

    return open_disk


def _yes(words: _Words) -> bool:
    said = words.pop("shared", "no")
    if said not in ("yes", "no"):
        raise InvalidArgument("tier", f"shared={said}", "write shared=yes, or leave it out")
    return said == "yes"


def _redis(words: _Words, site: Site) -> OpenTier:
    url, prefix = _needed(words, "redis", "url"), words.pop("prefix", "kvweave:")
    return OpenTier(Redis(url, prefix=prefix), site.size)


def _mooncake(words: _Words, site: Site) -> OpenTier:
    master, prefix = _needed(words, "mooncake", "master"), words.pop("prefix", "kvweave.")
    segment = n_bytes(words.pop("segment")) if "segment" in words else 0
    listing, host = words.pop("listing", ""), words.pop("host", "127.0.0.1")
    return OpenTier(Mooncake(Cluster(master, listing, host, segment), prefix=prefix), site.size)


def _s3(words: _Words, site: Site) -> OpenTier:
    url, prefix = _needed(words, "s3", "url"), words.pop("prefix", "kvweave")
    return OpenTier(Archive.at(url, prefix=prefix), site.size)


def _needed(words: _Words, kind: str, name: str) -> str:
    if name not in words:
        raise InvalidArgument("tier", f"{kind} needs {name}=", f"write: {kind} {name}=...")
    return words.pop(name)


_Open = Callable[[_Words, Site], OpenTier]
KINDS: Mapping[str, _Open] = {
    "ram": _ram, "disk": _directory("kv"), "files": _directory("files"),
    "redis": _redis, "mooncake": _mooncake, "s3": _s3,
}  # fmt: skip
