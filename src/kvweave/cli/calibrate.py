"""``kvweave calibrate``: bounds of the drift from the user's own text, or from prompts he has logged."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvweave.cli.command import UsageError
from kvweave.cli.home import model_of, offline_vllm, quieten
from kvweave.cli.show import Out
from kvweave.cli.suite import BOUNDS, check_home, file_of, print_calibration
from kvweave.cli.values import path_of
from kvweave.errors import InvalidArgument, of_system
from kvweave.run.base import Backend
from kvweave.run.model import Runner
from kvweave.suite import calibrate as fits
from kvweave.suite import own
from kvweave.suite.exam import Exam, Trial
from kvweave.suite.method import Method
from kvweave.suite.words import Paper


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
        found = _measured(runner, texts, lines, args.n, file, out)
    if out.as_json:
        out.data(found)
    else:
        print_calibration(found["calibration"], out)


@contextmanager
def _loaded(model: str, args: Namespace) -> Iterator[Backend]:
    """Load the model, as vLLM does if that is asked for."""
    if args.vllm is None:
        yield Runner.load(model)
        return
    with offline_vllm().loaded(model, args.vllm) as backend:
        yield backend


def _measured(
    runner: Backend, texts: list[str], lines: list[str], n: int, file: Path, out: Out
) -> dict[str, Any]:
    """Measure, write, and return what is told of it."""
    bos = str(getattr(runner.tokenizer, "bos_token", None) or "")
    exam = Exam(runner, bos)
    try:
        maker = exam.words.maker
        papers = (
            own.of_texts(maker, texts, n)
            if texts
            else own.of_prompts(maker, lines, n, runner.limit)
        )
        seen = fits.gather(_sit(exam, papers, out))
    finally:
        exam.close()
    bins = fits.bins_of(len(seen))
    try:
        made = fits.fit(seen, runner.fingerprint, bins=bins)
    except ValueError as error:
        hint = "give more or longer text: what stands before a question has to be most of it"
        raise InvalidArgument("n", str(error), hint) from error
    replace(made, source="text" if texts else "prompts").save(file)
    try:
        half = fits.bins_of(len(seen) // 2)
        halves = fits.halves(seen, runner.fingerprint, BOUNDS, bins=half)
    except ValueError:
        halves = None
    found = {"file": str(file), "questions": made.n, "cases": len(papers), "held_out": halves}
    return {"model": runner.fingerprint.to_dict(), "calibration": found}


def _sit(exam: Exam, papers: Sequence[Paper], out: Out) -> list[Trial]:
    methods = [Method("auto", share, modes=("forget",)) for share in fits.SHARES]
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
        raise InvalidArgument("text", f"{name} is no text") from error
