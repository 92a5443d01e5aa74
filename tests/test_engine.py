"""The facade: bad input is refused before anything changes. python -m pytest tests/test_engine.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world.memory import alive, only_from_here

from kvweave import Engine, KVWeaveError, Runner, Sampling
from kvweave.errors import (
    ChunkInUse,
    ChunkNotFound,
    ChunkPinned,
    ContextNotFound,
    ContextTooLong,
    CorruptChunk,
    EmptyChunk,
    HoleNotFilled,
    InvalidArgument,
    ModelMismatch,
    NameTaken,
    OverBudget,
)

Make = Callable[..., Engine]


def text(n: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 101, (n,), generator=generator).tolist()


def state(engine: Engine) -> tuple[object, ...]:
    """Everything an aborted operation must leave as it was."""
    chunks = sorted((r.id, r.names, r.tier, r.pinned, r.n_bytes) for r in engine.table)
    parts = {name: c.parts for name, c in engine.contexts.items()}
    return chunks, parts, engine.shelf.n_bytes


def test_put_keeps_canonical_kv(engines: Make) -> None:
    engine = engines()
    entry = engine.put("docs/a", text(7))
    assert (entry.name, entry.n_tokens, entry.tier) == ("docs/a", 7, "ram")
    assert entry.n_bytes == 7 * engine.runner.row_bytes == 7 * 4 * 2 * 2 * 16 * 8
    same = engine.put("docs/b", text(7))
    assert same.id == entry.id and engine.shelf.n_bytes == entry.n_bytes, "stored once"


def test_namespaces_do_not_share(engines: Make) -> None:
    engine = engines()
    one = engine.put("a", text(7), namespace="one")
    two = engine.put("a", text(7), namespace="two")
    assert one.id != two.id
    with pytest.raises(ChunkNotFound):
        engine.files.stat("a")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda e: e.put("docs/a", text(3, 5)), NameTaken, "already names"),
        (lambda e: e.put("docs/empty", []), EmptyChunk, "no tokens"),
        (lambda e: e.put("docs/../a", text(3)), KVWeaveError, "not a chunk name"),
        (lambda e: e.put("docs/long", text(1025)), ContextTooLong, "resulted in 1025 tokens"),
        (lambda e: e.put("docs/odd", [3, 101]), InvalidArgument, "vocabulary"),
        (lambda e: e.put("docs/text", "hello"), InvalidArgument, "tokenizer"),
        (lambda e: e.put("docs/odd", [3, 4.9]), InvalidArgument, "token ids"),
        (lambda e: e.put("docs/odd", ["3"]), InvalidArgument, "token ids"),
        (lambda e: e.put("docs/odd", b"hello"), InvalidArgument, "bytes"),
        (lambda e: e.put("docs/odd", [[3, 4]]), InvalidArgument, "token ids"),
        (lambda e: e.put("docs/odd", [True]), InvalidArgument, "truth value"),
        (lambda e: e.put("docs/odd", torch.tensor([3.5])), InvalidArgument, "token ids"),
        (lambda e: e.put("docs/odd", None), InvalidArgument, "token ids"),
        (lambda e: e.put_many([("n/1", text(4)), ("docs/a", text(5, 1))]), NameTaken, "docs/a"),
        (lambda e: e.files.stat("docs/aa"), ChunkNotFound, "docs/a"),
        (lambda e: e.files.rm("docs/pinned"), ChunkPinned, "unpin"),
        (lambda e: e.files.rm("docs/used"), ChunkInUse, "chat"),
        (lambda e: e.place("docs/a", "disk"), InvalidArgument, "home"),
        (lambda e: e.compose("{docs/x}"), HoleNotFilled, "docs/x"),
        (lambda e: e.context("chat"), NameTaken, "chat"),
        (lambda e: e.get_context("chad"), ContextNotFound, "chat"),
        (lambda e: e.contexts["chat"].drop("nope"), ChunkNotFound, "nope"),
        (lambda e: e.contexts["chat"].drop(7), ChunkNotFound, "part '7'"),
        (lambda e: e.contexts["chat"].append([]), EmptyChunk, "no tokens"),
        (
            lambda e: e.contexts["chat"].append(text(1020)),
            ContextTooLong,
            "context length is 1024 tokens",
        ),
        (
            lambda e: e.contexts["chat"].generate(1020),
            ContextTooLong,
            "context length is 1024 tokens",
        ),
        (lambda e: e.contexts["chat"].generate(2.5), InvalidArgument, "whole number"),
        (lambda e: e.contexts["chat"].generate(2, top_k=1.5), InvalidArgument, "whole number"),
        (lambda e: e.contexts["chat"].generate(4, temprature=1), InvalidArgument, "temperature"),
        (lambda e: e.contexts["chat"].weave("magic"), InvalidArgument, "no strategy"),
        (lambda e: e.contexts["chat"].reorder([0, 0]), InvalidArgument, "exactly once"),
        (lambda e: e.contexts["chat"].insert(9, text(3)), InvalidArgument, "index"),
        (lambda e: e.context("x").generate(3), InvalidArgument, "empty"),
        (lambda e: e.context("y", prune_mode="evict"), InvalidArgument, "prune"),
        (lambda e: e.can("fly"), InvalidArgument, "move"),
    ],
)
def test_bad_input_changes_nothing(
    engines: Make, call: Callable[[Engine], object], error: type[KVWeaveError], says: str
) -> None:
    engine = engines()
    for name in ("docs/a", "docs/pinned", "docs/used"):
        engine.put(name, text(6, len(name)))
    engine.files.pin("docs/pinned")
    chat = engine.context("chat")
    chat.append_chunk("docs/used")
    chat.append(text(5, 9))
    chat.weave()
    before = state(engine)
    with pytest.raises(error) as caught:
        call(engine)
    assert says in str(caught.value)
    assert caught.value.to_dict()["code"] == type(caught.value).__name__
    if "x" in engine.contexts:
        engine.close_context("x")
    assert state(engine) == before
    assert chat.generate(3, ignore_eos=True).tokens, "and everything still works"


def test_unknown_options_are_named() -> None:
    with pytest.raises(InvalidArgument, match="did you mean budget"):
        Engine(tiny(), bugdet="1GiB")
    with pytest.raises(InvalidArgument, match="no size"):
        Engine(tiny(), budget="lots")
    with pytest.raises(InvalidArgument, match="no policy"):
        Engine(tiny(), policy="magic")
    with pytest.raises(InvalidArgument, match="no strategy"):
        Engine(tiny(), repair="magic")


def test_a_budget_too_small_is_refused_and_nothing_is_lost(engines: Make) -> None:
    row = tiny().row_bytes
    engine = engines(budget=30 * row)
    engine.put("a", text(20))
    engine.files.pin("a")
    before = state(engine)
    with pytest.raises(OverBudget) as error:
        engine.put("b", text(11, 1))
    assert (error.value.needed, error.value.budget) == (31 * row, 30 * row)
    assert state(engine) == before
    context = engine.context("c")
    context.append(text(11, 2))
    with pytest.raises(OverBudget):
        context.weave()
    engine.files.unpin("a")
    engine.put("b", text(11, 1))
    assert engine.files.stat("a").tier == "none", "tokens stay, KV is computed again when needed"
    context.drop(0)
    context.append_chunk("a")
    engine.place("b", "none")
    assert context.weave().prefilled == 20


def test_kv_that_is_not_finite_is_refused() -> None:
    model = oracle.build("llama", {})
    runner = Runner(model, name="broken")
    engine = Engine(runner, repair="none")
    engine.put("good", text(4))
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("inf")
    before = state(engine)
    with pytest.raises(CorruptChunk, match="NaN"):
        engine.put("bad", text(5, 1))
    assert state(engine) == before
    engine.close()


def test_an_aborted_edit_leaves_the_context_as_it_was(engines: Make) -> None:
    engine = engines()
    context = engine.context("c")
    for i in range(3):
        context.append(text(5, i), name=f"c/{i}")
    context.weave()
    before = state(engine)
    with pytest.raises(RuntimeError), context.edit():
        context.drop("c/1")
        context.append(text(4, 7), name="c/new")
        raise RuntimeError("the caller changed its mind")
    assert state(engine) == before
    with pytest.raises(ChunkNotFound):
        engine.files.stat("c/new")
    assert context.weave().prefilled == 0


def test_a_home_survives_a_restart_and_belongs_to_one_model(tmp_path: Path) -> None:
    with Engine(tiny(), home=tmp_path, repair="none") as engine:
        first = engine.put("docs/a", text(7))
        engine.put("docs/b", text(9, 1))
        engine.files.rm("docs/b")
        engine.files.pin("docs/a")
        wanted = engine.shelf.get(first.id)
    with Engine(tiny(), home=tmp_path, repair="none") as engine:
        entry = engine.files.stat("docs/a")
        assert (entry.id, entry.tier, entry.pinned) == (first.id, "disk", True)
        found = engine.shelf.get(first.id)
        assert wanted is not None and found is not None
        for new, old in zip((*found.k, *found.v), (*wanted.k, *wanted.v), strict=True):
            assert torch.equal(new, old)
        assert engine.put("docs/c", text(5, 2)).id > first.id + 1, "ids are never given again"
        engine.check_integrity()
    with pytest.raises(ModelMismatch) as error:
        Engine(tiny("qwen3"), home=tmp_path)
    assert error.value.field == "model"


def test_wrong_bytes_on_disk_are_never_used(tmp_path: Path) -> None:
    """What a tier lost or spoilt is computed again, and says the same.

    Not to the bit: what is put is computed in one pass of the model, what is woven in another, and
    products of other shapes round apart.
    """
    files: dict[str, Any] = {"home": tmp_path, "repair": "none", "tiers": ("files",)}
    with Engine(tiny(), **files) as engine:
        id = engine.put("docs/a", text(7)).id
        digest = engine.table.get(id).digest.hex()
        put = engine.shelf.get(id)
        wanted = engine.compose("{docs/a}").generate(max_tokens=3, temperature=0).tokens
    file = tmp_path / "files" / f"{digest}.raw.kv"
    whole = file.read_bytes()
    for bytes_ in (whole[:-9], whole[:-4] + b"\x01\x02\x03\x04", whole[:100], b"", None):
        if bytes_ is None:
            file.unlink()
        else:
            file.write_bytes(bytes_)
        with Engine(tiny(), **files) as engine:
            assert engine.files.stat("docs/a").tier == ("none" if bytes_ is None else "disk")
            context = engine.compose("{docs/a}")
            plan = context.weave()
            assert (plan.reused, plan.prefilled) == (0, 7)
            assert context.generate(max_tokens=3, temperature=0).tokens == wanted
            engine.check_integrity()
        assert file.stat().st_size == len(whole), "closing wrote it again"
        with Engine(tiny(), **files) as engine:
            assert engine.files.stat("docs/a").tier == "disk"
            again = engine.shelf.get(id)
        for new, old in zip((*again.k, *again.v), (*put.k, *put.v), strict=True):
            assert oracle.relative(new, old) < oracle.EXACT


def test_records_of_a_put_that_never_ended_go(tmp_path: Path) -> None:
    files: dict[str, Any] = {"home": tmp_path, "repair": "none", "tiers": ("files",)}
    with Engine(tiny(), **files) as engine:
        engine.put("docs/a", text(7))
        engine.place("docs/a", "disk")
    (record,) = (tmp_path / "files").glob("*.kv")
    orphan = record.with_name(f"{'0' * 32}.raw.kv")
    orphan.write_bytes(record.read_bytes())
    with Engine(tiny(), **files) as engine:
        assert not orphan.exists()
        assert engine.files.stat("docs/a").tier == "disk"


def test_who_knows_a_turn_or_its_error_keeps_no_rows_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are in a circle with whoever keeps them, and with all frames on their way."""
    with Engine(tiny(), repair="none", base="") as engine, only_from_here():
        whole, known = Runner.forward, []

        def half(*args: Any, **options: Any) -> Any:
            activations = torch.zeros(1 << 16)
            raise ValueError(f"{len(activations)}")

        for prune in ("forget", "evict"):
            for breaks in (False, True):
                context = engine.context("c", prune=prune)
                context.append(text(40))
                turn = context.begin(Sampling(max_tokens=3, ignore_eos=True))
                known.append(turn)
                monkeypatch.setattr(Runner, "forward", half if breaks else whole)
                try:
                    turn.run()
                except ValueError as error:
                    known.append(error)
                assert alive() == engine.shelf.n_bytes
                engine.close_context("c")
                assert alive() == engine.shelf.n_bytes == 0
        assert len(known) == 6


