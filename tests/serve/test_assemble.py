"""Segments become known chunks, slices and new text. python -m pytest tests/serve/test_assemble.py"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from loaded import bundled_runner

from kvweave import Engine
from kvweave.chunk.identity import ChunkId
from kvweave.demo.vocabulary import FILLER
from kvweave.errors import ChunkNotFound
from kvweave.serve.reuse.find import Assembler, Wanted
from kvweave.serve.reuse.library import Library
from kvweave.serve.reuse.render import PromptSegment

Make = Callable[..., Engine]


def tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 101, n)]


def segment(
    ids: list[int], label: str = "user 0", new: bool = False, kind: Any = "user"
) -> PromptSegment:
    return PromptSegment(kind, "", label, new, tokens=tuple(ids))


def system(ids: list[int]) -> PromptSegment:
    return segment(ids, "system 0", kind="system")


class Desk:
    """An engine with an assembler; ``put`` stores chunks of one base."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.library = Library(engine.table)
        self.assembler = Assembler(engine, self.library, **options)

    def put(
        self, name: str, ids: list[int], base: ChunkId | None = None, namespace: str = ""
    ) -> ChunkId:
        id = self.engine.maker.add(ids, base=base, namespace=namespace)
        self.engine.table.bind(name, id, namespace=namespace)
        self.library.note(namespace, id)
        return id

    def assemble(self, *segments: PromptSegment, namespace: str = "", **options: Any) -> Wanted:
        wanted = self.assembler.assemble(segments, namespace, None, **options)
        given = [s.tokens for s in segments if s.chunk is None and s.kind != "system"]
        assert wanted.tokens().tolist() == [t for ids in given for t in ids or ()]
        return wanted


def shape(wanted: Wanted) -> list[tuple[int | None, int, int]]:
    """Return (id, first token of the chunk, tokens) of each piece."""
    return [(piece.id, piece.start, piece.n) for piece in wanted.pieces]


@pytest.fixture
def desk(engines: Make) -> Iterator[Desk]:
    yield Desk(engines())


def test_messages_of_the_history_are_whole_chunks(desk: Desk) -> None:
    head, asked, said = tokens(6, 0), tokens(9, 1), tokens(3, 2)
    base = desk.put("s", head)
    ids = [desk.put("u", asked, base), desk.put("a", said, base)]
    wanted = desk.assemble(
        system(head),
        segment(asked),
        segment(said, "assistant 0"),
        segment(asked, "user 1", new=True),
    )
    assert wanted.base is not None and wanted.base.tokens.tolist() == head
    assert shape(wanted) == [(ids[0], 0, 9), (ids[1], 0, 3), (None, 0, 9)]
    assert wanted.reasons[1:] == [
        {"segment": "user 0", "found": 9, "new": 0, "why": ""},
        {"segment": "assistant 0", "found": 3, "new": 0, "why": ""},
        {"segment": "user 1", "found": 0, "new": 9, "why": "new text"},
    ]


def test_another_system_message_finds_the_same_messages_by_their_tokens(desk: Desk) -> None:
    base = desk.put("s", tokens(6, 0))
    asked = tokens(9, 1)
    id = desk.put("u", asked, base)
    wanted = desk.assemble(system(tokens(5, 3)), segment(asked))
    assert shape(wanted) == [(id, 0, 9)]


def test_new_input_takes_long_runs_and_leaves_the_rest(desk: Desk) -> None:
    page, short = tokens(100, 1), tokens(20, 2)
    id, whole = desk.put("page", page), desk.put("short", short)
    new = [tokens(5, 3), tokens(4, 4), tokens(3, 5)]
    wanted = desk.assemble(
        segment([*new[0], *page[10:90], *new[1], *page[40:60], *new[2], *short], new=True)
    )
    # 20 tokens of the page are under min_match; the short chunk is found because it is whole
    assert shape(wanted) == [(None, 0, 5), (id, 10, 80), (None, 0, 27), (whole, 0, 20)]


def test_min_match_is_kept_to(engines: Make) -> None:
    desk = Desk(engines(), min_match=40)
    page = tokens(100, 1)
    id = desk.put("page", page)
    assert shape(desk.assemble(segment(page[10:49]))) == [(None, 0, 39)]
    assert shape(desk.assemble(segment(page[10:50]))) == [(id, 10, 40)]


