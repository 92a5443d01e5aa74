from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.chunk import match
from kvweave.chunk.identity import ChunkId
from kvweave.chunk.match import SHORTEST, Match, Matcher
from kvweave.chunk.postings import TRIED
from kvweave.errors import InvalidArgument

fresh = itertools.count(1000)


def new(n: int) -> list[int]:
    """Tokens that stand nowhere else."""
    return [next(fresh) for _ in range(n)]


def matcher(*chunks: list[int], width: int = 16) -> Matcher:
    """A matcher of chunks #1, #2, ..."""
    made = Matcher(width)
    for id, tokens in enumerate(chunks, 1):
        made.add(ChunkId(id), tokens)
    made.check_integrity()
    return made


def test_a_chunk_is_found_wherever_it_stands_and_twice():
    a, b = new(100), new(40)
    prompt = [*new(3), *b, *new(1), *a, *a, *new(5)]
    assert matcher(a, b).find(prompt) == [
        Match(3, 43, 2, 0), Match(44, 144, 1, 0), Match(144, 244, 1, 0),
    ]  # fmt: skip


def test_a_run_inside_a_chunk_is_found_to_the_token():
    a = new(200)
    for first, last in ((0, 16), (184, 200), (5, 36), (169, 200), (37, 150), (0, 200)):
        prompt = [*new(7), *a[first:last], *new(7)]
        assert matcher(a).find(prompt) == [Match(7, 7 + last - first, 1, first)], (first, last)


def test_an_edit_in_the_middle_leaves_both_sides():
    a = new(90)
    edited = [*a[:50], *new(5), *a[53:]]
    assert matcher(a).find(edited) == [Match(0, 50, 1, 0), Match(55, 92, 1, 53)]


def test_runs_under_the_width_are_not_found_in_long_chunks():
    a = new(200)
    assert matcher(a).find([*new(2), *a[:15], *new(9), *a[30:45]]) == []


def test_short_chunks_are_found_as_a_whole():
    a, b, c, d = new(15), new(4), new(3), new(9)
    found = matcher(a, b, c, d)
    prompt = [*b, *a, *c, *b, *d[:8], *new(1), *d]
    assert found.find(prompt) == [
        Match(0, 4, 2, 0), Match(4, 19, 1, 0), Match(22, 26, 2, 0), Match(35, 44, 4, 0),
    ]  # fmt: skip
    assert found.find(d) == [Match(0, 9, 4, 0)]
    assert found.find(b[:3]) == []
    assert len(found) == 4 and found.n_tokens == 31 and 3 in found and 5 not in found


def test_the_longer_of_short_chunks_wins_and_none_reaches_into_a_run():
    a = new(10)
    found = matcher(a, a[:6], a[4:], [7, 8, 9, 1], new(20))
    assert found.find([*a, *a[:6]]) == [Match(0, 10, 1, 0), Match(10, 16, 2, 0)]
    b = [*new(4), *a[:2]]
    assert matcher(a, b).find([*b[:4], *a]) == [Match(4, 14, 1, 0)]
    long = new(30)
    found = matcher(long, [*long[-2:], 5, 6], [5, 6, 7, 8])
    assert found.find([*long, 5, 6, 7, 8]) == [Match(0, 30, 1, 0), Match(30, 34, 3, 0)]


def test_overlapping_runs_meet_at_the_end_of_a_chunk():
    seam = new(8)
    whole, rest = [*new(40), *seam], [*new(60), *seam, *new(70)]
    # 48 of a whole chunk, 78 of another that began before: the seam is the first one's end.
    prompt = [*whole, *rest[68:]]
    assert matcher(whole, rest).find(prompt) == [Match(0, 48, 1, 0), Match(48, 118, 2, 68)]
    # What begins as a whole keeps its start, though the other is longer.
    first, second = [*new(80), *seam, *new(20)], [*seam, *new(20)]
    prompt = [*first[:88], *second[8:]]
    assert matcher(first, second).find(prompt) == [Match(0, 80, 1, 0), Match(80, 108, 2, 0)]


def test_else_the_longer_run_has_the_overlap():
    seam = new(8)
    a, b = [*new(50), *seam, *new(9)], [*new(9), *seam, *new(70)]
    assert matcher(a, b).find([*a[:58], *b[17:]]) == [Match(0, 50, 1, 0), Match(50, 128, 2, 9)]
    a, b = [*new(90), *seam, *new(9)], [*new(9), *seam, *new(70)]
    assert matcher(a, b).find([*a[:98], *b[17:]]) == [Match(0, 98, 1, 0), Match(98, 168, 2, 17)]


def test_a_run_that_would_be_left_too_short_gets_its_width_or_goes():
    a = new(60)
    b = [*a[-12:], *new(6)]  # 18 tokens, 12 of them also the end of a
    assert matcher(a, b).find([*a, *b[12:]]) == [Match(0, 48, 1, 0), Match(48, 66, 2, 0)]
    a = new(20)
    b = [*a[-12:], *new(6)]
    assert matcher(a, b).find([*a, *b[12:]]) == [Match(0, 20, 1, 0)]
    # What goes does not hide what stands behind the run it was too close to.
    ones = [1] * 5
    found = matcher(ones, width=5).find([2, *ones, *ones, 3])
    assert found == [Match(1, 6, 1, 0), Match(6, 11, 1, 0)]