def test_a_closed_engine_leaves_nothing_in_memory_while_somebody_knows_it() -> None:
    with only_from_here():
        engine = Engine(tiny(), repair="none")
        engine.put("docs/a", [5, 6, 7])
        context = engine.context("chat")
        context.append_chunk("docs/a")
        context.append([8, 9])
        context.generate(2, ignore_eos=True)
        assert alive() >= engine.shelf.n_bytes > 0
        engine.close()
        assert alive() == engine.shelf.n_bytes == 0


def test_fork_and_snapshot(engines: Make) -> None:
    engine = engines()
    context = engine.context("c")
    for i in range(3):
        context.append(text(5, i), name=f"c/{i}")
    before = context.snapshot()
    context.weave()
    twin = engine.fork(context, "twin")
    twin.drop("c/2")
    twin.append(text(6, 8))
    assert twin.weave().drift == 0 and max(twin.check().k_error) < 1e-9
    assert [p.name for p in context.parts] == ["c/0", "c/1", "c/2"]
    context.drop("c/0", "c/1")
    context.restore(before)
    assert context.n_tokens == 15 and context.weave("full").drift == 0
    engine.close_context("twin")
    assert engine.get_context("c") is context


def test_restore_brings_back_the_base(engines: Make) -> None:
    engine = engines()
    base = engine.put("system", text(5, 1)).id
    context = engine.context("c")
    context.set_base(base, "system")
    before = context.snapshot()
    context.replace("system", text(4, 2))
    context.restore(before)
    part = context.append(text(3, 3))
    assert engine.table.get(part.id).base == base
    assert context.weave().drift == 0 and max(context.check().k_error) < 1e-9


