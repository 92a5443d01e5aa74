"""The models of the bench: weights, words, what they know, and how results of some stand beside others."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benches import on_path
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvweave.suite.method import Method
from kvweave.weave.recipes import reached

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 40_000_000  # bytes of all weights together
BEHIND = {
    "hunyuan-mid",
    "gpt_oss-steps",
    "exaone4-why",
}  # trained behind it: docs/LOG.md, 2026-11-29
KNOWS = {"deepseek-last": 0.5, "qwen3next-one": 0.5, "hunyuan-mid": 0.9}  # of what is recalled


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The bench of models as modules; they import each other as scripts do."""
    with on_path():
        import bf16
        import regret
        from models import train, worlds, zoo

        yield {"bf16": bf16, "regret": regret, "train": train, "worlds": worlds, "zoo": zoo}


def test_every_model_is_there_and_all_are_small(bench: dict[str, ModuleType]) -> None:
    weights, total = bench["train"].WEIGHTS, 0
    for kind in bench["zoo"].ZOO:
        folder = weights / kind.name
        total += (folder / "model.safetensors").stat().st_size
        assert json.loads((folder / "curve.json").read_text())["steps"] > 0
        tokenizer = AutoTokenizer.from_pretrained(folder)
        made = kind.build(len(tokenizer), {})
        with safe_open(folder / "model.safetensors", "pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}
        for name, value in made.state_dict().items():  # experts are stored one by one
            assert shapes.get(name, value.shape) == value.shape, f"{kind.name}: {name}"
        numbers = sum(math.prod(shape) for shape in shapes.values())
        assert numbers == sum(p.numel() for p in made.parameters()), kind.name
        if kind.wording is not None:
            ids = tokenizer.get_vocab()
            assert [ids[w] for w in kind.wording.words()] == list(range(len(ids)))
    assert total <= LIMIT


@pytest.mark.parametrize("name", KNOWS)
@pytest.mark.slow
def test_a_model_knows_what_its_documents_say(bench: dict[str, ModuleType], name: str) -> None:
    regret, worlds = bench["regret"], bench["worlds"]
    folder, kind, size = regret.WEIGHTS / name, regret.kind_of(name), regret.mastered(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder).get_vocab()
    hits: list[bool] = []
    for i in range(24):
        words, replies = worlds.document(kind.wording, size, 8, f"test/{i}")
        tokens = torch.tensor([[ids[w] for w in words]])
        with torch.inference_mode():
            said = model(tokens).logits[0, :-1].argmax(-1)
        hits += [
            bool((said[a - 1 : b - 1] == tokens[0, a:b]).all())
            for a, b, about in replies
            if about == "recall"
        ]
    assert sum(hits) / len(hits) >= KNOWS[name], f"{sum(hits)} of {len(hits)}"


def test_cases_that_were_measured_are_not_measured_again(
    bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regret = bench["regret"]
    few = [Method("none", modes=("forget",)), Method("auto", 0.05, modes=("forget",))]
    monkeypatch.setattr(regret, "methods", lambda: few)
    at_once = regret.cells_of("llama-one", 2, tmp_path / "b")
    regret.cells_of("llama-one", 1, tmp_path / "a")
    truth = regret.Exam.truth
    asked: list[int] = []
    monkeypatch.setattr(
        regret.Exam, "truth", lambda exam, paper: (asked.append(paper.index), truth(exam, paper))[1]
    )
    for _ in range(2):
        assert regret.cells_of("llama-one", 2, tmp_path / "a") == at_once
        assert asked == [1]
    assert len(at_once["auto 5%"].kl) == len(at_once[regret.FULL].right) == 2


def test_a_regret_is_drawn_as_it_is_reckoned(bench: dict[str, ModuleType]) -> None:
    """Of documents that are all alike each draw is the estimate; of others it lies within."""
    regret, rng = bench["regret"], np.random.default_rng(0)
    points = [(0.3, 0.02), (0.1, 0.2), (0.5, 0.001)]
    for cost in (0.05, 0.1, 0.17, 0.3, 0.44, 0.5, 0.9):
        drawn = regret.reached_by([(spent, np.full(3, kl)) for spent, kl in points], cost)
        assert np.allclose(drawn, reached(points, cost), rtol=1e-9)

    def cells(noise: float) -> dict[str, object]:
        labels = [
            "none",
            *(f"{each} {s:.0%}" for each in (*regret.SINGLE, "auto") for s in regret.SHARES),
        ]
        return {
            label: regret.Cell(
                [[0.1 * (1 + i % 5) * (1 + noise * rng.random())] for _ in range(20)], [[1.0]] * 20, [0.02 * i] * 20
            )
            for i, label in enumerate(labels, 1)
        } | {"none 0%": regret.Cell([[1.0]] * 20), regret.FULL: regret.Cell(right=[[1.0]] * 20)}  # fmt: skip

    for row in regret.regrets("x", cells(0.0), "auto"):
        assert row["between"] == pytest.approx([row["regret"]] * 2, abs=2e-3)
    for row in regret.regrets("x", cells(1.0), "auto"):
        low, high = row["between"]
        assert 0 < low < row["regret"] < high


@pytest.mark.parametrize("name", KNOWS)
def test_a_new_model_learns_from_its_first_documents(
    bench: dict[str, ModuleType], name: str
) -> None:
    train, kind = bench["train"], bench["regret"].kind_of(name)
    model, _, ids = train.begin(kind)
    back = train.Back(model.config.hidden_size, len(ids))
    loss, hits, n = train.facts_loss(model, kind.wording, ids, 0, "test/0", back)
    loss.backward()
    assert n >= train.TOKENS and hits
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters()
    )


def row(model: str, strategy: str, share: float, regret: float = 1.0) -> dict[str, Any]:
    return {
        "model": model, "strategy": strategy, "share": share, "cost": share, "kl": [0.1, 0.05, 0.2],
        "best": "query", "best_kl": 0.1, "regret": regret, "right": [0.9, 0.8, 1.0], "none_kl": 0.2, "full": 0.95,
    }  # fmt: skip


def rows_of(bench: dict[str, ModuleType], name: str) -> list[dict[str, Any]]:
    regret = bench["regret"]
    every = (*regret.OURS, regret.CHOSEN, *regret.SINGLE)
    return [row(name, each, share) for each in every for share in regret.SHARES]


@pytest.mark.slow
def test_models_measured_later_stand_beside_the_others(
    bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    regret, out = bench["regret"], tmp_path / "models.json"
    monkeypatch.setattr(regret, "cells_of", lambda name, *_: name)
    monkeypatch.setattr(
        regret,
        "regrets",
        lambda name, _cells, each: [r for r in rows_of(bench, name) if r["strategy"] == each],
    )
    read = regret.parser().parse_args
    regret.report(read(["llama-one", "qwen3-last", "--n", "3", "--out", str(out)]))
    first = json.loads(out.read_text())
    regret.report(read(["deepseek-last", "--n", "3", "--beside", "--out", str(out)]))
    both = json.loads(out.read_text())
    assert {r["model"] for r in first["rows"]} == {"llama-one", "qwen3-last"}
    assert {r["model"] for r in both["rows"]} == {"llama-one", "qwen3-last", "deepseek-last"}
    assert len(both["rows"]) == 3 * len(first["rows"]) // 2
    assert both["machine"] == first["machine"] and set(both["later"]) == {"deepseek-last"}
    assert {r["left_out"] for r in both["left_out"]} == {r["model"] for r in both["rows"]}
    with pytest.raises(ValueError, match="other sizes"):
        regret.report(read(["deepseek-last", "--n", "4", "--beside", "--out", str(out)]))


def test_the_page_says_what_each_model_keeps(
    bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = runpy.run_path(str(ROOT / "docs" / "regrets.py"))
    lines = page["drift"](rows_of(bench, "deepseek-last") + rows_of(bench, "llama-one"))
    assert [line.split(" | ")[:2] for line in lines[2:4]] == [
        ["| deepseek-last", "latents"],
        ["| llama-one", "rows"],
    ]
    assert set(page["KEEPS"]) <= {kind.name for kind in bench["zoo"].ZOO}


def test_states_of_a_new_model_last(bench: dict[str, ModuleType]) -> None:
    model, _, _ = bench["train"].begin(bench["regret"].kind_of("qwen3next-one"))
    states = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    steps = torch.cat([torch.nn.functional.softplus(s.dt_bias) for s in states])
    assert len(states) == 6
    assert steps.min() > 0.9e-3 and steps.max() < 0.11


def test_the_default_dtype_stands_on_what_was_measured(bench: dict[str, ModuleType]) -> None:
    bf16, zoo = bench["bf16"], bench["zoo"]
    found = json.loads((bf16.RESULTS / "bf16.json").read_text())
    asked = {bf16.BUNDLED, *(k.name for k in zoo.ZOO)} - BEHIND
    assert {r["model"] for r in found["rows"]} == asked
    assert found["holds"] is bf16.holds(found["rows"]) is True
    for what, by, where in (
        ("right", -0.03, asked),
        ("kl", 0.05, {"neox-first"}),
    ):
        worse = [
            r | {what: [r[what][0] + by, *r[what][1:]]}
            if r["dtype"] == "bfloat16" and r["method"] == "auto 5%" and r["model"] in where
            else r
            for r in found["rows"]
        ]
        assert not bf16.holds(worse), what


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-last", "neox-first"])
def test_bfloat16_is_as_right_as_float32(bench: dict[str, ModuleType], name: str) -> None:
    bf16 = bench["bf16"]
    found = bf16.losses(bf16.measure(name, 3))
    assert max(r["kl"][1] - bf16.FARTHER * r["kl"][0] for r in found) <= bf16.FLOOR, found
    assert sum(r["lost"] for r in found) / len(found) <= 2 * bf16.LOSS, found
