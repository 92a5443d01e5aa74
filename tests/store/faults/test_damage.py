"""Files that somebody else changed: a bit, a file, two files exchanged, a newer version's."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from days import DAY
from store.faults.conftest import Filled
from store.faults.host import Died, Host
from store.faults.tally import Tally
from store.faults.test_calls import STEP
from store.faults.verbs import Told, Verdict, chunks

from kvweave.store.record.layout import FIXED, FORMAT, MAGIC, SUM, head_sum

FLIPS = int(os.environ.get("KVWEAVE_FLIPS", "1000"))
SEED = int(os.environ.get("KVWEAVE_SEED", "2026"))
Fresh = Callable[[], Filled]
SQLITE = b"SQLite format 3\0"
LOST_BY_A_BIT = 6  # names that may stand in the page of SQLite that a repair must give up
VERSION = slice(60, 64)  # of an SQLite file: PRAGMA user_version


def look(
    host: Host, world: Filled, tally: Tally, where: str, *, may_lose: int, may: Told | None = None
) -> Verdict | None:
    """Open and ask: nothing wrong comes out, and no more than so many are lost."""
    told = world.may if may is None else may
    try:
        verdict: Verdict = host.run("look", world.home, world.tiers, told, list(world.told))
    except Died as died:
        tally.fault("hintless", f"{where}: {died}")
        return None
    lost = sorted({each.split(":")[0] for each in verdict.lost})
    tally.judge(verdict, where, but=lost if len(lost) <= may_lose else ())
    tally.did("refused" if verdict.refused else "opened")
    return verdict


def repaired(
    host: Host, world: Filled, verdict: Verdict | None, tally: Tally, where: str, *, may_lose: int
) -> None:
    """Who is refused and told of `kvweave fsck` follows that, and can go on with what it kept."""
    if verdict is None or "fsck" not in verdict.refused:
        return
    try:
        host.run("repair", world.home, world.tiers)
    except Died as died:
        tally.fault("hintless", f"{where}, fsck: {died}")
        return
    tally.did("repaired by fsck")
    after = look(host, world, tally, f"{where}, repaired", may_lose=may_lose)
    if after is not None and after.refused:
        tally.fault("lost", f"{where}, repaired: {after.refused}")
    elif after is not None:
        n = sum(tokens is not None for tokens in after.found.values())
        tally.did("names kept by a repair", n)
        tally.did("names lost by a repair", len(world.told) - n)


def undone(host: Host, world: Filled, original: Filled, tally: Tally, where: str) -> None:
    """What was changed is put back: opening must have destroyed nothing else meanwhile."""
    world.restore(original, tier=True)
    _open_again(host, world, tally, f"{where}, undone")


def mended(host: Host, world: Filled, original: Filled, tally: Tally, where: str) -> None:
    """The home is what it was, the tier as the engine left it: all its records are there."""
    world.restore(original, tier=False)
    _open_again(host, world, tally, f"{where}, the home restored")


def _open_again(host: Host, world: Filled, tally: Tally, where: str) -> None:
    verdict = look(host, world, tally, where, may_lose=0)
    if verdict is not None and verdict.refused:
        tally.fault("lost", f"{where}: {verdict.refused}")


def newer(whole: bytes) -> bytes | None:
    """Return a file as a later version might have written it, None for one without a version."""
    made = bytearray(whole)
    if whole.startswith(SQLITE):
        made[VERSION] = (int.from_bytes(whole[VERSION], "big") + 1).to_bytes(4, "big")
        return bytes(made)
    if whole.startswith(MAGIC):
        magic, _, *rest = FIXED.unpack_from(whole)
        FIXED.pack_into(made, 0, magic, FORMAT + 1, *rest)
        SUM.pack_into(made, FIXED.size, head_sum(memoryview(made)[: rest[0]]))
        return bytes(made)
    said = json.loads(whole) if whole.startswith(b"{") else {}
    return json.dumps(said | {"format": said["format"] + 1}).encode() if "format" in said else None


def spoilt(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """What may have become of one file."""
    whole = path.read_bytes()
    yield "missing", None
    if whole:
        yield "empty", b""
        for n in {len(whole) // 2, len(whole) - 1, min(len(whole) - 1, 10)}:
            yield f"cut to {n}", whole[:n]
    later = newer(whole)
    if later is not None:
        yield "newer", later
    if not whole.startswith(SQLITE):
        for i in range(min(len(whole), 24)):  # wherever the version of its format may stand
            changed = bytearray(whole)
            changed[i] = (changed[i] + 1) % 256
            yield f"byte {i} higher", bytes(changed)


def apply(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


def kind(path: Path) -> str:
    return f"{path.parts[0]}/*{path.suffix or path.name}"


Damage = tuple[Path, str, bytes | None]  # a file, what became of it, what it holds then


def damage(
    host: Host, original: Filled, to: Path, tally: Tally, *, quick: bool = False, step: int = 1
) -> None:
    for path, label, data in _few(original) if quick else _every(original, step):
        in_tier = original.in_tier(path)
        world, where = original.copy(to), f"{path} {label}"
        apply(world.root / path, data)
        # what only the index knew is gone with it; of a tier only what stood in that file
        may_lose = 1 if in_tier else len(world.told) * (label in ("missing", "empty"))
        verdict = look(host, world, tally, where, may_lose=may_lose)
        tally.did(f"damaged {kind(path)}")
        if label == "newer":
            left_alone(host, world, path, data, tally)
        most = 1 if in_tier else len(world.told)  # a file cut in half is half a file
        repaired(host, world, verdict, tally, where, may_lose=most)
        (undone if in_tier else mended)(host, world, original, tally, where)
    tally.settle()


def _every(original: Filled, step: int) -> list[Damage]:
    """All that may become of a file, or one in ``step`` of it, drawn: whatever it is, of all files."""
    every = [(p, *each) for p in original.files() for each in spoilt(original.root / p)]
    dice = random.Random(f"{SEED + DAY} {original.kind} {original.inside}")
    return every if step == 1 else dice.sample(every, len(every) // step)


def _few(original: Filled) -> Iterator[Damage]:
    """The index missing and otherwise hurt, one record, and what says whose directory it is."""
    records = 0
    for path in original.files():
        every, in_tier = list(spoilt(original.root / path)), original.in_tier(path)
        records += in_tier
        index = path.suffix == ".sqlite"
        n = 1 if index or (records == 1 if in_tier else path.suffix == ".json") else 0
        some = random.Random(str(path)).sample(every, min(n, len(every)))
        yield from ((path, *each) for each in every[:1] * index + some)


def left_alone(host: Host, world: Filled, path: Path, data: bytes | None, tally: Tally) -> None:
    """What a later version wrote is no damage, for an engine or for a repair; but for whose directory
    it is, which a repair knows."""
    for who in ("opening", "a repair") if path.suffix != ".json" else ("opening",):
        if who == "a repair":
            host.last_word("repair", world.home, world.tiers)  # it may well refuse
        if not (world.root / path).exists() or (world.root / path).read_bytes() != data:
            tally.fault("lost", f"{path} of a later version, by {who}")


def test_files_of_a_later_version(host: Host, fresh: Fresh, pristine: Filled, tally: Tally) -> None:
    kinds = {
        kind(path): path for path in pristine.files() if newer((pristine.root / path).read_bytes())
    }
    assert len(kinds) >= 3, "the index, a record, whose directory it is"
    for path in kinds.values():
        world, data = fresh(), newer((pristine.root / path).read_bytes())
        apply(world.root / path, data)
        in_tier = pristine.in_tier(path)
        look(host, world, tally, f"{path} newer", may_lose=len(world.told))
        left_alone(host, world, path, data, tally)
        (undone if in_tier else mended)(host, world, pristine, tally, f"{path} newer")
    tally.settle()


def test_some_files_damaged(host: Host, pristine: Filled, tmp_path: Path, tally: Tally) -> None:
    damage(host, pristine, tmp_path / "world", tally, quick=True)


def test_some_files_damaged_of_a_tier_in_the_home(
    host: Host, pristine_inside: Filled, tmp_path: Path, tally: Tally
) -> None:
    damage(host, pristine_inside, tmp_path / "world", tally, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["pristine", "pristine_inside"])
def test_each_file_damaged(
    host: Host, request: pytest.FixtureRequest, tmp_path: Path, tally: Tally, where: str
) -> None:
    damage(host, request.getfixturevalue(where), tmp_path / "world", tally, step=STEP)


def exchange(host: Host, fresh: Fresh, pristine: Filled, tally: Tally, pairs: int | None) -> None:
    every = list(itertools.combinations(pristine.files(), 2))
    size = {path: (pristine.root / path).stat().st_size for path in pristine.files()}

    def unlike(pair: tuple[Path, ...]) -> tuple[int, int]:
        a, b = pair
        return len({kind(a), kind(b)}) + (size[a] < 4096), abs(size[a] - size[b])

    every.sort(key=unlike)  # records of one size first
    for a, b in every[:pairs]:
        world = fresh()
        one, other = (pristine.root / a).read_bytes(), (pristine.root / b).read_bytes()
        (world.root / a).write_bytes(other)
        (world.root / b).write_bytes(one)
        n = pristine.in_tier(a) + pristine.in_tier(b)
        where = f"{a} and {b} exchanged"
        hollow = n < 2 and 0 in (size[a], size[b])
        look(host, world, tally, where, may_lose=max(n, len(world.told) * hollow))
        tally.did("exchanged")
        undone(host, world, pristine, tally, where)
    tally.settle()


def test_two_records_exchanged(
    host: Host, fresh: Fresh, pristine: Filled, tally: Tally
) -> None:  # point 2
    exchange(host, fresh, pristine, tally, 3)


@pytest.mark.slow
def test_any_two_files_exchanged(host: Host, fresh: Fresh, pristine: Filled, tally: Tally) -> None:
    exchange(host, fresh, pristine, tally, None if STEP == 1 else 120 // STEP)


def copied(host: Host, fresh: Fresh, pristine: Filled, tally: Tally) -> None:
    records = [p for p in pristine.files() if pristine.in_tier(p)]
    records = [p for p in records if (pristine.root / p).stat().st_size > 4096]
    small, *_, large = sorted(records, key=lambda p: (pristine.root / p).stat().st_size)
    for to, source in ((large, small), (small, large)):
        world = fresh()
        shutil.copyfile(pristine.root / source, world.root / to)
        look(host, world, tally, f"{source} in the place of {to}", may_lose=1)
    tally.settle()


def test_a_shorter_record_in_the_place_of_a_longer_one(
    host: Host, fresh: Fresh, pristine: Filled, tally: Tally
) -> None:  # point 2
    copied(host, fresh, pristine, tally)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_files_of_another_home(
    host: Host, fresh: Fresh, pristine: Filled, tmp_path: Path, tally: Tally, quick: bool
) -> None:
    """The other one has other texts under the same names: of either, and nothing is destroyed."""
    other = Filled(tmp_path / "other", chunks(len(pristine.told), seed=7))
    host.run("fill", other.home, other.tiers, other.told)
    may = {name: [tokens, other.told[name]] for name, tokens in pristine.told.items()}
    records = (path for path in other.files() if path.suffix == ".kv")
    files = [(path, path if (other.root / path).exists() else next(records))
             for path in pristine.files()]  # fmt: skip
    if quick:
        files = [pair for pair in files if pair[0].name in ("index.sqlite", "owner.json")]
    for ours, theirs in files:
        world, where = fresh(), f"{ours} of another home"
        shutil.copyfile(other.root / theirs, world.root / ours)
        in_tier = world.in_tier(ours)
        look(host, world, tally, where, may_lose=1 if in_tier else len(may), may=may)
        tally.did("of another home")
        (undone if in_tier else mended)(host, world, pristine, tally, where)
    tally.settle()


def flips(
    host: Host, fresh: Fresh, original: Filled, tally: Tally, n: int, *, log: bool = False
) -> None:
    """Turn one bit at a time; files are drawn alike, and places within them."""
    rng, files = random.Random(SEED + DAY), list(original.files())
    files = [p for p in files if (original.root / p).stat().st_size]
    if log:
        files = [p for p in files if p.name.endswith(("-wal", "-journal"))]
    for i in range(n):
        home = [p for p in files if not original.in_tier(p)]
        path = rng.choice(home if i % 2 and home else files)
        world = fresh()
        data = bytearray((world.root / path).read_bytes())
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        (world.root / path).write_bytes(data)
        in_tier = original.in_tier(path)
        where = f"{path} bit {bit}"
        # behind a wrong frame SQLite's log has ended: nothing tells it from one that was cut
        most = 1 if in_tier else len(world.told) * log
        verdict = look(host, world, tally, where, may_lose=most)
        tally.did(f"flips in {kind(path)}")
        repaired(host, world, verdict, tally, where, may_lose=max(most, LOST_BY_A_BIT))
        if not in_tier:
            mended(host, world, original, tally, where)
    tally.settle()


@pytest.mark.small
def test_some_bits(host: Host, fresh: Fresh, pristine: Filled, tally: Tally) -> None:
    flips(host, fresh, pristine, tally, 4)


@pytest.mark.slow
def test_many_bits(host: Host, fresh: Fresh, pristine: Filled, tally: Tally) -> None:
    flips(host, fresh, pristine, tally, FLIPS)


@pytest.mark.slow
def test_bits_of_the_log(host: Host, pristine: Filled, tmp_path: Path, tally: Tally) -> None:
    """The engine was killed, so that what it was told stands in SQLite's log."""
    killed = pristine.copy(tmp_path / "killed")
    old, new = dict(list(killed.told.items())[:1]), {"new/0": (5, 6, 7), "new/1": (7, 8, 9, 10)}
    child = host.start("write", killed.home, killed.tiers, old, new, False)
    assert child.hear(60)[0] == "did"
    child.kill()
    killed.told = {n: t for n, t in (killed.told | new).items() if n not in old}
    assert any(path.name.endswith("-wal") for path in killed.files())
    look(host, killed.copy(tmp_path / "world"), tally, "as it was", may_lose=0)
    flips(host, lambda: killed.copy(tmp_path / "world"), killed, tally, FLIPS // 5, log=True)
