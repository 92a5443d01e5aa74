"""The engine over an engine that is not transformers: nothing above `run/base.py` knows which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from reference import Reference, Sizes
from run.backend import EXACT, assert_rows, ids, prefill, reference, room, run, some, transformers
from transformers import AutoTokenizer

from kvweave import Context, Engine
from kvweave.run.base import ALL, Backend, Mask, Rows
from kvweave.store.kv import KV

STRATEGIES = ("none", "first_k", "query", "deviation:v", "rollout:1", "auto", "full")
TEXT = {
    "a": "keep the red apple in the old house by the river .",
    "b": "the blue lamp stands on the table of the north room .",
    "c": "who sold the green book went to the market again .",
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def engine(bundled: Path) -> Iterator[Engine]:
    """An engine over the reference with the bundled tokenizer, and three documents."""
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    sizes = Sizes((ALL, Mask(window=16), ALL), vocab=len(tokenizer), ends=frozenset())
    backend = Reference(sizes)
    backend.tokenizer = tokenizer
    with Engine(backend, repair="none", share=0.2) as made:
        for name, words in TEXT.items():
            made.put(name, words)
        yield made
        made.check_integrity()


def continued(backend: Backend, tokens: Sequence[int], n: int) -> list[int]:
    """Return the ``n`` likeliest next tokens by a full prefill for each."""
    found = list(tokens)
    for _ in range(n):
        found.append(int(prefill(backend, np.array(found))[1][-1].argmax()))
    return found[len(tokens) :]


def decoded(backend: Backend, rows: Rows, tokens: Sequence[int], n: int) -> list[int]:
    """Return the ``n`` likeliest next tokens over rows; the last one is computed again."""
    found = list(tokens)
    rows.reserve(len(found) + n)
    for _ in range(n):
        logits = run(backend, some(rows, np.array(found), [len(found) - 1]))
        found.append(int(logits[0].argmax()))
    return found[len(tokens) :]


def documents_last(engine: Engine, **options: object) -> Context:
    return engine.compose("keep the notes . {docs}", docs=["a", "b", "c"], **options)  # type: ignore[arg-type]


def canonical(backend: Backend, base: Sequence[int], tokens: Sequence[int]) -> KV:
    """Return KV of tokens that saw the base before them, and nothing else."""
    n = len(base) + len(tokens)
    kv = backend.new_kv(n)
    prefill(backend, np.array([*base, *tokens]), raw=kv)
    return kv.rows(len(base), n)


def test_full_is_a_plain_prefill(engine: Engine) -> None:
    """The documents stand last: the answer goes on behind them, and leaves them as they are."""
    context = documents_last(engine, repair="full")
    tokens = context.tokens()
    wanted = continued(engine.runner, tokens, 6)
    answer = context.generate(max_tokens=6, **GREEDY)
    assert list(answer.tokens) == wanted and context.tokens() == tokens + wanted
    check = context.check()
    assert check.kl_max < EXACT and max(*check.k_error, *check.v_error) < EXACT


def test_none_reuses_what_was_stored(engine: Engine) -> None:
    """As worked out by hand: the text is prefilled, the documents are placed behind it."""
    context = documents_last(engine)
    tokens, backend = context.tokens(), engine.runner
    sizes = [part.n for part in context.parts]
    base = tokens[: sizes[0]] if len(sizes) == 5 else []
    first = sum(sizes[:-3])
    rows = room(backend, len(tokens))
    run(backend, some(rows, np.array(tokens), range(first)))
    starts = np.cumsum([first, *sizes[-3:]])
    kvs = [canonical(backend, base, tokens[a:b]) for a, b in pairwise(starts)]
    rows.place([(first, kvs)], np.arange(len(tokens)))
    answer = context.generate(max_tokens=6, **GREEDY)
    assert list(answer.tokens) == decoded(backend, rows, tokens, 6)
    assert answer.plan.reused >= sum(sizes[-3:]) - 1
    assert context.check().kl_max > 1e-4, "what was reused is exact: this shows nothing"


@pytest.mark.parametrize("repair", STRATEGIES)
def test_the_answer_stands_behind_the_documents(engine: Engine, repair: str) -> None:
    """However it was repaired, the answer is the one that the woven rows give."""
    context = documents_last(engine, repair=repair, share=0.3)
    tokens, n = context.tokens(), context.n_tokens
    context.weave()
    woven = context.session.state.rows.clone()
    wanted = decoded(engine.runner, woven.clone(), tokens, 4)
    answer = context.generate(max_tokens=4, **GREEDY)
    assert list(answer.tokens) == wanted
    rows = context.session.state.rows
    for layer in range(len(engine.runner.layers)):
        for now, before in zip(rows.read(layer), woven.read(layer), strict=False):
            assert bool((now[: n - 1] == before[: n - 1]).all()), "a row that is not its own"
    assert context.check().n_compared > 1


@pytest.mark.parametrize("repair", ["none", "full"])
def test_what_is_pruned_was_never_there(engine: Engine, repair: str) -> None:
    context = documents_last(engine, repair=repair)
    context.weave()
    context.drop("b")
    docs = ["a", "c"]
    never = engine.compose("keep the notes . {docs}", docs=docs, name="never", repair=repair)
    tokens = never.tokens()
    answers = [each.generate(max_tokens=5, **GREEDY) for each in (context, never)]
    assert answers[0].tokens == answers[1].tokens
    assert context.tokens() == never.tokens()
    assert_rows(engine.runner, context.session.state.rows, never.session.state.rows)
    if repair == "full":
        assert list(answers[0].tokens) == continued(engine.runner, tokens, 5)


def test_contexts_answered_together_answer_as_alone(engine: Engine) -> None:
    together = [documents_last(engine), documents_last(engine, repair="full", name="full")]
    together[1].append("the market", kind="user")
    alone = [engine.fork(context, f"alone-{i}") for i, context in enumerate(together)]
    answers = engine.generate_many(together, max_tokens=5, **GREEDY)
    for mine, context in zip(answers, alone, strict=True):
        assert mine.tokens == context.generate(max_tokens=5, **GREEDY).tokens


def test_a_fork_goes_its_own_way(engine: Engine) -> None:
    context, alone = documents_last(engine), documents_last(engine, name="alone")
    context.weave()
    twin = engine.fork(context, "twin")
    twin.drop("a")
    twin.append("the market", kind="user")
    twin.generate(max_tokens=5, **GREEDY)
    answers = [each.generate(max_tokens=5, **GREEDY) for each in (context, alone)]
    assert answers[0].tokens == answers[1].tokens
    twin.weave(repair="full")
    assert twin.check().kl_max < EXACT


def test_chunks_come_back_from_a_tier(engine: Engine, tmp_path: Path) -> None:
    """KV that was written to files by one engine and is read, layer by layer, by the next."""
    wanted = documents_last(engine).generate(max_tokens=5, **GREEDY)
    for again in range(2):
        with Engine(engine.runner, home=tmp_path, repair="none") as other:
            if not again:
                for name, words in TEXT.items():
                    other.put(name, words)
            answer = documents_last(other).generate(max_tokens=5, **GREEDY)
            assert answer.tokens == wanted.tokens
            tiers = {s.tier for s in answer.plan.spans if s.part in TEXT}
            assert tiers == ({"disk"} if again else {"ram"})
            other.check_integrity()


@pytest.mark.parametrize("repair", STRATEGIES)
def test_two_backends_of_one_model_answer_alike(repair: str) -> None:
    """The same strategy chooses the same rows, and the answers are the same."""
    found = []
    for backend in (reference("ministral"), transformers("ministral")):
        with Engine(backend, repair=repair, share=0.25, base="") as engine:
            for i, name in enumerate("abc"):
                engine.put(name, ids(14 + 5 * i, i).tolist())
            context = engine.context("c")
            context.append(ids(6, 9).tolist())
            for name in "bca":
                context.append_chunk(name)
            answer = context.generate(max_tokens=6, **GREEDY)
            plan = answer.plan
            found.append((answer.tokens, plan.counts(), [s.n_repaired for s in plan.spans]))
            engine.check_integrity()
    assert found[0] == found[1]
