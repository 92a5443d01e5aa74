"""``kvweave memory ...``: the memories over a server's contexts."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvweave.cli import stdin
from kvweave.cli.command import UsageError
from kvweave.cli.show import Out, aligned
from kvweave.cli.target import server
from kvweave.cli.text import sampling_of
from kvweave.memory.limits import MemoryBudget

if TYPE_CHECKING:
    from kvweave.client import RemoteMemory
    from kvweave.memory.told import By

ZONED = ("window", "turns", "summaries", "summary", "recalled", "warm")


def ls(args: Namespace) -> None:
    """List memories."""
    with server(args, "a memory").weaver() as client:
        _list(args, sorted(client.memories))


def open(args: Namespace) -> None:
    """Open one."""
    given = {zone: getattr(args, zone) for zone in ZONED if getattr(args, zone) is not None}
    budget = MemoryBudget(**given)
    how: dict[str, Any] = {}
    if args.sentences is not None:
        how = {"summarise": "sentences", "sentences": args.sentences}
    with server(args, "a memory").weaver() as client:
        memory = client.memory(args.name, root=args.root, budget=budget, **how)
        _did(args, "opened", memory)


def show(args: Namespace) -> None:
    """Show the zones of one."""
    out = Out.of(args)
    with _memory(args) as memory:
        told = memory.describe()
    if out.as_json:
        out.data(told)
        return
    rows = [
        (zone, part["name"], f"#{part['id']}", str(part["n_tokens"]))
        for zone, parts in told["zones"].items()
        for part in parts
    ]
    total = ("", "total", "", str(told["n_tokens"]))
    print("\n".join(aligned([("zone", "part", "id", "tokens"), *rows, total], left=3)))
    steps = f"{told['n_steps']} steps can be undone{', busy' if told['busy'] else ''}"
    out.note(f"{told['n_items']} items below {told['root']}, {steps}")


def items(args: Namespace) -> None:
    """List items."""
    out = Out.of(args)
    with _memory(args) as memory:
        found = memory.items(args.pattern)
    if out.as_json:
        out.data([asdict(item) for item in found])
    elif found:
        rows = [
            (each.name, f"#{each.id}", each.kind, each.tier, "here" if each.in_context else "-")
            + (str(each.n_tokens),)
            for each in found
        ]
        out.table(("item", "id", "kind", "tier", "in context", "tokens"), rows, left=5)


def read(args: Namespace) -> None:
    """Print an item."""
    out = Out.of(args)
    with _memory(args) as memory:
        text = memory.read(args.item)
    if out.as_json:
        out.data({"name": args.item, "text": text})
    else:
        print(text)


def ask(args: Namespace) -> None:
    """Put a message to one, and print the answer."""
    out = Out.of(args)
    sampling = asdict(sampling_of(args, stop=[]))
    n, recall = sampling.pop("max_tokens"), None if args.recall == "none" else args.recall
    with _memory(args) as memory:
        answer = memory.ask(_text(args.text), n, recall=recall, question=args.question, **sampling)
    if out.as_json:
        told = {"text": answer.text, "finish": answer.finish, "usage": answer.usage}
        out.data(told | {"plan": answer.plan.to_dict()})
        return
    print(answer.text)
    if args.explain:
        print(answer.plan.explain(), file=sys.stderr)


def tell(args: Namespace) -> None:
    """Add a message."""
    with _memory(args) as memory:
        part = memory.tell(_text(args.text), args.role)
        _did(args, f"added {part.name}", memory)


def settle(args: Namespace) -> None:
    """Bring one under its budgets."""
    with _memory(args) as memory:
        _list(args, memory.settle())


def search(args: Namespace) -> None:
    """Rank items."""
    out, by = Out.of(args), _by(args)
    with _memory(args) as memory:
        found = memory.search(args.question, by, **({"n": args.limit} if args.limit else {}))
    if out.as_json:
        out.data([{"name": name, "score": score} for name, score in found])
    elif found:
        out.table(("item", "score"), [(name, f"{score:.3g}") for name, score in found], left=1)


def recall(args: Namespace) -> None:
    """Recall items."""
    with _memory(args) as memory:
        _list(args, memory.recall(args.question, _by(args), args.limit))


def release(args: Namespace) -> None:
    """Release recalled items."""
    with _memory(args) as memory:
        _list(args, memory.release(args.pattern))


def anchor(args: Namespace) -> None:
    """Anchor a text."""
    with _memory(args) as memory:
        _did(args, f"anchored {memory.anchor(args.label, _text(args.text))}", memory)


def write(args: Namespace) -> None:
    """Write an item."""
    with _memory(args) as memory:
        name = memory.write(args.item, _text(args.text), replace=not args.new)
        _did(args, f"wrote {name}", memory)


def rm(args: Namespace) -> None:
    """Remove items."""
    with _memory(args) as memory:
        _list(args, memory.delete(args.pattern, dry_run=args.dry_run))


def mv(args: Namespace) -> None:
    """Rename items."""
    with _memory(args) as memory:
        _did(args, f"renamed to {memory.rename(args.item, args.to)}", memory)


def undo(args: Namespace) -> None:
    """Take back a step."""
    with _memory(args) as memory:
        what = memory.undo()
        _did(args, "there is no step to undo" if what is None else f"undid {what}", memory)


def idle(args: Namespace) -> None:
    """Do a step of what can wait."""
    out = Out.of(args)
    with _memory(args) as memory:
        slept = memory.idle()
    if out.as_json:
        out.data(None if slept is None else asdict(slept))
    elif not out.quiet:
        print("nothing waits" if slept is None else f"{slept.what}: {slept.name}")


def tool(args: Namespace) -> int:
    """Answer a call of the tool; 1 where it says that something went wrong."""
    out = Out.of(args)
    try:
        call = json.loads(_text(args.call))
    except ValueError as error:
        raise UsageError(f"CALL is no JSON: {error}", 'such as \'{"command": "view"}\'') from None
    if not isinstance(call, dict):
        raise UsageError("CALL is no JSON object", 'such as \'{"command": "view"}\'')
    with _memory(args) as memory:
        reply = memory.tool(call)
    if out.as_json:
        out.data(asdict(reply))
    else:
        print(reply.text)
    return int(reply.is_error)


def blocks(args: Namespace) -> None:
    """List blocks."""
    out = Out.of(args)
    with _memory(args) as memory:
        found = memory.blocks()
    if out.as_json:
        out.data([asdict(block) for block in found])
    elif found:
        rows = [(b.label, str(len(b.value)), str(b.limit), b.value[:60]) for b in found]
        out.table(("block", "characters", "of", "value"), rows, left=1)


def close(args: Namespace) -> None:
    """Close one."""
    out = Out.of(args)
    with _memory(args) as memory:
        memory.close()
    if out.as_json:
        out.data({"name": args.name})
    elif not out.quiet:
        print(f"closed: {args.name}")


@contextmanager
def _memory(args: Namespace) -> Iterator[RemoteMemory]:
    with server(args, "a memory").weaver() as client:
        yield client.get_memory(args.name)


def _by(args: Namespace) -> By:
    by: By = args.by
    return by


def _text(text: str | None) -> str:
    return stdin.whole() if text in (None, "-") else str(text)


def _list(args: Namespace, names: Sequence[str]) -> None:
    out = Out.of(args)
    if out.as_json:
        out.data(list(names))
    elif names:
        print("\n".join(names))


def _did(args: Namespace, what: str, memory: RemoteMemory) -> None:
    """Say what was done to a memory, and what it is now."""
    out, told = Out.of(args), memory.describe()
    if out.as_json:
        out.data(told)
    elif not out.quiet:
        print(f"{what}: {memory.name}  {told['n_items']} items, {told['n_tokens']} tokens")
