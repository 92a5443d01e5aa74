"""``kvweave check --suite``: the fidelity suite for any model, as tables or JSON."""

from __future__ import annotations

from argparse import Namespace

from kvweave.cli.home import model_of, quieten
from kvweave.cli.parser import UsageError
from kvweave.cli.show import Out
from kvweave.run.model import Runner
from kvweave.suite import report
from kvweave.suite.exam import Outcome
from kvweave.suite.method import Method, methods
from kvweave.suite.run import NAMES, Suite


def check(args: Namespace) -> None:
    """Run the suite and print a table a protocol."""
    out = Out.of(args)
    if args.template is not None:
        raise UsageError("--suite takes no TEMPLATE", "leave one of the two away")
    protocols = args.protocols or list(NAMES)
    for name in protocols:
        if name not in NAMES:
            raise UsageError(f"no protocol {name!r}", f"some of {', '.join(NAMES)}")
    wanted = methods(args.strategies, args.shares)
    quieten(args)
    runner = Runner.load(model_of(args))
    runner.require_move()
    suite = Suite(runner, args.n)
    try:
        outcomes = _run(suite, protocols, wanted, out)
    finally:
        suite.close()
    rows = report.summarise(outcomes, wanted)
    if out.as_json:
        out.data({"model": runner.fingerprint.to_dict(), "n": args.n, "rows": rows})
        return
    for title, part in report.tables(rows).items():
        note = report.warning(part)
        print(f"{title}: {note}" if note else title)
        out.table(report.head(part[0]), [report.cells(row) for row in part], left=2)
        print()


def _run(suite: Suite, protocols: list[str], wanted: list[Method], out: Out) -> list[Outcome]:
    found: list[Outcome] = []
    units = {name: suite.units(name) for name in protocols}
    with out.progress("cases", sum(units.values())) as advance:
        for name, n in units.items():
            for outcomes in suite.run(name, wanted, range(n)):
                found += outcomes
                advance(1)
    return found
