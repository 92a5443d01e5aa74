"""Namespaces do not see each other: python -m pytest tests/weave/test_namespaces.py"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import tiny
from weaving import EXACT, rows, same_rows, text

from kvweave import Engine, KVWeaveError
from kvweave.errors import (
    ChunkInUse,
    ChunkNotFound,
    ContextNotFound,
    HoleNotFilled,
    InvalidArgument,
    NameTaken,
)

Make = Callable[..., Engine]


def two(engine: Engine) -> None:
    """The same names, texts and contexts in the namespaces one and two, and a secret in two."""
    for space in ("one", "two"):
        engine.put("docs/a", text(9, 1), namespace=space)
        context = engine.context("chat", namespace=space, denoise=False)
        context.append_chunk("docs/a")
        context.append(text(6, 2), name="chat/own")
        context.weave()
    engine.put("docs/secret", text(8, 3), namespace="two")


def secret(engine: Engine) -> int:
    return int(engine.table.resolve("docs/secret", "two").id)


@pytest.mark.parametrize("space", ["one", ""])
@pytest.mark.parametrize(
    "call",
    [
        lambda e, c, id: c.append_chunk("docs/secret"),
        lambda e, c, id: c.append_chunk(f"#{id}"),
        lambda e, c, id: c.insert_chunk(0, f"#{id}"),
        lambda e, c, id: c.append_slice("docs/secret", 0, 4),
        lambda e, c, id: c.append_slice(f"#{id}", 0, 4),
        lambda e, c, id: c.insert_slice(0, f"#{id}", 2, 4),
        lambda e, c, id: c.index(f"#{id}"),
        lambda e, c, id: c.drop(f"#{id}"),
        lambda e, c, id: c.replace(f"#{id}", text(3, 0)),
        lambda e, c, id: c.reorder([f"#{id}"]),
        lambda e, c, id: c.restore(e.get_context("chat", "two").snapshot()),
        lambda e, c, id: c.drop(e.get_context("chat", "two").parts[0]),
        lambda e, c, id: e.context("x", namespace=c.namespace).set_base(id, "base"),
        lambda e, c, id: e.compose("{docs/secret}", namespace=c.namespace),
        lambda e, c, id: e.compose(f"{{#{id}}}", namespace=c.namespace),
        lambda e, c, id: e.compose("{d}", d=["docs/secret"], namespace=c.namespace),
        lambda e, c, id: e.compose("{d}", d=[f"#{id}"], namespace=c.namespace),
        lambda e, c, id: e.get_context("only two", c.namespace),
        lambda e, c, id: e.close_context("only two", c.namespace),
    ],
)
def test_nothing_of_another_namespace_is_found(
    engines: Make, call: Callable[..., object], space: str
) -> None:
    engine = engines()
    two(engine)
    engine.context("only two", namespace="two")
    context = engine.get_context("chat", "one") if space else engine.context("chat")
    parts = context.parts
    with pytest.raises(KVWeaveError) as caught:
        call(engine, context, secret(engine))
    assert isinstance(caught.value, ChunkNotFound | ContextNotFound | HoleNotFilled)
    assert "secret" not in str(caught.value.to_dict().get("did_you_mean"))
    assert "only two" not in str(caught.value.to_dict().get("did_you_mean"))
    assert context.parts == parts
    engine.check_integrity()


def test_the_same_name_in_two_namespaces_is_two_contexts(engines: Make) -> None:
    engine = engines()
    two(engine)
    mine = engine.context("chat")
    one, other = engine.get_context("chat", "one"), engine.get_context("chat", "two")
    assert len({id(c) for c in (mine, one, other)}) == 3
    assert engine.contexts == {"chat": mine} and engine.get_context("chat") is mine
    assert engine.contexts_of("one") == {"chat": one} and engine.contexts_of("three") == {}
    assert [p.id for p in one.parts] != [p.id for p in other.parts]
    with pytest.raises(NameTaken):
        engine.context("chat", namespace="one")
    charged, kept = engine.shelf.n_bytes, rows(other).clone()
    one.drop("chat/own")
    one.append(text(30, 8))
    one.generate(3, ignore_eos=True)
    assert same_rows(rows(other), kept) and other.weave().moved == 0
    engine.close_context("chat", "one")
    assert engine.contexts_of("one") == {}
    assert engine.get_context("chat", "two") is other and engine.get_context("chat") is mine
    assert other.weave().prefilled == 0 and max(other.check().v_error) < EXACT
    engine.check_integrity()
    engine.close_context("chat", "two")
    assert engine.shelf.n_bytes < charged
    assert engine.contexts == {"chat": mine}


def test_rows_of_contexts_of_one_name_are_charged_apart(engines: Make) -> None:
    engine = engines()
    two(engine)
    one, other = engine.get_context("chat", "one"), engine.get_context("chat", "two")
    assert engine.shelf._charged == {
        "one|chat": rows(one).n_bytes,
        "two|chat": rows(other).n_bytes,
    }


def test_who_uses_a_chunk_is_said_within_its_namespace(engines: Make) -> None:
    engine = engines()
    two(engine)
    id = engine.get_context("chat", "one").parts[0].id
    assert engine.table.contexts_of(id) == ("one|chat",)
    with pytest.raises(ChunkInUse):
        type(engine.files)(engine.table, "one").rm("docs/a")
    engine.close_context("chat", "one")
    type(engine.files)(engine.table, "one").rm("docs/a")
    assert engine.get_context("chat", "two").weave().prefilled == 0


def test_a_fork_stays_in_its_namespace(engines: Make) -> None:
    engine = engines()
    two(engine)
    one = engine.get_context("chat", "one")
    twin = engine.fork(one, "twin")
    assert (twin.namespace, engine.get_context("twin", "one")) == ("one", twin)
    for other in ("", "two"):
        with pytest.raises(ContextNotFound):
            engine.get_context("twin", other)
    engine.fork(engine.get_context("chat", "two"), "twin")
    with pytest.raises(NameTaken):
        engine.fork(one, "twin")
    twin.append_chunk("docs/a")
    with pytest.raises(ChunkNotFound):
        twin.append_chunk("docs/secret")
    assert engine.table.contexts_of(one.parts[1].id) == ("one|chat", "one|twin")


def test_equal_text_of_two_namespaces_is_computed_twice(engines: Make) -> None:
    """Exact in-context KV is known by chunk, and equal text is another chunk elsewhere."""
    engine = engines()
    first = engine.context("c", namespace="one", denoise=False)
    second = engine.context("c", namespace="two", denoise=False)
    third = engine.context("d", namespace="one", denoise=False)
    for context in (first, second, third):
        for i in range(2):
            context.append(text(7, i), kind="document")
    assert [c.weave().prefilled for c in (first, second, third)] == [14, 14, 0]
    assert first.tokens() == second.tokens()
    assert {int(p.id) for p in first.parts}.isdisjoint(int(p.id) for p in second.parts)


def test_compose_uses_the_chunks_of_its_namespace(engines: Make) -> None:
    engine = engines()
    two(engine)
    context = engine.compose("{docs/secret}{docs/a}", namespace="two")
    assert context.name == "compose-1" and engine.contexts_of("two")["compose-1"] is context
    assert context.tokens() == [*text(8, 3), *text(9, 1)]
    assert engine.compose("{docs/a}", namespace="one").name == "compose-1", "counts tell nothing"
    engine.rename_context("compose-1", "compose-2", "two")
    assert engine.compose("{docs/a}", namespace="two").name == "compose-3", "that one is taken"
    with pytest.raises(HoleNotFilled):
        engine.compose("{docs/a}")
    with pytest.raises(InvalidArgument, match="namespace"):
        engine.compose("{docs/a}", namespace="a/b")
    with pytest.raises(InvalidArgument, match="namespace"):
        engine.context("c", namespace="a|b")


def test_closing_the_engine_closes_all() -> None:
    engine = Engine(tiny(), repair="none")
    two(engine)
    engine.context("chat")
    engine.close()
    assert engine.contexts == engine.contexts_of("one") == engine.contexts_of("two") == {}
    assert engine.shelf._charged == {}
