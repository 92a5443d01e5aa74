"""Latents in half precision: python -m pytest tests/run/test_latent.py"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from test_tracked import ROOT
from transformers import AutoModelForCausalLM

from kvweave.run.base import Work
from kvweave.run.model import Runner

TRAINED = ROOT / "bench" / "models" / "weights" / "deepseek-last"  # random ones do not show it
N, TEXTS = 100, 10


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_few_rows_attend_as_exactly_as_the_model(half: torch.dtype) -> None:
    """Absorbed, a query is not rounded on its way to latents, nor what it reads: the model has no such
    steps. With them rows that are off most are so 1.5 times and more."""
    if not (TRAINED / "config.json").exists():
        pytest.skip("bench/models/weights is not here; to run it git checkout -- bench/models")
    narrow = AutoModelForCausalLM.from_pretrained(TRAINED, dtype=half).eval()
    wide, runner = copy.deepcopy(narrow).float(), Runner(copy.deepcopy(narrow))
    assert N < min(info.latent.pays for info in runner.layers if info.latent is not None)
    ours, own = [], []
    draw, every = np.random.default_rng(0), np.arange(N)
    for _ in range(TEXTS):
        tokens = draw.integers(4, runner.n_vocab, N)
        rows = runner.new_rows()
        rows.reserve(N)
        (found,) = runner.forward([Work(rows, tokens, every, every, want=every)])
        with torch.inference_mode():
            true = wide(torch.tensor(tokens[None])).logits[0].log_softmax(-1)
            plain = narrow(torch.tensor(tokens[None])).logits[0].float().log_softmax(-1)
        ours.append((found.float().log_softmax(-1) - true).square().mean(-1).sqrt())
        own.append((plain - true).square().mean(-1).sqrt())
    worst, plain = (float(torch.cat(each).quantile(0.9)) for each in (ours, own))
    assert worst < 1.25 * plain, worst / plain