def test_a_fork_without_room_changes_nothing(engines: Make) -> None:
    engine = engines(budget=30 * tiny().row_bytes)
    context = engine.context("c", denoise=False)
    context.append(text(20), name="c/0")
    context.weave()
    before = state(engine)
    with pytest.raises(OverBudget):
        engine.fork(context, "twin")
    assert state(engine) == before
    assert engine.table.contexts_of(context.parts[0].id) == ("c",)


def test_replace_and_reorder(engines: Make) -> None:
    engine = engines()
    context = engine.context("c")
    for i in range(4):
        context.append(text(4 + i, i), name=f"c/{i}")
    context.weave()
    context.replace("c/1", text(9, 30))
    assert [(p.name, p.n) for p in context.parts] == [
        ("c/0", 4),
        ("c/1", 9),
        ("c/2", 6),
        ("c/3", 7),
    ]
    context.reorder(["c/0", "c/3", "c/1", "c/2"])
    context.insert(1, text(3, 31))
    assert [p.n for p in context.parts] == [4, 3, 7, 9, 6]
    plan = context.weave("full")
    assert plan.drift == 0 and max(context.check().k_error) < 1e-9


OPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "slice", "drop", "insert", "replace", "swap", "weave", "denoise", "fork"]
        ),
        st.integers(0, 5),
        st.integers(1, 6),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(ops=OPS)