def test_long_new_text_is_cut_where_its_content_says(desk: Desk) -> None:
    text = tokens(1000, 8)
    pieces = desk.assemble(segment(text, new=True)).pieces
    assert len(pieces) > 2 and all(64 <= p.n <= 1024 for p in pieces[:-1])
    ids = [desk.put(f"p{i}", p.tokens.tolist()) for i, p in enumerate(pieces)]
    again = desk.assemble(segment(text))
    assert [p.id for p in again.pieces] == ids, "as history they are chunks"


def test_nothing_crosses_namespaces(desk: Desk) -> None:
    page = tokens(100, 1)
    desk.put("page", page, namespace="anna")
    wanted = desk.assemble(segment(page), namespace="berta")
    assert all(piece.id is None for piece in wanted.pieces)
    assert wanted.reasons[0]["found"] == 0
    named = PromptSegment("user", "", "user 0", True, chunk="page")
    with pytest.raises(ChunkNotFound):
        desk.assemble(named, namespace="berta")
    assert shape(desk.assembler.assemble([named], "anna", None))[0][1:] == (0, 100)


def test_chunks_that_are_gone_are_forgotten(desk: Desk) -> None:
    page = tokens(100, 1)
    desk.put("page", page)
    desk.engine.files.rm("page")
    assert shape(desk.assemble(segment(page[:50]))) == [(None, 0, 50)]
    id = desk.put("page", page)
    assert shape(desk.assemble(segment(page[:50]))) == [(id, 0, 50)]


def test_a_library_knows_what_was_there_before(desk: Desk) -> None:
    page = tokens(100, 1)
    id = desk.put("page", page, namespace="anna")
    library = Library(desk.engine.table)
    assert [m.id for m in library.find("anna", page)] == [id]
    assert library.find("", page) == library.find("berta", page) == []


def test_limited_reuse_leaves_all_text_new(desk: Desk) -> None:
    page = tokens(100, 1)
    desk.put("page", page)
    for reuse in ("prefix", "off"):
        wanted = desk.assemble(segment(page), reuse=reuse)
        assert shape(wanted) == [(None, 0, 100)]
        assert wanted.reasons[0]["why"] == "reuse is limited"
    named = PromptSegment("user", "", "user 0", True, chunk="page")
    assert shape(desk.assembler.assemble([named], "", None, "off")) == [(None, 0, 100)]


def test_an_answer_is_found_by_its_text_though_written_with_other_tokens() -> None:
    with Engine(bundled_runner(), repair="none") as engine:
        desk = Desk(engine)
        text = "<|assistant|> river metal<|end|>"
        odd = [t for c in text.replace("<|assistant|>", "").replace("<|end|>", "")
               for t in engine.maker.tokens(c)]  # fmt: skip
        chat = engine.maker.tokens("<|assistant|>"), engine.maker.tokens("<|end|>")
        written = [*chat[0], *odd, *chat[1]]
        assert written != engine.maker.tokens(text)
        assert desk.assembler.text(written) == text
        id = desk.put("a", written)
        desk.library.note_answer("", text, (id,))
        old = PromptSegment("assistant", text, "assistant 0", False)
        wanted = desk.assembler.assemble([old], "", None)
        assert shape(wanted) == [(id, 0, len(written))]
        assert desk.assembler.assemble([old], "anna", None).pieces[0].id is None
        engine.files.rm("a")
        assert desk.assembler.assemble([old], "", None).pieces[0].id is None


def test_a_gap_of_known_text_is_called_a_seam() -> None:
    with Engine(bundled_runner(), repair="none") as engine:
        desk = Desk(engine)
        picked = np.random.default_rng(0).choice(FILLER, 120).tolist()
        picked[60] = "keep"
        words = "".join(f" {word}" for word in picked)
        ids, keep = engine.maker.tokens(words), engine.maker.tokens(" keep")
        assert ids[60:61] == keep
        stored = [*ids[:60], *(t for c in " keep" for t in engine.maker.tokens(c)), *ids[61:]]
        assert desk.assembler.text(stored) == words and stored != ids
        desk.put("a", stored)
        new = PromptSegment("user", words, "user 0", True)
        reason = desk.assembler.assemble([new], "", None).reasons[0]
        assert reason["why"] == "tokenised differently at the seam"
        assert (reason["found"], reason["new"]) == (119, 1)
        other = PromptSegment("user", words.replace(" keep", " notes"), "user 0", True)
        assert desk.assembler.assemble([other], "", None).reasons[0]["why"] == "new text"
