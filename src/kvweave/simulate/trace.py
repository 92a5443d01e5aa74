"""Traces of requests: Mooncake's format, Bailian's, and the first with declarations added.

A file has a JSON object a line. Both formats have ``timestamp``, ``input_length``,
``output_length`` (tokens) and ``hash_ids`` (one per block; equal ids are equal content).

::

    Mooncake   timestamp in ms, blocks of 512 tokens
    Bailian    timestamp in s, blocks of 16; chat_id, parent_chat_id (-1: none), type, turn
    ours       as Mooncake's, and of these what is known: session; kinds and sizes (tokens), one
               per block; made ([id, tokens, kind] of each chunk the answer becomes, stored when
               it is done); pruned (ids declared dropped after this request); ended (true: the session
               is over after it). A line with declarations only has no hash_ids.

The ids of the two published formats are *prefix-chained*: a hash of the block and all before it. Equal
content behind another beginning has another id, so such traces say nothing about chunks that are used
at any position; `Trace.chained` tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvweave.chunk.rebuild import replacing
from kvweave.errors import InvalidArgument

MOONCAKE, BAILIAN = 512, 16  # tokens of a block


class Made(NamedTuple):
    """A chunk that an answer becomes."""

    id: int
    size: int  # tokens
    kind: str


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as blocks, what its answer becomes, and what was declared after it."""

    time: float  # seconds
    n_output: int
    blocks: tuple[int, ...]
    sizes: tuple[int, ...]  # tokens of the prompt in each block
    kinds: tuple[str, ...]
    session: str = ""
    pruned: tuple[int, ...] = ()
    ended: bool = False
    made: tuple[Made, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Requests in order of time."""

    requests: list[Request]
    block: int
    """Tokens a block takes memory for; 0: as many as it has."""

    def held_tokens(self, size: int) -> int:
        """Return for how many tokens a block with ``size`` of them takes memory."""
        return self.block or size

    def unique_tokens(self) -> int:
        """Return for how many tokens all different blocks take memory."""
        sizes = {id: n for r in self.requests for id, n in zip(r.blocks, r.sizes, strict=True)}
        sizes |= {made.id: made.size for r in self.requests for made in r.made}
        return sum(map(self.held_tokens, sizes.values()))

    @cached_property
    def chained(self) -> bool:
        """Whether no block is ever used behind another predecessor: prefixes are all that is shared."""
        before: dict[int, int] = {}
        for request in self.requests:
            ids = (*request.blocks, *(made.id for made in request.made))
            for last, id in zip((-1, *ids), ids, strict=False):
                if before.setdefault(id, last) != last:
                    return False
        return True


def prefix_chained(trace: Trace) -> Trace:
    """Return the trace as a prefix cache sees it: a block behind other blocks is another block.

    An answer's chunks stand behind its prompt and one another: what is used behind another prompt, or
    without the thinking before it, is not they. Nobody can prune the inside of a prefix.
    """
    if trace.chained:
        return trace
    known: dict[tuple[int, int], int] = {}

    def chain(ids: Iterable[int]) -> tuple[int, ...]:
        found, last = [], -1
        for id in ids:
            last = known.setdefault((last, id), len(known))
            found.append(last)
        return tuple(found)

    requests = []
    for request in trace.requests:
        keys = chain([*request.blocks, *(made.id for made in request.made)])
        n = len(request.blocks)
        made = tuple(m._replace(id=key) for m, key in zip(request.made, keys[n:], strict=True))
        requests.append(replace(request, blocks=keys[:n], made=made, pruned=()))
    return Trace(requests, trace.block)


def read(path: str | Path) -> Trace:
    """Return the trace in a file. Raises InvalidArgument, which names the line, and OSError."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        return parse(lines)


def parse(lines: Iterable[str]) -> Trace:
    """Return the trace in lines. Raises InvalidArgument, which names the line."""
    requests: list[Request] = []
    roots: dict[int, str] = {}
    bailian, sized = False, False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            bailian = bailian or "chat_id" in row
            sized = sized or "sizes" in row
            requests.append(_request(row, roots))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            hint = "a trace has a JSON object a line, in Mooncake's or Bailian's format"
            raise InvalidArgument("trace", f"line {number}: {what}", hint) from error
    if not any(request.blocks for request in requests):
        raise InvalidArgument("trace", "there is no request in it", "give a JSONL trace")
    requests.sort(key=lambda request: request.time)
    return Trace(requests, 0 if sized else BAILIAN if bailian else MOONCAKE)


def _request(row: dict[str, Any], roots: dict[int, str]) -> Request:
    blocks = tuple(int(id) for id in row["hash_ids"])
    n_input, n_output = int(row["input_length"]), int(row["output_length"])
    time = float(row["timestamp"])
    if n_input < 0 or n_output < 0 or not 0 <= time < float("inf"):
        raise ValueError("a length or a time is negative")
    if "chat_id" in row:
        chat, parent = int(row["chat_id"]), int(row["parent_chat_id"])
        session = roots[chat] = roots.get(parent, str(chat))
        kinds = (str(row.get("type", "")),) * len(blocks)
        return Request(time, n_output, blocks, _cut(n_input, blocks, BAILIAN), kinds, session)
    sizes = tuple(int(n) for n in row.get("sizes", _cut(n_input, blocks, MOONCAKE)))
    kinds = tuple(str(kind) for kind in row.get("kinds", ("",) * len(blocks)))
    if not len(sizes) == len(kinds) == len(blocks) or min(sizes, default=1) < 1:
        raise ValueError("sizes, kinds and hash_ids do not match")
    made = tuple(Made(int(id), int(n), str(kind)) for id, n, kind in row.get("made", ()))
    if any(each.size < 1 for each in made):
        raise ValueError("an answer's chunk has no tokens")
    return Request(
        time / 1000, n_output, blocks, sizes, kinds,
        str(row.get("session", "")), tuple(int(id) for id in row.get("pruned", ())),
        row.get("ended", False) is True, made,
    )  # fmt: skip


def _cut(n_input: int, blocks: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return tokens per block: all full but the last."""
    if not blocks:
        return ()
    last = min(max(1, n_input - block * (len(blocks) - 1)), block)
    return (block,) * (len(blocks) - 1) + (last,)


def write(trace: Trace, path: str | Path) -> None:
    """Write a trace in Mooncake's format with declarations.

    ``read`` returns an equal one, but for the memory of blocks that are not full: of other than 512
    tokens, they then take as much as they have.
    """
    with replacing(Path(path)) as new, new.open("w", encoding="utf-8") as file:
        for row in rows(trace):
            file.write(json.dumps(row) + "\n")


def rows(trace: Trace) -> Iterator[dict[str, object]]:
    """Yield what stands in the lines of a file."""
    for request in trace.requests:
        row: dict[str, object] = {
            "timestamp": round(request.time * 1000),
            "input_length": sum(request.sizes),
            "output_length": request.n_output,
            "hash_ids": list(request.blocks),
        }
        if trace.block != MOONCAKE:
            row["sizes"] = list(request.sizes)
        if any(request.kinds):
            row["kinds"] = list(request.kinds)
        if request.session:
            row["session"] = request.session
        if request.made:
            row["made"] = [list(made) for made in request.made]
        if request.pruned:
            row["pruned"] = list(request.pruned)
        if request.ended:
            row["ended"] = True
        yield row
