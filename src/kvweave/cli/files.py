"""The verbs on names. They need the index only: no model, no torch."""

from __future__ import annotations

import time
from argparse import Namespace
from datetime import datetime

from kvweave.chunk.files import Files
from kvweave.cli.home import open_table
from kvweave.cli.show import Out, aligned, size


def ls(args: Namespace) -> None:
    """List names."""
    with open_table(args) as table:
        found = Files(table).ls(
            args.pattern, sort=args.sort, reverse=args.reverse, limit=args.limit
        )
    Out.of(args).entries(found, long=args.long)


def find(args: Namespace) -> None:
    """List names by what stands behind them."""
    since = None if args.unused_for is None else time.time() - args.unused_for
    with open_table(args) as table:
        found = Files(table).find(
            args.pattern,
            kind=args.kind,
            tier=args.tier,
            pinned=args.pinned,
            min_tokens=args.min_tokens,
            unused_since=since,
        )
    Out.of(args).entries(found, long=args.long)


def stat(args: Namespace) -> None:
    """Tell all about one chunk."""
    out = Out.of(args)
    with open_table(args) as table:
        entry = Files(table).stat(args.ref)
        record = table.get(entry.id)
        names, base = list(table.names_of(entry.id)), record.base
    about = {**entry.to_dict(), "names": names, "base": base, "digest": record.digest.hex()}
    if out.as_json:
        out.data(about)
        return
    shown = about | {
        "id": f"#{entry.id}",
        "n_bytes": f"{entry.n_bytes} ({size(entry.n_bytes)})",
        "pinned": "yes" if entry.pinned else "no",
        "created": _date(entry.created),
        "last_used": _date(entry.last_used),
        "names": ", ".join(names) or "-",
        "base": "-" if base is None else f"#{base}",
    }
    print("\n".join(aligned([(key, str(value)) for key, value in shown.items()], left=2)))


def rm(args: Namespace) -> None:
    """Remove names."""
    with open_table(args) as table:
        gone = Files(table).rm(args.pattern, dry_run=args.dry_run, force=args.force)
    Out.of(args).done("removed", gone, dry_run=args.dry_run)


def mv(args: Namespace) -> None:
    """Rename."""
    with open_table(args) as table:
        moved = Files(table).mv(args.src, args.dst, args.replace, dry_run=args.dry_run)
    Out.of(args).done("named", moved, dry_run=args.dry_run)


def cp(args: Namespace) -> None:
    """Give chunks another name."""
    with open_table(args) as table:
        copied = Files(table).cp(args.src, args.dst, args.replace, dry_run=args.dry_run)
    Out.of(args).done("named", copied, dry_run=args.dry_run)


def pin(args: Namespace) -> None:
    """Keep chunks."""
    with open_table(args) as table:
        pinned = Files(table).pin(args.pattern, dry_run=args.dry_run)
    Out.of(args).done("pinned", pinned, dry_run=args.dry_run)


def unpin(args: Namespace) -> None:
    """Take back pin."""
    with open_table(args) as table:
        unpinned = Files(table).unpin(args.pattern, dry_run=args.dry_run)
    Out.of(args).done("unpinned", unpinned, dry_run=args.dry_run)


def du(args: Namespace) -> None:
    """Add up tokens and bytes."""
    out = Out.of(args)
    with open_table(args) as table:
        usages = Files(table).du(args.pattern, args.by, all_namespaces=args.by == "namespace")
    if out.as_json:
        out.data([usage.to_dict() for usage in usages])
        return
    rows = [
        (u.key or "(default)", str(u.n_chunks), str(u.n_tokens), size(u.n_bytes)) for u in usages
    ]
    n_chunks, n_tokens = sum(u.n_chunks for u in usages), sum(u.n_tokens for u in usages)
    n_bytes = sum(u.n_bytes for u in usages)
    rows.append(("total", str(n_chunks), str(n_tokens), size(n_bytes)))
    out.table((args.by, "chunks", "tokens", "size"), rows)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
