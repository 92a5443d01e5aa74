"""Chains of thought of which every token's needs are known, and controls of equal length without any.

One token a word. A name has three forms (``h7`` heads a line, ``n7`` is mentioned, ``u7`` is gone back to), so
that what follows a word is decided by its form and place. What a family's lines look like:

========= ============================ =================================== ==================================
family    prompt, a line               chain of thought, a line            reads far back
========= ============================ =================================== ==================================
program   ``h5 n2 7``  5 = 2 + 7       ``h5 n2 4 7 n5 1``                  the line; 2's value where it was made
walk      ``h5 3 n9``  an edge         ``h5 3 n9 8``  and the sum so far   the line
search    ``h5 3 n9 u2 n6``            ``h5 3 8 n9`` down, ``u2 5 n6`` up  the line; a parent's sum, on the way up
sum       ``h5 3 9``   two digits      ``h5 3 9 2 1`` digit, carry         the line
verify    as program                   program, then ``n2 4`` for each     values, in the order they were made
list      ``h5 3``                     ``h5 w1 w2 w3 w4``                  nothing: a control
========= ============================ =================================== ==================================

In `search` a line of the prompt has the weight, the first child or ``leaf``, the parent, and the next sibling or
``none``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

PAD, BOS, END, GO = "<pad>", "<bos>", "<end>", "go"
NAMES = 260
FAR = 48  # rows back from which on a need counts as far
WORDS = tuple("so well then it was a day of rain and some light".split())
SPECIALS = (PAD, BOS, END, GO)


@dataclass
class Task:
    """Words, of which those from ``start`` on are the chain of thought.

    ``needs`` [slot of a word of the chain] are the slots that decide it, where one is not in its line: a set, any of
    which will do, for each thing needed. ``phases`` [slot] names what part of the chain a word is of.
    """

    family: str
    words: list[str]
    start: int = 0
    needs: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    phases: dict[int, str] = field(default_factory=dict)

    def say(self, word: str, *needs: tuple[int, ...], phase: str = "step") -> int:
        """Add a word; return its slot."""
        at = len(self.words)
        self.words.append(word)
        if self.start:
            self.phases[at] = phase
        if needs:
            self.needs[at] = list(needs)
        return at

    def milestones(self, far: int = FAR) -> dict[int, int]:
        """Return the slots of the chain that a word ``far`` rows or more behind needs, and how often."""
        found: dict[int, int] = {}
        for at, needs in self.needs.items():
            for slots in needs:
                first = min(slots)  # where it was made; others say it again
                if self.start <= first <= at - far:
                    found[first] = found.get(first, 0) + 1
        return found


def vocabulary() -> list[str]:
    """Return every word, the special ones first."""
    forms = [f"{form}{i}" for form in "hnu" for i in range(NAMES)]
    families = [f"<{name}>" for name in FAMILIES]
    return [*SPECIALS, *families, *map(str, range(10)), "leaf", "none", "check", *WORDS, *forms]


def names(rng: random.Random, n: int) -> list[int]:
    """Return ``n`` names in a row, round the end."""
    first = rng.randrange(NAMES)
    return [(first + i) % NAMES for i in range(n)]


def opened(family: str) -> Task:
    """Return a task that has said its family."""
    return Task(family, [BOS, f"<{family}>"])


def begin(task: Task) -> None:
    """The prompt is over."""
    task.say(GO)
    task.start = len(task.words)


def program(rng: random.Random, n: int, family: str = "program") -> Task:
    """``n`` variables: each the sum of an earlier one and a digit, modulo ten."""
    task, order = opened(family), names(rng, n)
    lines: list[tuple[int, int | None, int]] = []
    rows: dict[int, tuple[int, int, int]] = {}
    for i, name in enumerate(order):
        # half of them go on with what is new, half take up anything
        of = (
            None
            if i == 0 or rng.random() < 0.1
            else i - 1
            if rng.random() < 0.4
            else rng.randrange(i)
        )
        digit = rng.randrange(10)
        lines.append((name, of, digit))
        rows[i] = (
            task.say(f"h{name}"),
            task.say("none" if of is None else f"n{order[of]}"),
            task.say(str(digit)),
        )
    begin(task)
    values: list[int] = []
    said: list[list[int]] = []  # where each value was made, and said again
    for i, (name, of, digit) in enumerate(lines):
        task.say(f"h{name}")
        task.say("none" if of is None else f"n{order[of]}", (rows[i][1],))
        value = 0 if of is None else values[of]
        where = task.say(str(value), *(() if of is None else (tuple(said[of]),)))
        if of is not None:
            said[of].append(where)
        task.say(str(digit), (rows[i][2],))
        task.say(f"n{name}")
        values.append((value + digit) % 10)
        said.append([task.say(str(values[-1]))])
    if family == "verify":
        task.say("check", phase="check")
        for i, name in enumerate(order):
            task.say(f"n{name}", phase="check")
            task.say(str(values[i]), tuple(said[i]), phase="check")
    task.say(END)
    return task


def verify(rng: random.Random, n: int) -> Task:
    """A program, then all of its values again."""
    return program(rng, n, "verify")


def walk(rng: random.Random, n: int) -> Task:
    """``n`` edges of a path, shuffled in the prompt; the chain follows them and adds up."""
    task = opened("walk")
    path = rng.sample(range(NAMES), min(n + 1, NAMES))
    weights = [rng.randrange(10) for _ in path[1:]]
    rows: dict[int, tuple[int, int]] = {}
    for i in rng.sample(range(len(weights)), len(weights)):
        task.say(f"h{path[i]}")
        rows[i] = task.say(str(weights[i])), task.say(f"n{path[i + 1]}")
    task.say(f"n{path[0]}")
    begin(task)
    total = 0
    for i, weight in enumerate(weights):
        total = (total + weight) % 10
        task.say(f"h{path[i]}")
        task.say(str(weight), (rows[i][0],))
        task.say(f"n{path[i + 1]}", (rows[i][1],))
        task.say(str(total))
    task.say(END)
    return task


def search(rng: random.Random, n: int) -> Task:
    """A tree of ``n`` nodes, depth first: sums on the way down, taken up again on the way back."""
    task = opened("search")
    order = rng.sample(range(NAMES), min(n, NAMES))
    children: dict[int, list[int]] = {name: [] for name in order}
    parent: dict[int, int] = {}
    room = [order[0]]
    for name in order[1:]:
        above = room[-1] if rng.random() < 0.4 else rng.choice(room)
        children[above].append(name)
        parent[name] = above
        if len(children[above]) == 3:
            room.remove(above)
        room.append(name)
    weights = {name: rng.randrange(10) for name in order}
    rows: dict[int, tuple[int, ...]] = {}
    after: dict[int, str] = {}
    for above in order:
        for i, name in enumerate(children[above]):
            after[name] = f"n{children[above][i + 1]}" if i + 1 < len(children[above]) else "none"
    for name in rng.sample(order, len(order)):
        task.say(f"h{name}")
        rows[name] = (
            task.say(str(weights[name])),
            task.say(f"n{children[name][0]}" if children[name] else "leaf"),
            task.say(f"u{parent[name]}" if name in parent else "none"),
            task.say(after.get(name, "none")),
        )
    task.say(f"n{order[0]}")
    begin(task)
    sums: dict[int, int] = {}
    said: dict[int, list[int]] = {}

    def down(name: int) -> None:
        task.say(f"h{name}", phase="down")
        task.say(str(weights[name]), (rows[name][0],), phase="down")
        sums[name] = (sums.get(parent.get(name, -1), 0) + weights[name]) % 10
        said[name] = [task.say(str(sums[name]), phase="down")]
        task.say(
            f"n{children[name][0]}" if children[name] else "leaf", (rows[name][1],), phase="down"
        )

    stack = [order[0]]
    down(order[0])
    while stack:
        name = stack[-1]
        left = [c for c in children[name] if c not in sums]
        if left:
            stack.append(left[0])
            down(left[0])
            continue
        stack.pop()
        above = parent.get(name)
        if above is None:
            task.say("none", (rows[name][2],), phase="up")
            break
        task.say(f"u{above}", (rows[name][2],), phase="up")
        said[above].append(task.say(str(sums[above]), tuple(said[above]), phase="up"))
        task.say(after[name], (rows[name][3],), phase="up")
    task.say(END)
    return task


def long_sum(rng: random.Random, n: int) -> Task:
    """Two numbers of ``n`` digits, added with the carry written down."""
    task, order = opened("sum"), names(rng, n)
    digits = [(rng.randrange(10), rng.randrange(10)) for _ in order]
    rows = []
    for name, (a, b) in zip(order, digits, strict=True):
        task.say(f"h{name}")
        rows.append((task.say(str(a)), task.say(str(b))))
    begin(task)
    carry = 0
    for name, (a, b), row in zip(order, digits, rows, strict=True):
        total = a + b + carry
        carry = total // 10
        task.say(f"h{name}")
        task.say(str(a), (row[0],))
        task.say(str(b), (row[1],))
        task.say(str(total % 10))
        task.say(str(carry))
    task.say(END)
    return task


def listing(rng: random.Random, n: int) -> Task:
    """A control: lines that follow from the line before, whatever stands further back."""
    task, order = opened("list"), names(rng, n)
    first = rng.randrange(len(WORDS))
    for name in order:
        task.say(f"h{name}")
        task.say(str(rng.randrange(10)))
    task.say(WORDS[first])
    begin(task)
    for i, name in enumerate(order):
        task.say(f"h{name}")
        for k in range(4):
            task.say(WORDS[(first + 4 * i + k) % len(WORDS)])
    task.say(END)
    return task


FAMILIES: dict[str, Callable[[random.Random, int], Task]] = {
    "program": program,
    "walk": walk,
    "search": search,
    "sum": long_sum,
    "verify": verify,
    "list": listing,
}
LINE = {"program": 6, "walk": 4, "search": 7, "sum": 5, "verify": 8, "list": 5}  # words of a line


def make(family: str, n_words: int, seed: str) -> Task:
    """Return a task of a chain of about ``n_words`` (a name is used once, so some end sooner)."""
    n = max(3, min(round(n_words / LINE[family]), NAMES))
    return FAMILIES[family](random.Random(f"{family}/{seed}"), n)
