"""Whole engines are killed, or lose their power, over and over; what was acknowledged is there."""

from __future__ import annotations

import os
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from store.faults.host import Child, Host
from store.faults.shim import power_cut
from store.faults.tally import Tally
from store.faults.verbs import Tokens, shared_at, tier_at

KILLS = int(os.environ.get("KVWEAVE_KILLS", "500"))
CUTS = int(os.environ.get("KVWEAVE_CUTS", "100"))
SEED = int(os.environ.get("KVWEAVE_SEED", "2026"))
NAMES = 10
LIFE = 20.0  # seconds at most


@dataclass
class Book:
    """What one engine was told, and what each name may be after it died."""

    prefix: str
    home: Path
    tiers: tuple[str, ...]
    states: dict[str, list[Tokens | None]] = field(default_factory=dict)
    durable: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.states = {f"{self.prefix}/{i}": [None] for i in range(NAMES)}

    def note(self, heard: tuple[Any, ...], tally: Tally) -> None:
        what, *rest = heard
        if what == "raised":
            if not rest[1]:  # else the look that follows says it
                tally.fault("hintless", " | ".join(rest[0].split("\n")[-4:]))
        elif what == "begin":
            name, tokens = rest
            self.states[name].append(tokens)
            self.durable.discard(name)
        elif what == "done":
            name, lasting = rest
            tally.did("changes")
            if lasting:  # the same sync took all names with it
                tally.did("durable puts acknowledged")
                self.states = {n: states[-1:] for n, states in self.states.items()}
                self.durable.add(name)
        elif what == "said":
            name, tokens, right = rest
            tally.did("answers")
            if not right or tokens != self.states[name][-1]:
                tally.fault("wrong", f"{name}: while it lived")

    def check(self, host: Host, tally: Tally, where: str) -> bool:
        """Look at what is there, and take it over; False when it cannot go on from there."""
        verdict = host.run("look", self.home, self.tiers, self.states, sorted(self.durable))
        tally.judge(verdict, f"{where} {self.prefix}")
        if verdict.refused:
            tally.fault("lost", f"{where}: {verdict.refused}")
        self.states.update({name: [tokens] for name, tokens in verdict.found.items()})
        tally.did("durable records found", verdict.loaded)
        return not verdict.refused


def hear(
    children: dict[str, Child], books: dict[str, Book], tally: Tally, n: int, more: float
) -> None:
    """Listen until ``n`` things were said, however fast this machine is, and a moment longer."""
    end = time.monotonic() + LIFE
    while n > 0 and children and time.monotonic() < end:
        for name, child in children.items():
            heard = child.hear(0.002)
            if heard is not None:
                books[name].note(heard, tally)
                n -= 1 if heard[0] != "raised" else n
    time.sleep(more)


def drain(child: Child, book: Book, tally: Tally) -> None:
    while (heard := child.hear(0)) is not None:
        book.note(heard, tally)


def kill_all(
    children: dict[str, Child], books: dict[str, Book], rng: random.Random, tally: Tally
) -> None:
    """Kill one after the other, while those that are left go on."""
    for name in rng.sample(sorted(children), len(children)):
        child = children.pop(name)
        child.kill()
        tally.did("kills")
        drain(child, books[name], tally)
        hear(children, books, tally, rng.randrange(10), rng.uniform(0, 0.01))


def killed(
    host: Host, books: dict[str, Book], rng: random.Random, tally: Tally, **how: Any
) -> None:
    """Start an engine for each book, and kill them at random moments."""
    children: dict[str, Child] = {}
    for name, book in books.items():
        seed = rng.randrange(1 << 30)
        args = (book.home, book.tiers, seed, book.prefix, NAMES, None, how.get("skew", False))
        children[name] = child = host.start("live", *args)
        if rng.random() < 0.8:  # else also while it opens
            books[name].note(child.hear(60) or ("raised", "it says nothing", ""), tally)
    hear(children, books, tally, rng.randrange(how.get("life", 60)), rng.uniform(0, 0.01))
    kill_all(children, books, rng, tally)


def books_of(root: Path, *, tier: str = "") -> dict[str, Book]:
    if not tier:
        return {"a": Book("a", root / "a", (tier_at(root / "kv"),))}
    return {name: Book(name, root / name, (tier,)) for name in "ab"}


def campaign(host: Host, root: Path, n: int, tally: Tally, *, tier: str = "") -> None:
    rng, books = random.Random(SEED), books_of(root, tier=tier)
    while tally.counts["kills"] < n:
        killed(host, books, rng, tally)
        for name, book in books.items():
            fine = book.check(host, tally, f"kill {tally.counts['kills']} {name}")
            if (
                not fine or rng.random() < 0.05
            ):  # from the start again: opening for the first time, too
                for path in (book.home, root / "kv"):  # what is shared stays: the other needs it
                    shutil.rmtree(path, ignore_errors=True)
                books[name] = Book(name, book.home, book.tiers)
    tally.settle()


@pytest.mark.small
def test_a_few_kills(host: Host, tmp_path: Path, tally: Tally) -> None:
    campaign(host, tmp_path, 4, tally)


