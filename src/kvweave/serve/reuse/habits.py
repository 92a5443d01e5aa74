"""What clients do to their histories from one request to the next, and what that says of the next one.

::

    before  [system][task][call][output 1][call][output 2][call]            a request and its answer
    after   [system][task][call][mark    ][call][output 2][call][output 3]  the request behind it

Each namespace's is its own. Of messages only digests and sizes are kept, of a mark its text. What is
told by one conversation holds for others of the same agent: one with the same system text and tools.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from kvweave.serve.reuse.latest import LatestOfEach
from kvweave.serve.reuse.rules import (
    MOST_ITEMS,
    BeforeEdit,
    EditEvidence,
    EditItem,
    EditRule,
    Habit,
    Mark,
)
from kvweave.serve.reuse.said import said_of

MOST_CONVERSATIONS, MOST_AGENTS = 128, 32  # that are remembered, of all namespaces: 90 MB at most
MOST_MESSAGES = 1024  # of a conversation; of longer ones nothing is learned
MOST_MARK = 2000  # characters of what stands for something
RESULTS = ("tool", "function")
_Message = Mapping[str, Any]


class SeenMessage(NamedTuple):
    """What is known of one message."""

    role: str
    place: bytes  # what it is found by again, whatever became of an output's text
    body: bytes  # of its text
    n_chars: int
    n_lines: int
    calls: tuple[bytes, ...] = ()  # of an answer: what it calls; of a result: what was called
    thinks: bool = False
    edited: bool = False  # something stands for its text; the sizes are those of the text


class HistoryChange(NamedTuple):
    """What became of the messages before."""

    found: list[int | None]  # of each message after, which it was before
    masked: dict[int, int]  # before -> after
    dropped: frozenset[int]  # before
    notice: int | None  # after: one that stands for those dropped


@dataclass
class _Agent:
    masks: Habit = field(default_factory=Habit)
    drops: Habit = field(default_factory=Habit)
    returns: bool | None = None  # whether thinking comes back


@dataclass
class _Conversation:
    lines: list[SeenMessage]  # the last request and its answer
    n_front: int  # messages before the first answer
    began: bytes
    notice: Mark | None = None  # the message that stands for those dropped
    n_outputs: int = 0  # that came since the last were taken out
    n_messages: int = 0
    n_edits: int = 0

    def n_kept(self, lines: Sequence[SeenMessage]) -> int:
        """Return how many messages in front of lines are not looked at: the notice too."""
        here, notice = lines[self.n_front : self.n_front + 1], self.notice
        return self.n_front + (
            notice is not None and [line.place for line in here] == [_place(notice)]
        )

    masks: bool = False  # what is foreseen of the next request
    drops: bool = False


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a client is likely to do to its history, the last answer included, before the next request."""

    began: str  # the same for all requests of one conversation
    returns: bool | None  # whether it sends thinking back; None where nobody knows
    texts: Mapping[int, str] = field(default_factory=dict)  # instead of the content of messages
    dropped: frozenset[int] = frozenset()
    notice: Mark | None = None  # new, in front of what was dropped
    rule: str = ""

    @property
    def edits(self) -> bool:
        """Whether anything is taken out."""
        return bool(self.texts or self.dropped)

    def applied(self, messages: Sequence[_Message]) -> list[_Message]:
        """Return the messages as they will be sent."""
        made: list[_Message] = []
        first = min(self.dropped, default=-1)
        for i, message in enumerate(messages):
            if i == first and self.notice is not None:
                made.append({"role": self.notice.role, "content": self.notice.text})
            if i in self.dropped:
                continue
            made.append({**message, "content": self.texts[i]} if i in self.texts else message)
        return made


