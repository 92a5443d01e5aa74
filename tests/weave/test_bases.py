"""KV of another base: an approximation that is named, until there is KV of the right one.

python -m pytest tests/weave/test_bases.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from conftest import tiny
from weaving import EXACT, tensors, text

from kvweave import Context, Engine
from kvweave.errors import InvalidArgument
from kvweave.weave.bases import HOLDER

Make = Callable[..., Engine]
HERE, THERE = text(5, 1), text(3, 2)  # system messages
DOCS = {"docs/a": text(7, 3), "docs/b": text(12, 4), "docs/c": text(4, 5)}


def stored(engine: Engine) -> None:
    """Store the documents after the engine's own base."""
    for name, tokens in DOCS.items():
        engine.put(name, tokens)


def behind(engine: Engine, name: str, system: list[int] = HERE, **options: object) -> Context:
    """A context of another system message, of the documents and a question of its own."""
    context = engine.context(name, **options)
    while context.parts:
        context.drop(0)
    base = engine.maker.add(system, kind="system")
    context.set_base(base, "system")
    engine.maker.canonicalise([base])
    with context.edit():
        for doc in DOCS:
            context.append_chunk(doc)
        context.append(text(3, 9 + ord(name[0])))
    return context


def is_full_prefill(context: Context) -> bool:
    """Whether all rows are those of a full prefill."""
    found = context.check()
    return max(*found.k_error, *found.v_error) < EXACT


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_kv_of_another_base_is_named_everywhere_and_never_exact(engines: Make, name: str) -> None:
    engine = engines(name, base=THERE)
    stored(engine)
    context = behind(engine, "c")
    plan = context.preview()
    assert plan.drift is None and plan.counts()["other_base"] == plan.reused == 23
    plan = context.weave()
    docs = plan.spans[1:4]
    assert all({"reuse", "base"} <= set(s.approximate) and not s.exact for s in docs)
    assert plan.approximate["base"] == 23 and "base 23" in plan.explain()
    assert all("of another base" in c.says for c in context.why().parts[1:4])
    assert not is_full_prefill(context)
    answer = context.generate(2, ignore_eos=True)
    assert answer.usage["kv"]["other_base"] == 23  # type: ignore[index]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_full_repair_of_it_is_exact(engines: Make, name: str) -> None:
    engine = engines(name, base=THERE)
    stored(engine)
    context = behind(engine, "c")
    context.weave()
    plan = context.weave("full")
    assert plan.drift == 0 and plan.other_base == 0 and is_full_prefill(context)
    direct = behind(engine, "d", repair="full", share=1.0)
    assert direct.weave().drift == 0 and is_full_prefill(direct)
    same = behind(engine, "c2", repair="full", share=1.0)  # its question has exact in-context KV
    assert same.weave().prefilled == 0 and same.plan.drift == 0 and is_full_prefill(same)


def test_own_computes_it_anew_and_is_exact(engines: Make) -> None:
    engine = engines(base=THERE)
    stored(engine)
    context = behind(engine, "c", bases="own")
    plan = context.weave()
    assert plan.prefilled == 23 + 3 and plan.drift == 0 and is_full_prefill(context)
    with pytest.raises(InvalidArgument, match="any, own"):
        engine.context("d", bases="others")
    assert engines(base=THERE, bases="own").context("e").settings.bases == "own"


def test_kv_of_the_right_base_takes_its_place(engines: Make) -> None:
    engine = engines(base=THERE)
    stored(engine)
    context = behind(engine, "c")
    other = [engine.table.resolve(name).id for name in DOCS]
    assert engine.denoise() > 0 and engine.denoise() == 0
    plan = context.weave()
    assert [int(s.id) for s in plan.spans[1:4]] == list(map(int, other)), (
        "names lead where they led"
    )
    assert plan.spans[1].exact and plan.spans[1].how == "prefix", "it stands behind its base"
    assert [s.approximate for s in plan.spans[2:4]] == [("reuse",), ("reuse",)]
    assert plan.other_base == 0
    found = context.check()
    base, first = len(HERE), len(DOCS["docs/a"])
    wanted, _ = oracle.rows_of(engine.runner, torch.tensor(context.tokens()))
    for mine, right in zip(tensors(context.session.state.rows), tensors(wanted), strict=True):
        assert torch.allclose(mine[: base + first], right[: base + first], atol=EXACT)
    assert found.kl > 0, "what stands behind has not seen the first"
    engine.check_integrity()


def test_what_could_not_be_computed_leaves_no_chunk_behind(engines: Make, monkeypatch) -> None:
    engine = engines(base=THERE)
    stored(engine)
    behind(engine, "c")
    before = {r.id for r in engine.table}

    def broken(*args: object) -> int:
        raise RuntimeError("no")

    monkeypatch.setattr(engine.maker, "canonicalise", broken)
    with pytest.raises(RuntimeError, match="no"):
        engine.denoise()
    assert {r.id for r in engine.table} == before
    monkeypatch.undo()
    assert engine.denoise() > 0 and len(engine.table) > len(before)
    engine.check_integrity()


