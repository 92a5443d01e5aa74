"""The verbs that need the model: run, check, can, place, demo."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import kvweave
from kvweave.chunk.files import Files
from kvweave.chunk.names import has_glob
from kvweave.cli.home import home_of, open_engine, open_table, quieten
from kvweave.cli.parser import UsageError
from kvweave.cli.show import Out, aligned, size
from kvweave.errors import ChunkNotFound, HoleNotFilled
from kvweave.weave.template import Template

# arguments of Engine.compose
RESERVED = ("self", "template", "name", "repair", "share", "max_drift")


def run(args: Namespace) -> None:
    """Weave a context from text and chunks, and continue it."""
    out = Out.of(args)
    with composed(args) as context:
        sampling = sampling_of(args, stop=args.stop)
        check = context.check() if args.check else None
        woven = context.plan  # with --check it is woven by now, and the answer finds all in place
        turn = context.begin(sampling)
        plan = woven if check is not None else context.plan
        for piece in turn.stream():
            if not out.as_json:
                print(piece, end="", flush=True)
        answer = turn.finish()
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
        import_module("kvweave.cli.suite").check(args)
        return
    if args.calibrate is not None:
        raise UsageError("--calibrate belongs to --suite", "write both")
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
    out = Out.of(args)
    with open_engine(args) as engine:
        move, runner = engine.can("move"), engine.runner
        about: dict[str, object] = {
            "move": {"ok": move.ok, "reason": move.reason},
            "model": runner.fingerprint.model,
            "dtype": runner.fingerprint.dtype,
            "device": str(runner.device),
            "max_positions": runner.limit,
            "bytes_per_token": runner.row_bytes if move else None,
        }
    if out.as_json:
        out.data(about)
        return
    shown = about | {"move": f"{'yes' if move else 'no'}: {move.reason}"}
    if move:
        shown["bytes_per_token"] = f"{runner.row_bytes} ({size(runner.row_bytes)})"
    rows = [(key.replace("_", " "), "-" if v is None else str(v)) for key, v in shown.items()]
    print("\n".join(aligned(rows, left=2)))


def place(args: Namespace) -> None:
    """Move KV to a tier."""
    out = Out.of(args)
    if args.tier == "ram":
        out.note("note: ram lasts as long as this process, then the KV goes to disk")
    if not (home_of(args) / "model.json").exists():
        with open_table(args) as table:  # says that nothing is there, or what is not found
            Files(table).ls(args.pattern)
        out.done("placed", [], dry_run=args.dry_run)
        return
    with open_engine(args) as engine:
        moved = engine.place(args.pattern, args.tier, dry_run=args.dry_run)
    out.done("placed", moved, dry_run=args.dry_run)


def demo(args: Namespace) -> int:
    """Run the demonstration."""
    quieten(args)
    job = import_module("kvweave.demo.job")
    return int(job.run(args.model, args.turns, args.json, Path(args.out), args.quick, args.repair))


@contextmanager
def composed(args: Namespace) -> Iterator[kvweave.Context]:
    """Open the engine and yield the context TEMPLATE describes."""
    template, values = Template(_template_text(args)), _hole_values(args)
    with open_engine(args) as engine:
        filled: dict[str, object] = dict(values)
        for hole, value in values.items():
            if isinstance(value, list):
                filled[hole] = [name for ref in value for name in _names(engine, ref)]
        try:
            options = {"repair": args.repair, "share": args.share, "max_drift": args.max_drift}
            yield engine.compose(template, **options, **filled)  # type: ignore[arg-type]
        except HoleNotFilled as error:
            raise _explained(engine, error) from error


def sampling_of(args: Namespace, stop: list[str]) -> kvweave.Sampling:
    """Return the sampling the options ask for. Raises InvalidArgument."""
    return kvweave.Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(stop),
    )


def _template_text(args: Namespace) -> str:
    text = sys.stdin.read() if args.template == "-" else str(args.template)
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


def _names(engine: kvweave.Engine, ref: str) -> list[str]:
    """Return the names a glob or ``docs/`` stands for, in order; any other name as it is."""
    if not has_glob(ref) and not ref.endswith("/"):
        return [ref]
    names = [entry.name for entry in engine.files.ls(ref)]
    if not names:
        raise ChunkNotFound(ref)
    return names


def _explained(engine: kvweave.Engine, error: HoleNotFilled) -> ChunkNotFound | HoleNotFilled:
    """Return the error in the words of the shell: a path is a missing chunk, not a hole."""
    hole = str(error.hole)
    near = engine.table.similar_names(hole)
    if near or "/" in hole or hole.startswith("#"):
        return ChunkNotFound(hole, near)
    error.hint = f"pass --set {hole}=TEXT or --docs {hole}=NAME, or write {{{{{hole}}}}} for braces"
    return error
