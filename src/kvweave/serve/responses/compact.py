"""Summaries that stand for items, and what becomes of a list of items that has them.

::

    items      [u0][a0][call][result][u1][a1][u2][compaction][a2]     all that was said
    given      [u0][u1][compaction][u2][a2]                           messages of users stay
    taken back [u0][a0][call][result][u1][a1][u2][a2]                 as if it had not been
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvweave.errors import WeaveError
from kvweave.serve.chat.ask import ChatAsk
from kvweave.serve.chat.asked import Asked
from kvweave.serve.chat.count import chat_tokens
from kvweave.serve.chat.sealed import seal, unseal
from kvweave.serve.chat.summary import fewest, summary_room, write_summary
from kvweave.serve.responses.items import ResponseItem, digest, messages_of, new_id
from kvweave.serve.responses.records import Compaction
from kvweave.serve.responses.schemas import ResponsesRequest
from kvweave.serve.responses.settings import SETTINGS
from kvweave.serve.state import ServerState

ASK = (
    "Write a summary of this conversation for yourself: it will stand in the place of your answers "
    "and of the results of tools. Keep what was asked, what was decided and why, names, numbers, "
    "paths, what is done and what is left to do. Write only the summary."
)


@dataclass(frozen=True, slots=True)
class Conversed:
    """Who asks, and what is asked besides the messages."""

    state: ServerState
    tenant: str
    body: ResponsesRequest

    def asking(self, items: Sequence[ResponseItem]) -> ChatAsk:
        """Return what is asked of these items. Raises InvalidArgument."""
        ask = self.body.ask(self.state.renderer.template, items)
        return replace(ask, messages=messages_of(self.body.instructions, items))

    async def count(self, items: Sequence[ResponseItem]) -> int:
        """Return the tokens of the prompt; where that is too long, at least so many."""
        ask = self.asking(items)
        return await self.state.call(
            self.tenant, lambda engine: chat_tokens(self.state, self.tenant, ask)
        )

    async def fit(
        self, items: Sequence[ResponseItem], room: int
    ) -> tuple[list[ResponseItem], list[ResponseItem]]:
        """Return what is left when the oldest items go until the prompt has ``room`` tokens, and
        those that went. System messages and the last exchange stay."""
        if not items or await self.count(items) <= room:
            return list(items), []
        groups = _groups(items)

        async def fits(n: int) -> bool:
            return await self.count(_without(items, groups[:n])[0]) <= room

        n = await fewest(len(groups) - 1, fits)
        return _without(items, groups[:n] if len(groups) > 1 else [])


def given(items: Sequence[ResponseItem], known: Mapping[str, Compaction]) -> list[ResponseItem]:
    """Return what the model is given of items: summaries in the place of what they stand for.

    What one that was taken back stands for may have others, taken back or not.
    """
    originals: dict[str, _Restored] = {}
    waiting = _undone(items, known)
    while waiting:  # a summary stands for older ones only: this comes to an end
        record = waiting[-1]
        inner = [each for each in _undone(record.items, known) if each.id not in originals]
        if inner:
            waiting += inner
        else:
            originals[waiting.pop().id] = _Restored(record, _shown(record.items, originals))
    return _shown(items, originals)


def _undone(items: Sequence[ResponseItem], known: Mapping[str, Compaction]) -> list[Compaction]:
    found = (known.get(item["id"]) for item in items if item["type"] == "compaction")
    return [each for each in found if each is not None and each.undone and each.of == "items"]


def _shown(items: Sequence[ResponseItem], originals: Mapping[str, _Restored]) -> list[ResponseItem]:
    """Return items as they are given; ``originals``: what those taken back stand for, by their id."""
    made, restored = _Shown(), set()
    behind: list[str] = []  # what comes now and was restored already
    for item in items:
        if behind and digest(item) == behind[0]:
            del behind[0]
            continue
        behind = []
        if item["type"] != "compaction":
            made.put(item)
        elif item["id"] not in originals:
            made.cover(item)
        elif item["id"] not in restored:
            restored.add(item["id"])
            behind = originals[item["id"]].behind(made)
            made.restore(originals[item["id"]].items)
    return [item for item in made.slots if item is not None]


@dataclass(slots=True)
class _Restored:
    """What a compaction stands for."""

    record: Compaction
    items: list[ResponseItem]  # summaries among them given or taken back too

    def behind(self, made: _Shown) -> list[str]:
        """Return what follows where a client sends what a summary leaves, and not all there was:
        the messages behind the last one that is covered."""
        covered = {id(item) for item in self.record.covered}
        left = [digest(item) for item in self.record.items if id(item) not in covered]
        have = Counter(digest(item) for item in made.slots if item is not None)
        places = [i for i, item in enumerate(self.record.items) if id(item) in covered]
        if not places or Counter(left) <= have:
            return []
        return [digest(item) for item in self.record.items[places[-1] + 1 :]]


class _Shown:
    """Items in order, while summaries come in the place of some."""

    def __init__(self) -> None:
        self.slots: list[ResponseItem | None] = []
        self._at: defaultdict[str, deque[int]] = defaultdict(deque)  # places by what is said there

    def put(self, item: ResponseItem) -> None:
        """Add an item at the end."""
        self._at[digest(item)].append(len(self.slots))
        self.slots.append(item)

    def cover(self, compaction: ResponseItem) -> None:
        """Put a compaction in the place of the last item that it covers, and take all these out."""
        covers = unseal(compaction["encrypted_content"]).get("covers") or ()
        places = [self._at[key].popleft() for key in covers if self._at.get(key)]
        if not places:
            self.put(compaction)
            return
        for place in places:
            self.slots[place] = None
        self.slots[max(places)] = compaction
        self._at[digest(compaction)].append(max(places))

    def restore(self, originals: Sequence[ResponseItem]) -> None:
        """Put in what there was before a compaction, where the first of it is."""
        known = {digest(item) for item in originals}
        now = [item for item in self.slots if item is not None]
        first = next((i for i, item in enumerate(now) if digest(item) in known), len(now))
        behind = [item for item in now[first:] if digest(item) not in known]
        self.__init__()  # type: ignore[misc]
        for item in (*now[:first], *originals, *behind):
            self.put(item)


def to_cover(items: Sequence[ResponseItem], *, answered: bool) -> list[ResponseItem]:
    """Return the items that a summary is to stand for: all but the messages of users and operators,
    and what says how to answer.

    ``answered``: those that the next answer is about stay too.
    """
    n = len(items)
    while n and items[n - 1]["type"] in SETTINGS:
        n -= 1
    if answered and n and items[n - 1]["type"].endswith("_output"):
        while n and items[n - 1]["type"].endswith("_output"):
            n -= 1
        while n and (items[n - 1]["type"] in ("function_call", "custom_tool_call", "reasoning")):
            n -= 1
    return [item for item in items[:n] if not _stays(item)]


def _stays(item: ResponseItem) -> bool:
    kind = item["type"]
    return kind in SETTINGS or (kind == "message" and item["role"] != "assistant")


async def compact(
    who: Conversed, items: Sequence[ResponseItem], *, answered: bool
) -> tuple[ResponseItem, Compaction, Asked]:
    """Have the model write a summary. Raises WeaveError where it writes none, or none is needed."""
    covered = to_cover(items, answered=answered)
    if not covered:
        raise WeaveError("there is nothing to make a summary of", hint="send more of it")
    question: ResponseItem = {"type": "message", "id": "", "role": "user"}
    question["content"] = [{"type": "input_text", "text": ASK}]
    room = who.state.longest - summary_room(who.state)
    shown, _ = await who.fit([*items, question], room)
    n_before = await who.count(items)
    summary = await write_summary(who.state, who.tenant, who.asking(shown))
    if not summary.text:
        raise WeaveError("the model wrote no summary", hint="ask again, or send the items")
    id = new_id("compaction")
    told = {"summary": summary.text, "covers": [digest(item) for item in covered]}
    item: ResponseItem = {"type": "compaction", "id": id, "encrypted_content": seal(told)}
    n_after = await who.count(_shown([*items, item], {}))
    record = Compaction(
        id, summary.text, tuple(items), tuple(covered), int(time.time()), n_before, n_after,
        summary.n_tokens,
    )  # fmt: skip
    return item, record, summary.asked


def _groups(items: Sequence[ResponseItem]) -> list[list[int]]:
    """Return what goes together, oldest first: a call and its results; no system messages."""
    groups: list[list[int]] = []
    of_call: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        kind = item["type"]
        if kind in SETTINGS or (kind == "message" and item["role"] in ("system", "developer")):
            continue
        group = of_call.get(item["call_id"]) if kind.endswith("_output") else None
        goes_on = groups and kind in ("function_call", "custom_tool_call", "message")
        if group is None and goes_on and items[i - 1]["type"] in ("reasoning", "function_call"):
            group = groups[-1] if kind != "message" or item["role"] == "assistant" else None
        if group is None:
            group = []
            groups.append(group)
        group.append(i)
        if kind in ("function_call", "custom_tool_call"):
            of_call[item["call_id"]] = group
    return groups


def _without(
    items: Sequence[ResponseItem], groups: Sequence[Sequence[int]]
) -> tuple[list[ResponseItem], list[ResponseItem]]:
    gone = {i for group in groups for i in group}
    left = [item for i, item in enumerate(items) if i not in gone]
    return left, [item for i, item in enumerate(items) if i in gone]
