"""Text: real prose, one chunk pruned from its middle; how well the end is still predicted.

The prose is the documentation that ships with Python. The bundled model's training holds out every
tenth topic; documents are cut from those::

    [base][c0][c1] ... [c6] | c7: 16 tokens asked, 48 predicted
              `- pruned
"""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data import topics

from kvweave.suite.words import Paper, Question
from kvweave.weave.maker import Maker

CHUNK, CHUNKS = 64, 8  # tokens of a chunk, chunks of a document
GIVEN = 16  # tokens of the last chunk that are the question
STRIDE = 64  # tokens between the starts of documents; those that overlap count as one case


def texts(held_out: bool) -> list[str]:
    """Return the topics the bundled model's training holds out, or those it does not."""
    found = [topics.topics[name] for name in sorted(topics.topics)]
    return [text for i, text in enumerate(found) if (i % 10 == 5) == held_out]


def papers(maker: Maker, n: int) -> Iterator[Paper]:
    """Yield ``n`` documents, or as many as there are, spread evenly over the held-out prose."""
    size = CHUNK * CHUNKS
    places = []
    documents = [maker.tokens(text) for text in texts(True)]
    for which, tokens in enumerate(documents):
        for start in range(0, len(tokens) - size + 1, STRIDE):
            places += [(which, start, dropped) for dropped in range(1, CHUNKS - 1)]
    step = max(1, len(places) // n)
    regions: dict[tuple[int, int], int] = {}
    for which, start, dropped in places[::step][:n]:
        index = regions.setdefault((which, start // size), len(regions))
        tokens = documents[which][start : start + size]
        chunks = [tuple(tokens[i : i + CHUNK]) for i in range(0, size, CHUNK)]
        notes = tuple((f"prose/{i}", chunk) for i, chunk in enumerate(chunks[:-1]))
        question = Question("prose", chunks[-1][:GIVEN], chunks[-1][GIVEN:])
        yield Paper("prose", index, notes, (question,), dropped)
