"""A memory over the bundled model: what stands in the context, what is undone, what sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from conftest import tiny
from loaded import bundled_runner

from kvweave import Engine, Memory, MemoryBudget, Sampling
from kvweave.errors import (
    ChunkNotFound,
    ContextBusy,
    ContextChanged,
    ContextTooLong,
    InvalidArgument,
    NameTaken,
    OverBudget,
)
from kvweave.memory import FirstSentences, MeanRows
from kvweave.weave.naming import holds_vectors, namespace_of

SYSTEM = "keep the notes ."
FACTS = {
    "Anna's river": "cold", "Omar's metal": "hot", "Mei's song": "loud", "Ravi's bird": "tame",
    "Lena's stone": "rough", "Hugo's food": "sweet", "Nina's game": "wild", "Tariq's town": "rich",
}  # fmt: skip
SMALL = MemoryBudget(window=60, summaries=60, summary=30, recalled=60, warm=40)


def keep_facts() -> FirstSentences:
    return FirstSentences(n=None, pattern=r"\w+'s \w+ is \w+ \.")


def says(key: str) -> str:
    return f"so well {key} is {FACTS[key]} . then we saw it"


@pytest.fixture(scope="module")
def model() -> Iterator[Engine]:
    with Engine(bundled_runner()) as engine:
        yield engine


@pytest.fixture
def make(model: Engine, request) -> Iterator[Callable[..., Memory]]:
    """Make a memory with a root and a context of its own; afterwards all is checked."""
    name, made = request.node.name.replace("[", "-").replace("]", ""), []

    def make(engine: Engine = model, **options) -> Memory:
        context = options.pop("context", None) or engine.context(name, system=SYSTEM)
        options = {"budget": SMALL, "summarise": keep_facts(), "root": f"m/{name}"} | options
        made.append(Memory(engine, context, **options))
        return made[-1]

    yield make
    for memory in made:
        memory.close()
        model.check_integrity()


def state(memory: Memory) -> tuple[object, ...]:
    table = memory._ground.engine.table
    names = {name: table.resolve(name).digest for name in table.names("", "")}
    pins = {name for name in names if table.resolve(name).pinned}
    parts = [(part.name, part.id) for part in memory.context.parts]
    return memory.context.tokens(), parts, names, pins


def fill(memory: Memory) -> None:
    for key in FACTS:
        memory.tell(says(key))
        memory.tell("ok", "assistant")


@contextmanager
def eight_turns() -> Iterator[Memory]:
    """A memory in an engine of its own, which is checked in the end."""
    with Engine(bundled_runner()) as engine:
        made = Memory(
            engine, engine.context("c", system=SYSTEM), budget=SMALL, summarise=keep_facts()
        )
        fill(made)
        yield made
        made.close()
        engine.check_integrity()


# ---- the loop


def test_an_erratum_leaves_with_the_turn_it_amends(make) -> None:
    memory = make()
    wrong = memory.tell(says("Anna's river"))
    erratum = memory.context.amend(
        wrong, "so well Anna's river is loud . then we saw it", role="user"
    )
    for key in list(FACTS)[1:]:
        memory.tell(says(key))
    names = [part.name for part in memory.context.parts]
    assert wrong.name not in names and erratum.name not in names
    kept = [memory.read(item.name) for item in memory.items()]
    assert any("Anna's river is cold" in said for said in kept)
    assert any("Anna's river is loud" in said for said in kept), "it is an item too"
    summary = memory.zone("summary")[0]
    assert "Anna's river is loud" in memory.read(summary.name)


def test_old_turns_become_a_summary_and_items(make) -> None:
    memory = make()
    fill(memory)
    window = [part.name.rpartition("/")[2] for part in memory.zone("turn")]
    assert window[-2:] == ["u-007", "a-007"] and sum(p.n for p in memory.zone("turn")) <= 90
    (summary, *_) = memory.zone("summary")
    assert "Anna's river is cold ." in memory.read(summary.name)
    item = memory.items("**/u-000")
    assert [memory.read(each.name) for each in item] == [says("Anna's river")]
    context = memory.context
    assert memory.items("**/u-000")[0].name == f"{memory.root}/{context.name}/u-000"
    zones = [memory._ground.zones.of(part) for part in context.parts]
    assert zones == sorted(zones, key=["anchor", "recalled", "summary", "turn"].index)
    verbs = {edit.verb for edit in context.history.log()}
    assert {"summarise", "message"} <= verbs
    for key in FACTS:
        memory.tell(says(key).replace("river", "tree"))
    assert "summarise summaries" in {edit.verb for edit in context.history.log()}
    assert sum(p.n for p in memory.zone("summary")) <= SMALL.summaries


def test_what_is_asked_for_stands_in_the_context_again_and_leaves_it(make) -> None:
    memory = make()
    fill(memory)
    answer = memory.ask("what about Anna's river", max_tokens=8)
    assert answer.text.strip() == "Anna's river is cold ."
    recalled = [part.name for part in memory.zone("recalled")]
    assert f"{memory.root}/{memory.context.name}/u-000" in recalled
    assert sum(p.n for p in memory.zone("recalled")) <= SMALL.recalled
    assert set(recalled) <= {span.part for span in answer.plan.spans}, "the plan shows it"
    memory.ask("what about Omar's metal", max_tokens=8)
    assert f"{memory.root}/{memory.context.name}/u-000" not in [
        part.name for part in memory.zone("recalled")
    ]


def test_the_question_looks_at_the_item_that_answers_it(make) -> None:
    memory = make(budget=MemoryBudget(window=60, summaries=60, summary=30, recalled=20))
    fill(memory)
    for key in ("Anna's river", "Mei's song"):
        best = memory.search(f"what about {key}", "attention")
        assert f"{key} is {FACTS[key]}" in memory.read(best[0][0])
    names = set(memory._ground.engine.contexts)
    assert not any("looking" in name for name in names)


def test_the_model_is_asked_for_summaries_by_default(make) -> None:
    memory = make(summarise=None)
    names = set(memory._ground.engine.table.names())
    try:
        fill(memory)
    except InvalidArgument as error:  # it may have nothing to say
        assert error.argument == "summary"
    new = set(memory._ground.engine.table.names()) - names
    assert not [name for name in new if ".summary" in name]
    assert all(part.n <= SMALL.summary for part in memory.zone("summary"))


@pytest.mark.parametrize("fault", ["raises", "empty", "long"])
def test_a_faulty_summary_leaves_all_as_it_was(make, fault: str) -> None:
    memory = make()
    keys = iter(FACTS)
    while not memory._settling.is_due:
        memory.tell(says(next(keys)))

    def faulty(segment):
        if fault == "raises":
            raise OSError("gone")
        return " " if fault == "empty" else "Anna " * 200

    memory._settling.summarise = faulty
    before, version = state(memory), memory.context.history.version
    log = len(memory.context.history.log())
    for verb in (lambda: memory.ask("what about Anna's river"), memory.settle, memory.idle):
        with pytest.raises(OSError if fault == "raises" else InvalidArgument):
            verb()
        assert state(memory) == before and memory.context.history.version == version
        assert len(memory.context.history.log()) == log


def test_an_answer_that_fails_takes_its_recall_back(make, monkeypatch) -> None:
    memory = make()
    fill(memory)
    before = state(memory)
    with pytest.raises(ContextTooLong):
        memory.ask("what about Anna's river " + "so well " * 3000)
    assert state(memory) == before

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no model today")

    with monkeypatch.context() as patch:
        patch.setattr(memory._ground.engine.runner, "forward", broken)
        with pytest.raises(RuntimeError):
            memory.ask("what about Anna's river")
    assert state(memory) == before
    assert memory.ask("what about Anna's river", max_tokens=8).text.strip().endswith("cold .")


def test_an_answer_under_way_is_not_disturbed(make, model) -> None:
    memory = make()
    fill(memory)
    before, turn = len(memory.items()), memory.context.begin(Sampling(4))
    for verb in (lambda: memory.tell("so well"), lambda: memory.release(), memory.undo):
        with pytest.raises((ContextBusy, ContextChanged)):
            verb()
    turn.cancel()
    turn.finish()
    assert len(memory.items()) == before
    memory.tell("so well")


def test_what_is_woven_is_what_a_full_prefill_has(make, model) -> None:
    context = model.context("exact", system=SYSTEM, repair="full")
    memory = make(context=context)
    fill(memory)
    for _ in range(2):
        memory.ask("what about Anna's river", max_tokens=8)
        assert context.check().kl_max < 1e-6
        assert memory.undo() == "ask"
        assert context.check().kl_max < 1e-6


def test_many_names_of_one_text_do_not_hide_another(make) -> None:
    memory = make()
    for i in range(120):
        memory.write(f"a/{i}", "Anna's river")
    memory.write("b", "so well Anna's river is cold . then we saw it and more")
    found = [name.removeprefix(f"{memory.root}/") for name, _ in memory.search("Anna's river")]
    assert found == ["a/0", "b"]
    memory.delete("a/0")
    found = [name.removeprefix(f"{memory.root}/") for name, _ in memory.search("Anna's river")]
    assert found == ["a/1", "b"]


# ---- undo


def test_steps_are_undone_one_by_one(make) -> None:
    memory = make()
    states, labels = [state(memory)], []

    def did(label: str) -> None:
        labels.append(label)
        states.append(state(memory))

    fill_some = [lambda k=k: memory.tell(says(k)) for k in list(FACTS)[:6]]
    verbs = [
        *fill_some,
        lambda: memory.write("notes/a", "Yuki's tree is dim ."),
        lambda: memory.anchor("rules", "so wait ."),
        lambda: memory.ask("what about Anna's river", max_tokens=8),
        lambda: memory.recall("notes/*", "name"),
        lambda: memory.write("notes/a", "Yuki's river is dim ."),
        lambda: memory.rename("notes/a", "old/a"),
        lambda: memory.delete("**/u-000"),
        lambda: memory.delete("old/"),
        lambda: memory.release(),
        lambda: memory.write("anchors/rules", "so wait here ."),
    ]
    for verb in verbs:
        before = state(memory)
        verb()
        if state(memory) != before:
            did("")
    for wanted in reversed(states[:-1]):
        assert memory.undo() is not None
        tokens, parts, names, pins = state(memory)
        assert (tokens, names, pins) == (wanted[0], wanted[2], wanted[3])
        assert [name for name, _ in parts] == [name for name, _ in wanted[1]]
        memory._ground.engine.check_integrity()
    assert memory.undo() is None


def test_several_verbs_are_one_step(make) -> None:
    memory = make()
    fill(memory)
    before = state(memory)
    with memory.step("plan"):
        memory.write("notes/a", says("Mei's song"))
        memory.recall("notes/a", by="name")
        memory.tell("so well .")
    assert memory.zone("recalled") and memory.undo() == "plan" and state(memory) == before
    with pytest.raises(NameTaken), memory.step("plan"):
        memory.write("notes/a", "late rain .")
        memory.write("notes/a", "so well .", replace=False)
    assert state(memory) == before


def test_a_memory_made_anew_finds_its_zones(make) -> None:
    memory = make()
    fill(memory)
    memory.recall("what about Anna's river")
    memory.anchor("me", "so well .")
    zones = ("anchor", "recalled", "summary", "turn")
    wanted = [memory.zone(zone) for zone in zones]
    assert all(wanted)
    memory.close()
    again = make(context=memory.context)
    assert [again.zone(zone) for zone in zones] == wanted
    again.release()
    assert not again.zone("recalled") and not memory.zone("recalled")


def test_what_somebody_else_changed_is_not_undone(make) -> None:
    memory = make()
    memory.tell(says("Anna's river"))
    memory.context.append("so well")
    with pytest.raises(ContextChanged):
        memory.undo()
    memory.context.drop(-1)
    memory.write("n", "so well .")
    memory._ground.engine.put(f"{memory.root}/n", "then we saw it", replace=True)
    with pytest.raises(ContextChanged):
        memory.undo()
    assert memory.read("n") == "then we saw it"


# ---- items are chunks


def test_an_item_and_its_chunk_are_one(make, model) -> None:
    memory = make()
    name = memory.write("notes/a", "Anna's river is cold .")
    memory.recall("notes/a", "name")
    model.put(name, "Anna's river is hot .", replace=True)
    assert memory.read("notes/a") == "Anna's river is hot ."
    assert memory.search("what about Anna's river")[0][0] == name
    assert "cold" in model.maker.backend.tokenizer.decode(memory.context.tokens())
    memory.recall("notes/a", "name")  # what is recalled is what the item says now
    assert "hot" in model.maker.backend.tokenizer.decode(memory.context.tokens())
    memory.write("notes/a", "Anna's river is deep .")
    assert memory.search("is deep .")[0][0] == name
    assert "deep" in model.maker.backend.tokenizer.decode(memory.context.tokens())
    memory.delete("notes/a")
    assert not memory.zone("recalled")
    with pytest.raises(ChunkNotFound):
        memory.read("notes/a")
    with pytest.raises(NameTaken):
        memory.anchor("x", "so .")
        memory.anchor("x", "so .")
    with pytest.raises(NameTaken):
        memory.rename("anchors/x", "anchors/x2")
        memory.anchor("x", "well .")
        memory.rename("anchors/x", "anchors/x2")


def test_new_words_of_others_are_found_when_there_was_time(make, model) -> None:
    memory = make()
    name = memory.write("notes/a", "Anna's river is cold .")
    assert memory.search("Anna's river")
    model.put(name, "Yuki's tree is dim .", replace=True)
    model.put(f"{memory.root}/notes/b", "Zara's game is wild .")
    assert memory.search("Zara's game")[0][0] == f"{memory.root}/notes/b"
    while memory.idle() is not None:
        pass
    assert memory.search("Yuki's tree")[0][0] == name and not memory.search("Anna's river")


def test_anchors_stand_in_front_and_cannot_be_lost(make, model) -> None:
    memory = make()
    fill(memory)
    name = memory.anchor("rules", "so wait here .")
    memory.ask("what about Anna's river", max_tokens=8)
    assert [part.name for part in memory.context.parts[:2]] == [
        f"{memory.context.name}/s-000",
        name,
    ]
    assert all(model.files.stat(part.name).pinned for part in memory.zone("anchor"))
    assert memory.delete("anchors/rules") == [name] and len(memory.zone("anchor")) == 1
    memory.undo()
    assert model.files.stat(name).pinned and len(memory.zone("anchor")) == 2
    memory.delete("anchors/rules")
    memory.close()
    assert not model.files.stat(f"{memory.context.name}/s-000").pinned


def test_another_conversation_recalls_what_one_left(make, model) -> None:
    first = make()
    fill(first)
    second = make(context=model.context("later", system=SYSTEM), root=first.root)
    answer = second.ask("what about Anna's river", max_tokens=8)
    assert answer.text.strip() == "Anna's river is cold ."
    second.close()


def zoned(memory: Memory) -> dict[str, list[str]]:
    zones = ("anchor", "recalled", "summary", "turn")
    return {zone: [part.name for part in memory.zone(zone)] for zone in zones}


def lived(engine: Engine, name: str) -> Memory:
    """A memory with something in each zone."""
    context = engine.context(name, system=SYSTEM)
    memory = Memory(engine, context, budget=SMALL, summarise=keep_facts(), root=f"m/{name}")
    memory.anchor("rule", "say what is known .")
    fill(memory)
    memory.recall("what about Anna's river")
    assert all(zoned(memory).values()), zoned(memory)
    return memory


def goes_on(memory: Memory) -> list[tuple[str, str | int]]:
    """What stands where after more was said, by name or, of what was said, by length."""
    for key in ("Nina's game", "Lena's stone", "Ravi's bird"):
        memory.context.append(says(key), kind="user")
        memory.settle()
    memory.recall("what about Mei's song")
    zones = ("anchor", "recalled", "summary", "turn")
    parts = [(zone, part) for zone in zones for part in memory.zone(zone)]  # type: ignore[arg-type]
    return [(zone, part.n if zone == "turn" else part.name) for zone, part in parts]


def test_zones_outlive_a_restart(tmp_path) -> None:
    """A context that is composed anew of the same names has the zones it had, and they do the same."""
    with Engine(bundled_runner(), home=tmp_path) as engine:
        memory = lived(engine, "life")
        before, parts = zoned(memory), [part.name for part in memory.context.parts]
        memory.close()
    with Engine(bundled_runner(), home=tmp_path) as engine:
        context = engine.context("life")
        for name in parts:
            context.append_chunk(name)
        again = Memory(engine, context, budget=SMALL, summarise=keep_facts(), root="m/life")
        assert zoned(again) == before
        assert engine.files.stat(before["anchor"][-1]).pinned, "anchors are pinned again"
        found = goes_on(again)
        engine.check_integrity()
    with Engine(bundled_runner()) as engine:
        assert goes_on(lived(engine, "life")) == found


def test_zones_go_with_parts_to_other_contexts(model) -> None:
    memory = lived(model, "first")
    before, context = zoned(memory), memory.context
    fork = model.fork(context, "fork")
    options = {"budget": SMALL, "summarise": keep_facts(), "root": "m/first"}
    assert zoned(Memory(model, fork, **options)) == before
    other = model.context("other")
    after = Memory(model, other, **options)
    assert not any(zoned(after).values())
    other.restore(context.snapshot())
    assert zoned(after) == before, "the memory was there before"
    recalled = before["recalled"]
    assert after.release() == recalled and not after.zone("recalled")
    other.append("so", kind="user")
    part = other.append_chunk(recalled[0])
    assert after.zone("turn")[-1].name == part.name, "an item in a turn is of the turn"
    for each in ("fork", "other", "first"):
        model.close_context(each)


def test_words_count_in_the_budget() -> None:
    """What is known to find items by is charged like rows, refused with all of its step, and given back."""
    with Engine(bundled_runner(), budget="24MiB") as engine:
        context = engine.context("words", system=SYSTEM)
        memory = Memory(engine, context, budget=SMALL, summarise=keep_facts(), root="m/words")
        fill(memory)
        assert memory.search("what about Anna's river")
        ((holder, n_bytes),) = [each for each in engine.shelf.charged() if "#words/" in each[0]]
        assert n_bytes == memory._recaller.ranking.n_bytes > 0
        engine.shelf.charge("somebody", engine.shelf.room)  # nothing more fits
        names = [item.name for item in memory.items()]
        with pytest.raises(OverBudget):
            for i in range(200):
                memory.write(f"more/{i}", " ".join(map(str, range(i, i + 60))))
                memory.search("river")
        engine.shelf.charge("somebody", 0)
        assert {*names} <= {item.name for item in memory.items()}
        assert memory.search("what about Anna's river"), "it is whole again when there is room"
        assert engine.shelf.n_bytes <= engine.shelf.budget
        memory.close()
        assert holder not in dict(engine.shelf.charged())


def test_vectors_may_be_given(make, model) -> None:
    context = model.context("vectors", system=SYSTEM)
    memory = make(context=context, embed=MeanRows(model, context))
    fill(memory)
    n_chunks = len(model.table)
    found = memory.search("what about Anna's river")
    assert found and all(np.isfinite(score) for _, score in found)
    assert len(model.table) == n_chunks, "a question leaves no chunk"
    ((holder, n_bytes),) = [each for each in model.shelf.charged() if holds_vectors(each[0])]
    d, n_items = MeanRows(model, context)([5, 6]).size, len(memory.items())
    assert namespace_of(holder) == context.namespace
    assert n_bytes == 2 * 4 * d * n_items > 0, "each by itself, and in the matrix"
    memory.delete(memory.items()[0].name)
    memory.search("so")
    assert dict(model.shelf.charged())[holder] == 2 * 4 * d * (n_items - 1)
    memory.close()
    assert holder not in dict(model.shelf.charged())
    with pytest.raises(InvalidArgument, match="layer"):
        MeanRows(model, context, 99)
    wrong = make(context=model.context("w"), root="w", embed=lambda tokens: np.array([np.nan]))
    wrong.write("x", "so well")
    with pytest.raises(InvalidArgument, match="embed"):
        wrong.search("so")


# ---- sleep


def test_sleep_lays_down_what_is_not_used(make, tmp_path) -> None:
    told: list[str] = []
    with Engine(bundled_runner(), home=tmp_path) as engine:
        memory = make(engine, compress=told.append)
        fill(memory)
        memory.write("notes/a", "Yuki's tree is dim .")
        done = []
        while (slept := memory.idle()) is not None:
            done.append(slept.what)
            assert len(done) < 100
        assert {"denoise", "place"} <= set(done) and len(told) == done.count("place")
        tiers = {item.name: item.tier for item in memory.items()}
        warm = sum(i.n_tokens for i in memory.items() if i.tier == "ram" and not i.in_context)
        assert "disk" in tiers.values() and warm <= SMALL.warm + 30
        answer = memory.ask("what about Anna's river", max_tokens=8)
        assert answer.text.strip() == "Anna's river is cold ."
        assert any(span.tier == "disk" for span in answer.plan.spans)
        engine.check_integrity()
        memory.close()


def test_sleep_thins_items_and_they_are_recalled(make) -> None:
    """Fewer bytes, the same text; the answer says that rows are gone."""
    with Engine(bundled_runner()) as engine:
        memory = make(engine, compress=lambda name: engine.compress(name, "kvzip:0.5"))
        fill(memory)
        done = []
        while (slept := memory.idle()) is not None:
            done.append(slept.what)
            assert len(done) < 100
        assert "compress" in done and "place" not in done
        thin = [i for i in memory.items() if engine.maker.thinned_by(i.id) is not None]
        assert thin
        answer = memory.ask("what about Anna's river", max_tokens=8)
        assert answer.text.strip() == "Anna's river is cold ."
        assert "thinned:kvzip:0.5" in answer.plan.approximate and answer.plan.drift is None
        memory.undo()
        engine.check_integrity()
        memory.close()


def test_undo_gives_thinned_items_back(make, tmp_path) -> None:
    """Also those that were freed meanwhile; with a home they stay in memory, and others go on."""
    with Engine(bundled_runner(), home=tmp_path) as engine:
        tight = MemoryBudget(window=60, summaries=60, summary=30, recalled=60, warm=5)
        hook = lambda name: engine.compress(name, "h2o:0.5")  # noqa: E731
        memory = make(engine, compress=hook, budget=tight)
        for name, text in (("a", "Anna's river is cold ."), ("b", "Omar's metal is hot .")):
            memory.write(name, f"so well {text} then we saw it")
        for _ in range(8):
            memory.idle()
        thin = {item.name: item.id for item in memory.items()}
        assert all(engine.maker.thinned_by(id) is not None for id in thin.values())
        memory.delete("a")
        assert memory.undo() == "delete"
        again = engine.table.resolve(memory.items("a")[0].name).id
        assert str(engine.maker.thinned_by(again)) == "h2o:0.5"
        assert memory.undo() == "write" and memory.undo() == "write" and not memory.items()
        memory.close()


def test_a_hook_that_fails_leaves_the_item_where_it_is(make) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError(name)

    memory = make(compress=refuse, budget=MemoryBudget(window=60, summaries=60, summary=30, warm=0))
    fill(memory)
    before = state(memory)
    with pytest.raises(RuntimeError):
        for _ in range(50):
            memory.idle()
    assert state(memory)[:1] == before[:1]


def test_a_hook_may_bind_another_chunk_and_steps_are_undone_all_the_same(make, model) -> None:
    memory = make(budget=MemoryBudget(window=60, summaries=60, summary=30, warm=0))
    memory._compress, done = lambda name: model.put(name, "so well .", replace=True), []
    memory._sleep.compress = memory._compressed
    before = state(memory)
    fill(memory)
    while (slept := memory.idle()) is not None:
        done.append(slept.name)
    compressed = [name for name in done if memory.read(name) == "so well ."]
    assert compressed and memory.search("so well .", n=1)[0][0] in compressed
    while memory.undo() is not None:
        pass
    assert state(memory)[0] == before[0] and state(memory)[2] == before[2]


def test_without_a_tokenizer_and_in_a_namespace() -> None:
    with Engine(tiny(), base=[1, 2], repair="none") as engine:  # type: ignore[arg-type]
        context = engine.context("c", namespace="anna")
        budget = MemoryBudget(window=12, turns=3, summaries=8, summary=4)
        memory = Memory(engine, context, budget=budget, summarise=lambda s: [s.said[0].tokens[0]])
        for i in range(6):
            memory.tell([10 + i, 20 + i, 30 + i])
        assert memory.items("**/u-*") and not engine.table.names("", "memory/")
        memory.recall([10, 20], "embedding", n=1)
        assert [part.name for part in memory.zone("recalled")] == ["memory/c/u-000"]
        while memory.undo() is not None:
            engine.check_integrity()
        assert not engine.table.names("anna")


def test_budgets_and_contexts_that_cannot_be(model) -> None:
    for options in ({"summary": 200}, {"window": 0}, {"keep": 2.0}, {"turns": 0}, {"warm": -1}):
        with pytest.raises(InvalidArgument):
            MemoryBudget(**options)  # type: ignore[arg-type]
    gaps = model.context("gaps", positions="keep")
    with pytest.raises(InvalidArgument, match="positions"):
        Memory(model, gaps)


def test_one_memory_over_a_context_at_once(make: Callable[..., Memory]) -> None:
    """Each would unpin what is anchored in the other, and take away what was told to it in its own step."""
    first = make()
    name = first.anchor("rule", "so well")
    with pytest.raises(NameTaken, match="is open already"):
        Memory(first._ground.engine, first.context, root="another")
    first.close()
    second = make(context=first.context)
    first.close()
    with pytest.raises(NameTaken):
        make(context=first.context)
    assert second.items_below.get(name).pinned