@pytest.mark.slow
def test_kills_of_an_engine(host: Host, tmp_path: Path, tally: Tally) -> None:
    campaign(host, tmp_path, KILLS // 2, tally)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_kills_of_engines_that_share_a_store(
    host: Host, tmp_path: Path, tally: Tally, kind: str
) -> None:
    (tmp_path / "shared").mkdir()
    campaign(host, tmp_path, KILLS // 4, tally, tier=shared_at(tmp_path / "shared", kind))


@pytest.mark.parametrize(
    "n",
    [pytest.param(3, marks=pytest.mark.small), pytest.param(KILLS // 10, marks=pytest.mark.slow)],
)
def test_kills_where_files_have_names_at_once(
    host: Host, tmp_path: Path, tally: Tally, n: int
) -> None:
    """As on NFS: a file is written under a name of its own and linked to its key."""
    host.control.raw.named = 1
    campaign(host, tmp_path, n, tally)


def cuts(host: Host, root: Path, n: int, tally: Tally, *, kind: str = "", **how: Any) -> None:
    """As kills, but what was not synced goes: all of it, or any pages and names. ``kind``: of a tier
    that others may use."""
    rng, fine = random.Random(SEED), True
    for i in range(n):
        if i % 10 == 0 or not fine:
            home, tier = root / f"{i}/home", root / f"{i}/kv"
            home.mkdir(parents=True)
            tier.mkdir()
            spec = shared_at(tier, kind) if kind else tier_at(tier)
            books = {"a": Book("a", home, (spec,))}
        shadow = root / "shadow"
        host.control.watch(shadow, home, tier)
        killed(host, books, rng, tally, **how)
        host.control.unwatch()
        power_cut(shadow, home, tier, rng=rng if i % 2 else None)
        tally.did("power cuts")
        fine = books["a"].check(host, tally, f"cut {i}")
    tally.settle()


def test_a_few_power_cuts(host: Host, tmp_path: Path, tally: Tally) -> None:
    cuts(host, tmp_path, 4, tally, life=20)


def test_a_power_cut_just_after_the_first_opening(host: Host, tmp_path: Path, tally: Tally) -> None:
    """Nothing was put yet; what was synced of two directories must still belong together."""
    home, tier = tmp_path / "home", tmp_path / "kv"
    home.mkdir()
    tier.mkdir()
    book, shadow = Book("a", home, (tier_at(tier),)), tmp_path / "shadow"
    host.control.watch(shadow, home, tier)
    child = host.start("live", home, book.tiers, 1, "a", NAMES)
    assert child.hear(60) == ("open",)
    child.kill()
    drain(child, book, tally)
    host.control.unwatch()
    power_cut(shadow, home, tier)
    book.check(host, tally, "the first opening")
    tally.settle()


@pytest.mark.slow
def test_power_cuts(host: Host, tmp_path: Path, tally: Tally) -> None:
    cuts(host, tmp_path, CUTS, tally)


@pytest.mark.parametrize(
    "n", [pytest.param(2, marks=pytest.mark.small), pytest.param(CUTS // 4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("named", [0, 1], ids=["nameless", "named"])
def test_power_cuts_of_a_shared_directory(
    host: Host, tmp_path: Path, tally: Tally, named: int, n: int
) -> None:
    host.control.raw.named = named
    cuts(host, tmp_path, n, tally, kind="disk", life=20)


@pytest.mark.slow
def test_power_cuts_while_the_wall_clock_jumps(host: Host, tmp_path: Path, tally: Tally) -> None:
    cuts(host, tmp_path, max(CUTS // 5, 1), tally, skew=True)


def test_the_book_finds_what_is_lost_or_comes_back(host: Host, tmp_path: Path) -> None:
    """The test's own test."""
    home, tiers = tmp_path / "home", (tier_at(tmp_path / "kv"),)
    host.run("fill", home, tiers, {"a/1": (5, 6, 7, 8)})
    for events, found in (
        ([("begin", "a/1", (5, 6, 7, 8)), ("done", "a/1", True)], ""),
        ([("begin", "a/1", (5, 6, 7, 8)), ("begin", "a/1", None)], ""),
        ([("begin", "a/1", (5, 6, 7, 9)), ("done", "a/1", True)], "wrong"),
        ([("begin", "a/2", (5, 6, 7, 9)), ("done", "a/2", True)], "lost"),
        ([("begin", "a/1", None), ("done", "a/1", True)], "wrong"),
    ):  # fmt: skip
        tally, book = Tally(), Book("a", home, tiers)
        for event in events:
            book.note(event, tally)
        book.states.update({} if any("a/1" in e for e in events) else {"a/1": [(5, 6, 7, 8)]})
        book.check(host, tally, "")
        assert (tally.found or [""])[0].startswith(found) and bool(tally.found) == bool(found)
    (record, *_) = (p for p in (tmp_path / "kv").iterdir() if p.stat().st_size > 4096)
    record.unlink()
    tally, book = Tally(), Book("a", home, tiers)
    for event in [("begin", "a/1", (5, 6, 7, 8)), ("done", "a/1", True)]:
        book.note(event, tally)
    book.check(host, tally, "")
    assert tally.counts["lost"] == 1
