"""Regret: how much further from a full prefill a strategy is than the best one at the same cost.

Each model of the bench is asked about documents of its own world; prose is continued. The cost of a
strategy is what it computes: rows of all its passes (looks, drafts, rounds) as a share of the
context's, and `PASS` for each pass.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from pydoc_data import topics
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import RESULTS, machine, progress, table
from models.prose import texts
from models.train import size_of
from models.worlds import BOS, Size, case
from models.zoo import ZOO, Kind
from numpy.typing import NDArray
from rich.console import Console

from kvweave.run.model import Runner
from kvweave.suite import choose, own, plot, prose, stats
from kvweave.suite.exam import Exam, outcome
from kvweave.suite.method import FULL, Method
from kvweave.suite.words import Paper, Question
from kvweave.weave.calibration import Calibration
from kvweave.weave.recipes import PASS, reached
from kvweave.weave.repair import Auto

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parent / "docs" / "repair.png"
WEIGHTS, CACHE = HERE / "models" / "weights", HERE / ".cache" / "regret"
NOTES, ASKED = 8, 8
SINGLE = ("random", "first_k", "deviation:v@1", "query", "rollout:1@0", "boundary")
OURS = ("auto", "auto:0", "auto hedge 0%", "auto hedge 50%")  # auto: two drafted, a third hedged
Floats = NDArray[np.float64]
CHOSEN = "auto chosen"  # with options that other documents of the model chose: `kvweave calibrate --only rows`
CHOOSE = 16  # documents that choose
FLOOR = 1e-4  # nats: below that all are alike
DRAWN = ("random", "first_k", "deviation:v@1", "query", "rollout:1@0", "auto")
SHARES = (0.02, 0.05, 0.10, 0.15, 0.30)
WIDER = (0.5, 0.8)  # of single strategies, so that nothing is compared beyond what was measured


class Hedged(Auto):
    """`auto` with another part of the budget for first rows."""

    def __init__(self, hedge: float) -> None:
        super().__init__()
        self.hedge, self.name = hedge, f"auto hedge {hedge:.0%}"


class Chosen(Auto):
    """`auto` with the options that the model was measured best with."""

    def __init__(self) -> None:
        super().__init__()
        self.name = CHOSEN


@dataclass
class Cell:
    """One method on one model: KL (nats) and rightness of each question by case, and its cost."""

    kl: list[list[float]] = field(default_factory=list)
    right: list[list[float]] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)


def kind_of(name: str) -> Kind:
    """Return a model's entry. Raises ValueError for one that is not in the zoo."""
    found = {kind.name: kind for kind in ZOO}
    if name not in found:
        raise ValueError(f"no model {name!r}; there are {', '.join(found)}")
    return found[name]


def mastered(name: str) -> Size:
    """Return the longest documents on which the model reached the next stage of its training."""
    curve = json.loads((WEIGHTS / name / "curve.json").read_text())
    return size_of(max(2, curve["stage"] - 1))


def papers(kind: Kind, exam: Exam, n: int, seed: str) -> Iterator[Paper]:
    """Yield ``n`` cases of a model's world, or documents of held-out prose."""
    if kind.wording is None:
        for paper in prose.papers(exam.words.maker, 4 * n):
            yield replace(paper, notes=tuple(paper.left()), dropped=None)
        return
    ids, size = exam.runner.tokenizer.get_vocab(), mastered(kind.name)
    for i in range(n):
        made = case(kind.wording, size, NOTES, ASKED, f"{seed}/{kind.name}/{i}")
        notes = [(f"note/{j}", tuple(ids[w] for w in words)) for j, words in enumerate(made.notes)]
        asked = [
            Question(about, tuple(ids[w] for w in words), tuple(ids[w] for w in reply))
            for about, words, reply in made.questions
        ]
        yield Paper(kind.name, i, tuple(n for n in notes if n[1]), tuple(asked))


