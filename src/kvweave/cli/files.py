"""The verbs on names. On this machine they need the index only: no model, no torch."""

from __future__ import annotations

import time
from argparse import Namespace

from kvweave.cli.command import UsageError
from kvweave.cli.show import Out, aligned, date, size
from kvweave.cli.target import There, target
from kvweave.errors import InvalidArgument


def ls(args: Namespace) -> None:
    """List names."""
    with target(args).files() as files:
        found = files.ls(args.pattern, sort=args.sort, reverse=args.reverse, limit=args.limit)
    Out.of(args).entries(found, long=args.long)


def find(args: Namespace) -> None:
    """List names by what stands behind them."""
    since = None if args.unused_for is None else time.time() - args.unused_for
    with target(args).files() as files:
        found = files.find(
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
    with target(args).files() as files:
        about = files.about(args.ref)
    if out.as_json:
        out.data(about)
        return
    shown = about | {
        "id": f"#{about['id']}",
        "n_bytes": f"{about['n_bytes']} ({size(about['n_bytes'])})",
        "pinned": "yes" if about["pinned"] else "no",
        "created": date(about["created"]),
        "last_used": date(about["last_used"]),
        "names": ", ".join(about["names"]) or "-",
        "base": "-" if about["base"] is None else f"#{about['base']}",
    }
    print("\n".join(aligned([(key, str(value)) for key, value in shown.items()], left=2)))


def cat(args: Namespace) -> None:
    """Print what a chunk says."""
    out = Out.of(args)
    told = target(args).text(args.ref)
    if out.as_json:
        out.data({"ref": args.ref} | told)
        return
    if told["text"] is None:
        raise InvalidArgument("ref", "this model has no tokenizer, so there is no text", "--json")
    print(told["text"], end="" if told["text"].endswith("\n") else "\n")


def rm(args: Namespace) -> None:
    """Remove names."""
    with target(args).files(change=True) as files:
        gone = files.rm(args.pattern, dry_run=args.dry_run, force=args.force)
    Out.of(args).done("removed", gone, dry_run=args.dry_run)


def mv(args: Namespace) -> None:
    """Rename."""
    with target(args).files(change=True) as files:
        moved = files.mv(args.src, args.dst, args.replace, dry_run=args.dry_run)
    Out.of(args).done("named", moved, dry_run=args.dry_run)


def cp(args: Namespace) -> None:
    """Give chunks another name."""
    with target(args).files(change=True) as files:
        copied = files.cp(args.src, args.dst, args.replace, dry_run=args.dry_run)
    Out.of(args).done("named", copied, dry_run=args.dry_run)


def pin(args: Namespace) -> None:
    """Keep chunks."""
    with target(args).files(change=True) as files:
        pinned = files.pin(args.pattern, dry_run=args.dry_run)
    Out.of(args).done("pinned", pinned, dry_run=args.dry_run)


def unpin(args: Namespace) -> None:
    """Take back pin."""
    with target(args).files(change=True) as files:
        unpinned = files.unpin(args.pattern, dry_run=args.dry_run)
    Out.of(args).done("unpinned", unpinned, dry_run=args.dry_run)


def du(args: Namespace) -> None:
    """Add up tokens and bytes."""
    out = Out.of(args)
    if args.by == "namespace" and isinstance(target(args), There):
        raise UsageError(
            "--by namespace counts everybody's, and a server shows each key its own",
            "take --by tier, kind or dir; or run it on the server's home",
        )
    with target(args).files() as files:
        usages = files.du(args.pattern, args.by, all_namespaces=args.by == "namespace")
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
