"""Contexts against the oracle: python -m pytest tests/weave/test_weave.py"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle
import pytest
import torch
from weaving import EXACT, chat, rows, same_rows, text

from kvweave import Context, Engine
from kvweave.run.base import Work
from kvweave.weave.repair import Deviation, Query

Make = Callable[..., Engine]


def next_logits(engine: Engine, context: Context) -> torch.Tensor:
    """Logits after the last token of a woven context, over a copy of its rows."""
    copy = rows(context).clone()
    last = np.array([copy.n - 1])
    token, position = np.array(context.tokens()[-1:]), copy.positions[last]
    return engine.runner.forward([Work(copy, token, last, position, want=np.array([0]))])[0][0]


@pytest.mark.parametrize("name", sorted(oracle.MODELS))
def test_full_repair_equals_full_prefill(engines: Make, name: str) -> None:
    engine = engines(name)
    context = chat(engine, "c", [6, 9, 4])
    context.append(text(3, 77))
    before = context.weave("none")
    assert (before.reused, before.prefilled) == (9 + 4, 3), (
        "the first chunk after the base is exact"
    )
    rough = context.check()
    plan = context.weave("full")
    found = context.check()
    assert plan.drift == 0.0 and plan.repaired == 13
    assert found.kl < 1e-12 and found.logit_max < 1e-6 and found.top1 == 1
    assert max(*found.k_error, *found.v_error) < EXACT
    assert rough.v_error[-1] > 1e-3, "without repair this model must show a difference"
    wanted = oracle.full_prefill(engine.runner, torch.tensor(context.tokens()))
    assert oracle.relative(next_logits(engine, context), wanted[-1]) < oracle.bound(name)


@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3_nope", "phi3_partial"])
def test_layer_zero_of_placed_chunks_equals_recomputed(engines: Make, name: str) -> None:
    engine = engines(name)
    context = chat(engine, "c", [6, 9, 4])
    context.weave("none")
    placed = rows(context).clone()
    found = context.check()
    assert max(found.k_error[0], found.v_error[0]) < EXACT, "products of other shapes round apart"
    assert found.k_error[-1] > 1e-3
    assert same_rows(placed, rows(context)), "check() changes nothing"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_a_context_of_fresh_text_is_exact(engines: Make, name: str) -> None:
    """Prefilled in pieces over exact rows it equals one full prefill, and says so."""
    engine = engines(name)
    context = engine.context("c")
    for i in range(3):
        context.append(text(7, i))
        plan = context.weave()
    assert plan.drift == 0 and plan.exact == 14 and plan.prefilled == 7
    assert max(*context.check().k_error) < EXACT


def test_exact_prefix_is_found_by_another_context(engines: Make) -> None:
    engine = engines()
    one, two = engine.context("one"), engine.context("two")
    for context, last in ((one, 5), (two, 6)):
        context.append(text(8, 1))
        context.append(text(9, 2))
        context.append(text(4, last))
        plan = context.weave()
    assert plan.exact == 17 and plan.prefilled == 4 and plan.drift == 0
    assert max(two.check().k_error) < EXACT


def test_forget_is_bit_equal_to_never_having_had_it(engines: Make) -> None:
    engine = engines()
    with_it = chat(engine, "with", [6, 9, 4, 7])
    with_it.weave()
    with_it.drop("with/1")
    with_it.weave()
    without = engine.context("without")
    without.set_base(with_it.parts[0].id, "base")
    for i in (0, 2, 3):
        without.append_chunk(f"with/{i}")
    without.weave()
    assert same_rows(rows(with_it), rows(without))
    assert torch.equal(next_logits(engine, with_it), next_logits(engine, without))


def test_a_hundred_prunes_equal_one_fresh_weave(engines: Make) -> None:
    engine = engines()
    rolling = chat(engine, "rolling", [5, 8, 3, 6])
    rolling.weave()
    for turn in range(4, 104):
        with rolling.edit():
            rolling.drop(rolling.oldest())
            rolling.append(text(3 + turn % 5, turn), name=f"rolling/{turn}")
        rolling.weave()
        engine.denoise()
    rolling.drop(rolling.oldest())
    rolling.weave()
    fresh = engine.context("fresh")
    fresh.set_base(rolling.parts[0].id, "base")
    for part in rolling.parts[1:]:
        fresh.append_chunk(f"#{part.id}")
    fresh.weave()
    assert [p.id for p in fresh.parts] == [p.id for p in rolling.parts]
    assert same_rows(rows(rolling), rows(fresh))


def test_evict_keeps_what_survivors_saw(engines: Make) -> None:
    engine = engines()
    context = engine.context("c", prune="evict", denoise=False)
    for i, n in enumerate((5, 8, 6)):
        context.append(text(n, i), name=f"c/{i}")
    context.weave()
    before = rows(context).clone()
    gone = int(context.parts[1].id)
    context.drop("c/1")
    plan = context.weave()
    after = rows(context)
    assert after.n == 11 and plan.spans[1].saw == (gone,)
    assert plan.drift is None and plan.prefilled == 0
    for layer in range(4):
        new, old = after.read(layer)[1], before.read(layer)[1]
        assert torch.equal(new[5:11], old[13:19]), "values are untouched"
    turned = engine.runner.layers[2].rotation
    raw = context.session.state.kept.own[context.parts[1].uid].k[2]
    positions = torch.arange(5, 11, device=oracle.DEVICE)
    assert oracle.same(after.read(2)[0][5:11], turned.apply(raw, turned.angles(positions)))


def test_evict_with_kept_positions_does_no_work(engines: Make) -> None:
    engine = engines()
    context = engine.context("c", prune="evict", positions="keep", denoise=False)
    for i, n in enumerate((5, 8, 6)):
        context.append(text(n, i), name=f"c/{i}")
    context.weave()
    before = rows(context).clone()
    context.drop("c/1")
    context.weave()
    after = rows(context)
    assert after.positions[:11].tolist() == [*range(5), *range(13, 19)]
    for layer in range(4):
        assert torch.equal(after.read(layer)[0][5:11], before.read(layer)[0][13:19])


def test_evict_keeps_the_rows_of_the_last_weave_only(engines: Make) -> None:
    """What an earlier weave had repaired was given up by the one that placed them anew."""
    engine = engines()
    context = chat(engine, "c", [6, 9, 4], prune="evict")
    context.weave("random", share=1.0)
    context.weave("none")
    before = rows(context).clone()
    context.drop("c/0")
    context.weave()
    for layer in range(4):
        assert torch.equal(rows(context).read(layer)[1][5:18], before.read(layer)[1][11:24])


def test_forget_with_kept_positions_leaves_a_gap(engines: Make) -> None:
    engine = engines()
    context = chat(engine, "c", [6, 9, 4], positions="keep")
    context.weave("full")
    context.drop("c/1")
    context.append(text(3, 50))
    plan = context.weave("full")
    assert rows(context).positions[: rows(context).n].tolist() == [*range(11), *range(20, 27)]
    assert plan.drift == 0.0
    assert max(*context.check().k_error) < EXACT


def test_evict_needs_a_context_that_keeps(engines: Make) -> None:
    context = chat(engines(), "c", [6, 9])
    before = context.parts
    with pytest.raises(Exception, match="prune"):
        context.drop("c/0", mode="evict")
    assert context.parts == before


@pytest.mark.parametrize("strategy", ["first_k", "deviation", "query", "random"])
def test_repair_recomputes_as_many_rows_as_asked(engines: Make, strategy: str) -> None:
    context = chat(engines(), "c", [10, 20, 20, 10], repair=strategy, share=0.2)
    context.append(text(5, 99))
    plan = context.weave()
    wanted = 9 if strategy == "first_k" else 10  # an equal number of each of three chunks
    assert (plan.repaired, plan.reused, plan.drift) == (wanted, 50 - wanted, None)


def test_repair_brings_rows_nearer_to_the_oracle(engines: Make) -> None:
    engine = engines()
    errors = []
    for share in (0.0, 0.3, 0.6, 1.0):
        context = chat(engine, f"c{share}", [10, 20, 20, 10], repair="deviation", share=share)
        context.append(text(5, 99))
        context.weave()
        errors.append(context.check().v_error[-1])
    assert errors == sorted(errors, reverse=True) and errors[-1] < EXACT < errors[-2]


def test_deviation_is_the_distance_to_the_oracle_at_its_layer(engines: Make) -> None:
    """At layer 1 the inputs are exact for every row, so the ranking is that of the true error."""
    seen = {}

    class Spy(Deviation):
        def choose(self, view):  # type: ignore[no-untyped-def]
            seen["found"] = yield from view.deviation(1, "v")
            seen["slots"] = view.candidates
            return (yield from super().choose(view))

    engine = engines()
    context = chat(engine, "c", [6, 9, 4], repair=Spy(), share=0.0)
    context.append(text(3, 77))
    context.weave()
    true, _ = oracle.rows_of(engine.runner, torch.tensor(context.tokens()))
    slots = seen["slots"]
    far = true.read(1, slots)[1] - rows(context).read(1, slots)[1]
    wanted = far.square().sum((1, 2))
    assert slots.tolist() == list(range(11, 24))
    assert oracle.relative(torch.from_numpy(seen["found"]), wanted) < 1e-5


def test_query_follows_the_question(engines: Make) -> None:
    seen = {}

    class Spy(Query):
        def choose(self, view):  # type: ignore[no-untyped-def]
            seen["mass"] = yield from view.attention()
            seen["chosen"] = yield from super().choose(view)
            return seen["chosen"]

    engine = engines()
    context = chat(engine, "c", [6, 9, 4], repair=Spy(), share=0.2)
    context.append(text(3, 77))
    plan = context.weave()
    n_layers, heads = 4, 4
    assert 0 < float(seen["mass"].sum()) < n_layers * heads * 3, "part of the question's mass"
    best = np.sort(np.argsort(-seen["mass"])[: plan.repaired]) + 11
    assert seen["chosen"].tolist() == best.tolist() and plan.repaired == round(0.2 * 13)


def test_composed_kv_never_enters_an_exact_cache(engines: Make) -> None:
    engine = engines()
    context = chat(engine, "c", [6, 9, 4])
    last = context.append(text(3, 77))
    context.weave("none")
    assert int(last.id) not in engine.shelf._in_context
    context.weave("full")
    twin = engine.context("twin")
    for part in context.parts[1:]:
        twin.append_chunk(f"#{part.id}")
    plan = twin.preview()
    assert plan.exact == 0


def test_new_text_is_prefilled_even_if_it_is_stored(engines: Make) -> None:
    """What a question sees must not depend on who asked the same before."""
    engine = engines()
    context = chat(engine, "c", [6, 9])
    question = text(4, 60)
    context.append(question)
    context.weave()
    engine.denoise()
    context.append(text(5, 61))
    context.append(question)
    assert [s.how for s in context.weave().spans][-2:] == ["prefill", "prefill"]
    context.drop("c/0")
    assert [s.how for s in context.weave().spans] == [
        "prefix",
        "prefix",
        "reuse",
        "prefill",
        "reuse",
    ]


def test_exact_rows_stay_exact_behind_approximate_ones(engines: Make) -> None:
    """Exact in-context KV is right wherever the same tokens stand before it."""
    engine = engines()
    fresh = engine.context("fresh")
    for i in range(3):
        fresh.append(text(6, i), name=f"f/{i}")
    fresh.weave()
    last = fresh.parts[2].id
    engine.denoise()
    engine.shelf._in_context.pop(int(fresh.parts[1].id))
    again = engine.context("again")
    for i in range(3):
        again.append_chunk(f"f/{i}")
    plan = again.weave("random", share=1.0)
    assert [s.n_repaired for s in plan.spans] == [0, 6, 0] and plan.drift == 0
    assert again.session.state.woven[2].part.id == last
    found = again.check()
    assert found.v_error[-1] < 1e-9 and found.kl < 1e-12


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_greedy_text_is_that_of_generate(engines: Make, name: str) -> None:
    engine = engines(name)
    prompt = text(20, 3)
    context = engine.context("c")
    context.append(prompt)
    answer = context.generate(12, ignore_eos=True)
    model = engine.runner.model
    model.set_attn_implementation("eager")
    wanted = model.generate(
        torch.tensor([prompt], device=oracle.DEVICE),
        attention_mask=torch.ones(1, 20, dtype=torch.int64, device=oracle.DEVICE),
        max_new_tokens=12, min_new_tokens=12, do_sample=False,
    )  # fmt: skip
    model.set_attn_implementation("kvweave")
    assert list(answer.tokens) == wanted[0, 20:].tolist()
    assert context.n_tokens == 32


def test_contexts_that_decode_together_answer_as_alone(engines: Make) -> None:
    engine = engines(max_batch=3)
    alone = []
    for i in range(5):
        context = engine.context(f"a{i}")
        context.append(text(9 + 13 * i, i))
        alone.append(context.generate(8, ignore_eos=True).tokens)
    together = []
    for i in range(5):
        context = engine.context(f"b{i}")
        context.append(text(9 + 13 * i, i))
        together.append(context)
    answers = engine.generate_many(together, 8, ignore_eos=True)
    assert [a.tokens for a in answers] == alone


def test_generated_rows_are_those_of_a_prefill(engines: Make) -> None:
    engine = engines()
    context = engine.context("c")
    context.append(text(12, 3))
    context.generate(6, ignore_eos=True)
    context.append(text(4, 4))
    context.weave()
    assert max(*context.check().k_error, *context.check().v_error) < EXACT


def test_a_context_without_a_question_can_be_repaired_and_continued(engines: Make) -> None:
    """Nothing is left to prefill: `query` has no question, and the last row is computed again."""
    context = chat(engines(), "c", [6, 9, 4], repair="query", share=0.2)
    plan = context.weave()
    assert plan.repaired == 2 and plan.prefilled == 0
    plan = context.generate(3, ignore_eos=True).plan
    assert plan.repaired == 1 and plan.prefilled == 0, "the last row, for its logits"
    assert plan.exact + plan.reused + plan.repaired == plan.n_tokens == 24


def test_plan_counts_add_up(engines: Make) -> None:
    context = chat(engines(), "c", [6, 9, 4], repair="first_k", share=0.3)
    context.append(text(3, 77))
    plan = context.weave()
    total = plan.exact + plan.reused + plan.repaired + plan.prefilled
    assert total == plan.n_tokens == context.n_tokens == 27
    table = plan.explain().splitlines()
    assert (
        len(table) == 1 + 5 + 2
        and table[-2] == "approximate: reuse 13"
        and table[0].split()[:3] == ["part", "tokens", "how"]
    )
    assert [line.split()[2] for line in table[1:-2]] == [
        "prefix",
        "prefix",
        "repair",
        "repair",
        "prefill",
    ]


def test_preview_equals_what_weave_does(engines: Make) -> None:
    context = chat(engines(), "c", [6, 9, 4])
    context.append(text(3, 77))
    preview = context.preview()
    assert context.weave() == preview