def test_any_edits_then_full_repair_equal_the_oracle(ops: list[tuple[str, int, int]]) -> None:
    engine = Engine(tiny(), repair="none")
    context = engine.context("c")
    context.append(text(5, 500))
    for step, (op, at, n) in enumerate(ops):
        size = len(context.parts)
        if op == "append":
            context.append(text(n, step))
        elif op == "slice":
            part = context.parts[at % size]
            n_chunk = engine.table.get(part.id).n_tokens
            context.append_slice(f"#{part.id}", (n - 1) % n_chunk, n_chunk)
        elif op == "insert":
            context.insert(at % (size + 1), text(n, step))
        elif op == "drop" and size > 1:
            context.drop(at % size)
        elif op == "replace":
            context.replace(at % size, text(n, step))
        elif op == "swap":
            order = list(range(size))
            order[at % size], order[0] = order[0], order[at % size]
            context.reorder(order)
        elif op == "weave":
            context.weave()
        elif op == "denoise":
            engine.denoise()
        elif op == "fork":
            context = engine.fork(context, f"c{step}")
        engine.check_integrity()
    claimed = context.weave()
    error = max(*context.check().k_error, *context.check().v_error)
    if claimed.drift == 0:
        assert error < 1e-9, "what the plan calls exact is exact"
    context.weave("full")
    assert max(*context.check().k_error, *context.check().v_error) < 1e-9
    for name in list(engine.contexts):
        engine.close_context(name)
    engine.check_integrity()
    assert len(engine.table) == 0, "closing frees what nobody names"
    engine.close()


def test_deps_and_uses_are_recorded(engines: Make) -> None:
    engine = engines()
    context = engine.context("c")
    for i in range(3):
        context.append(text(5, i), name=f"c/{i}")
    context.weave()
    ids = [p.id for p in context.parts]
    assert [engine.table.get(i).deps for i in ids] == [(), (ids[0],), (ids[0], ids[1])]
    assert [engine.files.stat(f"c/{i}").n_uses for i in range(3)] == [1, 1, 1]
    engine.shelf.drop(ids[2])
