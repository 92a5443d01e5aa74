"""Which items a question looks at: their KV is woven behind one another, and the model reads."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.chunk.identity import ChunkId
from kvweave.engine import Engine
from kvweave.memory.beside import beside
from kvweave.run.base import Ints, Steps
from kvweave.run.loop import Task
from kvweave.weave.context import Context
from kvweave.weave.passes import Floats, Passes
from kvweave.weave.repair import Strategy, Verdict, View, Wish

DRAFT = 2  # tokens of a reply that look too: the one in front of a value looks it up


class Watched(Strategy):
    """Repairs nothing, and keeps what the question looked at: squared attention [slot]."""

    name = "watched"
    draft = DRAFT

    def __init__(self) -> None:
        self.mass: Floats | None = None
        self.spans: dict[int, tuple[int, int]] = {}  # slots of each part by its uid

    def choose(self, view: View) -> Ints:
        """Return no slots."""
        return view.candidates[:0]

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        """Look, and leave the rows as they are."""
        self.spans = {p.part.uid: p.slots for p in passes.placed}
        if len(passes.unready):
            self.mass = (yield from passes.look(DRAFT)).mass
        return Verdict(passes.early)


def attending(
    engine: Engine, context: Context, ids: Sequence[ChunkId], question: Sequence[int]
) -> Task[list[float]]:
    """Return for each chunk the most that one of its rows gets of the question's attention, as a
    share of what all get, as a task of the loop. Costs a pass of the question over these chunks,
    and their canonical KV where it is missing."""
    if not ids:
        return []
    watched, base = Watched(), context.snapshot().base
    header = engine.maker.tokens(engine.maker.chat.header()) if engine.runner.tokenizer else []
    with beside(engine, context, "looking", repair="none", share=0.0) as looking:
        with looking.edit():
            parts = [looking.append_chunk(f"#{id}") for id in ids]
            looking.append([*question, *header])
        for id in ids if base is None else (base, *ids):  # held by now
            yield from engine.maker.computing(id, context.namespace)
        yield from looking.weaving(watched)
        if watched.mass is None:
            return [0.0] * len(ids)
        spans = [watched.spans[part.uid] for part in parts]
        found = [float(watched.mass[start:stop].max()) for start, stop in spans]
    total = sum(found)
    return [score / total if total else 0.0 for score in found]