def test_lossy_or_evicting_or_patched_contexts_say_the_same(engines: Make) -> None:
    engine = engines(base=THERE)
    stored(engine)
    engine.denoise()
    keeping = behind(engine, "c", prune="evict", repair="none")
    engine.denoise()
    keeping.weave()
    assert keeping.plan.approximate["base"] == 23, (
        "rows that are kept beside are told by their chunk"
    )
    keeping.drop("docs/a", mode="evict")
    assert "base" in keeping.weave().approximate and not is_full_prefill(keeping)
    keeping.weave("full")
    assert is_full_prefill(keeping) == (keeping.plan.drift == 0)
    patched = behind(engine, "d", repair="patch", share=1.0)
    patched.weave()
    assert is_full_prefill(patched) == (patched.plan.drift == 0)
    again = behind(engine, "e", repair="patch", share=0.0)
    assert again.weave().patched == 23 and again.plan.drift is None
    bits = engines(base=THERE, rows="int8")
    stored(bits)
    assert behind(bits, "c").weave().drift is None


def test_it_lives_as_long_as_the_chunk_it_was_made_of(tmp_path: Path) -> None:
    engine = Engine(tiny(), base=THERE, home=tmp_path, repair="none")
    stored(engine)
    context = behind(engine, "c")
    before = len(engine.table)
    engine.denoise()
    made = [r for r in engine.table if HOLDER in engine.table.contexts_of(r.id)]
    assert len(made) == 3 and len(engine.table) == before + 3 and not any(r.names for r in made)
    engine.place("docs/**", "disk")
    assert context.weave().other_base == 0, "its KV rests where it is itself"
    for record in made:
        engine.shelf.place(int(record.id), "none")
    context.reorder([0, 2, 1, 3, 4])
    assert context.weave().other_base == 23, "the first chunk's KV stands for it again"
    engine.denoise()
    engine.close_context("c")
    engine.files.rm("docs/a")
    assert len([r for r in engine.table if HOLDER in engine.table.contexts_of(r.id)]) == 2
    engine.check_integrity()
    engine.put("docs/a", DOCS["docs/a"])
    engine.close()
    with Engine(tiny(), base=THERE, home=tmp_path, repair="none") as opened:
        assert not [r for r in opened.table if not r.names and r.base is not None]
        assert behind(opened, "c").weave().other_base > 0


def test_audits_count_it_by_itself(engines: Make) -> None:
    engine = engines(base=THERE, audit=1.0)
    stored(engine)
    for i in range(2):
        context = behind(engine, f"c{i}")
        context.generate(2, ignore_eos=True)
        engine.audit()
        engine.denoise()
    cells = {report.cell.bases for report in engine.shadow.auditor.report()}
    assert cells == {"others", "own"}


@pytest.mark.parametrize("seed", range(4))
def test_what_is_called_exact_is_exact_whatever_is_done(engines: Make, seed: int) -> None:
    rng = random.Random(seed)
    engine = engines(base=THERE)
    stored(engine)
    systems = [HERE, THERE, text(2, 8)]
    contexts: list[Context] = []
    for step in range(14):
        verb = rng.choice(
            ["open", "drop", "reorder", "denoise", "lose", "weave", "replace", "fork"]
        )
        if verb == "open" or not contexts:
            how = {
                "repair": rng.choice(["none", "first_k", "auto"]),
                "bases": rng.choice(["any", "own"]),
            }
            how |= {"prune": "evict"} if rng.random() < 0.3 else {}
            contexts.append(behind(engine, f"c{step}", rng.choice(systems), **how))
            continue
        context = rng.choice(contexts)
        n = len(context.parts)
        if verb == "drop" and n > 3:
            context.drop(rng.randrange(1, n - 1))
        elif verb == "reorder":
            order = list(range(1, n - 1))
            rng.shuffle(order)
            context.reorder([0, *order, n - 1])
        elif verb == "denoise":
            engine.denoise()
        elif verb == "lose":
            engine.shelf.place(int(rng.choice(list(engine.table)).id), "none")
        elif verb == "replace":
            context.replace(0, rng.choice(systems))
        elif verb == "fork":
            contexts.append(engine.fork(context, f"f{step}"))
        plan = context.weave()
        shown = context.check()
        errors = max(*shown.k_error, *shown.v_error)
        assert plan.drift is None or errors < EXACT, (verb, plan.explain())
        exact = [s for s in plan.spans if s.exact]
        assert plan.drift == 0 or not all(s.exact for s in plan.spans), exact
    engine.check_integrity()
