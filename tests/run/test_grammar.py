"""Answers keep to their grammars, whatever the logits say. python -m pytest tests/run/test_grammar.py"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from loaded import bundled_runner
from needs import need

from kvweave.errors import InvalidArgument
from kvweave.run.draw import Sampler
from kvweave.run.grammar import Grammars, GrammarText, ThinkTokens
from kvweave.run.sample import Choice, sample
from kvweave.run.sampling import Follower, Sampling

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


def allowed(follower: Follower) -> set[int]:
    words = follower.allowed()
    assert words is not None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: bundled_runner().n_vocab]
    return {*map(int, np.flatnonzero(bits))}


@pytest.fixture(scope="module")
def tagged() -> Grammars:
    """Of a tokenizer that has tags: special ones, and as Qwen's some that are not."""
    runner = bundled_runner()
    tokenizer = copy.deepcopy(runner.tokenizer)
    tokenizer.add_tokens(["<|tag|>"], special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "<think>"])
    return Grammars(tokenizer, len(tokenizer), runner.ends)


@pytest.mark.parametrize("tag", ["<|tag|>", "<tool_call>", "x<think>y"])
@pytest.mark.parametrize("kind", ["json_schema", "choice", "regex", "lark"])
def test_text_that_reads_like_a_special_token_is_text(
    tagged: Grammars, kind: Any, tag: str
) -> None:
    source = {
        "json_schema": {"enum": [{tag: tag}]},
        "choice": [tag],
        "regex": re.escape(tag),
        "lark": f'start: "{tag}"',
    }[kind]
    sampler = Sampler(Sampling(constraint=tagged.compile(GrammarText(kind, source))))
    found = text(tagged, write(tagged, [sampler], 99)[0])
    assert (json.loads(found)[tag] if kind == "json_schema" else found) == tag


def test_a_literal_has_the_tokens_that_the_model_writes(tagged: Grammars) -> None:
    whole = "<tool_call>\n<|tag|>so"
    lark = f"start: {tagged.literal(whole)}"
    sampler = Sampler(Sampling(constraint=tagged.compile(GrammarText("lark", lark))))
    out = write(tagged, [sampler])[0]
    known = tagged.tokenizer.get_vocab()
    assert known["<tool_call>"] in out and known["<|tag|>"] in out and text(tagged, out) == whole


def test_a_grammar_that_is_over_ends_though_more_tokens_are_asked_for(grammars: Grammars) -> None:
    grammar = grammars.compile(GrammarText("choice", ["yes"]))
    known = grammars.tokenizer.get_vocab()
    for more in ({}, {"stop_tokens": (*range(300, 305), *known.values())}):
        asked = Sampling(min_tokens=40, constraint=grammar, **more)  # type: ignore[arg-type]
        assert text(grammars, write(grammars, [Sampler(asked), Sampler(asked)])[1]) == "yes"
    free = Sampler(Sampling(min_tokens=40))
    assert len(write(grammars, [free, Sampler(Sampling(constraint=grammar))])[0]) > 40


def test_what_can_no_longer_be_followed_ends_in_an_error_and_not_as_if_it_were_whole(
    grammars: Grammars,
) -> None:
    grammar = grammars.compile(GrammarText("choice", ["yes"]))
    bad, good = (Sampler(Sampling(constraint=grammar)) for _ in range(2))
    assert bad.shaping is not None and bad.shaping.follower is not None
    bad.shaping.follower.took(700)
    found = sample(torch.randn(2, grammars.n_vocab), [bad, good])
    assert isinstance(found[0], InvalidArgument) and found[0].argument == "grammar"
    assert isinstance(found[1], Choice)


def test_it_begins_behind_thinking(grammars: Grammars) -> None:
    grammar = grammars.compile(GrammarText("choice", ["yes"]))
    opens, closes = 700, 701
    follower = grammar.behind(ThinkTokens(opens, closes, waits=True)).begin()
    (end,) = grammars.ends
    for token in (5, 6, opens):
        assert allowed(follower) == {*range(grammars.n_vocab)} - {end}
        follower.took(token)
    follower.took(closes)
    assert (words := follower.allowed()) is not None and not words[opens // 32] >> opens % 32 & 1
    follower = grammar.behind(ThinkTokens(opens, closes, waits=False)).begin()
    assert (words := follower.allowed()) is not None and words[opens // 32] >> opens % 32 & 1
    follower.took(opens)
    assert allowed(follower) == {*range(grammars.n_vocab)} - {end}


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
