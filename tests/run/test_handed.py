"""Attention of the model's own: keys of an index, one tensor for keys and values, pooled rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from battery import text
from zoo import tiny

from kvweave import Engine
from kvweave.errors import CannotMove, CannotRun, InvalidArgument
from kvweave.run.base import Observer, Work, gapless
from kvweave.run.handing import As
from kvweave.run.model import Runner

N = 60
# what each has that others have not: keys of an index, behind what turns or in front of it; pools;
# two maps of attention, of which one goes off the other; a mask of values; states beside latents;
# ALiBi, a table of angles, and learned positions in code of their own
TYPES = (
    "deepseek_v32", "hy_v4", "deepseek_v4", "diffllama", "doge", "kimi_linear", "bloom", "gptj", "rembert",
)  # fmt: skip
SEES = ("jetmoe", "deepseek_v32", "doge", "bloom", "gptj")  # can be asked for its weights


@pytest.fixture(scope="module", params=TYPES)
def pair(request: pytest.FixtureRequest) -> tuple[Runner, Any]:
    model = tiny(request.param)
    return Runner(model), model


def filled(runner: Runner, tokens: list[int], **more: Any) -> tuple[Any, torch.Tensor]:
    rows, every = runner.new_rows(), np.arange(len(tokens))
    rows.reserve(len(tokens))
    work = Work(rows, np.array(tokens), every, every, want=every, **more)
    return rows, runner.forward([work])[0]


def native(model: Any, tokens: list[int], **options: Any) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False, **options)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.sampled
def test_rows_are_the_model_s_own(pair: tuple[Runner, Any]) -> None:
    """What stands at its position is not turned there and back: attention sees the model's keys."""
    runner, model = pair
    assert any(info.handed is not None for info in runner.layers)
    tokens = text(N, 1)
    _, logits = filled(runner, tokens)
    assert far(logits, native(model, tokens).logits[0]) < 1e-5


def test_contexts_of_one_call_do_not_see_each_other(pair: tuple[Runner, Any]) -> None:
    runner, model = pair
    works, wanted = [], []
    for seed in (2, 3):
        tokens, every, rows = text(20 + seed, seed), np.arange(20 + seed), runner.new_rows()
        rows.reserve(len(every))
        works.append(Work(rows, np.array(tokens), every, every, want=every[-3:]))
        wanted.append(native(model, tokens).logits[0, -3:])
    for found, true in zip(runner.forward(works), wanted, strict=True):
        assert far(found, true) < 1e-5


def test_a_pass_that_ends_early_writes_what_stands_before(pair: tuple[Runner, Any]) -> None:
    runner, _ = pair
    tokens = text(N, 4)
    whole, _ = filled(runner, tokens)
    for last in range(len(runner.layers)):
        rows, every = runner.new_rows(), np.arange(N)
        rows.reserve(N)
        runner.forward([Work(rows, np.array(tokens), every, every, last=last)])
        for layer in range(last + 1):
            for found, wanted in zip(rows.read(layer), whole.read(layer), strict=True):
                assert torch.equal(found, wanted), (last, layer)


class Seen(Observer):
    def __init__(self, n: int) -> None:
        self.n, self.found = n, {}  # type: ignore[var-annotated]

    def see(self, layer: int, first: int, begin: int, weights: torch.Tensor) -> None:
        heads, rows, keys = weights.shape
        every = self.found.setdefault(layer, torch.zeros(heads, self.n, self.n))
        every[:, first : first + rows, begin : begin + keys] += weights


@pytest.mark.parametrize("model_type", SEES)
def test_observers_see_the_model_s_own_weights(model_type: str) -> None:
    model = tiny(model_type)
    runner, tokens = Runner(model), text(N, 5)
    seen = Seen(N)
    filled(runner, tokens, observer=seen)
    model.set_attn_implementation("eager")
    wanted = native(model, tokens, output_attentions=True).attentions
    attending = [i for i, info in enumerate(runner.layers) if info.attends]
    assert list(seen.found) == attending
    for layer, weights in zip(attending, wanted, strict=True):
        assert far(seen.found[layer], weights[0].float()) < 1e-5


