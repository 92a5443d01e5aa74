"""How right the study's models are when they think by themselves: every word of a chain, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvweave import Engine
from kvweave.probe.recorder import prefill
from kvweave.run.base import Work
from study.tasks import Task, make
from study.train import WEIGHTS

WORDS = 1000  # of a chain that is reported
ONLY: set[str] = set()  # models that are asked; empty: all


def models() -> list[str]:
    """Return the names of the models that are asked."""
    there = sorted(p.name for p in WEIGHTS.iterdir() if (p / "config.json").exists())
    return [name for name in there if not ONLY or name in ONLY]


def opened(name: str, weights: Path = WEIGHTS) -> Engine:
    """Return an engine of a model of the study."""
    return Engine(weights / name, dtype="float32", repair="none")


def ids(engine: Engine, words: Sequence[str]) -> list[int]:
    """Return the tokens of words."""
    found: list[int] = engine.runner.tokenizer.convert_tokens_to_ids(list(words))
    return found


def tasks(family: str, n: int, words: int, kind: str = "test") -> list[Task]:
    """Return tasks that no model was trained on."""
    return [make(family, words, f"{kind}/{i}") for i in range(n)]


def decoded(engine: Engine, some: Sequence[Task]) -> list[list[int]]:
    """Return what the model says, greedily, as many words as each chain has."""
    backend, said = engine.runner, [[] for _ in some]
    made = []
    for task in some:
        rows, logits = prefill(
            backend, np.array(ids(engine, task.words[: task.start])), len(task.words)
        )
        made.append((rows, logits))
    for row, (_, logits) in zip(said, made, strict=True):
        row.append(int(logits.argmax()))
    most = [len(task.words) - task.start for task in some]
    while left := [i for i in range(len(some)) if len(said[i]) < most[i]]:
        works = []
        for i in left:
            rows = made[i][0]
            slot = np.array([rows.n])
            works.append(Work(rows, np.array(said[i][-1:]), slot, slot, np.array([0])))
        for i, logits in zip(left, backend.forward(works), strict=True):
            said[i].append(int(logits[0].argmax()))
    return said


def score(engine: Engine, family: str, n: int, words: int = WORDS) -> dict[str, Any]:
    """Return the share of right words, of chains without a wrong one, and where the first stands."""
    some = tasks(family, n, words)
    right, first = [], []
    for task, said in zip(some, decoded(engine, some), strict=True):
        same = np.array(said) == np.array(ids(engine, task.words[task.start :]))
        right.append(float(same.mean()))
        first.append(None if same.all() else int(np.argmin(same)))
    return {
        "n": n, "words": round(float(np.mean([len(t.words) - t.start for t in some]))),
        "right": round(float(np.mean(right)), 4), "whole": sum(f is None for f in first) / n,
        "first_wrong": first,
    }  # fmt: skip
