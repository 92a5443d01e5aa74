"""``kvweave check --suite``: the fidelity suite for any model, as tables or JSON."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvweave.chunk.identity import ModelFingerprint
from kvweave.cli.command import UsageError
from kvweave.cli.home import home_of, model_of, quieten, read
from kvweave.cli.show import Out
from kvweave.cli.values import path_of
from kvweave.errors import InvalidArgument
from kvweave.run.model import Runner
from kvweave.suite import calibrate, report
from kvweave.suite.exam import Trial
from kvweave.suite.method import Method, methods
from kvweave.suite.run import NAMES, Suite
from kvweave.weave.calibration import FILE, Recipes, calibration_of

BOUNDS = (None, 0.1)  # nats; what a calibration is tried with
HEAD = ("tested on", "bound", "KL under", "within", "repaired", "wholly", "accuracy")


def check(args: Namespace) -> None:
    """Run the suite and print a table a protocol; calibrate the gate if asked."""
    out = Out.of(args)
    protocols = _protocols(args)
    wanted = methods(args.strategies, args.shares)
    if args.calibrate is not None:
        labels = {m.label for m in wanted}
        added = [Method("auto", share) for share in calibrate.SHARES]
        wanted += [m for m in added if m.label not in labels]
    quieten(args)
    model = model_of(args)
    file = None if args.calibrate is None else file_of(args.calibrate, args, model)
    runner = Runner.load(model)
    runner.require_move()
    if file is not None:
        check_home(file.parent, runner.fingerprint)
    recipes = _recipes(args, model, runner.fingerprint)
    suite = Suite(runner, args.n, recipes=recipes)
    try:
        outcomes = _run(suite, protocols, wanted, out)
    finally:
        suite.close()
    rows = report.summarise(outcomes, wanted)
    found: dict[str, Any] = {"model": runner.fingerprint.to_dict(), "n": args.n, "rows": rows}
    if not out.as_json:
        _print(rows, out)
    if file is not None:
        found["calibration"] = _calibrate(outcomes, runner.fingerprint, recipes, file)
        if not out.as_json:
            print_calibration(found["calibration"], out)
    if out.as_json:
        out.data(found)


def _protocols(args: Namespace) -> list[str]:
    """Return the protocols to run. Raises UsageError for what makes no sense with the suite."""
    if args.template is not None:
        raise UsageError("--suite takes no TEMPLATE", "leave one of the two away")
    for option in ("repair", "share", "max_drift", "keep", "bases"):
        if getattr(args, option) is not None:
            name = "--" + option.replace("_", "-")
            raise UsageError(f"--suite takes no {name}", "use --strategies and --shares")
    protocols: list[str] = list(dict.fromkeys(args.protocols or NAMES))
    for name in protocols:
        if name not in NAMES:
            raise UsageError(f"no protocol {name!r}", f"some of {', '.join(NAMES)}")
    least = 10 * calibrate.BINS
    if args.calibrate is not None and args.n * len(protocols) < least:
        raise UsageError(
            f"{args.n} questions of {len(protocols)} protocols are too few to calibrate on",
            f"{least} are the least; raise --n, or take more --protocols",
        )
    return protocols


def file_of(given: str | None, args: Namespace, model: str) -> Path:
    """Return where the calibration goes. Raises UsageError when it cannot be written there."""
    if given:
        file = path_of(given)
    elif args.home or os.environ.get("KVWEAVE_HOME") or not Path(model).is_dir():
        file = home_of(args) / FILE
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        file = Path(model) / FILE
    written = (
        file.parent if file.is_file() or not file.exists() else file
    )  # a file is put in its place
    if file.is_dir() or not os.access(written, os.W_OK):
        raise UsageError(f"cannot write {file}", "give a FILE, or a --home")
    return file


def check_home(home: Path, mine: ModelFingerprint) -> None:
    """Raise ModelMismatch when this is the home of another model."""
    if (home / "model.json").exists():
        mine.require(ModelFingerprint.from_dict(read(home / "model.json")))


def _recipes(args: Namespace, model: str, mine: ModelFingerprint) -> Recipes:
    """Return how `auto` is to choose rows: as asked for, else as the model's calibration has it. Raises
    UsageError where bounds would be of several ways."""
    if args.auto is not None:
        return tuple((share, args.auto) for share in calibrate.SHARES)
    known = calibration_of(mine, None, [home_of(args), Path(model)])
    found = () if known is None else known.recipes
    return found if args.calibrate is None else one_way(found, "give --auto one")


def one_way(recipes: Recipes, hint: str) -> Recipes:
    """Return how `auto` chooses rows where that is alike at all shares. Raises UsageError."""
    if len({way for _, way in recipes}) > 1:
        raise UsageError("this model has other options of auto at each share", hint)
    return recipes


def _calibrate(
    outcomes: Sequence[Trial], mine: ModelFingerprint, recipes: Recipes, file: Path
) -> dict[str, Any]:
    """Fit, write, and test each half on the other; None where a half has too few questions."""
    # contexts that never had a chunk would count twice, with those that forgot it
    seen = calibrate.gather(o for o in outcomes if o.mode in ("", "forget"))
    try:
        made = calibrate.fit(seen, mine)
    except ValueError as error:
        raise InvalidArgument("n", str(error), "raise --n, or take more --protocols") from error
    replace(made, recipes=recipes).save(file)
    try:
        halves = calibrate.halves(seen, mine, BOUNDS)
    except ValueError:
        halves = None
    return {"file": str(file), "questions": made.n, "held_out": halves}


def _print(rows: Sequence[report.Row], out: Out) -> None:
    for title, part in report.tables(rows).items():
        note = report.warning(part)
        print(f"{title}: {note}" if note else title)
        out.table(report.head(part[0]), [report.cells(row) for row in part], left=2)
        print()


def print_calibration(found: dict[str, Any], out: Out) -> None:
    """Tell what a calibration is worth, and where it is."""
    if found["held_out"] is None:
        print("held out: unknown; half of it gives too few questions to calibrate on")
    else:
        rows = [
            (
                ",".join(half["tested_on"]),
                "-" if half["max_drift"] is None else f"{half['max_drift']:g}",
                f"{half['under']:.1%}",
                "-" if half["within"] is None else f"{half['within']:.1%}",
                f"{half['repaired']:.1%}",
                f"{half['full']:.1%}",
                f"{half['right']:.1%}",
            )
            for half in found["held_out"]
        ]
        print("held out: fitted on the other half, from 5 % repaired rows on")
        out.table(HEAD, rows)
    print(f"wrote {found['file']}: calibrated on {found['questions']} questions")


def _run(suite: Suite, protocols: list[str], wanted: list[Method], out: Out) -> list[Trial]:
    found: list[Trial] = []
    units = {name: suite.units(name) for name in protocols}
    with out.progress("cases", sum(units.values())) as advance:
        for name, n in units.items():
            for outcomes in suite.run(name, wanted, range(n)):
                found += outcomes
                advance(1)
    return found