class Habits:
    """Learns from each request, once it is answered. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._talks: LatestOfEach[bytes, _Conversation] = LatestOfEach(MOST_CONVERSATIONS)
        self._agents: LatestOfEach[bytes, _Agent] = LatestOfEach(MOST_AGENTS)

    def expire(self, before: float) -> None:
        """Forget what was not used since ``before``."""
        with self._lock:
            self._talks.expire(before)
            self._agents.expire(before)

    def note(
        self,
        namespace: str,
        messages: Sequence[_Message],
        answer: _Message,
        tools: Sequence[str] = (),
    ) -> Foreseen | None:
        """Learn from a request of ``messages``, as `ChatAsk` has them, that was answered so; return
        what is foreseen of the next. None for a conversation that is too long."""
        if len(messages) > MOST_MESSAGES:
            return None
        lines = lines_of([*messages, answer])
        n_front = next(i for i, line in enumerate(lines) if line.role == "assistant")
        systems = [line.place for line in lines[:n_front] if line.role in ("system", "developer")]
        user = next((i for i, line in enumerate(lines) if line.role == "user"), n_front - 1)
        who = _digest(*systems, *(name.encode(errors="replace") for name in tools))
        began = _digest(who, *(line.place for line in lines[: user + 1]))
        with self._lock:
            agent = self._agents.find(namespace, who) or _Agent()
            talk = self._talks.find(namespace, began) or _Conversation([], n_front, began)
            change = change_of(talk.lines, lines[:-1]) if talk.lines else None
            if change is None:
                talk.n_front, talk.n_messages = n_front, len(lines) - 1 - n_front
                talk.n_outputs = len(_outputs(lines[:-1]))
            else:
                _learn(agent, talk, change, lines[:-1], messages)
            talk.lines = [*_carried(talk.lines, lines[:-1], change), lines[-1]]
            self._agents.note(namespace, who, agent)
            self._talks.note(namespace, began, talk)
            return _foreseen(agent, talk, began.hex())


def lines_of(messages: Sequence[_Message]) -> list[SeenMessage]:
    """Return what is known of messages, one by one."""
    called: dict[str, bytes] = {}
    return [_line(message, called) for message in messages]


def _line(message: _Message, called: dict[str, bytes]) -> SeenMessage:
    role, text = str(message["role"]), text_of(message)
    body, sizes = _digest(text), (len(text), len(text.splitlines()))
    if role in RESULTS:
        id = str(message.get("tool_call_id") or "")
        call = called.get(id)
        place = _digest(role, "id", id) if id else _digest(role, body)
        return SeenMessage(role, place, body, *sizes, () if call is None else (call,))
    if role != "assistant" or (said := said_of({**message, "content": text})) is None:
        return SeenMessage(role, _digest(role, body), body, *sizes)
    calls = {call.id: _digest(call.name, call.arguments) for call in said.calls}
    called |= calls
    each = [part for call in said.calls for part in (call.id, call.name, call.arguments)]
    place = _digest(role, said.content, *each)
    return SeenMessage(role, place, body, *sizes, tuple(calls.values()), bool(said.reasoning))


def text_of(message: _Message) -> str:
    """Return the text of a message, a chunk in it by its name."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        part["text"] if isinstance(part.get("text"), str) else json.dumps(part, sort_keys=True)
        for part in content
    )


def change_of(before: Sequence[SeenMessage], after: Sequence[SeenMessage]) -> HistoryChange | None:
    """Return what became of ``before``, whose last is an answer; None where that is not there any
    more, or it was rewritten in a way that is no rule here."""
    found = _found(before, after)
    if len(before) - 1 not in found:
        return None
    masked: dict[int, int] = {}
    dropped: set[int] = set()
    notice: int | None = None
    i = j = 0
    for stop, known in enumerate(found):
        if known is None:
            continue
        old, new = range(i, known), range(j, stop)
        i, j = known + 1, stop + 1
        if _stand_for(before, after, old, new):
            masked.update(zip(old, new, strict=True))
        elif old and len(new) <= 1 and not (new and notice is not None):
            dropped.update(old)
            notice = new[0] if new else notice
        elif old or new:
            return None
        if before[known].role in RESULTS and before[known].body != after[stop].body:
            if before[known].edited:
                return None
            masked[known] = stop
    for old_line, new_line in masked.items():
        found[new_line] = old_line
    return HistoryChange(found, masked, frozenset(dropped), notice)


def _found(before: Sequence[SeenMessage], after: Sequence[SeenMessage]) -> list[int | None]:
    """Return of each line after which one it was, in order."""
    where: dict[bytes, list[int]] = {}
    for i, line in enumerate(before):
        where.setdefault(line.place, []).append(i)
    found: list[int | None] = []
    at = 0
    for line in after:
        places = where.get(line.place, [])
        n = bisect_left(places, at)
        found.append(places[n] if n < len(places) else None)
        at = at if n == len(places) else places[n] + 1
    return found


def _stand_for(
    before: Sequence[SeenMessage], after: Sequence[SeenMessage], old: range, new: range
) -> bool:
    """Tell whether each new line stands for an old one."""
    pairs = zip(old, new, strict=False)
    same = all(before[i].role == after[j].role in (*RESULTS, "user") for i, j in pairs)
    return bool(old) and len(old) == len(new) and same


def _carried(
    before: Sequence[SeenMessage], after: Sequence[SeenMessage], change: HistoryChange | None
) -> list[SeenMessage]:
    """Return the lines after, with what is known of those that were edited."""
    masked = {} if change is None else change.masked
    made = []
    found = _found(before, after) if change is None else change.found
    for line, i in zip(after, found, strict=True):
        if i is None or not (i in masked or (before[i].edited and before[i].body == line.body)):
            made.append(line)
            continue
        was = before[i]
        made.append(
            line._replace(n_chars=was.n_chars, n_lines=was.n_lines, calls=was.calls, edited=True)
        )
    return made


