"""Weights that are written over while a model runs on them: python -m pytest tests/run/test_mapped.py"""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import oracle
import pytest
import torch

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