def test_a_long_run_swallows_what_was_found_of_its_beginning():
    header = new(40)
    chunks = [[*header, *new(50)] for _ in range(20)]
    assert matcher(*chunks).find([*chunks[11], *chunks[4]]) == [
        Match(0, 90, 12, 0), Match(90, 180, 5, 0),
    ]  # fmt: skip


def test_of_runs_that_reach_as_far_the_one_with_more_before_wins():
    header, line = new(48), new(50)
    others = [[*header, *new(50)] for _ in range(6)]
    found = matcher([*new(48), *line], *others[:3], [*header, *line], *others[3:])
    assert found.find([*header, *line]) == [Match(0, 98, 5, 0)]


def test_of_equal_runs_the_chunk_of_the_run_before_goes_on():
    tail = new(32)
    chunks = [[*new(64), *tail] for _ in range(9)]
    found = matcher(*chunks)
    for id in (1, 5, 9):  # the 5th is neither among the oldest nor the newest
        prompt = [*chunks[id - 1][:64], 3, *tail]
        assert found.find(prompt) == [Match(0, 64, id, 0), Match(65, 97, id, 64)]


def test_equal_chunks_stand_in_for_each_other():
    a = new(50)
    found = matcher(a, a)
    assert found.find(a) == [Match(0, 50, 1, 0)]
    found.remove(ChunkId(1))
    assert found.find(a) == [Match(0, 50, 2, 0)]
    found.remove(ChunkId(2))
    assert found.find(a) == [] and len(found) == 0 == found.n_tokens
    found.check_integrity()


def test_add_again_changes_nothing_and_other_tokens_are_refused():
    a = new(50)
    found = matcher(a)
    found.add(ChunkId(1), np.array(a))
    with pytest.raises(InvalidArgument, match="#1 is known with other tokens"):
        found.add(ChunkId(1), a[1:])
    with pytest.raises(InvalidArgument, match="tokens"):
        found.add(ChunkId(2), [-1])
    found.remove(ChunkId(7))
    assert len(found) == 1 and found.n_tokens == 50
    found.check_integrity()


def test_the_tokens_are_a_copy():
    a = np.arange(5000, 5050)
    found = matcher(a)
    a[:] = 1
    assert found.find(np.arange(5000, 5050)) == [Match(0, 50, 1, 0)]
    found.check_integrity()


@pytest.mark.parametrize("width", [3, 257])
def test_width_has_limits(width):
    with pytest.raises(InvalidArgument, match="width"):
        Matcher(width)


def test_nothing_is_found_in_nothing():
    assert Matcher().find([]) == [] == matcher(new(20), new(5), []).find([])
    assert Matcher().find(new(50)) == []


def test_integrity_is_of_the_tokens():
    found = matcher(new(50), new(5))
    found._tokens[ChunkId(1)] = found._tokens[ChunkId(1)][::-1]
    with pytest.raises(AssertionError):
        found.check_integrity()


def test_equal_hashes_are_never_trusted(monkeypatch):
    monkeypatch.setattr(
        match, "rolling", lambda t, w, _: np.full(max(0, len(t) - w + 1), 9, np.uint64)
    )
    a, b, c = new(40), new(4), new(16)
    found = matcher(a, b, c)
    prompt = [*new(30), *c, *new(9), *a, *b]
    wanted = [Match(30, 46, 3, 0), Match(55, 95, 1, 0), Match(95, 99, 2, 0)]
    assert found.find(prompt) == wanted
    assert found.find(new(100)) == []


class Counted:
    """Counts how often tokens are compared."""

    def __init__(self, monkeypatch) -> None:
        self.n = 0
        inner = match._n_equal

        def counted(a, b):
            self.n += 1
            return inner(a, b)

        monkeypatch.setattr(match, "_n_equal", counted)


def test_padding_costs_little(monkeypatch):
    counted = Counted(monkeypatch)
    found = matcher(*([0] * n for n in range(16, 1000)))
    matches = found.find([0] * 20_000)
    assert sum(m.stop - m.start for m in matches) == 20_000
    assert len(matches) < 25  # of nearly the longest chunk each
    assert counted.n < 25 * 2 * 2


def test_boilerplate_costs_little(monkeypatch):
    counted = Counted(monkeypatch)
    header, lines = new(64), [new(100) for _ in range(500)]
    found = matcher(*([*header, *line] for line in lines))
    assert len(found.find(header * 20)) == 20
    assert counted.n <= 20 * 2
    counted.n = 0
    prompt = [token for line in lines for token in (*header, *line)]
    assert [m.id for m in found.find(prompt)] == [*range(1, 501)]
    assert counted.n <= 500 * 3


def test_overlapping_copies_cost_little(monkeypatch):
    counted = Counted(monkeypatch)
    text = new(20_000)
    found = matcher(*([0, *text[at : at + 1000]] for at in range(0, 19_000, 16)))
    matches = found.find(text)
    assert sum(m.stop - m.start for m in matches) >= 19_900
    assert len(matches) < 30 and counted.n < 30 * 2 * TRIED