@mock.patch.object(Auto, "weighs", False)
def measure(
    name: str, methods: Sequence[Method], n: int, seed: str = "report", first: int = 0
) -> dict[str, Cell]:
    """Return a cell for each method, and one for the full prefill, of all cases from the ``first`` on. How rows
    are chosen is what is asked, so `auto` looks also where it would rather repair all."""
    torch.set_num_threads(1)
    kind = kind_of(name)
    runner = Runner.load(str(WEIGHTS / name), device="cpu")
    known = None
    if any(isinstance(method.strategy, Chosen) for method in methods):
        known = choosing(runner, kind, CHOOSE if seed == "report" else n)
    exam = Exam(runner, BOS, evidence=False)
    found: dict[str, Cell] = {}
    for paper in islice(papers(kind, exam, n, seed), first, None):
        truth = exam.truth(paper)
        list(exam.under(paper, Method("none"), truth))  # stores the notes
        for method in methods:
            exam.calibration = known if isinstance(method.strategy, Chosen) else None
            trials = exam.under_counted(paper, method, truth)
            cell = found.setdefault(method.label, Cell())
            cell.kl.append([t.kl for t in trials])
            cell.right.append([t.right for t in trials])
            cell.cost.append(trials[0].cost)
        full = found.setdefault("full prefill", Cell())
        whole = [outcome(paper, i, x, x, method=FULL) for i, x in enumerate(truth)]
        full.right.append([t.right for t in whole])
        exam.clear()
    exam.close()
    return found


def choosing(runner: Runner, kind: Kind, n: int) -> Calibration:
    """Return a calibration that holds what ``n`` other documents of the model's world choose; of models of
    prose, four times as many pieces of source, since documentation is what they are asked about."""
    exam, trials = Exam(runner, BOS, evidence=False), []
    known = len(topics.topics)  # these stand first
    sources = [text for i, text in enumerate(texts(True)) if 10 * i + 5 >= known]
    made = (
        papers(kind, exam, n, "choose")
        if kind.wording
        else own.of_texts(exam.words.maker, sources, 4 * n)
    )
    for paper in made:
        trials += exam.sit(paper, choose.methods(SHARES))
    exam.close()
    recipes = tuple((c.share, c.recipe) for c in choose.choose(trials, SHARES))
    return Calibration(runner.fingerprint, 0.0, 0, (), recipes=recipes)


def regrets(name: str, cells: dict[str, Cell], strategy: str) -> list[dict[str, Any]]:
    """Return, for each share of a strategy, its KL over that of the best single one at equal cost; the
    interval (``between``) is of both over the same documents, drawn anew, the best one of each draw."""
    single: dict[str, list[tuple[float, float]]] = {}
    drawn: dict[str, list[tuple[float, Floats]]] = {}
    for label, cell in cells.items():
        words = label.split()
        if words[0] in SINGLE and words[0] != strategy:
            spent = mean(cell.cost)
            single.setdefault(words[0], []).append((spent, stats.mean(cell.kl).value))
            drawn.setdefault(words[0], []).append((spent, stats.drawn_means(cell.kl)))
    made = []
    for share in SHARES:
        cell = cells[f"{strategy} {share:.0%}"]
        spent, kl = mean(cell.cost), stats.mean(cell.kl)
        least, best = min((reached(points, spent), each) for each, points in single.items())
        lows = np.min([reached_by(points, spent) for points in drawn.values()], axis=0)
        regret = (kl.value + FLOOR) / (least + FLOOR)
        between = stats.interval(regret, (stats.drawn_means(cell.kl) + FLOOR) / (lows + FLOOR))
        made.append({
            "model": name, "strategy": strategy, "share": share, "cost": round(spent, 4),
            "kl": kl.to_list(), "best": best, "best_kl": float(f"{least:.4g}"),
            "regret": round(regret, 3), "between": [round(between.low, 3), round(between.high, 3)],
            "right": stats.mean(cell.right).to_list(),
            "none_kl": stats.mean(cells["none 0%"].kl).value,
            "full": stats.mean(cells[FULL].right).value,
        })  # fmt: skip
    return made


