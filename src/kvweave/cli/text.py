"""The verbs that need the model: run, check, can, place, demo."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import kvweave
from kvweave.chunk.names import has_glob
from kvweave.cli import stdin
from kvweave.cli.command import UsageError
from kvweave.cli.home import open_engine, quieten
from kvweave.cli.show import Out, aligned, size
from kvweave.cli.start import uncollected
from kvweave.cli.target import There, is_bundled, require_here, target
from kvweave.errors import ChunkNotFound, HoleNotFilled
from kvweave.run.capability import Capability
from kvweave.weave.template import Template

if TYPE_CHECKING:
    from kvweave.client import RemoteContext

MANY, FEW = 256, 32  # tokens of an answer
# arguments of Engine.compose
WEAVE = ("repair", "share", "max_drift", "keep", "bases")
WHAT = ("run", "move")  # what a model can do, or not
RESERVED = ("self", "template", "name", *WEAVE)


def run(args: Namespace) -> None:
    """Weave a context from text and chunks, and continue it."""
    out = Out.of(args)
    with composed(args) as context:
        sampling = sampling_of(args, stop=args.stop)
        # with --check it is woven by now, and the answer finds all in place
        check, woven = (context.check(), context.plan) if args.check else (None, None)
        turn = context.begin(sampling)
        for piece in turn.stream():
            if not out.as_json:
                print(piece, end="", flush=True)
        answer = turn.finish()
        plan = woven or answer.plan
    if out.as_json:
        found = {"text": answer.text, "finish": answer.finish, "usage": answer.usage}
        checked = None if check is None else check.to_dict()
        out.data(found | {"plan": plan.to_dict(), "check": checked})
        return
    print()
    if args.explain:
        print(plan.explain(), file=sys.stderr)
    if check is not None:
        print(check, file=sys.stderr)


def check(args: Namespace) -> None:
    """Weave a context and compare it with a full prefill; or measure the model on the suite."""
    if args.suite:
        require_here(args, "the suite")
        with uncollected():
            suite = import_module("kvweave.cli.suite")
        suite.check(args)
        return
    if args.calibrate is not None or args.auto is not None:
        name = "--auto" if args.calibrate is None else "--calibrate"
        raise UsageError(f"{name} belongs to --suite", "write both")
    if args.template is None:
        raise UsageError("no TEMPLATE", "write one, or --suite to measure the model")
    out = Out.of(args)
    with composed(args) as context:
        found = context.check()
        plan = context.plan
    if out.as_json:
        out.data({"plan": plan.to_dict(), "check": found.to_dict()})
        return
    print(plan.explain())
    print(found)


def can(args: Namespace) -> None:
    """Tell what the model can do."""
    where = target(args)
    if isinstance(where, There):
        _can_there(where)
        return
    out = Out.of(args)
    with open_engine(args) as engine:
        can, runner = {what: engine.can(what) for what in WHAT}, engine.runner
        about: dict[str, object] = {
            **{what: {"ok": found.ok, "reason": found.reason} for what, found in can.items()},
            "model": runner.fingerprint.model,
            "dtype": runner.fingerprint.dtype,
            "device": str(runner.device),
            "max_positions": runner.limit,
            "bytes_per_token": runner.row_bytes if can["run"] else None,
        }
    if out.as_json:
        out.data(about)
        return
    shown = about | _shown(can)
    if can["run"]:
        shown["bytes_per_token"] = f"{runner.row_bytes} ({size(runner.row_bytes)})"
    rows = [(key.replace("_", " "), "-" if v is None else str(v)) for key, v in shown.items()]
    print("\n".join(aligned(rows, left=2)))


def _can_there(where: There) -> None:
    with where.weaver() as client:
        can, told = {what: client.can(what) for what in WHAT}, client.status()
    if where.out.as_json:
        about = {what: {"ok": found.ok, "reason": found.reason} for what, found in can.items()}
        where.out.data({**about, "model": told["model"], "url": client.url})
        return
    rows = [*_shown(can).items(), ("model", str(told["model"])), ("server", client.url)]
    print("\n".join(aligned(rows, left=2)))


def _shown(can: Mapping[str, Capability]) -> dict[str, str]:
    return {what: f"{'yes' if found else 'no'}: {found.reason}" for what, found in can.items()}


def compress(args: Namespace) -> None:
    """Leave of a chunk's KV what a token policy keeps."""
    out = Out.of(args)
    with target(args).weaver() as weaver:
        entry = weaver.compress(args.ref, args.keep, to=args.to, dry_run=args.dry_run)
    out.done("compressed", [entry], dry_run=args.dry_run)


