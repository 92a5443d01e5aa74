"""A cell of audits is all that a drift depends on besides model and text: whatever else differs, differs there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from conftest import tiny
from weaving import chat, text

from kvweave import Context, Engine
from kvweave.chunk.identity import ChunkId
from kvweave.weave.audit import AuditCell, Auditor
from kvweave.weave.learned import write_learned
from kvweave.weave.settings import Settings
from kvweave.weave.shift import LEAST

Make = Callable[..., Engine]
Verb = Callable[[Engine, Context, str], object]
NOTHING: Verb = lambda engine, context, name: None  # noqa: E731
EVICTS: dict[str, object] = {"prune": "evict"}


def drop(engine: Engine, context: Context, name: str) -> None:
    context.weave()
    context.drop(1)


def foreign(engine: Engine, context: Context, name: str) -> None:
    """Add a chunk that was computed after another base."""
    base = engine.maker.add(text(6, 77), kind="system")
    id = engine.maker.add(text(20, 78), base=base)
    engine.table.bind(f"{name}/other", id)
    engine.maker.canonicalise([base, id])
    context.append_chunk(f"{name}/other")


def compressed(keep: str) -> Verb:
    def verb(engine: Engine, context: Context, name: str) -> None:
        engine.compress(f"{name}/0", keep)
        context.replace(1, text(3, 5))
        context.append_chunk(f"{name}/0")

    return verb


def coded(codec: str) -> Verb:
    """Have a chunk lie in a codec, of rows that went through no other one."""

    def verb(engine: Engine, context: Context, name: str) -> None:
        id = engine.table.resolve(f"{name}/0").id
        engine.shelf.drop(int(id))
        engine.maker.canonicalise([id])
        engine.place(f"{name}/0", "disk", codec=codec)

    return verb


# options of a context and a verb on it, and the same two of one whose answers drift otherwise
FIELDS: dict[str, str | tuple[dict[str, object], Verb, dict[str, object], Verb]] = {
    "repair": ({"repair": "first_k:3"}, NOTHING, {"repair": "first_k:4"}, NOTHING),
    "share": ({"repair": "query", "share": 0.2}, NOTHING, {"repair": "query", "share": 0.3}, NOTHING),
    "prune": ({}, drop, EVICTS, drop),
    "positions": (EVICTS | {"positions": "keep"}, drop, EVICTS, drop),
    "namespace": "its chunks have names of their own: test_audit, test_shadow",
    "max_drift": "whether there is one is in the cell (test_gate); each such answer has a bound of its own",
    "keep": ({"keep": "knorm:0.5"}, NOTHING, {"keep": "knorm:0.7"}, NOTHING),
    "bases": ({}, foreign, {}, NOTHING),  # "own" computes such chunks: there is nothing to tell apart
    "denoise": "when canonical KV is computed, not what it is",
}  # fmt: skip
VERBS: dict[str, tuple[Verb, Verb]] = {
    "compress, how much": (compressed("kvzip:0.9"), compressed("kvzip:0.5")),
    "compress, by what": (compressed("kvzip:0.5"), compressed("streaming:0.5")),
    "compress, or not": (compressed("kvzip:0.9"), NOTHING),
    "place": (coded("int8"), coded("int4")),
}


def cell(engine: Engine, name: str, options: dict[str, object], verb: Verb) -> AuditCell:
    """The cell in which an answer of such a context is audited."""
    context = chat(engine, name, [20, 20, 20], **({"share": 0.2} | options))
    verb(engine, context, name)
    context.append(text(4, 5))
    plan, strategy = context.preview(), context.session.strategy
    assert plan.drift is None, strategy
    context.generate(2, ignore_eos=True)
    [audit] = engine.audit()
    return audit.cell


def test_each_setting_has_a_line() -> None:
    assert set(FIELDS) == {f.name for f in fields(Settings)}


@pytest.mark.parametrize("name", [name for name, how in FIELDS.items() if not isinstance(how, str)])
def test_a_setting_that_changes_drifts_is_in_the_cell(
    engines: Make, tmp_path: Path, name: str
) -> None:
    engine, how = engines(audit=1.0, home=tmp_path / "home"), FIELDS[name]
    assert not isinstance(how, str)
    one, other = cell(engine, "one", *how[:2]), cell(engine, "two", *how[2:])
    assert one != other


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_that_changes_drifts_is_in_the_cell(
    engines: Make, tmp_path: Path, name: str
) -> None:
    engine = engines(audit=1.0, home=tmp_path / "home")
    one, other = (cell(engine, f"c{i}", {}, verb) for i, verb in enumerate(VERBS[name]))
    assert one != other


@pytest.mark.parametrize("then", ["gone", "raw", "int8"])
def test_rows_are_named_after_what_they_went_through_whatever_becomes_of_the_chunk(
    engines: Make, tmp_path: Path, then: str
) -> None:
    engine = engines(audit=1.0, home=tmp_path / "home")
    context = chat(engine, "c", [20, 20])
    engine.place("c/1", "disk", codec="int4")
    context.weave()
    id = context.parts[-1].id
    engine.shelf.drop(int(id))  # its rows stay
    if then != "gone":
        engine.maker.canonicalise([id])
        engine.place("c/1", "disk", codec=then)
    twin, context = context.fork("twin"), context
    for each in (context, twin):
        each.append(text(4, 6))
        answer = each.generate(2, ignore_eos=True)
        assert [n for n in answer.plan.approximate if n.startswith("codec:")] == ["codec:int4"]
        assert answer.plan.drift is None
    assert {audit.cell.codec for audit in engine.audit()} == {"int4"}


def test_nothing_is_promised_of_rows_of_which_nobody_knows_what_they_went_through(
    engines: Make, tmp_path: Path
) -> None:
    engine = engines(audit=1.0, home=tmp_path / "home", tiers=["disk codec=int4"])
    context = chat(engine, "c", [20, 20])
    id = int(engine.table.lookup("c/1").id)
    engine.place("c/1", "disk")
    engine.shelf.get(id)
    engine.shelf.mover.drop(id)  # a lossy copy in memory is all there is
    context.append(text(4, 6))
    answer = context.generate(2, ignore_eos=True)
    assert answer.plan.approximate["codec:lossy"] and answer.plan.drift is None
    assert not engine.audit()


@pytest.mark.parametrize("last", ["int8", "raw", "raw+zstd", "raw/raw+zstd", "0-1:int8,2-:int4"])
@pytest.mark.parametrize("over", ["ram", "disk"])
def test_what_went_through_two_codecs_is_not_of_the_last_ones_cell(
    tmp_path: Path, last: str, over: str
) -> None:
    """It has lost what the first one loses: its drifts would make the bound of those that have not."""
    home = tmp_path / "home"

    def told(engine: Engine, name: str) -> dict[str, int]:
        context = chat(engine, name, [20, 20])
        context.append(text(4, 6))
        return context.generate(2, ignore_eos=True).plan.approximate

    with Engine(tiny(), home=home, audit=1.0, repair="none") as engine:
        chat(engine, "c", [20, 20])
        engine.place("c/1", "disk", codec="int4")
        engine.place("c/1", over)
        engine.place("c/1", "disk", codec=last)
        assert told(engine, "d")["codec:lossy"] == 20 and not engine.audit()
        engine.check_integrity()
    with Engine(tiny(), home=home, audit=1.0, repair="none") as again:
        mine = {"codec:lossy"} if over == "ram" else {"codec:lossy", "codec:int4"}  # both are there
        assert mine.intersection(told(again, "e"))
        again.audit()
        id = int(again.table.lookup("c/1").id)
        again.shelf.drop(id)
        again.maker.canonicalise([ChunkId(id)])
        again.place("c/1", "disk", codec="int8")
        assert told(again, "f")["codec:int8"] == 20 and len(again.audit()) == 1


def test_an_alarm_of_answers_over_thinned_chunks_is_heeded(engines: Make) -> None:
    """The cell is the same before the rows are placed and after it."""
    engine = engines(audit=1.0, repair="none")
    told = cell(engine, "first", {}, compressed("streaming:0.3"))
    for drift in (*[1e-4] * (2 * LEAST), *[1.0] * LEAST):
        engine.shadow.auditor.saw(told, drift, engine.shadow.auditor.promise(told).bound)
        if engine.shadow.auditor.alarmed:
            break
    context = chat(engine, "next", [20, 20, 20])
    compressed("streaming:0.3")(engine, context, "next")
    context.append(text(4, 5))
    assert context.generate(2, ignore_eos=True).plan.alarm


def test_what_an_earlier_version_found_is_read_and_where_it_mixed_not_believed(
    tmp_path: Path,
) -> None:
    auditor, file = Auditor(), tmp_path / "audit.json"
    policies = ("forget", "evict", "thinned", "snapkv:0.3")
    cells = [AuditCell("query", 0.2, policy=policy) for policy in policies]
    for each in cells:
        for _ in range(LEAST):
            auditor.saw(each, 0.1, None)
    write_learned(file, auditor.told(tiny().fingerprint))
    assert len(Auditor.load(file, tiny().fingerprint)) == len(cells)
    told = json.loads(file.read_text())
    del told["sum"]
    for known in told["cells"]:
        del known["cell"]["thinned"], known["cell"]["positions"]
    file.write_text(json.dumps(told))
    read = Auditor.load(file, tiny().fingerprint)
    assert [report.cell for report in read.report()] == cells[:1]
    assert asdict(cells[0])["positions"] == "compact"