def test_weights_of_pools_are_those_of_their_rows() -> None:
    runner, seen = Runner(tiny("deepseek_v4")), Seen(N)
    filled(runner, text(N, 6), observer=seen)
    for layer, weights in seen.found.items():
        sums = weights.sum(-1)
        assert float(sums.max()) <= 1 + 1e-5 and float(weights.min()) >= 0, layer
        assert not weights.triu(1).any(), f"layer {layer}: a row sees what comes behind it"


@pytest.mark.parametrize("kind", ["bloom"])
def test_alibi_goes_by_slots_in_contexts_without_gaps(kind: str) -> None:
    with Engine(Runner(tiny(kind))) as engine:
        with pytest.raises(CannotMove, match="no gaps"):
            engine.context("gaps", positions="keep")


def test_attention_that_is_not_shown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its scores were made into weights by no softmax."""
    softmax = torch.nn.functional.softmax

    def other(scores: torch.Tensor, dim: int, **options: Any) -> torch.Tensor:
        return torch.exp(torch.log_softmax(scores, dim, **options))

    monkeypatch.setattr(torch.nn.functional, "softmax", other)
    runner = Runner(tiny("bloom"))
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    assert not runner.can_run


def test_pools_stand_in_contexts_without_gaps() -> None:
    runner = Runner(tiny("deepseek_v4"))
    assert gapless(runner.layers)
    assert {info.handed.what for info in runner.layers if info.handed} == {As.ONE, As.POOLED}
    with Engine(runner) as engine:
        with pytest.raises(CannotMove, match=r"no gaps.*compact"):
            engine.context("gaps", positions="keep")
        assert "gaps" not in engine.contexts
    rows = runner.new_rows()
    rows.reserve(5)
    there = np.arange(5)
    with pytest.raises(CannotMove, match="gaps"):
        runner.forward([Work(rows, np.array(text(5, 7)), there, there + 3, want=there)])


def test_rows_are_not_freed_one_by_one(pair: tuple[Runner, Any]) -> None:
    runner, _ = pair
    with Engine(runner) as engine:
        with pytest.raises(InvalidArgument, match=r"its own|keeps states"):
            engine.context("thin", keep="h2o:0.5")
    rows, _ = filled(runner, text(N, 8))
    layer = next(i for i, info in enumerate(runner.layers) if info.attends)
    with pytest.raises(InvalidArgument, match="its own"):
        rows.free(layer, 0, np.arange(3))


@pytest.mark.parametrize("repair", ["auto", "query", "deviation", "full"])
@pytest.mark.sampled
def test_every_repair_goes_through(pair: tuple[Runner, Any], repair: str) -> None:
    runner, model = pair
    with Engine(runner, repair=repair, share=0.3) as engine:
        parts = [text(n, 20 + n) for n in (15, 9, 12)]
        for i, part in enumerate(parts):
            engine.put(f"d/{i}", part)
        context = engine.compose("{d/2}{d/0}{d/1}")
        context.append(text(6, 40))
        answer = context.generate(max_tokens=2, ignore_eos=True)
        if repair == "full":
            tokens = parts[2] + parts[0] + parts[1] + text(6, 40)
            best = int(native(model, tokens).logits[0, -1].argmax())
            assert answer.tokens[0] == best
            assert context.check().kl_max < 1e-6


def test_a_model_that_differs_is_refused_with_the_first_cause(monkeypatch: Any) -> None:
    """As if the mask of a pass did not go by positions."""
    monkeypatch.setattr(
        "kvweave.run.batch.Batch.positions_seen",
        property(lambda batch: (batch._positions, batch._positions.new_zeros(batch.parts[0].stop))),
    )
    runner = Runner(tiny("doge"))
    assert not runner.can_run
    with pytest.raises(CannotRun, match="changes the mask"):
        runner.require_run()
