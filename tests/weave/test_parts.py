"""Where the KV of a part comes from, without tensors: python -m pytest tests/weave/test_parts.py"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.chunk.identity import ChunkId
from kvweave.weave import explaining
from kvweave.weave.explaining import still_seen
from kvweave.weave.parts import (
    Available,
    Part,
    Placement,
    Seen,
    Stretch,
    Truth,
    chunk_seen,
    is_seam,
    resolve,
    seen_from,
    slice_seen,
)

BASE = (Stretch(1, -5, 0, 5),)  # chunk 1, 5 tokens, carries all others


def part(uid: int, id: int, n: int, start: int = 0, **more: object) -> Part:
    return Part(uid, ChunkId(id), n, f"p{uid}", start=start, **more)  # type: ignore[arg-type]


def canonical(part: Part, seen: Seen) -> Available:
    return Available(True, slice_seen(part, () if part.id == 1 else BASE), False)


def placed(*parts: Part) -> list[Placement]:
    return resolve(parts, [], canonical)


def test_slices_that_touch_are_one_stretch() -> None:
    whole = placed(part(0, 1, 5), part(1, 7, 32), part(2, 8, 4))
    cut = placed(part(0, 1, 5), part(1, 7, 16), part(2, 7, 10, 16), part(3, 7, 6, 26))
    assert (
        seen_from(whole[:2], 37)
        == seen_from(cut, 37)
        == (
            Stretch(1, -37, 0, 5),
            Stretch(7, -32, 0, 32),
        )
    )


@pytest.mark.parametrize(
    "parts",
    [
        [part(1, 7, 16), part(2, 7, 16)],  # the same tokens twice
        [part(1, 7, 16), part(2, 7, 15, 17)],  # a token is left out
        [part(1, 7, 16, 16), part(2, 7, 16)],  # the wrong way round
        [part(1, 7, 16), part(2, 8, 16, 16)],  # of another chunk
        [part(1, 7, 16), part(2, 7, 16, 16, position=30)],  # a gap between them
    ],
)
def test_slices_that_do_not_touch_are_two(parts: list[Part]) -> None:
    assert len(seen_from(placed(*parts), 100)) == 2


def test_which_slices_are_exact() -> None:
    head, tail = part(1, 7, 16), part(2, 7, 16, 16)
    base = part(0, 1, 5)
    both = placed(base, head, tail)
    assert [p.exact for p in both] == [True, True, True]
    assert both[2].seen == (Stretch(1, -21, 0, 5), Stretch(7, -16, 0, 16))
    assert [p.exact for p in placed(base, tail)] == [True, False]
    assert [p.exact for p in placed(base, tail, head)] == [True, False, False]
    assert [p.exact for p in placed(base, part(3, 8, 4), head, tail)] == [True, True, False, False]
    assert [p.exact for p in placed(base, part(3, 7, 8, 8), tail)] == [True, False, False], (
        "the tokens before it stand there, but they are approximate"
    )
    assert [p.exact for p in placed(head)] == [False], "no base"


def test_what_a_slice_saw() -> None:
    base, head, tail = part(0, 1, 5), part(1, 7, 16), part(2, 7, 16, 16)
    assert still_seen(placed(base, tail)) == [(), (7,)]
    assert still_seen(placed(base, head, part(3, 8, 4), tail)) == [(), (), (), ()]
    assert still_seen(placed(base, part(1, 7, 15), tail)) == [(), (), (7,)], "token 15 is missing"
    assert still_seen(placed(base, part(3, 7, 6, 10), part(4, 7, 10), tail)) == [(), (7,), (), ()]
    assert still_seen(placed(tail)) == [(1, 7)]


def test_rows_are_kept_only_for_the_same_slice() -> None:
    base, first = part(0, 1, 5), part(1, 7, 8, 8)
    woven = placed(base, first)

    def sources(*parts: Part) -> list[str]:
        return [p.source for p in resolve(parts, woven, canonical)]

    assert sources(base, part(9, 7, 8, 8)) == ["kept", "kept"]
    assert sources(base, part(9, 7, 8)) == ["kept", "canonical"]
    assert sources(base, part(9, 7, 9, 8)) == ["kept", "canonical"]
    assert sources(base, part(9, 8, 8, 8)) == ["kept", "canonical"]
    assert sources(base, part(9, 7, 5, 8)) == ["kept", "kept"], "its front has its rows"
    shorter = resolve([base, part(9, 7, 5, 8), part(2, 7, 3, 13)], woven, canonical)
    assert [(p.source, p.ready, p.slot) for p in shorter] == [
        ("kept", 5, 0),
        ("kept", 5, 5),
        ("canonical", 3, 10),
    ]


def test_seams_between_slices() -> None:
    base, head, tail = part(0, 1, 5), part(1, 7, 16), part(2, 7, 16, 16)

    def seams(*parts: Part) -> list[bool]:
        found = placed(*parts)
        return [is_seam(a, b) for a, b in pairwise(found)]

    assert seams(base, head, tail) == [False, False]
    assert seams(base, tail, head) == [True, True]
    assert seams(base, part(1, 7, 4), part(2, 7, 4, 4), part(3, 7, 8, 8)) == [False] * 3
    assert seams(base, head, part(3, 7, 15, 17)) == [False, True]


@given(start=st.integers(0, 9), before=st.integers(0, 9), n=st.integers(1, 9))
def test_a_chunk_and_its_slice_saw_the_same(start: int, before: int, n: int) -> None:
    whole = (Stretch(3, -before - 1, 0, before + 1),)
    piece = part(1, 7, n, start)
    assert chunk_seen(piece, slice_seen(piece, whole)) == whole
    elsewhere = chunk_seen(piece, whole)
    assert elsewhere == (None if start else whole)


def test_in_context_kv_is_asked_for_as_of_the_whole_chunk() -> None:
    tail = part(2, 7, 4, 16)
    seen = seen_from(placed(part(0, 1, 5), part(1, 7, 10), part(3, 7, 6, 10)), 21)
    assert chunk_seen(tail, seen) == BASE
    late = seen_from(placed(part(0, 1, 5), part(1, 7, 8, 8)), 13)
    assert chunk_seen(tail, late) is None, "the chunk's first tokens are not there"


def seen_slowly(all_placed: list[Placement]) -> list[tuple[int, ...]]:
    """As `still_seen`, token by token."""
    before: set[tuple[int, int]] = set()
    left = []
    for p in all_placed:
        stands = [all((s.id, s.start + i) in before for i in range(s.n)) for s in p.seen]
        left.append(tuple(dict.fromkeys(s.id for s, here in zip(p.seen, stands, strict=True) if not here)))  # fmt: skip
        before |= {(int(p.part.id), p.part.start + i) for i in range(p.part.n)}
    return left


RANGES = st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(1, 5))


@given(st.lists(st.tuples(RANGES, st.lists(RANGES, max_size=4)), max_size=9))
def test_what_is_still_seen_is_found_as_token_by_token(cases: list) -> None:
    all_placed = [
        Placement(part(i, id, n, start), 0, 0, "own", n, Truth.STALE, tuple(Stretch(a, 0, b, c) for a, b, c in seen))
        for i, ((id, start, n), seen) in enumerate(cases)
    ]  # fmt: skip
    assert still_seen(all_placed) == seen_slowly(all_placed)


@pytest.mark.parametrize("gap", [0, 1])
def test_the_same_chunk_many_times_is_not_looked_through_again_for_each(
    monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    n_looked = 0

    def counting(ranges, start, stop):  # type: ignore[no-untyped-def]
        nonlocal n_looked
        n_looked += 1 + len(ranges) // 16
        return covers(ranges, start, stop)

    covers = explaining._covers
    monkeypatch.setattr(explaining, "_covers", counting)
    still_seen(placed(*(part(i, 7, 4, (4 + gap) * (i % 3)) for i in range(200))))
    assert n_looked < 400, "a server's thread would stand still for a thousand parts"
