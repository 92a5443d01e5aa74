"""Looking after what is stored: `fsck` for a home, `sweep` for a tier that homes share."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvweave.chunk.guard import free_name, lost_of
from kvweave.chunk.index import is_shared
from kvweave.chunk.marks import marks, uuid_of
from kvweave.chunk.rebuild import there
from kvweave.chunk.salvage import salvage
from kvweave.chunk.table import Table
from kvweave.cli.home import has_index, home_of, private, tiers_of
from kvweave.cli.show import Out, size
from kvweave.cli.values import path_of
from kvweave.errors import CorruptChunk, InvalidArgument, StoreError
from kvweave.store import collect
from kvweave.store import fsck as files
from kvweave.store.spec import open_shared


@private()
def fsck(args: Namespace) -> int:
    """Check a home, and repair it if asked to; the status is 1 when something is wrong and stays so."""
    for option in ("discard_strays", "take_over"):
        if getattr(args, option) and not args.repair:
            raise InvalidArgument(option.replace("_", "-"), "it goes with --repair", "add --repair")
    home = home_of(args) if args.directory is None else path_of(args.directory)
    out = Out.of(args)
    index = home / "index.sqlite"
    begun = (args.repair and (home / "kv").is_dir()) or has_index(home)
    if not begun:
        raise StoreError(f"there is no home {home}", hint="give another --home", path=str(home))
    files.model_of(home)  # one of a later version is refused before anything is touched
    said: dict[str, object] = {"home": str(home), "index": "ok", "directories": []}
    lines = []
    try:
        with Table(index) as table:
            table.check_integrity()
    except (CorruptChunk, AssertionError) as error:
        said["index"] = str(error)
        lines.append(f"index.sqlite: {error}")
        if args.repair:
            report = salvage(index)
            said["salvaged"] = report.to_dict()
            lost = len(report.lost_chunks)
            lines.append(
                f"  rebuilt: {report.n_chunks} chunks, {report.n_names} names; {lost} chunks and "
                f"{len(report.lost_names)} names are lost; the old file is {report.kept_aside}"
            )
    said_of_model = _model(home, args.repair)
    checked = []
    if said["index"] == "ok" or args.repair:
        checked = _directories(args, home, out)
        said_of_model += _contradicted(home, checked, args.repair)
    if said_of_model:
        said["model"] = "damaged"
        lines += said_of_model
    said["directories"] = [each.to_dict() for each in checked]
    ok = all(each.ok for each in checked) and said["index"] == "ok" and "model" not in said
    if args.repair:
        mixed = any(each.foreign for each in checked) and any(each.n_ours for each in checked)
        ok = not mixed and not any(each.owner or each.unread for each in checked)
    said["ok"] = ok
    if out.as_json:
        out.data(said)
    else:
        print("\n".join([*lines, *(line for each in checked for line in _lines(each))]))
        if not ok and not args.repair:
            print(
                f"`kvweave fsck {home} --repair` keeps what verifies and removes the rest; what cannot be read stays"
            )
    return 0 if ok else 1


def _directories(args: Namespace, home: Path, out: Out) -> list[files.Found]:
    """Look through all directories of a home, and mend them if that is wanted."""
    index, checked = home / "index.sqlite", []
    with Table(index) as table:
        chunks = {r.digest.hex(): (r.n_tokens, r.tier == "disk") for r in table}
        known = files.Known(index, table.uuid, chunks, files.model_of(home), table.was)
    how = {"repair": args.repair, "take_over": args.take_over}
    discard = args.repair and args.discard_strays
    specs = tiers_of(home, args.tier)
    for directory in files.directories(home, specs):
        out.note(f"reading {directory}")
        checked.append(files.check(directory, known, discard_strays=discard, **how))
    checked += files.check_shared(specs, repair=args.repair)
    files.compare(checked)
    if discard:
        lost_of(index).unlink(missing_ok=True)
    return checked


def _model(home: Path, repair: bool) -> list[str]:
    """Return what is wrong with ``model.json``, which ``repair`` puts aside."""
    fingerprint = home / "model.json"
    if files.model_of(home) is not None or not there(fingerprint):
        return []
    return ["model.json: it is no model's fingerprint", *_put_aside(fingerprint, repair)]


def _contradicted(home: Path, checked: Sequence[files.Found], repair: bool) -> list[str]:
    """Return what is wrong with ``model.json`` where good records of its chunks are of another model; it is
    put aside if all are."""
    n = sum(len(each.foreign) for each in checked)
    if not n:
        return []
    ours = sum(each.n_ours for each in checked)
    line = f"model.json: {n} of {n + ours} records of its chunks are of another model"
    return [line, *_put_aside(home / "model.json", repair and not ours)]


def _put_aside(file: Path, repair: bool) -> list[str]:
    if not repair:
        return []
    kept = free_name(file)
    file.rename(kept)
    return [f"  put aside as {kept.name}; the next engine that puts a chunk writes it anew"]


def _lines(found: files.Found) -> list[str]:
    lines = [
        f"{found.directory}: {found.n_records} records, {size(found.n_bytes)}, "
        f"{len(found.spoilt)} spoilt, {len(found.missing)} missing, {len(found.strays)} of chunks "
        "that the index does not know"
    ]
    lines += [f"  {Path(key).name}: {why}" for key, why in found.spoilt.items()]
    lines += [
        f"  {Path(key).name}: it cannot be read now, and stays: {why}"
        for key, why in found.unread.items()
    ]
    lines += [f"  {digest}: not there; it is computed again" for digest in found.missing]
    lines += [f"  {found.owner}"] * bool(found.owner)
    return lines + [f"  {each}" for each in found.repaired]


def sweep(args: Namespace) -> int:
    """Remove from a shared tier what no index names; the status is 1 when something could not go."""
    indexes = [_index(word) for word in args.index]
    if not indexes and not args.retire:
        raise InvalidArgument("index", "none is given", "write --index HOME for each that uses it")
    tier = open_shared(args.tier)
    try:
        swept = collect.sweep(
            tier,
            lambda: {digest.hex() for index in indexes for digest in marks(index)},
            {uuid_of(index) for index in indexes},
            grace=args.grace,
            dry_run=args.dry_run,
            retired=args.retire,
        )
    finally:
        tier.close()
    out = Out.of(args)
    if out.as_json:
        out.data(swept.to_dict())
    else:
        would = "would remove" if args.dry_run else "removed"
        waiting = f", {len(swept.waiting)} wait for their time" if swept.waiting else ""
        print(
            f"{swept.n_records} records, {swept.n_named} are named; {would} {len(swept.removed)}"
            f" ({size(swept.n_bytes)}){waiting}"
        )
        for key in swept.failed:
            print(f"  {key} could not be removed; it is tried again next time")
    return 1 if swept.failed else 0


def _index(word: str) -> str | Path:
    """Return the index of a home, or a shared one by its address."""
    path = path_of(word)
    return word if is_shared(word) else path / "index.sqlite" if path.is_dir() else path
