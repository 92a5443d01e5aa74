"""The protocols as token ids of one model: system message, notes, questions and replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.demo import world
from kvweave.demo.vocabulary import ENTITIES, VALUES, piece
from kvweave.suite.protocols import Case
from kvweave.weave.maker import Maker

INSTRUCTION = (  # for models that were not trained on this world
    "You keep notes. A note is several statements between chatter. 'E A V .' says that entity E has "
    "attribute A with value V. 'now E A V .' replaces an earlier value. 'from E A same F A also .' says "
    "that F has the same A as E had when this was said. A value may be an entity with attributes of "
    "its own. 'ask E A' asks for the latest value: reply 'E A V .'; 'ask E A B' asks for the B of "
    "that value: reply 'E A V B W .', and so on. Reply with nothing else."
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question as tokens: ``expected`` is the reply with its end.

    For leak questions ``expected`` ends with the value that must not come back.
    """

    kind: str
    asked: tuple[int, ...]
    expected: tuple[int, ...]

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
    """Turns text into token ids, every text once; ``system`` is the text of the base."""

    def __init__(self, maker: Maker, system: str | None = None) -> None:
        self.maker = maker
        self._known: dict[str, tuple[int, ...]] = {}
        if system is None:
            system = maker.chat.message("system", self._instruction())
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
            asked = self.tokens(self.maker.chat.message("user", item.question) + self.header)
            expected = self.expected(item.reply)
            if item.kind.startswith("leak"):
                expected = self._until(item.reply, item.value, expected)
            questions.append(Question(item.kind, asked, expected))
        notes = tuple((name, self.user(text)) for name, text in case.notes)
        return Paper(case.protocol, index, notes, tuple(questions), case.dropped)

    def _until(self, reply: str, value: str, expected: Sequence[int]) -> tuple[int, ...]:
        """Cut a reply behind its value."""
        behind = reply[reply.rindex(value) + len(value) :]
        return tuple(expected[: len(expected) - len(self.tokens(behind)) - 1])

    def _instruction(self) -> str:
        """Return the bundled model's system text where its words are known, else all of it."""
        some = (*ENTITIES[:8], *VALUES[:8])
        known = all(len(self.maker.tokens(piece(word))) == 1 for word in some)
        return world.SYSTEM if known else INSTRUCTION
