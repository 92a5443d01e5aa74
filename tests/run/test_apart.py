"""What a caller's program sets of torch around a verb does not show in what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import oracle
import pytest
import torch
from needs import only_on_cpu
from weaving import text

from kvweave import Context, Engine, Runner
from kvweave.keep.tokens import POLICIES
from kvweave.run.apart import apart
from kvweave.weave.answer import request_from

BASE, A, B = text(3, 9), text(9, 1), text(7, 2)
Setting = Callable[[], AbstractContextManager[object]]


@contextmanager
def device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Setting] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: device("meta"),
    "dtype": lambda: dtype(torch.float16),
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
}


def logprobs(around: Setting, loading: Setting) -> tuple[list[float], float]:
    """Load a model and answer with it, each within a setting; also what `check` says."""
    model = oracle.build("llama", {"num_hidden_layers": 2}, torch.float32)
    with loading():
        engine = Engine(Runner(model), base=BASE, repair="full", share=1.0)
    with engine, around():
        engine.put("a", A)
        engine.put("b", B)
        context = engine.compose("{a}{b}{a}")
        answer = context.generate(3, ignore_eos=True)
        return [choice.logprob for choice in answer.choices], context.check().kl


def nothing() -> AbstractContextManager[object]:
    return torch.no_grad()


@only_on_cpu("it is about what a CPU rounds")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.sampled
def test_settings_of_the_caller_change_nothing(name: str) -> None:
    setting, wanted = SETTINGS[name], logprobs(nothing, nothing)
    assert wanted[1] < 1e-6
    for found in (logprobs(setting, nothing), logprobs(nothing, setting)):
        assert found[0] == pytest.approx(wanted[0], abs=1e-6)
        assert found[1] < 1e-6


LONG = text(60, 5)
KEEPS = [f"{name}:24,every=6" for name in POLICIES] + [
    "h2o:12,int8=8,k4v2=8,every=6",
    "keydiff:12,below=rest,every=6",
]

UNDISTURBED: dict[str, list[object]] = {}


def decoded(runner: Runner, keep: str, around: Setting, streamed: bool) -> list[object]:
    """Decode behind a prompt and behind chunks; return what was drawn, what is left, and what it holds."""
    with Engine(runner, base=BASE, repair="none", denoise="never") as engine, around():
        context = engine.context("c", keep=keep)
        context.append(LONG)
        if streamed:
            turn = context.begin(*request_from(20, {"ignore_eos": True}))
            list(turn.stream())
            choices = turn.finish().choices
        else:
            choices = context.generate(20, ignore_eos=True).choices
        with apart():  # to look only
            return [[c.token for c in choices], [c.logprob for c in choices], *held(context)]


def held(context: Context) -> Iterator[object]:
    rows = context.session.state.rows
    for layer in range(len(context.session.weaver.backend.layers)):
        yield [slots.tolist() for slots in rows.kept(layer)]
        yield from (t.double().tolist() for t in rows.packed(layer))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(oracle.build("llama", {"num_hidden_layers": 2}, torch.float32))


@only_on_cpu("it is about what a CPU rounds")
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["autocast", "device"])
@pytest.mark.sampled
def test_policies_choose_the_same_rows(name: str, keep: str, runner: Runner) -> None:
    if keep not in UNDISTURBED:
        UNDISTURBED[keep] = decoded(runner, keep, nothing, False)
    streamed = SETTINGS[name] is SETTINGS["autocast"]
    assert decoded(runner, keep, SETTINGS[name], streamed) == UNDISTURBED[keep]


@only_on_cpu("it is about what a CPU rounds")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("strategy", ["patch:4", "auto", "rollout", "deviation"])
@pytest.mark.sampled
def test_repairs_and_patches_are_the_same(name: str, strategy: str, runner: Runner) -> None:
    found = []
    for around in (nothing, SETTINGS[name]):
        with Engine(runner, base=BASE) as engine, around():
            engine.put("a", A * 4)
            engine.put("b", B * 4)
            each = []
            for share in (1.0, 0.0):  # the second time patches are used
                context = engine.compose("{b}{a}{b}", repair=strategy, share=share)
                answer = context.generate(3, ignore_eos=True)
                with apart():
                    each.append([[c.logprob for c in answer.choices], *held(context)])
                engine.close_context(context.name)
            assert bool(answer.plan.patched) == strategy.startswith("patch")
            found.append(each)
    assert found[0] == found[1]


@only_on_cpu("it is about what a CPU rounds")
@pytest.mark.parametrize("name", SETTINGS)
def test_thinned_chunks_are_the_same(name: str, runner: Runner) -> None:
    found = []
    for around in (nothing, SETTINGS[name]):
        with Engine(runner, base=BASE, repair="none", denoise="never") as engine, around():
            for policy in ("h2o", "kvzip", "expected_attention", "rkv", "triattention"):
                engine.put(policy, LONG)
                engine.compress(policy, f"{policy}:0.5")
            context = engine.compose("{kvzip}{h2o}{rkv}{expected_attention}{triattention}")
            context.generate(2, ignore_eos=True)
            with apart():
                found.append(list(held(context)))
    assert found[0] == found[1]


def test_they_hold_again_behind_it() -> None:
    with torch.autocast("cpu", torch.bfloat16), device("meta"):
        with apart():
            assert not torch.is_autocast_enabled("cpu")
            assert torch.zeros(1).device.type == "cpu"
        assert torch.is_autocast_enabled("cpu") and torch.zeros(1).device.type == "meta"
