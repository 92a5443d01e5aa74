"""Several engines over homes that are copied, moved, put back and exchanged at random, while they are
closed, open, stopped or dead; and sweeps and repairs in between. What a home was told, it has.

``KVWEAVE_HOMES`` says how many things happen.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from store.faults.host import Child, Host
from store.faults.tally import Tally
from store.faults.test_kills import Book
from store.faults.verbs import shared_at, tier_at

from kvweave.chunk.guard import give_lock, take_lock
from kvweave.chunk.marks import uuid_of
from kvweave.errors import InvalidArgument, KVWeaveError

STEPS = int(os.environ.get("KVWEAVE_HOMES", "1500"))
SEED = int(os.environ.get("KVWEAVE_SEED", "2026"))
PATIENCE = 10.0  # seconds of the store's own that a verb may take
NAMES = [f"n/{i}" for i in range(6)]
MOST = 7  # homes at once


@dataclass
class Place(Book):
    """A home, and what it may be."""

    outside: Path | None = None  # its tier, where that is not in it
    is_opened: bool = False  # as what it is: a copy is not
    is_fuzzy: bool = False  # it was copied while it was written, or in part: it may need a repair
    trail: list[str] = field(default_factory=list)
    ever: dict[str, list[Any]] = field(default_factory=dict)  # all that names ever were, anywhere

    def __post_init__(self) -> None:
        self.states = {name: [None] for name in NAMES}
        self.ever = {name: [None] for name in NAMES}

    def note(self, heard: tuple[Any, ...], tally: Tally) -> None:
        super().note(heard, tally)
        if heard[0] == "begin" and heard[2] not in self.ever[heard[1]]:
            self.ever[heard[1]].append(heard[2])

    def twin(self, home: Path) -> Place:
        made = copy.deepcopy(self)
        made.home, made.is_opened = home, False
        made.trail.append(f"{self.home.name} -> {home.name}")
        return made

    def doubt(self) -> None:
        """It may be anything that it ever was."""
        self.is_fuzzy, self.durable = True, set()
        self.states = {name: list(all_) for name, all_ in self.ever.items()}


class World:
    """The homes, and what happens to them."""

    def __init__(self, host: Host, root: Path, tally: Tally, seed: int) -> None:
        self.host, self.root, self.tally, self.rng = host, root, tally, random.Random(seed)
        self.n = 0
        self.dead: list[str] = []  # uuids of indexes that are no more
        self.shared = [shared_at(self._path("shared"), "disk"), shared_at(self._path("s3"), "s3")]
        for path in ("shared", "s3"):
            (root / path).mkdir()
        self.places = [self._new() for _ in range(3)]

    def _path(self, name: str) -> Path:
        return self.root / name

    def _fresh(self, kind: str) -> Path:
        self.n += 1
        return self.root / f"{kind}{self.n}"

    def _new(self) -> Place:
        home, outside = self._fresh("home"), None
        kind = self.rng.randrange(5)
        tiers: tuple[str, ...] = ("disk",)
        if kind == 1:
            outside = self._fresh("out")
            tiers = (tier_at(outside),)
        elif kind > 1:
            tiers = (self.shared[kind % 2],) if kind < 4 else ("disk size=64KiB", self.shared[0])
        return Place("n", home, tiers, outside=outside)

    # ---- what happens

    def step(self) -> None:
        ways = [self.live] * 5 + [self.copy] * 4 + [self.check] * 3
        ways += [self.sweep, self.fsck, self.move, self.exchange, self.replace]
        way = self.rng.choice(ways)
        way()
        self.tally.did(way.__name__)

    def live(self) -> None:
        """One engine, or several over several homes, end or are killed; some are stopped first."""
        mine = self.rng.sample(self.places, self.rng.randint(1, min(3, len(self.places))))
        children = [(each, self._start(each)) for each in mine]
        for each in mine:
            each.trail.append(f"{self.tally.counts['steps']} live")
        for place, child in children:
            self._hear(place, child, self.rng.randrange(20))
        place, child = children[0]
        if self.rng.random() < 0.5:
            os.kill(child.pid, signal.SIGSTOP)
            self._drain(place, child)
            if self.rng.random() < 0.5 and len(self.places) < MOST:
                self._copied(place, whole=False)
            elif place.home.exists():
                was_open = self._is_open(place)
                said = self.host.run("refused", place.home, place.tiers)
                if was_open and not said:
                    self.tally.fault("wrong", f"{place.home.name} was opened twice")
            if self.rng.random() < 0.5:
                self.sweep()
            os.kill(child.pid, signal.SIGCONT)
        for place, child in children:
            if self.rng.random() < 0.5:
                self._hear(place, child, 60)
            child.kill()
            self._drain(place, child)

    def copy(self) -> None:
        """Copy a home that is closed, or died: to a new place, or over another one."""
        place = self.rng.choice(self.places)
        if not place.home.exists():
            return
        if len(self.places) < MOST and self.rng.random() < 0.7:
            self._copied(place, whole=self.rng.random() < 0.8)
            return
        over = self.rng.choice([p for p in self.places if p is not place])
        over.home = over.home.resolve()
        if place.home.resolve() == over.home:
            return
        made = self._twin_of(place, over.home)
        if self.rng.random() < 0.5 or not over.home.exists():
            self._dies(over)
            shutil.rmtree(over.home, ignore_errors=True)
            shutil.copytree(place.home, over.home)
        else:  # what the other one had stays between what comes
            self._dies(over)
            shutil.copytree(place.home, over.home, dirs_exist_ok=True)
            made.ever = {n: [*place.ever[n], *over.ever[n]] for n in NAMES}
            if (over.home / "index.sqlite-wal").exists() and not (
                place.home / "index.sqlite-wal"
            ).exists():
                self.tally.did("copies over a log")
        self.places.remove(over)
        self.places.append(made)

    def _copied(self, place: Place, *, whole: bool) -> None:
        """``whole``: every file, of a home that nobody writes meanwhile."""
        if not place.home.exists():
            return
        made = self._twin_of(place, self._fresh("home"))
        if whole:
            how = self.rng.choice([shutil.copy2, os.link])
            shutil.copytree(place.home, made.home, copy_function=how, symlinks=True)
        else:
            left_out = self.rng.choice(["", "", "*.seal", "*-wal", "kv", "owner.json", "*.kv"])
            ignore = shutil.ignore_patterns(left_out) if left_out else None
            shutil.copytree(place.home, made.home, ignore=ignore)
            made.doubt()
        self.places.append(made)

    def _twin_of(self, place: Place, home: Path) -> Place:
        made = place.twin(home)
        if place.outside is not None and self.rng.random() < 0.5 and place.outside.exists():
            made.outside = self._fresh("out")
            shutil.copytree(place.outside, made.outside)
            made.tiers = (tier_at(made.outside),)
        return made

    def _dies(self, place: Place) -> None:
        with suppress(KVWeaveError):
            self.dead.append(uuid_of(place.home / "index.sqlite"))

    def move(self) -> None:
        place, to = self.rng.choice(self.places), self._fresh("home")
        if place.home.exists():
            place.home.rename(to)
            place.home = to
            if self.rng.random() < 0.3:
                link = self._fresh("link")
                link.symlink_to(to)
                place.home = link

    def replace(self) -> None:
        """Put a home back as another one is: the one that was there is no more."""
        place, other = self.rng.sample(self.places, 2)
        if other.home.exists():
            if place.home.is_symlink():
                place.home = place.home.resolve()
            self._dies(place)
            shutil.rmtree(place.home, ignore_errors=True)
            shutil.copytree(other.home, place.home)
            self.places[self.places.index(place)] = self._twin_of(other, place.home)

    def exchange(self) -> None:
        """As `replace`, while an engine has it open: from then on that acknowledges nothing."""
        place, other = self.rng.sample(self.places, 2)
        if not other.home.exists() or place.home.is_symlink():
            return
        child = self._start(place)
        self._hear(place, child, self.rng.randrange(3, 15))
        os.kill(child.pid, signal.SIGSTOP)
        self._drain(place, child)
        if not place.home.exists():
            child.kill()
            return
        self._dies(place)
        place.home.rename(self._fresh("gone"))
        shutil.copytree(other.home, place.home)
        made = self._twin_of(other, place.home)
        os.kill(child.pid, signal.SIGCONT)
        under_way = 1  # what it had done, and not said
        while (heard := child.hear(5)) is not None and heard[0] not in ("raised", "end"):
            if heard[0] == "done":
                under_way -= 1
            if under_way < 0 and heard[0] == "done":
                self.tally.fault("wrong", f"{heard} acknowledged where nobody will find it")
        if heard is not None and heard[0] == "raised" and not heard[2]:
            self.tally.fault("hintless", " | ".join(heard[1].split("\n")[-4:]))
        child.kill()
        self.places[self.places.index(place)] = made
        self._check(made)

    def sweep(self) -> None:
        """By all homes, or by some, of which one may be the wrong one."""
        spec, there = self.rng.choice(self.shared), [p for p in self.places if p.home.exists()]
        given = there if self.rng.random() < 0.5 else self.rng.sample(there, len(there) // 2)
        given = [p for p in given if (p.home / "index.sqlite").exists()]
        n, why = self.host.run("sweep_once", spec, [p.home for p in given], self.dead)
        self.tally.did("records swept", n)
        self.tally.did("sweeps refused", bool(why))
        for place in self.places:
            if n and not place.is_opened:
                place.durable = set()  # a copy that was never opened relies on nothing yet

    def fsck(self) -> None:
        place = self.rng.choice(self.places)
        if (place.home / "index.sqlite").exists() and not place.is_fuzzy:
            self.host.run("repair", place.home, place.tiers)
            place.trail.append("fsck")

    def check(self) -> None:
        self._check(self.rng.choice(self.places))

    def end(self) -> None:
        for place in self.places:
            self._check(place)

    # ---- how

    def _start(self, place: Place) -> Child:
        """Start an engine; what cannot be opened as it is, is looked at first."""
        if not place.is_opened or any(len(states) > 1 for states in place.states.values()):
            self._check(place)
        seed, n = self.rng.randrange(1 << 30), self.rng.randrange(5, 40)
        skew = self.rng.random() < 0.2
        return self.host.start("roam", place.home, place.tiers, seed, NAMES, n, skew)

    def _hear(self, place: Place, child: Child, n: int) -> None:
        while n > 0 and (heard := child.hear(5)) is not None and heard[0] != "end":
            n -= 1
            if heard[0] != "open":
                place.note(heard, self.tally)

    def _drain(self, place: Place, child: Child) -> None:
        while (heard := child.hear(0)) is not None:
            if heard[0] not in ("open", "end"):
                place.note(heard, self.tally)

    def _is_open(self, place: Place) -> bool:
        try:
            give_lock(take_lock(place.home / "index.sqlite"))
        except InvalidArgument:
            return True
        return False

    def _check(self, place: Place) -> None:
        self.host.control.raw.skew = 0
        for _ in range(4):
            where = f"step {self.tally.counts['steps']}, {place.home.name} {place.tiers}"
            given = place.home, place.tiers, place.states, sorted(place.durable), None, PATIENCE
            verdict = self.host.run("look", *given)
            if not verdict.refused:
                break
            self.tally.did("refused with a hint" if verdict.errors else "refused without one")
            if "a copy of" in verdict.refused or "another home" in verdict.refused:
                if (
                    "another home" in verdict.refused and place.outside is None
                ):  # an index was put over one with KV in its home
                    self.host.run("repair", place.home, place.tiers)
                    place.durable = set()
                    continue
                if place.outside is None and not place.is_fuzzy:
                    self.tally.fault("lost", f"{where}: {verdict.refused}")
                place.tiers, place.outside, place.durable = ("disk",), None, set()
            elif place.is_fuzzy:
                self.host.run("repair", place.home, place.tiers)
            else:
                self.tally.fault("lost", f"{where}: {verdict.refused}")
                place.doubt()
        else:
            self.tally.fault("lost", f"{where}: {verdict.refused}")
            return
        self.tally.judge(verdict, where)
        if verdict.faults:
            self.tally.found[-1] += f" [{', '.join(place.trail[-14:])}]"
        self.tally.did("durable records found", verdict.loaded)
        place.states.update({name: [tokens] for name, tokens in verdict.found.items()})
        place.is_fuzzy, place.is_opened = False, True


def campaign(host: Host, root: Path, tally: Tally, n: int, seed: int = SEED) -> None:
    world = World(host, root, tally, seed)
    for _ in range(n):
        tally.did("steps")
        world.step()
    world.end()
    tally.settle()


@pytest.mark.small
def test_a_few_homes(host: Host, tmp_path: Path, tally: Tally) -> None:
    campaign(host, tmp_path, tally, 6)


@pytest.mark.slow
def test_homes(host: Host, tmp_path: Path, tally: Tally) -> None:
    campaign(host, tmp_path, tally, STEPS)