def reached_by(points: Sequence[tuple[float, Floats]], cost: float) -> Floats:
    """Return `reached` of each draw: ``points`` are (cost, KL [draw])."""
    known = sorted(points, key=lambda point: point[0])
    if cost < known[0][0]:
        return np.full_like(known[0][1], np.inf)
    above = min(sum(spent <= cost for spent, _ in known), len(known) - 1)
    (low, before), (high, after) = known[above - 1], known[above]
    part = min(1.0, (cost - low) / (high - low)) if high > low else 1.0
    before, after = (np.log(np.maximum(each, 1e-9)) for each in (before, after))
    return np.asarray(np.exp((1 - part) * before + part * after))


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return float(np.mean(values))


def left_out(rows: Sequence[dict[str, Any]], candidates: Sequence[str]) -> list[dict[str, Any]]:
    """Return, for each model and share, the regret of the candidate that is best, in its worst case,
    on all other models."""
    made: list[dict[str, Any]] = []
    names = dict.fromkeys(r["model"] for r in rows)
    for name in names if len(names) > 1 else ():
        others = [r for r in rows if r["model"] != name]
        worst = {c: max(r["regret"] for r in others if r["strategy"] == c) for c in candidates}
        chosen = min(worst, key=lambda c: worst[c])
        mine = [r for r in rows if r["model"] == name and r["strategy"] == chosen]
        made += [{"left_out": name, "chosen": chosen} | r for r in mine]
    return sorted(made, key=lambda r: -r["regret"])


def methods() -> list[Method]:
    """Return every strategy at every share."""
    made = [Method("none", modes=("forget",))]
    for each in (*SINGLE, *OURS):
        shares = (*SHARES, *WIDER) if each in SINGLE else SHARES
        hedge = each.partition(" hedge ")[2]
        which = Hedged(int(hedge[:-1]) / 100) if hedge else each
        made += [Method(which, share, modes=("forget",)) for share in shares]
    return made + [Method(Chosen(), share, modes=("forget",)) for share in SHARES]


def cache_file(name: str, n: int, cache: Path, what: str = "") -> Path:
    """Return where what was measured of a model's weights is kept."""
    weights = hashlib.blake2b((WEIGHTS / name / "model.safetensors").read_bytes(), digest_size=8)
    return cache / f"{what}{name}-{weights.hexdigest()}-{n}.json"


def cells_of(name: str, n: int, cache: Path, again: str = "") -> dict[str, Cell]:
    """Return the cells of a model; what was measured of these weights before is read."""
    file = cache_file(name, n, cache)
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    fewer = _fewer(file, n) if kind_of(name).wording is not None else 0
    if not known and fewer:  # the first of a world are the same however many there are
        before = json.loads(file.with_name(file.name.replace(f"-{n}.", f"-{fewer}.")).read_text())
        more = measure(name, [m for m in methods() if m.label in before], n, first=fewer)
        known = {label: _joined(before[label], asdict(cell)) for label, cell in more.items()}
    missing = [m for m in methods() if m.label not in known or (again and m.name.startswith(again))]
    if missing:
        known |= {label: asdict(cell) for label, cell in measure(name, missing, n).items()}
    if missing or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known))
    return {label: Cell(**cell) for label, cell in known.items()}


def _fewer(file: Path, n: int) -> int:
    """Return how many cases were measured of these weights, at most ``n``."""
    stem = file.stem.removesuffix(f"-{n}")
    found = (int(each.stem.rpartition("-")[2]) for each in file.parent.glob(f"{stem}-*.json"))
    return max((m for m in found if m < n), default=0)


def _joined(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: one[name] + other[name] for name in one}


