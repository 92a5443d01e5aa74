"""Weights that are written over while a model runs on them: python -m pytest tests/run/test_mapped.py"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch

from kvweave import Engine
from kvweave.errors import ModelUnusable
from kvweave.run import mapped
from kvweave.run.model import Runner

TOKENS = torch.arange(3, 20)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint directory, and another one's weights beside it."""
    oracle.build("qwen3", {}, torch.float32).save_pretrained(tmp_path / "model")
    torch.manual_seed(1)
    other = oracle.build("qwen3", {}, torch.float32)
    for weight in other.parameters():
        weight.data.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    return tmp_path / "model" / "model.safetensors"


def runs(runner: Runner) -> torch.Tensor:
    return oracle.rows_of(runner, TOKENS)[1].clone()


def is_mapped(saved: Path) -> bool:
    maps = mapped.MAPS
    return maps.exists() and str(saved) in maps.read_text()


def test_nothing_is_computed_with_weights_that_were_written_over(
    saved: Path, tmp_path: Path
) -> None:
    runner = Runner.load(str(saved.parent), device="cpu")
    if not is_mapped(saved):
        pytest.skip("weights are not mapped here")
    before = runs(runner)
    new = (tmp_path / "other" / saved.name).read_bytes()
    with saved.open("r+b") as file:
        file.write(new)
    with pytest.raises(ModelUnusable) as failed:
        runs(runner)
    assert failed.value.data["path"] == str(saved) and "start again" in failed.value.hint
    assert "written over" in str(failed.value)
    other = Runner.load(str(saved.parent), device="cpu")
    assert other.fingerprint != runner.fingerprint
    assert not torch.equal(runs(other), before)


@pytest.mark.parametrize("how", ["renamed", "removed", "linked", "touched by nobody"])
def test_weights_that_are_put_in_their_place_change_nothing(
    saved: Path, tmp_path: Path, how: str
) -> None:
    runner = Runner.load(str(saved.parent), device="cpu")
    before = runs(runner)
    if how == "renamed":
        os.replace(tmp_path / "other" / saved.name, saved)
    elif how == "removed":
        shutil.rmtree(saved.parent)
    elif how == "linked":
        os.link(saved, tmp_path / "backup")
    assert torch.equal(runs(runner), before)


def test_weights_that_were_read_whole_do_not_depend_on_their_file(saved: Path) -> None:
    runner = Runner.load(str(saved.parent), dtype="bfloat16", device="cpu")
    before = runs(runner)
    saved.write_bytes(b"")
    assert torch.equal(runs(runner), before)


def test_files_are_let_go_of_with_their_model(saved: Path) -> None:
    def n_open() -> int:
        return sum(
            os.path.realpath(f"/proc/self/fd/{n}") == str(saved)
            for n in os.listdir("/proc/self/fd")
        )

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("nothing tells what is open here")
    files = mapped.MappedFiles(Runner.load(str(saved.parent), device="cpu").model)
    assert n_open() <= 2
    del files
    gc.collect()
    assert n_open() == 0


def _trained(model: torch.nn.Module) -> None:
    with torch.enable_grad():
        loss = model(input_ids=TOKENS[None], labels=TOKENS[None]).loss
        loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.01).step()


def _each(change: Callable[[torch.nn.Parameter], object]) -> Callable[[torch.nn.Module], None]:
    def all_of(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                change(weight)

    return all_of


CHANGES: dict[str, Callable[[torch.nn.Module], None]] = {
    "in place": _each(lambda weight: weight.mul_(1.1)),
    "data": _each(lambda weight: weight.data.mul_(1.1)),
    "merged": _each(lambda weight: setattr(weight, "data", weight.data.add_(0.1))),
    "another": _each(lambda weight: setattr(weight, "data", weight.data * 1.1)),
    "loaded": lambda model: model.load_state_dict(
        {name: each * 1.1 for name, each in model.state_dict().items()}
    ),
    "trained": _trained,
}


@pytest.mark.parametrize("how", CHANGES)
def test_nothing_is_made_of_weights_that_their_owner_changed(how: str) -> None:
    """A caller's model is his: what was computed before is of another one then, and so is its fingerprint."""
    model = oracle.build("qwen3", {}, torch.float64)
    engine = Engine(Runner(model), repair="none")
    engine.put("a", TOKENS.tolist())
    context = engine.compose("{a}")
    context.append([3, 4, 5])
    assert context.generate(2).plan.drift == 0
    CHANGES[how](model)
    with pytest.raises(ModelUnusable) as failed:
        context.generate(2)
    with pytest.raises(ModelUnusable):
        engine.put("b", [7, 8, 9])
    assert "changed" in str(failed.value) and [e.name for e in engine.files.ls()] == ["a"]
    assert Runner(model).fingerprint != engine.runner.fingerprint
    with pytest.raises(ModelUnusable):
        Engine(engine.runner)
    engine.close()
    with Engine(Runner(model), repair="none") as anew:
        assert anew.put("b", [7, 8, 9]).n_tokens == 3


def test_what_does_not_change_a_weight_is_no_change() -> None:
    model = oracle.build("qwen3", {}, torch.float64)
    runner = Runner(model)
    before = runs(runner)
    model.train()
    model.requires_grad_(False)
    model.state_dict()
    Runner(model)
    with torch.inference_mode():
        model(input_ids=TOKENS[None])
    assert torch.equal(runs(runner), before)
