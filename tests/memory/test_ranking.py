"""Ranking by words, by vectors, and summaries by extraction, without a model."""

from __future__ import annotations

import random
import tracemalloc
from itertools import count

import numpy as np
import pytest

from kvweave.errors import InvalidArgument, OverBudget
from kvweave.memory import DenseRanking, FirstSentences, GramRanking, Said, Segment


def brute(items: dict[str, list[int]], question: list[int]) -> set[str]:
    """The items that share a token with the question."""
    return {name for name, tokens in items.items() if {*tokens} & {*question}}


def test_ranks_through_random_adds_and_removes() -> None:
    draw, ranking = random.Random(0), GramRanking()
    items: dict[str, list[int]] = {}
    for _ in range(600):
        name = f"n{draw.randint(0, 90)}"
        if draw.random() < 0.6:
            items[name] = [draw.randint(0, 400) for _ in range(draw.randint(1, 8))]
            ranking.add(name, int.from_bytes(repr(items[name]).encode()), items[name])  # type: ignore[arg-type]
        else:
            items.pop(name, None)
            ranking.remove(name)
        question = [draw.randint(0, 400) for _ in range(3)]
        found = [name for name, _ in ranking.rank(question, 1000)]
        assert set(found) == brute(items, question) and ranking.known().keys() == items.keys()
    assert len(ranking._names) <= max(65, 2 * len(items) + 1), "removed rows are let go of"


def test_words_take_no_more_than_is_charged() -> None:
    """Against what Python allocates, through growth, edits, removal, and what is refused."""
    draw, charged, limit = random.Random(1), [0], [1 << 40]

    def charge(n_bytes: int) -> None:
        if n_bytes > max(charged[-1], limit[0]):
            raise OverBudget(n_bytes, limit[0], 0)
        charged.append(n_bytes)

    def fill(first: int, last: int, words: int, size: int) -> None:
        for i in range(first, last):
            tokens = [draw.randint(0, words) for _ in range(size)]
            ranking.add(f"some/longer/name/{i}", 10**6 + next(ids), tokens)  # type: ignore[arg-type]
            held.append((tracemalloc.get_traced_memory()[0] - before, charged[-1]))

    held: list[tuple[int, int]] = []
    ids = count()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        ranking = GramRanking(charge)
        fill(0, 600, 2000, 40)
        fill(0, 300, 2000, 40)  # edits
        fill(600, 605, 10**6, 3000)
        fill(700, 2000, 50, 4)
        for i in range(2000):
            if i % 7:
                ranking.remove(f"some/longer/name/{i}")
                held.append((tracemalloc.get_traced_memory()[0] - before, charged[-1]))
        notes = 2 * 120 * len(held) + 64 * len(charged)  # of the test's own
        assert all(mine <= said + notes for mine, said in held)
        assert max(mine for mine, _ in held) > 0.3 * max(said for _, said in held), "not far above"
    finally:
        tracemalloc.stop()
    limit[0], knew = ranking.n_bytes + 2000, dict(ranking.known())
    with pytest.raises(OverBudget):
        ranking.add("some/longer/name/7", 1, [*range(100)])  # type: ignore[arg-type]
    assert ranking.known() == knew
    for name in knew:
        ranking.remove(name)
    assert ranking.n_bytes == charged[-1] == 0


def test_the_rarest_words_and_the_shortest_text_come_first() -> None:
    ranking = GramRanking()
    for i in range(40):
        ranking.add(f"n{i}", i, [1, 2, 100 + i, 3])  # type: ignore[arg-type]
    ranking.add("long", 98, [5, 6, *range(300, 340)])  # type: ignore[arg-type]
    ranking.add("short", 99, [5, 6, 7])  # type: ignore[arg-type]
    assert ranking.rank([1, 2, 107, 3], 5)[0][0] == "n7"
    assert [n for n, _ in ranking.rank([5, 6], 5)] == ["short", "long"]
    assert ranking.rank([1, 2, 3], 5) == [], "what all say tells nothing"


def test_vectors_are_centred_and_checked() -> None:
    def embed(tokens):
        made = np.full(4, 10.0)
        made[tokens[0] % 4] += 1
        return made

    ranking = DenseRanking(embed)
    for i in range(4):
        ranking.add(f"n{i}", i, [i])  # type: ignore[arg-type]
    assert [name for name, _ in ranking.rank([2], 3)] == ["n2"]
    ranking.remove("n2")
    ranking.remove("n2")
    assert "n2" not in ranking.known()
    with pytest.raises(InvalidArgument):
        DenseRanking(lambda tokens: np.zeros((2, 2))).add("x", 0, [1])  # type: ignore[arg-type]


def segment(limit: int, *texts: str, kind: str = "user") -> Segment:
    said = tuple(Said(kind, "n", text, ()) for text in texts)  # type: ignore[arg-type]
    return Segment(
        said, limit, lambda text: len(text.split()) if isinstance(text, str) else len(text)
    )


def test_sentences_are_kept_word_by_word() -> None:
    assert FirstSentences()(segment(9, "One is. Two is.", "Three is! Four.")) == "One is. Three is!"
    assert FirstSentences(n=None)(segment(4, "One is. Two is.", "Three is.")) == "Two is. Three is."
    assert FirstSentences(pattern=r"\w+ is")(segment(9, "so One is. Two is.")) == "One is"
    assert FirstSentences()(segment(3, "a b c d e f.")) == "a b c", "a long one is cut"
    assert FirstSentences()(segment(9, "One. Two.", kind="summary")) == "One. Two."
    assert FirstSentences(pattern="nothing")(segment(9, "One.")) == ""
    with pytest.raises(InvalidArgument):
        FirstSentences(n=0)


@pytest.mark.parametrize("limit", range(7))
def test_a_cut_is_the_longest_that_fits(limit: int) -> None:
    whole = "a  b c\nd e"
    words = segment(limit).cut(whole).split()
    assert words == whole.split()[: min(limit, 5)]
