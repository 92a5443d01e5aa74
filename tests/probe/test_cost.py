"""What misses cost, against transformers' own attention and values, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch

from kvweave import Engine, Runner, Sampling
from kvweave.errors import InvalidArgument
from kvweave.probe import PageBudget, PageTrace, Recording, record
from kvweave.probe.cost import miss_cost

PAGE, PROMPT, STEPS = 4, 37, 30
BUDGET = PageBudget(0.3, 1, 2)
KINDS = ("llama", "gemma3", "gpt_oss_sinks")


def made(kind: str) -> tuple[Any, Engine]:
    torch.manual_seed(3)
    model = oracle.build(*oracle.MODELS[kind])
    return model, Engine(Runner(model), base="")


def recording(engine: Engine, path: Path) -> PageTrace:
    prompt = np.random.default_rng(5).integers(3, 101, PROMPT).tolist()
    sampling = Sampling(max_tokens=STEPS + 1, ignore_eos=True)
    return record(engine, prompt, path, sampling, Recording(PAGE))


def parts(model: Any, tokens: list[int]) -> tuple[list[Any], list[Any]]:
    """Attention [query head, row, key] and values [key, kv head, dim] of each layer, of transformers."""
    values: list[Any] = []

    def keep(module: Any, args: Any, out: torch.Tensor) -> None:
        values.append(out[0].view(len(tokens), -1, model.config.head_dim))

    hooks = [
        module.register_forward_hook(keep)
        for name, module in model.named_modules()
        if name.endswith("v_proj")
    ]
    kept = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        inputs = torch.tensor([tokens], device=oracle.DEVICE)
        found = model(inputs, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(kept)
    for hook in hooks:
        hook.remove()
    return [a[0].double().cpu() for a in found], [v.double().cpu() for v in values]


def by_hand(attention: list[Any], values: list[Any], slot: int, name: str) -> tuple[float, float]:
    """The mean error and the mean attention missed over all kv heads, at one row."""
    n_pages = slot // PAGE + 1
    counted = list(range(1, n_pages - 2))
    errors, missed = [], []
    for weights, value in zip(attention, values, strict=True):
        heads, group = value.shape[1], weights.shape[0] // value.shape[1]
        for head in range(heads):
            rows = weights[head * group : (head + 1) * group, slot, : slot + 1]
            of_page = torch.zeros(n_pages, dtype=torch.float64)
            of_page.index_add_(0, torch.arange(slot + 1) // PAGE, rows.mean(0))
            worth = {p: float(of_page[p]) if name == "oracle" else p for p in counted}
            best = sorted(counted, key=lambda p: (worth[p], p))[
                -max(1, round(0.3 * len(counted))) :
            ]
            there = torch.tensor(
                [s // PAGE in (0, n_pages - 1, n_pages - 2, *best) for s in range(slot + 1)]
            )
            for row in rows:
                whole = row @ value[: slot + 1, head]
                lost = float(row[~there].sum())
                left = torch.where(there, row, 0) / (1 - lost)
                errors.append(float((left @ value[: slot + 1, head] - whole).norm() / whole.norm()))
                missed.append(lost)
    return float(np.mean(errors)), float(np.mean(missed))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_outputs_are_off_by(kind: str, tmp_path: Path) -> None:
    model, engine = made(kind)
    with engine:
        trace = recording(engine, tmp_path / "a.kvt")
        found = miss_cost(engine, trace, ("newest", "oracle"), BUDGET)
    attention, values = parts(model, trace.notes["prompt_tokens"] + trace.notes["tokens"])
    for step in range(0, STEPS, 7):
        for name in ("newest", "oracle"):
            error, missed = by_hand(attention, values, PROMPT + step, name)
            assert error > 0.01
            assert found.error[name][step] == pytest.approx(error, rel=2e-3)
            assert found.missed[name][step] == pytest.approx(missed, abs=2e-4)
    assert len(found.error["oracle"]) == trace.n_steps
    assert found.mean("oracle", "missed") < found.mean("newest", "missed")


def test_where_all_pages_are_there_nothing_is_off(tmp_path: Path) -> None:
    _, engine = made("deepseek_v3_latent")
    with engine:
        trace = recording(engine, tmp_path / "a.kvt")
        whole = miss_cost(engine, trace, ("recent",), PageBudget(1.0))
        part = miss_cost(engine, trace, ("recent", "oracle"), PageBudget(0.3))
        for name, wrong in (("ranking", ("recnet",)), ("trace", ("recent",))):
            trace.notes["tokens"] = trace.notes["tokens"][: None if name == "ranking" else 3]
            with pytest.raises(InvalidArgument, match=name):
                miss_cost(engine, trace, wrong)
    assert whole.mean("recent") < 1e-6 and whole.mean("recent", "missed") < 1e-6
    assert 0 < part.mean("oracle", "missed") < part.mean("recent", "missed")
    assert part.mean("recent") > 0.01


def test_steps_in_which_no_page_counts_are_none(tmp_path: Path) -> None:
    _, engine = made("llama")
    with engine:
        trace = record(
            engine,
            [5, 6, 7],
            tmp_path / "a.kvt",
            Sampling(max_tokens=12, ignore_eos=True),
            Recording(4),
        )
        found = miss_cost(engine, trace, ("recent",))
    assert (
        np.isnan(found.error["recent"][:9]).all() and not np.isnan(found.error["recent"][9:]).any()
    )
