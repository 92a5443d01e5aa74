"""Penalties, biases and grammars against transformers' processors and loops that are plain to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvweave.errors import InvalidArgument
from kvweave.run.draw import Sampler, candidates
from kvweave.run.sample import Choice, sample
from kvweave.run.sampling import Sampling
from kvweave.run.shape import Shaping, shape

V = 97


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def plainly(row: torch.Tensor, asked: Sampling, prompt: list[int], out: list[int]) -> torch.Tensor:
    """What transformers makes of one row, and a loop of what it has not."""
    ids = torch.tensor([prompt + out])
    found = row[None]
    if asked.repetition_penalty != 1:
        found = RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(ids, found)
    found = found.clone()
    for token in out:
        found[0, token] -= asked.frequency_penalty
    for token in set(out):
        found[0, token] -= asked.presence_penalty
    if asked.logit_bias:
        bias = {(token,): value for token, value in asked.logit_bias.items()}
        found = SequenceBiasLogitsProcessor(bias)(ids, found)
    if len(out) < asked.min_tokens:
        found[0, [3, *asked.stop_tokens]] = -torch.inf
    return found[0]


ASKED = [
    Sampling(frequency_penalty=0.7),
    Sampling(presence_penalty=-1.5),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.8, frequency_penalty=0.2, presence_penalty=0.4),
    Sampling(logit_bias={3: 5.0, 90: -100.0}),
    Sampling(min_tokens=40, stop_tokens=(5, 6)),
    Sampling(min_tokens=7, repetition_penalty=2.0, logit_bias={3: 100.0}),
    Sampling(),
]


@pytest.mark.slow
def test_a_batch_is_shaped_as_transformers_shapes_each_row() -> None:
    prompt = [1, 2, 2, 50, 51]
    samplers = [Sampler(asked, "cpu", {3}, torch.tensor(prompt).numpy()) for asked in ASKED]
    outs: list[list[int]] = [[] for _ in ASKED]
    for step in range(200):
        given = logits(step, len(ASKED))
        before = given.clone()
        found = shape(given, [sampler.shaping for sampler in samplers])
        assert torch.equal(given, before)
        for row, (asked, out) in enumerate(zip(ASKED, outs, strict=True)):
            wanted = plainly(before[row], asked, prompt, out)
            torch.testing.assert_close(found[row], wanted, rtol=0, atol=1e-4)
        for row, choice in enumerate(sample(given, samplers)):
            assert isinstance(choice, Choice)
            own = before[row].log_softmax(-1)[choice.token]
            assert choice.logprob == pytest.approx(float(own), abs=1e-5), "it is the model's own"
            outs[row].append(choice.token)
    assert outs[-1] == [int(logits(i, len(ASKED))[-1].argmax()) for i in range(200)]


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_min_p_is_what_transformers_does(top_k: int, top_p: float) -> None:
    asked = Sampling(temperature=1.7, top_k=top_k, top_p=top_p, min_p=0.15)
    given = logits(1, 5)
    wanted = TemperatureLogitsWarper(1.7)(None, given)
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    wanted = TopPLogitsWarper(top_p)(None, wanted) if top_p < 1 else wanted
    wanted = MinPLogitsWarper(0.15)(None, wanted).softmax(-1)
    ids, probabilities, _ = candidates(given, asked, V)
    found = torch.zeros(5, V).scatter(-1, ids, probabilities)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert (found > 0).sum() < 5 * V


def test_a_seed_draws_the_same_beside_others() -> None:
    asked = Sampling(temperature=1.0, seed=5, frequency_penalty=0.5, top_p=0.9)

    def draws(beside: list[Sampling]) -> list[int]:
        samplers = [Sampler(asked), *map(Sampler, beside)]
        made = []
        for step in range(30):
            given = torch.cat([logits(step), logits(step + 99, len(beside))])[: len(samplers)]
            choice = sample(given, samplers)[0]
            assert isinstance(choice, Choice)
            made.append(choice.token)
        return made

    assert draws([]) == draws([Sampling(temperature=0.7), Sampling(logit_bias={1: 2.0})])


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {1: 200.0}}, "logit_bias"),
        ({"min_tokens": 300}, "min_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Sampling(**options)
    assert caught.value.data["argument"] == argument


def test_a_bias_of_a_token_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="names a token"):
        Shaping(Sampling(logit_bias={V: 1.0}), n_vocab=V)
