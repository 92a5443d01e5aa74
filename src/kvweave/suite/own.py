"""A user's own text, or prompts he has logged, as papers of the suite: what a calibration of his own
is measured on.

::

    text       [base][p0][p1] ... [p6] | p7: 16 tokens asked, the rest predicted
                     one paragraph is pruned, or two stand in each other's place
    prompts    [base][system][user][assistant] ... | user: asked; assistant: predicted
                     one message in the middle is pruned

Every chunk was stored by itself, as in real use; what is asked is never stored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.suite.words import Paper, Question
from kvweave.weave.maker import Maker

CHUNK, CHUNKS, GIVEN = 64, 8, 16  # tokens of a chunk, chunks of a case, tokens of the question
LEAST = 4 * CHUNK  # tokens of a document: one that is shorter is left out
MOST_REPLY = 64  # tokens of a reply that are compared
KINDS = ("own a", "own b")  # documents, or conversations, by turns: each is tested on the other

_Said = dict[str, str]


def of_texts(maker: Maker, texts: Sequence[str], n: int) -> list[Paper]:
    """Return about ``n`` cases, spread evenly. Raises InvalidArgument for too little text."""
    documents = [tokens for tokens in map(maker.tokens, texts) if len(tokens) >= LEAST]
    places = [
        (which, start)
        for which, tokens in enumerate(documents)
        for start in range(0, max(1, len(tokens) - CHUNK * CHUNKS + 1), GIVEN)
    ]
    step = max(1, len(places) // n)
    made = []
    for index, (which, start) in enumerate(islice(places[::step], n)):
        tokens = documents[which][start : start + CHUNK * CHUNKS]
        chunks = [tuple(tokens[at : at + CHUNK]) for at in range(0, len(tokens), CHUNK)]
        *notes, last = [chunk for chunk in chunks if len(chunk) > GIVEN]
        half = KINDS[which % 2 if len(documents) > 1 else start * 2 // len(documents[which])]
        question = Question("prose", last[:GIVEN], last[GIVEN:])
        made.append(_paper(half, index, notes, question))
    if not made:
        raise InvalidArgument("text", f"no document has {LEAST} tokens", "give longer ones")
    return made


def of_prompts(maker: Maker, lines: Sequence[str], n: int, limit: int) -> list[Paper]:
    """Return about ``n`` cases of logged conversations, one JSON object with ``messages`` a line.

    Each reply of an assistant behind two messages or more is one. Raises InvalidArgument.
    """
    found: list[tuple[int, list[_Said]]] = []
    for number, line in enumerate(filter(str.strip, lines), 1):
        messages = _messages(line, number)
        found += [
            (number, messages[: i + 1])
            for i in range(3, len(messages))
            if messages[i]["role"] == "assistant" and messages[i - 1]["role"] == "user"
        ]
    made: list[Paper] = []
    step = max(1, len(found) // n)
    for number, messages in islice(found[::step], n):
        paper = _conversation(maker, messages, (KINDS[number % 2], len(made)))
        question = paper.questions[0]
        size = sum(len(tokens) for _, tokens in paper.notes)
        if size + len(question.asked) + len(question.expected) < limit:
            made.append(paper)
    if not made:
        reason = "no line has a reply behind a question and what was said before it"
        raise InvalidArgument(
            "prompts", reason, 'a line is {"messages": [{"role", "content"}, ...]}'
        )
    return made


def _conversation(maker: Maker, messages: Sequence[_Said], which: tuple[str, int]) -> Paper:
    chat = maker.chat
    *before, asked, reply = messages
    notes = [tuple(maker.tokens(chat.message(m["role"], m["content"]))) for m in before]
    question = maker.tokens(chat.message("user", asked["content"]) + chat.header())
    expected = tuple(maker.tokens(reply["content"]))[:MOST_REPLY]
    return _paper(*which, notes, Question("prose", tuple(question), expected))


def _paper(
    protocol: str, index: int, notes: Sequence[tuple[int, ...]], question: Question
) -> Paper:
    """Return a case in which one note in the middle is pruned, or two are in each other's place."""
    random = Random(f"{protocol}/{index}")
    notes = [note for note in notes if note]
    if index % 2 and len(notes) > 2:
        i, j = random.sample(range(1, len(notes)), 2)
        notes[i], notes[j] = notes[j], notes[i]
    dropped = random.randrange(1, len(notes)) if len(notes) > 2 else 0
    named = tuple((f"own/{protocol[-1]}/{index}/{i}", note) for i, note in enumerate(notes))
    return Paper(protocol, index, named, (question,), dropped)


def _messages(line: str, number: int) -> list[_Said]:
    """Return the messages of one line. Raises InvalidArgument."""
    try:
        told: Any = json.loads(line)
        messages = told["messages"] if isinstance(told, dict) else told
        return [{"role": str(m["role"]), "content": _text(m["content"])} for m in messages]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            "prompts",
            f"line {number} has no messages: {error!r}",
            """write {"messages": [{"role": "user", "content": "..."}]} in it""",
        ) from error


def _text(content: Any) -> str:
    """Return what a message says; of parts, the text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)
