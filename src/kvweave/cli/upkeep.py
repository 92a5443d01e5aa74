"""Looking after what is stored: `fsck` for a home, `sweep` for a tier that homes share."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from kvweave.chunk.salvage import salvage
from kvweave.chunk.table import Table
from kvweave.cli.home import home_of
from kvweave.cli.show import Out, size
from kvweave.errors import CorruptChunk, StoreError
from kvweave.store import fsck as files


def fsck(args: Namespace) -> int:
    """Check a home, and repair it if asked to; the status is 1 when something is wrong and stays so."""
    home, out = home_of(args), Out.of(args)
    index = home / "index.sqlite"
    if not home.is_dir():
        raise StoreError(f"there is no home {home}", hint="give another --home", path=str(home))
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
    checked = []
    if said["index"] == "ok" or args.repair:
        with Table(index) as table:
            chunks = {r.digest.hex(): (r.n_tokens, r.tier == "disk") for r in table}
            uuid = table.uuid
        for directory in files.directories(home):
            out.note(f"reading {directory}")
            checked.append(files.check(directory, files.model_of(home), chunks, uuid, args.repair))
    said["directories"] = [each.to_dict() for each in checked]
    ok = all(each.ok for each in checked) and (said["index"] == "ok" or args.repair)
    if args.repair:
        ok = all(not each.owner for each in checked)
    said["ok"] = ok
    if out.as_json:
        out.data(said)
    else:
        print("\n".join([*lines, *(line for each in checked for line in _lines(each))]))
        if not ok and not args.repair:
            print(f"`kvweave fsck --home {home} --repair` keeps what verifies and removes the rest")
    return 0 if ok else 1


def _lines(found: files.Found) -> list[str]:
    lines = [
        f"{found.directory}: {found.n_records} records, {size(found.n_bytes)}, "
        f"{len(found.spoilt)} spoilt, {len(found.missing)} missing, {len(found.strays)} of chunks "
        "that the index does not know"
    ]
    lines += [f"  {Path(key).name}: {why}" for key, why in found.spoilt.items()]
    lines += [f"  {digest}: not there; it is computed again" for digest in found.missing]
    lines += [f"  {found.owner}"] * bool(found.owner)
    return lines + [f"  {each}" for each in found.repaired]
