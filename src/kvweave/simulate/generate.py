"""Seeded traces of conversations whose application declares prunes and ends of sessions.

Sessions come as a Poisson process. Each has one of a few system prompts, and turns at random intervals.
A turn adds a user chunk, sometimes a shared document, and is answered with thinking and an answer,
which are stored when they are done. Thinking is declared dropped when the next turn comes without it,
and the oldest turn is when the conversation is over its limit. A part of what was dropped is put into
a later turn again: the application regrets. Most sessions say when they end, some time after their
last turn; the others just stop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kvweave.simulate.times import Shaped, Zipf, draw_time
from kvweave.simulate.trace import Made, Request, Trace

DECODE = 0.02  # seconds a token of an answer is taken to last, until the pause begins


@dataclass(frozen=True)
class Shape:
    """What a generated trace is like. Times in seconds, sizes in tokens."""

    sessions: int = 400
    arrival: float = 12.0  # mean time between sessions
    turns: int = 8  # mean turns of a session
    pause: float = 60.0  # mean time between turns
    pauses: Shaped = "exponential"
    most_turns: int = 12  # kept in the prompt; older ones are pruned
    systems: int = 4
    documents: int = 300
    zipf: float = 0.8  # exponent of both: .64 to .83 on the web (Breslau et al., INFOCOM'99)
    declares: float = 0.8  # the part of the sessions that say when they end
    lingers: float = 30.0  # mean time from the last turn until then
    regret: float = 0.02  # the part of what is pruned before the last turn that is asked for again


DEFAULT = Shape()


@dataclass
class _Chunks:
    """Hands out ids, with the size and kind of each."""

    sizes: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def new(self, kind: str, size: float) -> int:
        """Return the id of a new chunk."""
        self.sizes.append(max(1, int(size)))
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def made(self, id: int) -> Made:
        """Return what is known of a chunk."""
        return Made(id, self.sizes[id], self.kinds[id])


@dataclass(frozen=True)
class _World:
    """What all sessions share."""

    shape: Shape
    rng: Random
    chunks: _Chunks
    systems: tuple[list[int], Zipf]
    documents: tuple[list[int], Zipf]

    def pick(self, what: tuple[list[int], Zipf]) -> int:
        """Return one of them, by popularity."""
        return what[0][what[1].draw(self.rng)]


def generate(shape: Shape = DEFAULT, seed: int = 0) -> Trace:
    """Return a trace; equal arguments give equal traces."""
    rng = Random(seed)
    chunks = _Chunks()
    systems = [chunks.new("system", rng.randint(300, 1500)) for _ in range(shape.systems)]
    documents = [chunks.new("document", rng.randint(200, 2000)) for _ in range(shape.documents)]
    world = _World(
        shape, rng, chunks,
        (systems, Zipf(shape.systems, shape.zipf)), (documents, Zipf(shape.documents, shape.zipf)),
    )  # fmt: skip
    requests: list[Request] = []
    time = 0.0
    for number in range(shape.sessions):
        time += draw_time(rng, shape.arrival)
        requests += _session(world, f"s{number}", time)
    requests.sort(key=lambda request: request.time)
    return Trace(requests, 0)


def _session(world: _World, name: str, time: float) -> list[Request]:
    shape, rng, chunks = world.shape, world.rng, world.chunks
    requests: list[Request] = []
    system, turns = world.pick(world.systems), list[list[int]]()
    n_turns = 1 + int(draw_time(rng, shape.turns))
    again: dict[int, list[int]] = {}  # pruned chunks by the turn that asks for them again
    thought: list[int] = []
    for number in range(n_turns):
        turn = [*again.pop(number, ())]
        if rng.random() < 0.4:
            turn.append(world.pick(world.documents))
        turn.append(chunks.new("user", 10 + draw_time(rng, 120)))
        pruned = thought
        turns.append(turn)
        if len(turns) > shape.most_turns:
            pruned = pruned + [id for id in turns.pop(0) if chunks.kinds[id] != "document"]
        blocks = tuple(dict.fromkeys([system, *(id for each in turns for id in each)]))
        pruned = [id for id in pruned if id not in blocks]
        for id in pruned if number < n_turns - 1 else ():
            if rng.random() < shape.regret:
                again.setdefault(rng.randint(number + 1, n_turns - 1), []).append(id)
        thought = [chunks.new("thinking", 50 + draw_time(rng, 600))]
        answer = chunks.new("assistant", 20 + draw_time(rng, 250))
        made = tuple(chunks.made(id) for id in (*thought, answer))
        about = [chunks.made(id) for id in blocks]
        n_output = sum(each.size for each in made)
        requests.append(
            Request(
                time, n_output, blocks, tuple(each.size for each in about),
                tuple(each.kind for each in about), name, tuple(pruned), made=made,
            )
        )  # fmt: skip
        turn.append(answer)
        time += n_output * DECODE + draw_time(rng, shape.pause, shape.pauses)
    if rng.random() < shape.declares:
        end = time + draw_time(rng, shape.lingers)
        requests.append(Request(end, 0, (), (), (), name, ended=True))
    return requests


def asked_again(trace: Trace) -> float:
    """Return the part of the declared prunes whose chunk is used by a later request."""
    waiting: dict[int, int] = {}
    n_pruned, n_again = 0, 0
    for request in trace.requests:
        for id in request.blocks:
            n_again += waiting.pop(id, 0)
        for id in request.pruned:
            waiting[id] = waiting.get(id, 0) + 1
            n_pruned += 1
    return n_again / n_pruned if n_pruned else 0.0
