"""Levels from words: ``disk size=50GiB codec=int8``, ``redis url=redis://127.0.0.1:6379``.

::

    KIND [size=SIZE] [codec=CODEC] [what the kind takes]
    ram                         memory, coded; where the device is a GPU, the host's
    disk   [path=DIR]           a slab in the home, or elsewhere
    files  [path=DIR]           one file for each chunk
    redis  url=URL [prefix=P]   Redis or Valkey
    mooncake master=HOST:PORT [listing=HOST:PORT] [segment=SIZE] [prefix=P]   Mooncake Store
    s3     url=URL [prefix=P]   whatever `obstore` reaches: s3://bucket, file:///archive, ...
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from kvweave.config import Config, n_bytes
from kvweave.errors import InvalidArgument
from kvweave.keep import POLICIES
from kvweave.keep.base import Policy
from kvweave.store import codec
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.shelf import Shelf
from kvweave.store.tier.base import Tier
from kvweave.store.tier.files import FileTier
from kvweave.store.tier.memory import Memory
from kvweave.store.tier.mooncake import Mooncake
from kvweave.store.tier.mooncake_cluster import Cluster
from kvweave.store.tier.redis import Redis
from kvweave.store.tier.s3 import Archive
from kvweave.store.tier.slab import Slab

HUGE = 1 << 50  # bytes: as much as the disk has
SEGMENT = 64 << 20  # bytes a slab takes from the disk at a time
_Words = dict[str, str]


def open_shelf(
    config: Config,
    home: Path | None,
    model: tuple[str, torch.device],
    key_of: Callable[[int], str],
    is_pinned: Callable[[int], bool],
) -> Shelf:
    """Return a shelf with the levels of ``config``; ``model`` is a fingerprint's digest and where
    the model runs. Raises as `open_levels`."""
    digest, device = model
    policy, budget = POLICIES[config.policy], n_bytes(config.budget)
    specs = ("disk",) if config.tiers is None and home is not None else config.tiers or ()
    levels = open_levels(specs, home, digest, policy)
    mover = Mover(levels, key_of, is_pinned=is_pinned, device=device, seconds=config.load_seconds)
    return Shelf(
        budget, policy(budget), mover, is_pinned, "gpu" if device.type == "cuda" else "ram"
    )


def open_levels(
    specs: Sequence[str], home: Path | None, model: str, policy: Callable[[int], Policy]
) -> list[Level]:
    """Open the tiers of ``specs``, fastest first; ``model`` is the fingerprint's hex digest.

    ``policy`` makes the order of leaving from a budget in bytes. Raises InvalidArgument for words
    that mean nothing, or the same kind of place twice; what was opened is closed again then.
    """
    levels: list[Level] = []
    try:
        for spec in specs:
            kind, words = _parse(spec)
            size = n_bytes(words.pop("size")) if "size" in words else None
            choice = codec.parse(words.pop("codec", "raw"))
            tier = KINDS[kind](words, size, home)
            levels.append(Level(tier, choice, model, policy(size or HUGE), size))
            if words:
                raise InvalidArgument("tier", f"{kind} does not take {', '.join(words)}")
        places = [level.place for level in levels]
        if len(set(places)) < len(places):
            raise InvalidArgument("tier", f"two of {', '.join(places)} are the same place")
    except BaseException:
        for level in levels:
            level.tier.close()
        raise
    return levels


def _parse(spec: str) -> tuple[str, _Words]:
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


def _directory(words: _Words, home: Path | None, name: str) -> Path:
    path = words.pop("path", None)
    if path is None and home is None:
        raise InvalidArgument("tier", f"{name} has no directory", "pass home=, or path=DIR here")
    return Path(path) if path is not None else Path(str(home)) / name


def _ram(words: _Words, size: int | None, home: Path | None) -> Tier:
    if size is None:
        raise InvalidArgument("tier", "ram has no size", "write: ram size=4GiB")
    return Memory(size)


def _disk(words: _Words, size: int | None, home: Path | None) -> Tier:
    room = HUGE if size is None else size + size // 8 + SEGMENT
    return Slab(_directory(words, home, "kv"), room, segment=SEGMENT)


def _files(words: _Words, size: int | None, home: Path | None) -> Tier:
    return FileTier(_directory(words, home, "files"))


def _redis(words: _Words, size: int | None, home: Path | None) -> Tier:
    return Redis(_needed(words, "redis", "url"), prefix=words.pop("prefix", "kvweave:"))


def _mooncake(words: _Words, size: int | None, home: Path | None) -> Tier:
    master, prefix = _needed(words, "mooncake", "master"), words.pop("prefix", "kvweave.")
    segment = n_bytes(words.pop("segment")) if "segment" in words else 0
    listing, host = words.pop("listing", ""), words.pop("host", "127.0.0.1")
    return Mooncake(Cluster(master, listing, host, segment), prefix=prefix)


def _s3(words: _Words, size: int | None, home: Path | None) -> Tier:
    return Archive.at(_needed(words, "s3", "url"), prefix=words.pop("prefix", "kvweave"))


def _needed(words: _Words, kind: str, name: str) -> str:
    if name not in words:
        raise InvalidArgument("tier", f"{kind} needs {name}=", f"write: {kind} {name}=...")
    return words.pop(name)


KINDS: Mapping[str, Callable[[_Words, int | None, Path | None], Tier]] = {
    "ram": _ram, "disk": _disk, "files": _files,
    "redis": _redis, "mooncake": _mooncake, "s3": _s3,
}  # fmt: skip