def place(args: Namespace) -> None:
    """Move KV to a tier."""
    Out.of(args).done("placed", target(args).place(), dry_run=args.dry_run)


def demo(args: Namespace) -> int:
    """Run the demonstration."""
    quieten(args)
    with uncollected():
        job = import_module("kvweave.demo.job")
    return int(job.run(args.model, args.turns, args.json, Path(args.out), args.quick, args.repair))


@contextmanager
def composed(args: Namespace) -> Iterator[kvweave.Context | RemoteContext]:
    """Yield the context TEMPLATE describes, and close it."""
    template, values = Template(_template_text(args)), _hole_values(args)
    with target(args).weaver() as weaver:
        filled: dict[str, object] = dict(values)
        for hole, value in values.items():
            if isinstance(value, list):
                filled[hole] = [name for ref in value for name in _names(weaver, ref)]
        try:
            options = {name: getattr(args, name) for name in WEAVE}
            context = weaver.compose(template, **options, **filled)  # type: ignore[arg-type]
        except HoleNotFilled as error:
            raise _explained(weaver, error) from error
        try:
            yield context
        finally:
            weaver.close_context(context.name)


def sampling_of(args: Namespace, stop: list[str]) -> kvweave.Sampling:
    """Return the sampling the options ask for. Raises InvalidArgument."""
    return kvweave.Sampling(
        max_tokens=args.max_tokens or (FEW if is_bundled(args) else MANY),
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(stop),
    )


def _template_text(args: Namespace) -> str:
    text = stdin.whole() if args.template == "-" else str(args.template)
    if not text.strip():
        raise UsageError("the template is empty", "write some text, or {name} of a chunk")
    return text


def _hole_values(args: Namespace) -> dict[str, str | list[str]]:
    values: dict[str, str | list[str]] = {}
    for option, words in (("--set", args.set), ("--docs", args.docs)):
        for word in words:
            hole, equals, value = word.partition("=")
            if not equals or not hole:
                raise UsageError(f"{option} {word}: no '='", f"write {option} hole=...")
            if hole in RESERVED:
                raise UsageError(f"a hole cannot be called {hole!r}", "choose another word")
            if hole in values:
                raise UsageError(f"{hole} is filled twice", "give it one --set or one --docs")
            values[hole] = value if option == "--set" else [n for n in value.split(",") if n]
    return values


def _names(weaver: kvweave.Engine | kvweave.Client, ref: str) -> list[str]:
    """Return the names a glob or ``docs/`` stands for, in order; any other name as it is."""
    if not has_glob(ref) and not ref.endswith("/"):
        return [ref]
    names = [entry.name for entry in weaver.files.ls(ref)]
    if not names:
        raise ChunkNotFound(ref)
    return names


def _explained(
    weaver: kvweave.Engine | kvweave.Client, error: HoleNotFilled
) -> ChunkNotFound | HoleNotFilled:
    """Return the error in the words of the shell: a path is a missing chunk, not a hole."""
    hole = str(error.hole)
    try:
        weaver.files.stat(hole)
    except ChunkNotFound as missing:
        if missing.did_you_mean or "/" in hole or hole.startswith("#"):
            return missing
    error.hint = f"pass --set {hole}=TEXT or --docs {hole}=NAME, or write {{{{{hole}}}}} for braces"
    return error
