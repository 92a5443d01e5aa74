"""What a caller's program sets of torch around a verb does not show in what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import oracle
import pytest
import torch
from weaving import text

from kvweave import Engine, Runner
from kvweave.run.apart import apart

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


@pytest.mark.skipif(oracle.DEVICE.type != "cpu", reason="it is about what a CPU rounds")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_caller_change_nothing(name: str) -> None:
    setting, wanted = SETTINGS[name], logprobs(nothing, nothing)
    assert wanted[1] < 1e-6
    for found in (logprobs(setting, nothing), logprobs(nothing, setting)):
        assert found[0] == pytest.approx(wanted[0], abs=1e-6)
        assert found[1] < 1e-6


def test_they_hold_again_behind_it() -> None:
    with torch.autocast("cpu", torch.bfloat16), device("meta"):
        with apart():
            assert not torch.is_autocast_enabled("cpu")
            assert torch.zeros(1).device.type == "cpu"
        assert torch.is_autocast_enabled("cpu") and torch.zeros(1).device.type == "meta"
