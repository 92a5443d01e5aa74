"""``kvweave calibrate``: from the user's own text, or prompts he has logged, how `auto` is to choose rows
for this model, and bounds of the drift."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvweave.chunk.identity import ModelFingerprint
from kvweave.cli.command import UsageError
from kvweave.cli.home import model_of, offline_vllm, quieten
from kvweave.cli.show import Out
from kvweave.cli.suite import BOUNDS, check_home, file_of, one_way, print_calibration
from kvweave.cli.values import path_of
from kvweave.errors import CorruptChunk, InvalidArgument, of_system
from kvweave.run.base import Backend
from kvweave.run.model import Runner
from kvweave.suite import calibrate as fits
from kvweave.suite import choose, own
from kvweave.suite.exam import Exam, Trial
from kvweave.suite.method import Method
from kvweave.suite.words import Paper
from kvweave.weave.calibration import STRATEGY, Calibration, Recipes

CASES = 100  # that choose, at most
SHARES = fits.SHARES
USUAL = [Method("auto", share, modes=("forget",)) for share in SHARES]


def calibrate(args: Namespace) -> None:
    """Weave cases of one's own at every share, compare with full prefills, and write the bounds."""
    out = Out.of(args)
    if bool(args.text) == (args.prompts is not None):
        raise UsageError("give --text FILES, or --prompts FILE", "one of the two")
    texts = [_read(name) for name in args.text]
    lines = [] if args.prompts is None else _read(args.prompts).splitlines()
    if args.vllm is not None and not (args.out or args.home or os.environ.get("KVWEAVE_HOME")):
        what = "the calibration beside a checkpoint is of the model as transformers loads it"
        raise UsageError(what, "with --vllm give --out FILE, or --home")
    quieten(args)
    model = model_of(args)
    file = file_of(args.out, args, model)
    with _loaded(model, args) as runner:
        runner.require_move()
        check_home(file.parent, runner.fingerprint)
        found = _measured(runner, texts, lines, args, file, out)
    if out.as_json:
        out.data(found)
    else:
        _show(found["calibration"], out)


@contextmanager
def _loaded(model: str, args: Namespace) -> Iterator[Backend]:
    """Load the model, as vLLM does if that is asked for."""
    if args.vllm is None:
        yield Runner.load(model)
        return
    with offline_vllm().loaded(model, args.vllm) as backend:
        yield backend


def _measured(
    runner: Backend, texts: list[str], lines: list[str], args: Namespace, file: Path, out: Out
) -> dict[str, Any]:
    """Measure, write, and return what is told of it."""
    bos = str(getattr(runner.tokenizer, "bos_token", None) or "")
    recipes = _as_it_is(file, runner.fingerprint) if args.only == "bounds" else ()
    exam = Exam(runner, bos, evidence=args.only != "rows")
    try:
        maker, n = exam.words.maker, args.n
        papers = (
            own.of_texts(maker, texts, n)
            if texts
            else own.of_prompts(maker, lines, n, runner.limit)
        )
        asked, rest = _shared_out(papers, args.only)
        chosen: list[choose.BestRecipe] = []
        if asked:
            trials = _sit(exam, asked, choose.methods(SHARES), out)
            chosen = choose.choose(trials, SHARES, together=args.only is None)
            recipes = tuple((c.share, c.recipe) for c in chosen)
        exam.calibration = Calibration(runner.fingerprint, 0.0, 0, (), recipes=recipes)
        made, told = exam.calibration, {"questions": 0, "held_out": None}
        if args.only != "rows":
            made, told = _bounded(runner, _sit(exam, rest, USUAL, out))
    finally:
        exam.close()
    replace(made, source="text" if texts else "prompts", recipes=recipes).save(file)
    found = {"file": str(file), "cases": len(papers), "chosen": [asdict(c) for c in chosen], **told}
    return {"model": runner.fingerprint.to_dict(), "calibration": found}


def _as_it_is(file: Path, mine: ModelFingerprint) -> Recipes:
    """Return how `auto` chooses rows by what is to be written over: bounds are measured so, and it stays.
    Raises UsageError where bounds would be of several ways."""
    try:
        known = Calibration.load(file) if file.is_file() else None
    except CorruptChunk:
        known = None
    if known is None or (known.fingerprint, known.strategy) != (mine, STRATEGY):
        return ()
    return one_way(known.recipes, "leave out --only, which chooses one for all")


def _show(found: dict[str, Any], out: Out) -> None:
    if found["chosen"]:
        print("rows that auto repairs, chosen for this model; KL of cases that did not choose")
        head = ("share", "auto:", "KL", "auto without options")
        rows = [
            (f"{c['share']:.0%}", c["recipe"], f"{c['kl']:.2g}", f"{c['usual_kl']:.2g}")
            for c in found["chosen"]
        ]
        out.table(head, rows)
        print()
    if found["questions"]:
        print_calibration(found, out)
    else:
        print(f"wrote {found['file']}: no bounds")


def _shared_out(papers: list[Paper], only: str | None) -> tuple[list[Paper], list[Paper]]:
    """Return the cases that choose, and those that bounds are made of: none is both. Where there are few,
    bounds get them."""
    n = min(CASES, len(papers) if only == "rows" else len(papers) // 4)
    if only == "bounds" or (n < choose.LEAST and only is None):
        return [], papers
    if n < choose.LEAST:
        reason = f"{n} cases are too few to choose on; {choose.LEAST} at least"
        raise InvalidArgument("only", reason, "give more or longer text")
    mine = {i * len(papers) // n for i in range(n)}
    return [papers[i] for i in sorted(mine)], [p for i, p in enumerate(papers) if i not in mine]


def _bounded(runner: Backend, trials: Sequence[Trial]) -> tuple[Calibration, dict[str, Any]]:
    """Fit bounds, and tell what those of one half are worth on the other."""
    seen = fits.gather(trials)
    try:
        made = fits.fit(seen, runner.fingerprint, bins=fits.bins_of(len(seen)))
    except ValueError as error:
        hint = "give more or longer text: what stands before a question has to be most of it"
        raise InvalidArgument("n", str(error), hint) from error
    half = fits.bins_of(len(seen) // 2)
    try:
        halves = fits.halves(seen, runner.fingerprint, BOUNDS, bins=half)
    except ValueError:
        halves = None
    return made, {"questions": made.n, "held_out": halves}


def _sit(exam: Exam, papers: Sequence[Paper], methods: Sequence[Method], out: Out) -> list[Trial]:
    found: list[Trial] = []
    with out.progress("cases", len(papers)) as advance:
        for paper in papers:
            found += exam.sit(paper, methods)
            advance(1)
    return found


def _read(name: str) -> str:
    try:
        return path_of(name).read_text("utf-8-sig")
    except OSError as error:
        raise of_system(error, "read", name) from error
    except UnicodeDecodeError as error:
        raise InvalidArgument("text", f"{name} is no text", "give a file of UTF-8 text") from error