def all_of(
    names: Sequence[str],
    n: int,
    cache: Path,
    again: str = "",
    figure: Path | None = None,
    others: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the table of regrets, worst case first, and what leaving a model out gives; ``others``
    are rows of models that are not measured now."""
    rows = [r for r in others if r["model"] not in names]
    with progress("models", len(names)) as step:
        for name in names:
            cells = cells_of(name, n, cache, again)
            rows += [r for each in (*OURS, CHOSEN, *SINGLE) for r in regrets(name, cells, each)]
            step(name)
    if figure is not None:
        draw(rows, figure)
    rows.sort(key=lambda r: -r["regret"])
    return {"rows": rows, "left_out": left_out(rows, OURS)}


def show(found: dict[str, Any]) -> None:
    """Print the worst and the middle regret of each strategy, then those of models left out."""
    worst = []
    for each in (*OURS, CHOSEN, *SINGLE):
        mine = sorted(r["regret"] for r in found["rows"] if r["strategy"] == each)
        where = max((r for r in found["rows"] if r["strategy"] == each), key=lambda r: r["regret"])
        at = f"{where['model']} {where['share']:.0%}"
        worst.append((each, f"{mine[-1]:.2f}", at, f"{mine[len(mine) // 2]:.2f}"))
    worst.sort(key=lambda r: float(r[1]))
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table("regret at equal cost", ["strategy", "worst", "on", "median"], worst))
    cells = [
        (r["left_out"], r["chosen"], f"{r['share']:.0%}", f"{r['cost']:.1%}", f"{r['kl'][0]:.2g}",
         f"{r['best_kl']:.2g} ({r['best']})", f"{r['regret']:.2f}", f"{r['right'][0] / max(r['full'], 1e-9):.2f}")
        for r in found["left_out"]
    ]  # fmt: skip
    head = ["model left out", "chosen", "share", "cost", "KL", "best single", "regret", "right / full"]  # fmt: skip
    console.print(table("leave one model out", head, cells))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw KL against cost, a panel a model; return False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = [k.name for k in ZOO if any(r["model"] == k.name for r in rows)]
    columns = -(-len(names) // 2)
    figure = Figure(figsize=(2.6 * columns + 1, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, columns, squeeze=False)
    for unused in panels.flat[len(names) :]:
        unused.set_visible(False)
    for axes, name in zip(panels.flat, names, strict=False):
        every = [r for r in rows if r["model"] == name]
        axes.axhline(max(FLOOR, every[0]["none_kl"]), color="#777777", linestyle=":", linewidth=0.8)
        for i, strategy in enumerate(DRAWN):
            mine = [r for r in every if r["strategy"] == strategy]
            points = sorted((100 * r["cost"], max(FLOOR, r["kl"][0])) for r in mine)
            width = 2.0 if strategy == "auto" else 1.0
            axes.plot(*zip(*points, strict=True), color=plot.COLOURS[i], marker=plot.MARKERS[i],
                      markersize=3, linewidth=width, label=strategy)  # fmt: skip
        axes.set_yscale("log")
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
    figure.supxlabel("computed, of the context (%)", fontsize=9)
    figure.supylabel("KL to a full prefill (nats)", fontsize=9)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(DRAWN), fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=110)
    return True


def report(options: argparse.Namespace) -> None:
    """Measure, write, print."""
    out, n = options.out, options.n
    names = options.names or [k.name for k in ZOO if (WEIGHTS / k.name / "curve.json").exists()]
    about: dict[str, Any] = {"machine": machine(torch.device("cpu"))}
    setup: dict[str, Any] = {"n": n, "notes": NOTES, "asked": ASKED, "pass": PASS, "floor": FLOOR}
    others: list[dict[str, Any]] = []
    if options.beside:
        before = json.loads(out.read_text())
        if before["setup"] != setup:
            raise ValueError(f"{out} is of other sizes: {before['setup']}")
        others, later = before["rows"], dict.fromkeys(names, about["machine"])
        about = {"machine": before["machine"], "later": before.get("later", {}) | later}
    whole = out == RESULTS / "models.json"
    figure = FIGURE if whole else out.with_suffix(".png")
    found = all_of(names, n, options.cache, options.again, figure, others)
    out.write_text(json.dumps(about | {"setup": setup} | found, indent=1) + "\n")
    show(found)


def parser() -> argparse.ArgumentParser:
    """Return what the command line is."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("names", nargs="*", help="models (all that are trained)")
    made.add_argument("--n", type=int, default=20, help="documents a model")
    made.add_argument("--again", default="", help="measure strategies again whose name begins so")
    made.add_argument("--beside", action="store_true", help="keep the rows of other models")
    made.add_argument("--cache", type=Path, default=CACHE)
    made.add_argument("--out", type=Path, default=RESULTS / "models.json")
    return made


if __name__ == "__main__":
    report(parser().parse_args())
