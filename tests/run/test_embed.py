"""Vectors of texts, held against transformers' own hidden states."""

from __future__ import annotations

import oracle
import pytest
import torch
from run.backend import Pooled

from kvweave import Runner
from kvweave.errors import CannotRun
from kvweave.run import embed
from kvweave.run.embed import Embedding

KINDS = ("qwen3", "gemma3", "gpt2", "gpt_neox", "deepseek_v3_latent", "gpt_oss_sinks")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "make"), [*((kind, Runner) for kind in KINDS), ("qwen3", Pooled), ("gemma3", Pooled)]
)
def test_the_vector_is_the_mean_of_the_last_hidden_states(
    kind: str, make: type[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "PIECE", 9)  # so that a text of 21 tokens comes in three
    name, changes = (oracle.MODELS | oracle.FIXED)[kind]
    runner = make(oracle.build(name, changes))
    ids = torch.arange(21) * 7 % 90 + 3
    for n_front in (0, 1, 11):
        made = Embedding(runner, ids.tolist(), n_front)
        steps = 0
        while not made.is_done:
            made.step()
            steps += 1
        model = oracle.build(name, changes)
        with torch.inference_mode():
            body = model.base_model(ids[None].to(model.device)).last_hidden_state[0]
        mean = body[n_front:].mean(0).float()
        found = torch.from_numpy(made.vector)
        assert steps == 3
        assert torch.allclose(found, (mean / mean.norm()).cpu(), atol=2e-5)
        assert float(found.norm()) == pytest.approx(1, abs=1e-5)


def test_a_model_without_a_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(oracle.build("qwen3", {}))
    monkeypatch.setattr(runner.model, "get_output_embeddings", lambda: None)
    with pytest.raises(CannotRun, match="hidden states"):
        Embedding(runner, [5, 6])
