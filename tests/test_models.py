"""docs/models.md says what kvweave makes of every causal language model of transformers.

All of it: ``make test-slow PYTEST_ARGS=tests/test_models.py``, a minute; with KVWEAVE_ALIKE=3, three of
those types whose lines say the same, others each day. After a change that is meant, or with another
transformers: ``make models``, and read the difference.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import battery
import models_page
import numpy as np
import pytest
import torch
import transformers
import zoo
from days import some
from test_tracked import ROOT

from kvweave.run.base import Mask, Work
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows

PAGE = models_page.FILE.read_text() if models_page.FILE.exists() else ""
LINES = models_page.lines(PAGE)
RENEW = "run `make models` and read what changed in docs/models.md"
# one of each class, in the order of the page
SAMPLE = (
    "llama", "mixtral", "llama4_text", "gemma3", "gpt_oss", "deepseek_v3", "deepseek_v32",
    "gemma4_text", "qwen3_next", "mamba", "gpt2", "bart", "musicgen",
)  # fmt: skip
ALIKE = int(os.environ.get("KVWEAVE_ALIKE", "1000"))


def others() -> list[str]:
    """Return the types that are not in `SAMPLE`, at most ``ALIKE`` of those whose lines say the same."""
    alike: dict[str, list[str]] = {}
    for name in zoo.TYPES:
        if name not in SAMPLE:
            alike.setdefault(LINES.get(name, name).partition("` | ")[2], []).append(name)
    return [name for names in alike.values() for name in some(ALIKE, names)]


@pytest.fixture(autouse=True)
def _this_version() -> None:
    about = models_page.version(PAGE)
    if transformers.__version__ != about:
        pytest.skip(f"docs/models.md is about transformers {about}, not {transformers.__version__}")


def test_the_page_is_about_the_pinned_transformers() -> None:
    pinned = f"transformers=={models_page.version(PAGE)}\n"
    assert pinned in (ROOT / "constraints.txt").read_text(), RENEW


def test_the_page_has_every_type_once() -> None:
    assert sorted(LINES) == zoo.TYPES, RENEW
    assert PAGE.count("\n| `") == len(zoo.TYPES)
    assert set(zoo.OWN) <= {*zoo.TYPES} and set(zoo.UNBUILT) <= {*zoo.TYPES}


def test_no_line_is_a_mistake() -> None:
    bad = [line for line in LINES.values() if "| WRONG |" in line or "| crash |" in line]
    assert not bad, "\n".join(bad)


def holds(model_type: str) -> None:
    found = battery.examine(model_type)
    assert models_page.line(model_type, found) == LINES[model_type], RENEW


@pytest.mark.parametrize("model_type", SAMPLE)
@pytest.mark.sampled
def test_a_line_holds(model_type: str) -> None:
    holds(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", others())
@pytest.mark.sampled(12)
def test_every_line_holds(model_type: str) -> None:
    holds(model_type)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "jamba"])
def test_a_tiny_model_is_the_same_each_time(model_type: str) -> None:
    one, two, other = (zoo.tiny(model_type, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    drawn = [name for name, _ in zoo.tiny(model_type).named_parameters()]
    assert not any(torch.equal(one[name], other[name]) for name in drawn)


class Widened(Runner):
    """Sees one token more than its windows let it."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        for layer in self.layers:
            object.__setattr__(layer, "mask", Mask(window=17))


class Unturned(Runner):
    """Forgets that a context may begin elsewhere than its chunks were computed."""

    def new_rows(self, *args: object, **options: object) -> KVRows:
        rows = super().new_rows(*args, **options)  # type: ignore[arg-type]
        place = rows.place
        rows.place = lambda runs, positions, *more: place(runs, positions - positions[0], *more)  # type: ignore[method-assign]
        return rows


class Failing(Runner):
    """Raises what is no error of kvweave, once it is verified."""

    ready = False

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.ready = True

    def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        if self.ready:
            raise ZeroDivisionError("division by zero")
        return super().forward(works)


class Meddling(Runner):
    """Changes the caller's model."""

    def __init__(self, model: transformers.PreTrainedModel, **options: object) -> None:
        super().__init__(model, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)


@pytest.mark.parametrize(
    ("kind", "verdict", "says"),
    [
        (Widened, "WRONG", "prefill"),
        (Unturned, "WRONG", "moved"),
        (Failing, "crash", "ZeroDivisionError"),
        (Meddling, "WRONG", "was changed"),
    ],
)
def test_the_battery_finds_mistakes(
    monkeypatch: pytest.MonkeyPatch, kind: type[Runner], verdict: str, says: str
) -> None:
    monkeypatch.setattr(battery, "Runner", kind)
    found = battery.examine("mistral")
    assert found.verdict == verdict and says in found.why, found


def test_numbers_of_one_machine_are_left_out() -> None:
    said = battery.said("differs by 1.2e-03 at position 2039 in its logits")
    assert said == "differs by ... in its logits"
    assert battery.far_apart(torch.tensor([np.nan]), torch.tensor([1.0])) == float("inf")
