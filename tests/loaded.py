"""The bundled model, loaded once in a process: that takes a quarter of a second."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from conftest import BUNDLED

from kvweave.run.load import load
from kvweave.run.model import Runner


@cache
def bundled_runner() -> Runner:
    return Runner.load(str(BUNDLED))


def _short() -> tuple[Any, Any]:
    model, tokenizer = load(str(BUNDLED), "auto", "cpu")
    layers: Any = model.model.layers
    del layers[1:-1]
    layers[1].self_attn.layer_idx = 1
    model.config.num_hidden_layers = 2
    model.config.layer_types = ["full_attention"] * 2
    return model, tokenizer


@cache
def short_runner() -> Runner:
    """Its first and its last layer: for tests that ask nothing of what it says, most of whose time would be
    passes."""
    return Runner(*_short(), name=str(BUNDLED))


def saved_short(folder: Path) -> Path:
    """Write these layers, for commands, which load a model; return the folder."""
    for one in _short():
        one.save_pretrained(folder)
    return folder
