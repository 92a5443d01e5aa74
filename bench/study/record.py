"""Record what the models read while they think: traces of each model and family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvweave import Sampling
from kvweave.engine import Engine
from kvweave.probe import Recording, record
from study.score import WORDS, ids, models, opened, tasks
from study.tasks import FAMILIES, Task
from study.train import RUN

TRACES = RUN / "traces"
PAGE = 8


def where(model: str, family: str, i: int, folder: Path = TRACES) -> Path:
    """Return the file of a trace."""
    return folder / f"{model}-{family}-{i}.kvt"


def trace_of(engine: Engine, model: str, task: Task, to: Path) -> None:
    """Record a chain; its notes say what is needed where."""
    marks = sorted(at - task.start for at in task.milestones())
    notes = {
        "label": f"{model} {task.family}",
        "model": model,
        "family": task.family,
        "milestones": marks,
    }
    if task.family == "verify":
        n = len(task.words) - task.start
        half = n * 6 // 8  # lines of six words, then two words for each
        spans = (("derive", 0, half), ("verify", half, n))
        notes["phases"] = [{"name": a, "first": b, "stop": c} for a, b, c in spans]
    wanted = ids(engine, task.words)
    notes["wanted"] = wanted[task.start :]
    sampling = Sampling(max_tokens=len(task.words) - task.start, ignore_eos=True)
    record(engine, wanted[: task.start], to, sampling, Recording(page=PAGE), notes)


def record_all(n: int, words: int = WORDS, tick: Callable[[], None] = lambda: None) -> None:
    """Record ``n`` tasks of each family with each model; what is there stays."""
    TRACES.mkdir(exist_ok=True, parents=True)
    for model in models():
        with opened(model) as engine:
            for family in FAMILIES:
                for i, task in enumerate(tasks(family, n, words, "trace")):
                    to = where(model, family, i)
                    if not to.exists():
                        trace_of(engine, model, task, to.with_suffix(".tmp"))
                        to.with_suffix(".tmp").rename(to)
                    tick()
