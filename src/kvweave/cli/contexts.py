"""``kvweave context ...``: the contexts of a server."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvweave.chunk.names import has_glob, matching
from kvweave.cli import stdin
from kvweave.cli.asking import answer_to
from kvweave.cli.command import UsageError
from kvweave.cli.show import Out, aligned, date
from kvweave.cli.target import server
from kvweave.cli.text import sampling_of
from kvweave.cli.values import part_of
from kvweave.errors import ContextNotFound, nearest

if TYPE_CHECKING:
    from kvweave.client import RemoteContext
    from kvweave.weave.parts import Part

_Json = dict[str, Any]


def ls(args: Namespace) -> None:
    """List contexts."""
    out = Out.of(args)
    with server(args, "a context").weaver() as client:
        found = {str(each["name"]): each for each in client.summaries()}
    names = sorted(matching(found, args.pattern))
    if not names and args.pattern and not has_glob(args.pattern):
        raise ContextNotFound(args.pattern, nearest(args.pattern, found))
    if out.as_json:
        out.data([found[name] for name in names])
    elif args.long and names:
        rows = [
            (name, "busy" if found[name]["busy"] else "-")
            + (str(found[name]["n_parts"]), str(found[name]["n_tokens"]))
            for name in names
        ]
        out.table(("name", "busy", "parts", "tokens"), rows, left=2)
    elif names:
        print("\n".join(names))


def show(args: Namespace) -> None:
    """Show the parts of one."""
    out = Out.of(args)
    with _context(args) as context:
        told = context.describe()
    if out.as_json:
        out.data(told)
        return
    rows = [
        (str(p["index"]), p["name"], f"#{p['id']}", p["how"], p["tier"], str(p["n_tokens"]))
        for p in told["parts"]
    ]
    total = ("", "total", "", "", "", str(told["n_tokens"]))
    print("\n".join(aligned([("", "part", "id", "how", "from", "tokens"), *rows, total], left=5)))
    if "version" in told:
        out.note(f"version {told['version']}{', busy' if told['busy'] else ''}")


def new(args: Namespace) -> None:
    """Open one."""
    given = {
        name: getattr(args, name)
        for name in ("prune", "repair", "share", "max_drift", "keep", "bases")
    }
    with server(args, "a context").weaver() as client:
        context = client.context(
            args.name, system=args.system, **{k: v for k, v in given.items() if v is not None}
        )
        _did(args, "opened", context)


def log(args: Namespace) -> None:
    """List what was done to one."""
    out = Out.of(args)
    with _context(args) as context:
        found = context.log(limit=args.limit)
    if out.as_json:
        out.data([edit.to_dict() for edit in found])
    elif found:
        rows = [(str(e.version), date(e.at), e.says, str(e.n_tokens)) for e in found]
        out.table(("version", "when", "what", "tokens"), rows, left=3)


def diff(args: Namespace) -> None:
    """Say how two versions of one differ."""
    out = Out.of(args)
    with _context(args) as context:
        found = context.diff(args.before, args.after)
    if out.as_json:
        out.data(found.to_dict())
        return
    signs = (("-", found.removed), ("+", found.added), ("~", found.moved))
    lines = [f"{sign} {p.name}  #{p.id}, {p.n} tokens" for sign, parts in signs for p in parts]
    if lines:
        print("\n".join(lines))
    else:
        out.note(f"versions {found.since} and {found.to} have the same parts")


def revert(args: Namespace) -> None:
    """Bring back the parts of a version."""
    with _context(args) as context:
        context.revert(args.version)
        _did(args, f"reverted to version {args.version}", context)


def why(args: Namespace) -> None:
    """Say what the next answer computes, and which edit is the cause."""
    out = Out.of(args)
    with _context(args) as context:
        found = context.why()
    if out.as_json:
        out.data(found.to_dict())
        return
    rows = [(p.name, p.how, p.says, str(p.n_computed), str(p.n_tokens)) for p in found.parts]
    print("\n".join(aligned([("part", "how", "why", "computed", "tokens"), *rows], left=3)))
    print(found.says)


def refine(args: Namespace) -> None:
    """Make rows exact while the server has nothing else to do."""
    out = Out.of(args)
    with _context(args) as context:
        n, left = context.refine(args.rows), context.preview()
    if out.as_json:
        out.data({"refined": n, "drift": left.drift})
        return
    exact = "all of it is exact" if left.drift == 0 else "not all of it is exact yet"
    print(f"{n} rows recomputed: {exact}")


def ledger(args: Namespace) -> None:
    """Say what each answer cost."""
    out = Out.of(args)
    with _context(args) as context:
        found = context.ledger()
    if out.as_json:
        out.data(found)
        return
    numbers = ("drift", "measured", "nats")
    rows = [
        (
            str(cost["version"]),
            str(cost["n_tokens"]),
            *("-" if cost[key] is None else f"{cost[key]:.2g}" for key in numbers),
            ", ".join(cost["edits"]),
        )
        for cost in found["data"]
    ]
    head = ("version", "tokens", "at most", "measured", "nats", "edits before it")
    print("\n".join(aligned([head, *rows], left=0)))
    print(f"{found['nats']:.2g} nats in {found['answers']} answers; of {found['unknown']} unknown")


def drop(args: Namespace) -> None:
    """Remove parts of one."""
    with _context(args) as context:
        parts = list(map(part_of, args.parts))
        if args.if_version is None:
            context.drop(*parts, mode=args.mode)
        else:
            with context.edit(version=args.if_version) as edit:
                edit.drop(*parts, mode=args.mode)
        _did(args, f"dropped {', '.join(args.parts)}", context)


def amend(args: Namespace) -> None:
    """Add an erratum of a part of one."""
    if args.role is not None and args.kind is not None:
        raise UsageError("the role of a message is its kind", "leave --kind away")
    text, how = _text(args.text), {"kind": args.kind, "role": args.role}
    with _context(args) as context:
        if args.if_version is None:
            part = context.amend(part_of(args.part), text, **how)
        else:
            with context.edit(version=args.if_version) as edit:
                made = edit.amend(part_of(args.part), text, **how)
            part = made.part
    _added(args, part)


def mv(args: Namespace) -> None:
    """Rename one."""
    with _context(args) as context:
        context.rename(args.to)
        _did(args, "renamed", context)


def fork(args: Namespace) -> None:
    """Copy one."""
    with _context(args) as context:
        _did(args, "forked", context.fork(args.to))


def rm(args: Namespace) -> None:
    """Close contexts."""
    out, names = Out.of(args), list(dict.fromkeys(args.names))
    with server(args, "a context").weaver() as client:
        for name in names:
            client.get_context(name)  # before one is closed
        for name in names:
            client.close_context(name)
            if not out.as_json and not out.quiet:
                print(f"closed: {name}")
    if out.as_json:
        out.data(names)


def append(args: Namespace) -> None:
    """Add text or a chunk to one."""
    if args.chunk is not None and (args.text or args.role or args.stored):
        raise UsageError("--chunk takes no text, role or name", "leave one away")
    if args.role is not None and (args.at is not None or args.stored):
        raise UsageError("a message goes to the end, by a name of its own", "leave --role away")
    with _context(args) as context:
        part = _append(args, context)
    _added(args, part)


def ask(args: Namespace) -> None:
    """Put a message to one, and print the answer."""
    out = Out.of(args)
    with server(args, "a context").weaver() as client:
        context = client.get_context(args.name)
        answer = answer_to(client, context, _text(args.text), sampling_of(args, stop=[]), out.piece)
    if out.as_json:
        told = {"text": answer.text, "finish": answer.finish, "usage": answer.usage}
        out.data(told | {"plan": answer.plan.to_dict()})
        return
    print()
    if args.explain:
        print(answer.plan.explain(), file=sys.stderr)


@contextmanager
def _context(args: Namespace) -> Iterator[RemoteContext]:
    with server(args, "a context").weaver() as client:
        yield client.get_context(args.name)


def _append(args: Namespace, context: RemoteContext) -> Any:
    if args.chunk is not None and args.at is None:
        return context.append_chunk(args.chunk)
    if args.chunk is not None:
        return context.insert_chunk(args.at, args.chunk)
    text = _text(args.text)
    if args.role is not None:
        return context.message(args.role, text)
    if args.at is None:
        return context.append(text, kind=args.kind, name=args.stored)
    return context.insert(args.at, text, kind=args.kind, name=args.stored)


def _added(args: Namespace, part: Part) -> None:
    out = Out.of(args)
    if out.as_json:
        out.data({"name": part.name, "id": part.id, "n_tokens": part.n})
    elif not out.quiet:
        print(f"added: {part.name}  #{part.id}, {part.n} tokens")


def _text(text: str | None) -> str:
    return stdin.whole() if text in (None, "-") else str(text)


def _did(args: Namespace, what: str, context: RemoteContext) -> None:
    """Say what was done to a context, and what it is now."""
    out, told = Out.of(args), context.describe()
    if out.as_json:
        out.data(told)
    elif not out.quiet:
        print(f"{what}: {context.name}  {told['n_parts']} parts, {told['n_tokens']} tokens")
