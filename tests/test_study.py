"""The study's tasks against an interpreter that reads the prompt only, and its models against the tasks."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvweave.keep.tokens.signals import PageSignals, apply

BENCH = Path(__file__).parents[1] / "bench"
WEIGHTS = BENCH / "study" / "weights"
FLOORS = {"gemma3": 0.97, "olmo2": 0.85, "qwen3": 0.8}  # of words, the worst family
MODELS = tuple(FLOORS)


@pytest.fixture(scope="module")
def study() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(BENCH))
    try:
        yield {
            n: importlib.import_module(f"study.{n}")
            for n in ("tasks", "train", "score", "record", "learn")
        }
    finally:
        sys.path.remove(str(BENCH))


def thought(words: list[str]) -> list[str]:
    """Think anew: from the words of a prompt alone."""
    family, body = words[1].strip("<>"), words[2:-1]
    return globals()[f"think_{family}"](body)


def think_program(body: list[str]) -> list[str]:
    env: dict[str, int] = {"none": 0}
    out: list[str] = []
    for head, of, digit in zip(body[::3], body[1::3], body[2::3], strict=True):
        name = "n" + head[1:]
        env[name] = (env[of] + int(digit)) % 10
        out += [head, of, str(env[of]), digit, name, str(env[name])]
    return [*out, "<end>"]


def think_verify(body: list[str]) -> list[str]:
    chain = think_program(body)[:-1]
    return [
        *chain,
        "check",
        *(w for i in range(0, len(chain), 6) for w in chain[i + 4 : i + 6]),
        "<end>",
    ]


def think_walk(body: list[str]) -> list[str]:
    *edges, at = body
    to = {h[1:]: (d, n) for h, d, n in zip(edges[::3], edges[1::3], edges[2::3], strict=True)}
    out, total, here = [], 0, at[1:]
    while here in to:
        digit, after = to[here]
        total = (total + int(digit)) % 10
        out += ["h" + here, digit, after, str(total)]
        here = after[1:]
    return [*out, "<end>"]


def think_search(body: list[str]) -> list[str]:
    *lines, root = body
    table = {lines[i][1:]: lines[i + 1 : i + 5] for i in range(0, len(lines), 5)}
    out: list[str] = []

    def visit(name: str, above: int) -> None:
        digit, child, parent, _ = table[name]
        total = (above + int(digit)) % 10
        out.extend(["h" + name, digit, str(total), child])
        while child not in ("leaf", "none"):
            visit(child[1:], total)
            sibling = table[child[1:]][3]
            out.extend(["u" + name, str(total), sibling])
            child = sibling
        if parent == "none":
            out.append("none")

    visit(root[1:], 0)
    return [*out, "<end>"]


def think_sum(body: list[str]) -> list[str]:
    out, carry = [], 0
    for head, a, b in zip(body[::3], body[1::3], body[2::3], strict=True):
        carry, digit = divmod(int(a) + int(b) + carry, 10)
        out += [head, a, b, str(digit), str(carry)]
    return [*out, "<end>"]


def think_list(body: list[str]) -> list[str]:
    words = "so well then it was a day of rain and some light".split()
    at = words.index(body[-1])
    out: list[str] = []
    for head in body[:-1:2]:
        out += [head, *(words[(at + i) % 12] for i in range(4))]
        at += 4
    return [*out, "<end>"]


@pytest.mark.parametrize("family", ["program", "walk", "search", "sum", "verify", "list"])
@pytest.mark.parametrize("n_words", [24, 200, 1000])
def test_a_chain_follows_from_its_prompt(
    study: dict[str, ModuleType], family: str, n_words: int
) -> None:
    tasks = study["tasks"]
    known = set(tasks.vocabulary())
    for seed in range(20):
        task = tasks.make(family, n_words, str(seed))
        assert task.words[task.start :] == thought(task.words[: task.start])
        assert known.issuperset(task.words)
        assert set(task.phases) == set(range(task.start, len(task.words)))


@pytest.mark.parametrize("family", ["program", "walk", "search", "sum", "verify", "list"])
def test_a_need_is_what_decides_a_word(study: dict[str, ModuleType], family: str) -> None:
    """Other content in all the slots that a word needs, and nowhere else, is another word."""
    tasks = study["tasks"]
    for seed in range(10):
        task = tasks.make(family, 120, str(seed))
        for at, needs in task.needs.items():
            for slots in needs:
                assert max(slots) < at
                assert {task.words[s] for s in slots} == {task.words[at]}, "it is copied"
                if min(slots) < task.start:
                    assert len(slots) == 1
    if family == "list":
        assert not task.needs
        assert not task.milestones()


def test_milestones_are_values_taken_up_late(study: dict[str, ModuleType]) -> None:
    tasks = study["tasks"]
    task = tasks.make("program", 600, "x")
    chain = task.words
    made = {chain[i + 4]: i + 5 for i in range(task.start, len(chain) - 1, 6)}
    wanted: dict[int, int] = {}
    for i in range(task.start, len(chain) - 1, 6):
        if chain[i + 1] in made and i + 2 - made[chain[i + 1]] >= tasks.FAR:
            wanted[made[chain[i + 1]]] = wanted.get(made[chain[i + 1]], 0) + 1
    assert task.milestones() == wanted
    assert len(wanted) > 10


def test_training_draws_other_tasks_than_are_asked(study: dict[str, ModuleType]) -> None:
    state = study["train"].State(stage=2)
    made, _ = study["train"].batch(state, "qwen3/7")
    again, _ = study["train"].batch(state, "qwen3/7")
    assert [t.words for t in made] == [t.words for t in again]
    asked = {
        tuple(t.words) for f in study["tasks"].FAMILIES for t in study["score"].tasks(f, 8, 96)
    }
    assert not asked & {tuple(t.words) for t in made}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_knows_the_next_word(study: dict[str, ModuleType], name: str) -> None:
    """Behind the true words; docs/study.md says how far each gets by itself."""
    curve = json.loads((WEIGHTS / name / "curve.json").read_text())
    assert curve["tokens"] > 1_000_000
    assert (WEIGHTS / name / "model.safetensors").stat().st_size < 5 << 20
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS / name, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(WEIGHTS / name).get_vocab()
    assert [ids[w] for w in study["tasks"].vocabulary()] == list(range(len(ids)))
    made = [t for f in study["tasks"].FAMILIES for t in study["score"].tasks(f, 2, 400)]
    with torch.inference_mode():
        _, found, _ = study["train"].loss_of(model, ids, made, None)
    for family, (right, n) in found.items():
        assert right / n > FLOORS[name], family


def test_a_model_thinks_by_itself(study: dict[str, ModuleType]) -> None:
    with study["score"].opened("gemma3") as engine:
        found = study["score"].score(engine, "verify", 2, 200)
    assert found["words"] > 180
    assert found["right"] > 0.9


def test_the_predictor_learns_what_is_read_next(study: dict[str, ModuleType]) -> None:
    """Reads that go round in order: no page that was read lately is read next."""
    learn = study["learn"]
    rng = random.Random(0)

    def lesson() -> object:
        pages = 40
        signals, at = PageSignals(), rng.randrange(pages)
        for step in range(120):
            mass = torch.zeros(2, pages)
            mass[:, (at + step) % pages] = 1
            signals.see(mass, mass > 0)
        wanted = np.zeros((2, pages), np.float32)
        wanted[:, (at + 120) % pages] = 1
        return learn.Lesson(signals.rows().numpy(), wanted)

    weights = learn.learn([lesson() for _ in range(60)])
    hits = 0
    for _ in range(40):
        asked = lesson()
        scores = apply(weights, torch.from_numpy(asked.rows)).numpy()
        hits += int((scores.argmax(1) == asked.wanted.argmax(1)).all())
    assert hits >= 36
