"""The exam measures what it says: forced replies are what greedy decoding writes, against an oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from conftest import BUNDLED

from kvweave import Engine, Runner
from kvweave.errors import InvalidArgument
from kvweave.suite import prose, stream
from kvweave.suite.exam import Exam
from kvweave.suite.method import FULL, Method, methods
from kvweave.suite.protocols import Size, cases
from kvweave.suite.words import Words

SMALL = Size(notes=(4, 5), questions=3)
QUERY, BLIND = Method("query", 0.15), Method("first_k", 0.15)


@pytest.fixture(scope="module")
def model():
    return Runner.load(str(BUNDLED), device="cpu")


@pytest.fixture(scope="module")
def exam(model):
    made = Exam(model)
    yield made
    for engine in made._engines.values():
        engine.check_integrity()
    made.close()


def paper(exam, protocol, index=0, size=SMALL):
    return exam.words.paper(next(islice(cases(protocol, "test", size), index, None)), index)


def by_method(outcomes):
    found = {}
    for o in outcomes:
        found.setdefault((o.method, o.mode), []).append(o)
    return found


def generated(model, words, paper, method, question):
    """The tokens an engine of its own writes, token by token."""
    with Engine(model, base=words.system if method.base else "", denoise="never") as engine:
        context = engine.context("c", repair=method.strategy, share=method.share)
        if not method.base:
            engine.put("system", words.head, kind="system")
            context.append_chunk("system")
        engine.put_many(dict(paper.notes).items())
        for name, _ in paper.notes:
            context.append_chunk(name)
        context.append(question.asked)
        return context.generate(len(question.expected)).tokens


@pytest.mark.parametrize("protocol", ["P1", "P3", "P8", "P9"])
@pytest.mark.parametrize(
    "method", [Method(), BLIND, QUERY, Method(base=False)], ids=lambda m: m.label
)
@pytest.mark.sampled
def test_forced_replies_are_right_when_greedy_decoding_writes_them(exam, model, protocol, method):
    one = paper(exam, protocol)
    found = by_method(exam.sit(one, [method]))[method.label, ""]
    for question, o in zip(one.questions, found, strict=True):
        tokens = generated(model, exam.words, one, method, question)
        assert o.right == float(tokens == question.expected)


def test_a_reply_ends_with_the_end_token(exam, model):
    end = model.tokenizer.eos_token_id
    for question in paper(exam, "P1").questions:
        assert question.expected[-1] == end
    leak = [q for q in paper(exam, "P5").questions if q.is_leak]
    assert leak and all(len(q.expected) == 3 for q in leak)  # entity, attribute, value


def test_the_oracle_is_first_and_full_repair_equals_it(exam):
    one = paper(exam, "P3")
    found = exam.sit(one, [Method("full", 1.0), Method()])
    assert {o.method for o in found[: len(one.questions)]} == {FULL}
    groups = by_method(found)
    for truth, full, none in zip(*groups.values(), strict=True):
        assert truth.kl == 0 and full.kl < 1e-9 and none.kl > 1e-7
        assert (truth.right, truth.nll) == (full.right, pytest.approx(full.nll, abs=1e-4))
        assert full.repaired == full.candidates > 0 and none.repaired == 0


def test_base_is_a_dimension_of_kv_not_of_text(exam):
    contexts = [exam.context(exam.engine(base), Method(base=base)) for base in (True, False)]
    assert contexts[0].tokens() == contexts[1].tokens() == list(exam.words.head)
    found = by_method(exam.sit(paper(exam, "P1"), [Method(), Method(base=False)]))
    on, off = found["none 0%", ""], found["none 0% no-base", ""]
    assert sum(o.kl for o in on) < sum(o.kl for o in off)


def test_methods_do_not_help_each_other(exam):
    """No KV, patch or record that one method leaves is found by another."""
    one = paper(exam, "P5")
    alone = by_method(exam.sit(one, [BLIND]))
    before = [
        Method("full", 1.0),
        Method("patch", 1.0),
        Method("patch", 0.0, before="patch"),
        Method("deps", 0.15, before="full:records"),
        Method(modes=("evict", "forget")),
    ]
    together = by_method(exam.sit(one, [*before, BLIND]))
    for mode in BLIND.modes:
        ours = [replace(o, evidence=None) for o in together[BLIND.label, mode]]
        assert ours == [replace(o, evidence=None) for o in alone[BLIND.label, mode]]


def test_the_share_is_kept(exam):
    one = paper(exam, "P1")
    for o in exam.sit(one, [QUERY, BLIND, Method("boundary", 0.15)])[len(one.questions) :]:
        assert o.repaired == pytest.approx(0.15 * o.candidates, abs=6), o.method
        assert o.candidates <= sum(len(tokens) for _, tokens in one.notes)


def test_forgotten_is_as_if_it_had_never_been_there_and_evicted_is_not(exam):
    method = Method(modes=("forget", "never", "evict"))
    found = by_method(exam.sit(paper(exam, "P5"), [method]))
    forget, never, evict = (found["none 0%", mode] for mode in method.modes)
    assert [(o.kl, o.right) for o in forget] == [(o.kl, o.right) for o in never]
    assert [o.kl for o in forget] != [o.kl for o in evict]
    assert evict[0].candidates > 0


def test_before_makes_patches_free(exam):
    cold, warm = Method("patch:16", 0.5), Method("patch:16", 0.5, before="patch:16")
    found = by_method(exam.sit(paper(exam, "P8"), [Method(), cold, warm]))
    _, none, once, again = found.values()
    assert again[0].repaired == 0 < once[0].repaired
    assert sum(o.kl for o in again) < sum(o.kl for o in none)


def test_a_stream_prunes_and_keeps_the_same_text(exam):
    steps = stream.script(exam, "test", prunes=3, window=3)
    assert [s.prunes for s in steps] == [-2, -1, 0, 1, 2, 3]
    ways = [Method("full", 1.0), Method(modes=("evict",)), QUERY, Method(base=False)]
    found = by_method(stream.hold(exam, 0, steps, ways, window=3))
    asked = [s.prunes for s in steps if s.asks and s.prunes > 0]
    for (label, mode), outcomes in found.items():
        assert [o.prunes for o in outcomes] == asked, (label, mode)
    assert all(o.kl < 1e-9 for o in found["full 100%", "forget"])  # the oracle's own text
    assert set(found) == {
        (FULL, ""),
        ("full 100%", "forget"),
        ("none 0%", "evict"),
        ("query 15%", "forget"),
        ("none 0% no-base", "forget"),
    }


def test_prose_is_spliced(model):
    exam = Exam(model, model.tokenizer.bos_token)
    papers = list(prose.papers(exam.words.maker, 12))
    assert len(papers) == 12 and len({p.index for p in papers}) > 3
    one = papers[0]
    assert [len(tokens) for _, tokens in one.notes] == [64] * 7
    assert len(one.questions[0].asked) == 16 and len(one.questions[0].expected) == 48
    found = by_method(
        exam.sit(one, [Method("full", 1.0, modes=("forget",)), Method(modes=("forget",))])
    )
    assert found["full 100%", "forget"][0].kl < 1e-9 < found["none 0%", "forget"][0].kl
    assert 0 < found[FULL, ""][0].right < 1
    exam.close()


def test_methods_of_names_and_shares():
    made = [m.label for m in methods(["none", "deviation:k@2", "full", "deps"], [0.0, 0.05, 0.3])]
    assert made == [
        "none 0%",
        "deviation:k@2 5%",
        "deviation:k@2 30%",
        "full 0%",
        "deps seen 5%",
        "deps seen 30%",
    ]
    with pytest.raises(InvalidArgument, match="quer"):
        methods(["quer"], [0.1])


def test_a_model_of_another_world_gets_an_instruction(tmp_path, model):
    words = Exam(model).words
    assert "keep the notes" in words.system
    assert Words(words.maker, "anything else").head == words.tokens("anything else")