def _learn(
    agent: _Agent,
    talk: _Conversation,
    change: HistoryChange,
    after: Sequence[SeenMessage],
    messages: Sequence[_Message],
) -> None:
    """Take in what a request says of the answer and the messages before it."""
    before = talk.lines
    last = change.found.index(len(before) - 1)
    if before[-1].thinks:
        agent.returns = after[last].thinks
    lines = [*before, *after[last + 1 :]]
    masks = {
        Mark.of(after[j].role, text_of(messages[j]), before[i].n_lines, before[i].n_chars)
        for i, j in change.masked.items()
    }
    there, drops = _outputs(lines), change.dropped
    talk.n_outputs += sum(i >= len(before) for i in there)
    talk.n_messages += len(lines) - len(before) + 1
    gone = frozenset(n for n, i in enumerate(there) if i in change.masked)
    if len(masks) <= 1 and len(gone) == len(change.masked):
        standing = _standing(lines, there, talk.n_outputs)
        request = EditEvidence(standing, gone, next(iter(masks), None))
        _note(agent.masks, request, talk, guessed=talk.masks)
    first, teaches = talk.n_kept(before), True
    if drops and (change.notice is not None or talk.n_kept(after) == talk.n_front):
        at = change.notice
        mark = None if at is None else Mark(after[at].role, text_of(messages[at]))
        teaches = mark is None or len(mark.text) <= MOST_MARK
        talk.notice = mark if teaches else None
    if teaches and all(i >= first for i in drops):
        standing = _standing(lines, range(first, len(lines)), talk.n_messages)
        gone = frozenset(i - first for i in drops)
        _note(
            agent.drops,
            EditEvidence(standing, gone, talk.notice if drops else None),
            talk,
            guessed=talk.drops,
        )
    talk.n_edits += bool(change.masked or drops)
    talk.n_outputs *= not change.masked
    talk.n_messages *= not drops


def _note(habit: Habit, request: EditEvidence, talk: _Conversation, *, guessed: bool) -> None:
    if request.mark is None or len(request.mark.text) <= MOST_MARK:
        habit.note(request, (talk.began, talk.n_edits), guessed=guessed)


def _outputs(lines: Sequence[SeenMessage]) -> list[int]:
    """Return where outputs stand whole: results of tools, or where there are none what the user says
    behind the first answer."""
    results = [i for i, line in enumerate(lines) if line.role in RESULTS]
    if not results:
        first = next((i for i, line in enumerate(lines) if line.role == "assistant"), len(lines))
        results = [i for i, line in enumerate(lines) if i > first and line.role == "user"]
    return [i for i in results if not lines[i].edited]


def _standing(
    lines: Sequence[SeenMessage], there: Sequence[int], since: int, n_unknown: int = 0
) -> BeforeEdit:
    """Return what there is, and so many more that nobody knows yet."""
    later: set[bytes] = set()
    again = set()
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i]
        if line.role == "assistant":
            later.update(line.calls)
        elif later.intersection(line.calls):
            again.add(i)
    items = [EditItem(lines[i].n_chars, i in again) for i in there]
    total = sum(line.n_chars for line in lines)
    return BeforeEdit([*items, *[EditItem(None)] * n_unknown], since + n_unknown, total)


def _foreseen(agent: _Agent, talk: _Conversation, began: str) -> Foreseen:
    """Return what the next request is likely to bring."""
    lines, texts = talk.lines, dict[int, str]()
    talk.masks = talk.drops = False
    n_calls = len(lines[-1].calls)
    there = _outputs(lines)
    by_results = any(line.role in RESULTS for line in lines)
    n_new = n_calls or int(not by_results)
    rules: list[EditRule] = []
    if (rule := agent.masks.rule) is not None and len(there) <= MOST_ITEMS:
        gone = rule.gone(_standing(lines, there, talk.n_outputs, n_new))
        mark = rule.mark
        assert mark is not None
        for i in (there[n] for n in gone if n < len(there)):
            texts[i] = mark.filled(lines[i].n_lines, lines[i].n_chars)
        talk.masks = bool(texts)
        rules += [rule] if texts else []
    dropped: frozenset[int] = frozenset()
    notice = None
    if (rule := agent.drops.rule) is not None and not texts:
        first = talk.n_kept(lines)
        standing = _standing(lines, range(first, len(lines)), talk.n_messages + 1, n_calls or 1)
        gone = rule.gone(standing)
        found = frozenset(first + n for n in gone)
        if found and max(found) < len(lines) - 1:
            dropped, talk.drops = found, True
            notice = rule.mark if first == talk.n_front else None
            rules.append(rule)
    return Foreseen(began, agent.returns, texts, dropped, notice, "; ".join(map(str, rules)))


def _place(mark: Mark) -> bytes:
    return _digest(mark.role, _digest(mark.text))


def _digest(*parts: bytes | str) -> bytes:
    made = blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode(errors="replace")
        made.update(len(data).to_bytes(8, "little") + data)
    return made.digest()
