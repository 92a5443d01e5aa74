"""The protocols as token ids of one model: system message, notes, questions and replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.demo import world
from kvweave.demo.plain import RULES, plain
from kvweave.demo.vocabulary import ENTITIES, VALUES, piece
from kvweave.suite.protocols import Case
from kvweave.weave.maker import Maker


@dataclass(frozen=True, slots=True)
class Question:
    """One question as tokens: ``expected`` is the reply with its end, ``value`` the word in it that
    decides; "" if none does.

    For leak questions ``expected`` ends with the value that must not come back.
    """

    kind: str
    asked: tuple[int, ...]
    expected: tuple[int, ...]
    value: str = ""

    @property
    def is_leak(self) -> bool:
        """Whether a right reply would be a wrong one: the note that says it is gone."""
        return self.kind.startswith("leak")


@dataclass(frozen=True, slots=True)
class Paper:
    """A case as tokens: named notes in order, and questions; ``dropped`` notes are pruned first."""

    protocol: str
    index: int
    notes: tuple[tuple[str, tuple[int, ...]], ...]
    questions: tuple[Question, ...]
    dropped: int | None = None

    def left(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the notes a question is asked after."""
        return [note for i, note in enumerate(self.notes) if i != self.dropped]


class Words:
    """Turns text into token ids, every text once; ``system`` is the text of the base.

    ``trained``: the model knows the little world, and gets its texts as they are. Others get `plain`
    ones, and rules; they may word a right reply in their own way.
    """

    def __init__(self, maker: Maker, system: str | None = None) -> None:
        self.maker = maker
        self._known: dict[str, tuple[int, ...]] = {}
        some = (*ENTITIES[:8], *VALUES[:8])
        self.trained = all(len(maker.tokens(piece(word))) == 1 for word in some)
        if system is None:
            system = maker.chat.message("system", world.SYSTEM if self.trained else RULES)
        bos = maker.bos()
        if bos and maker.tokens(system)[: len(bos)] == bos:  # the engine puts one there too
            system = system.removeprefix(maker.backend.tokenizer.bos_token)
        self.system = system
        self.head = (*bos, *maker.tokens(system))
        self.header = maker.chat.header()

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text."""
        if text not in self._known:
            self._known[text] = tuple(self.maker.tokens(text))
        return self._known[text]

    def told(self, text: str) -> str:
        """Return a text of the world as this model is told it."""
        return text if self.trained else plain(text)

    def user(self, text: str) -> tuple[int, ...]:
        """Return a user message."""
        return self.tokens(self.maker.chat.message("user", text))

    def reply(self, text: str) -> tuple[int, ...]:
        """Return what follows the assistant's header, the whole message."""
        whole = self.maker.chat.message("assistant", text)
        if whole.startswith(self.header):
            return self.tokens(whole[len(self.header) :])
        return self.tokens(text + self.maker.chat.wrap("assistant").after)

    def expected(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a reply up to the one that ends it."""
        whole = self.reply(text)
        n_after = len(self.tokens(self.maker.chat.wrap("assistant").after))
        return whole[: len(whole) - max(0, n_after - 1)]

    def paper(self, case: Case, index: int) -> Paper:
        """Return a case of a protocol as tokens."""
        questions = []
        for item in case.items:
            question, reply = self.told(item.question), self.told(item.reply)
            asked = self.tokens(self.maker.chat.message("user", question) + self.header)
            expected = self.expected(reply)
            if item.kind.startswith("leak"):
                expected = self._until(reply, item.value, expected)
            questions.append(Question(item.kind, asked, expected, item.value))
        notes = tuple((name, self.user(self.told(text))) for name, text in case.notes)
        return Paper(case.protocol, index, notes, tuple(questions), case.dropped)

    def _until(self, reply: str, value: str, expected: Sequence[int]) -> tuple[int, ...]:
        """Cut a reply behind its value."""
        behind = reply[reply.rindex(value) + len(value) :]
        return tuple(expected[: len(expected) - len(self.tokens(behind)) - 1])