def verify(
    chunks: dict[int, list[int]], prompt: list[int], matches: list[Match], width: int
) -> None:
    """All that holds for any chunks and prompt."""
    covered = [False] * len(prompt)
    end = 0
    for m in matches:
        n = m.stop - m.start
        assert end <= m.start and n > 0
        assert prompt[m.start : m.stop] == chunks[m.id][m.offset : m.offset + n]
        assert n >= width or (n >= SHORTEST and chunks[m.id] == prompt[m.start : m.stop])
        end = m.stop
        covered[m.start : m.stop] = [True] * n
    for m in matches:  # none can be longer
        left, right = m.offset - 1, m.offset + m.stop - m.start
        if m.start and left >= 0 and not covered[m.start - 1]:
            assert prompt[m.start - 1] != chunks[m.id][left]
        if m.stop < len(prompt) and right < len(chunks[m.id]) and not covered[m.stop]:
            assert prompt[m.stop] != chunks[m.id][right]
    known = {tuple(t) for t in chunks.values() if SHORTEST <= len(t) < width}
    for tokens in chunks.values():
        if len(tokens) >= width:
            places = {*range(0, len(tokens) - width + 1, width), len(tokens) - width}
            known |= {tuple(tokens[at : at + width]) for at in places}
    for tokens in known:  # no window of a chunk, and no short chunk, is passed over
        for at in range(len(prompt) - len(tokens) + 1):
            if tuple(prompt[at : at + len(tokens)]) == tokens:
                assert any(covered[at : at + len(tokens)]), (at, tokens)


few = st.lists(st.integers(0, 1), max_size=24)
pieces = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 24), st.integers(0, 24)), max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.lists(few, max_size=10), pieces, few, st.integers(4, 9))
def test_what_is_found_is_right_and_nothing_is_passed_over(chunks, pieces, noise, width):
    prompt = [*noise]
    for i, first, last in pieces:
        if i < len(chunks):
            prompt += chunks[i][min(first, last) : max(first, last)]
        prompt += noise[first:last]
    found = matcher(*chunks, width=width)
    matches = found.find(prompt)
    verify(dict(enumerate(chunks, 1)), prompt, matches, width)
    assert matcher(*chunks, width=width).find(prompt) == matches  # whatever the secret


@settings(deadline=None)
@given(st.lists(st.integers(31, 80), min_size=1, max_size=5), pieces, st.booleans())
def test_every_run_of_twice_the_width_is_found(sizes, pieces, glue):
    chunks = [new(n) for n in sizes]
    prompt, wanted = [], []
    for i, first, length in pieces:
        chunk = chunks[i % len(chunks)]
        first = min(first, len(chunk) - 31)
        piece = chunk[first : first + 31 + length]
        prompt += new(1)  # so that no run goes on into the next by chance
        wanted.append(Match(len(prompt), len(prompt) + len(piece), i % len(chunks) + 1, first))
        prompt += piece + ([0] * 5 if glue else [])
    assert matcher(*chunks).find(prompt) == wanted


@settings(deadline=None)
@given(st.lists(few, max_size=10), pieces, few, st.integers(4, 9), st.integers(9, 40))
def test_it_does_not_matter_where_a_block_ends(chunks, pieces, noise, width, n):
    prompt = [*noise]
    for i, first, last in pieces:
        if i < len(chunks):
            prompt += chunks[i][min(first, last) : max(first, last)] * 3
        prompt += noise[first:last]
    found = matcher(*chunks, width=width)
    wanted, block = found.find(prompt), match.BLOCK
    try:
        match.BLOCK = n
        assert found.find(prompt) == wanted
    finally:
        match.BLOCK = block


def test_what_lies_in_a_long_run_is_not_hashed(monkeypatch):
    a, short = new(100_000), new(7)
    found = matcher(a, short)
    hashed = []
    inner = match.rolling

    def counted(tokens, width, multiplier):
        hashed.append(len(tokens))
        return inner(tokens, width, multiplier)

    monkeypatch.setattr(match, "rolling", counted)
    assert found.find([*a, *short]) == [Match(0, 100_000, 1, 0), Match(100_000, 100_007, 2, 0)]
    assert sum(hashed) < 2 * match.BLOCK


steps = st.lists(st.tuples(st.integers(1, 6), few), max_size=12)


@settings(deadline=None)
@given(steps, few)
def test_after_adding_and_removing_it_is_as_if_it_never_had_more(steps, prompt):
    found, left = Matcher(4), {}
    for id, tokens in steps:
        if id in left:
            del left[id]
            found.remove(ChunkId(id))
        else:
            left[id] = tokens
            found.add(ChunkId(id), tokens)
        found.check_integrity()
    same = Matcher(4)
    for id, tokens in left.items():
        same.add(ChunkId(id), tokens)
    assert found.find(prompt) == same.find(prompt)
    assert len(found) == len(left) and found.n_tokens == sum(map(len, left.values()))
