"""Answers keep to their grammars, whatever the logits say. python -m pytest tests/run/test_grammar.py"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from needs import need
from serving import bundled_runner

from kvweave.errors import InvalidArgument
from kvweave.run.draw import Sampler
from kvweave.run.grammar import Grammars, GrammarText, ThinkTokens
from kvweave.run.sample import Choice, sample
from kvweave.run.sampling import Sampling

need("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", "yy"]},
        "n": {"type": "integer", "minimum": 3, "maximum": 7},
    },
    "required": ["a", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    runner = bundled_runner()
    return Grammars(runner.tokenizer, runner.n_vocab, runner.ends)


def write(grammars: Grammars, samplers: list[Sampler], n: int = 60) -> list[list[int]]:
    """Draw from random logits until each has an end token."""
    outs: list[list[int]] = [[] for _ in samplers]
    generator = torch.Generator().manual_seed(3)
    for _ in range(n):
        logits = torch.randn(len(samplers), grammars.n_vocab, generator=generator)
        for out, choice in zip(outs, sample(logits, samplers), strict=True):
            assert isinstance(choice, Choice)
            if not out or out[-1] not in grammars.ends:
                out.append(choice.token)
    return outs


def text(grammars: Grammars, out: list[int]) -> str:
    assert out[-1] in grammars.ends, "the grammar lets it end"
    return str(grammars.tokenizer.decode(out[:-1], skip_special_tokens=False))


def test_any_logits_give_json_of_the_schema_beside_rows_without_one(grammars: Grammars) -> None:
    grammar = grammars.compile(GrammarText("json_schema", SCHEMA))
    free = Sampling(temperature=1.0, seed=1)
    bound = Sampling(temperature=1.0, seed=2, constraint=grammar)
    outs = write(grammars, [Sampler(free), *(Sampler(bound) for _ in range(3)), Sampler(free)])
    for out in outs[1:4]:
        found = json.loads(text(grammars, out))
        assert found["a"] in ("x", "yy") and 3 <= found["n"] <= 7
    assert outs[1] == outs[2] == outs[3] or len({tuple(out) for out in outs[1:4]}) > 1
    assert outs[0][:5] != outs[1][:5]
    greedy = Sampler(Sampling(constraint=grammar))
    assert json.loads(text(grammars, write(grammars, [greedy])[0]))


@pytest.mark.parametrize(
    ("kind", "source", "fits"),
    [
        ("regex", "(so|well) [0-9]{2}", re.compile(r"(so|well) [0-9]{2}")),
        ("choice", ["yes", "no way"], re.compile("yes|no way")),
        ("lark", 'start: "a" /[bc]{3}/', re.compile("a[bc]{3}")),
    ],
)
def test_other_grammars(grammars: Grammars, kind: Any, source: Any, fits: re.Pattern[str]) -> None:
    sampler = Sampler(
        Sampling(temperature=2.0, constraint=grammars.compile(GrammarText(kind, source)))
    )
    assert fits.fullmatch(text(grammars, write(grammars, [sampler])[0]))


def test_it_begins_behind_thinking(grammars: Grammars) -> None:
    grammar = grammars.compile(GrammarText("choice", ["yes"]))
    opens, closes = 700, 701
    follower = grammar.behind(ThinkTokens(opens, closes, waits=True)).begin()
    for token in (5, 6, opens):
        assert follower.allowed() is None
        follower.took(token)
    follower.took(closes)
    assert (words := follower.allowed()) is not None and not words[opens // 32] >> opens % 32 & 1
    follower = grammar.behind(ThinkTokens(opens, closes, waits=False)).begin()
    assert (words := follower.allowed()) is not None and words[opens // 32] >> opens % 32 & 1
    follower.took(opens)
    assert follower.allowed() is None


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", {"type": "nonsense"}),
        ("json_schema", {"not": {"type": "string"}}),
        ("regex", "a(b"),
        ("lark", "start: foo"),
        ("choice", []),
    ],
)
def test_what_is_no_grammar_is_refused(grammars: Grammars, kind: Any, source: Any) -> None:
    with pytest.raises(InvalidArgument, match="no grammar"):
        grammars.compile(GrammarText(kind, source))
