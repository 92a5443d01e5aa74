"""What clients send is tokenised at a bounded cost."""

from __future__ import annotations

import pytest
from loaded import bundled_runner

from kvweave import Engine
from kvweave.errors import ContextTooLong
from kvweave.serve.guard.text import PROBE, tokens_of
from kvweave.weave.template import Template

A = "Nina's river is wide . so well then we saw it . "


@pytest.fixture
def counted(monkeypatch):
    """An engine, and the characters its tokenizer was given."""
    engine = Engine(bundled_runner())
    real, given = engine.maker.tokens, []

    def tokens(text):
        given.append(len(text))
        return real(text)

    monkeypatch.setattr(engine.maker, "tokens", tokens)
    yield engine, given
    engine.close()


@pytest.mark.parametrize("text", ["", A, A * 500, [5, 6, 7], " " * 40_000])
def test_tokens_are_those_of_the_whole_text(counted, text):
    engine, given = counted
    found = tokens_of(engine, text)
    assert found == engine.maker.tokens(text)
    assert sum(given[:-1]) <= 2.4 * len(text) or len(text) < PROBE * engine.runner.limit


@pytest.mark.parametrize("text", ["x" * 2**20, A * 30_000, "\u4e16" * 2**19, [5] * 2**20])
def test_what_is_far_too_long_is_not_tokenised_to_its_end(counted, text):
    engine, given = counted
    with pytest.raises(ContextTooLong) as refused:
        tokens_of(engine, text)
    assert sum(given) <= PROBE * engine.runner.limit
    assert refused.value.n > 5 * refused.value.limit


def test_routes_refuse_it_too(serve):
    anna = serve().anna
    anna("POST", "/v1/contexts", {"name": "c"}, 201)
    for method, path, body in (
        ("PUT", "/v1/chunks/a", {"text": "x" * 2**20}),
        ("POST", "/v1/contexts", {"name": "d", "system": "x" * 2**20}),
        ("POST", "/v1/contexts/c:append", {"text": "x" * 2**20}),
        ("POST", "/v1/contexts/c:message", {"role": "user", "content": "x" * 2**20}),
        ("POST", "/v1/contexts/c:ask", {"content": "x" * 2**20}),
        ("POST", "/v1/compose", {"template": "{q}", "values": {"q": "x" * 2**20}}),
        ("POST", "/v1/compose", {"template": "{q}", "values": {"q": ["a"] * 20_000}}),
    ):
        assert anna.error(method, path, body)["code"] == "context_length_exceeded"
    assert anna.names() == [] and anna("GET", "/v1/contexts/c")["n_parts"] == 0


def test_a_chat_that_is_far_too_long_is_refused_early(serve, monkeypatch):
    served, given = serve(), []
    maker = served.engine.maker
    real = maker.tokens
    monkeypatch.setattr(maker, "tokens", lambda text: (given.append(len(text)), real(text))[1])
    for said in (["x" * 2**20], [f"{i} {A * 200}" for i in range(100)]):
        given.clear()
        messages = [{"role": "user", "content": text} for text in said]
        body = {"model": "kvweave", "messages": messages}
        refused = served.anna.error("POST", "/v1/chat/completions", body)
        assert refused["code"] == "context_length_exceeded"
        assert sum(given) <= 2 * PROBE * served.engine.runner.limit


@pytest.mark.parametrize("value", ["x " * 3000, ["docs/a"] * 50])
def test_many_holes_for_one_value_are_refused_before_they_are_filled(serve, monkeypatch, value):
    anna = serve().anna
    anna.put("docs/a", "the museum opens at nine")
    filled = []
    real = Template.fill
    monkeypatch.setattr(Template, "fill", lambda self, *a: filled.append(1) or real(self, *a))
    body = {"template": "{a} " * 3000, "values": {"a": value}}
    assert anna.error("POST", "/v1/compose", body)["code"] == "context_length_exceeded"
    assert not filled
    anna("POST", "/v1/compose", {"template": "{a} {a}", "values": {"a": ["docs/a"]}}, 201)
    assert filled
