"""Let pages go in the middle of a decode, and see what becomes of the rest (KU5: the cascade).

::

    slot    0 ... prompt ... | step 0  1  2 ... step-1 | step  step+1 ...
            candidates: whole pages, but the sink and  ^ the newest two
                                     pages go here     | rows from here on do not see them

All that is said is compared with the same decode without eviction, greedy from the same row on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import ContextTooLong, InvalidArgument, nearest
from kvweave.probe.classes import APART, CLASSES, EvictionCase, Orders, going, most
from kvweave.probe.recorder import PageRecorder, Probed, Progress, Recording, prefill, tokens_of
from kvweave.probe.trace import PageTrace
from kvweave.run.base import Backend, Ints, Rows, Work

NONE = "none"  # the class of no page: the control
PLACES = ("decoded", "all")
PIECE = 64  # rows of a forced pass: each brings logits of the whole vocabulary for every class


@dataclass(frozen=True, slots=True)
class Eviction:
    """When and how much goes: at the share ``at`` of the recorded steps the ``share`` of the pages that
    may go. These are whole pages of decoded tokens (``where="all"``: of the prompt's too) that are neither
    the sink page nor among the newest two. ``tokens`` are decoded behind; None: as many as are recorded.

    Raises InvalidArgument.
    """

    at: float = 0.5
    share: float = 0.2
    tokens: int | None = None
    where: str = "decoded"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.at < 1:
            raise InvalidArgument("at", f"{self.at} is not between 0 and 1")
        if not 0 < self.share <= 1:
            raise InvalidArgument("share", f"{self.share} is not over 0 and at most 1")
        if self.tokens is not None and self.tokens < 1:
            raise InvalidArgument("tokens", f"{self.tokens} is less than 1")
        if self.where not in PLACES:
            raise InvalidArgument("where", f"no {self.where!r}", f"one of {', '.join(PLACES)}")
        if self.seed < 0:
            raise InvalidArgument("seed", f"{self.seed} is less than 0")


@dataclass(frozen=True, slots=True)
class Ablated:
    """What became of the rest when a class of pages had gone."""

    name: str
    pages: tuple[tuple[int, ...], ...]  # that went, by head of the trace
    n_bytes: int  # freed, as rows count them
    forced: float  # share of tokens that are first, each behind the reference up to it
    kl: float  # of these next-token distributions from the reference's: mean, nats
    free: float  # share of the reference's tokens that its own greedy decode says at their place
    first_wrong: int | None  # the first that it does not: 0 is the first that saw the eviction
    said: tuple[int, ...]  # its own greedy decode

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, JSON-ready; of pages how many, by head."""
        return {
            "class": self.name,
            "pages": [len(own) for own in self.pages],
            "bytes": self.n_bytes,
            "forced": self.forced,
            "kl": self.kl,
            "free": self.free,
            "first_wrong": self.first_wrong,
            "tokens": list(self.said),
        }


@dataclass(frozen=True, slots=True)
class Ablation:
    """Classes of pages at equal bytes. ``step`` is the first that does not see what went."""

    step: int
    candidates: int  # pages a head that may go
    wanted: int  # pages a head that the share is
    pages: int  # pages a head that went: fewer where a class has no more
    reference: tuple[int, ...]  # greedy, nothing gone, up to an end token
    control: float  # share of the recorded tokens that the reference says at their place
    results: tuple[Ablated, ...]  # the control is first
    skipped: Mapping[str, str]  # classes that this trace does not give, and why

    def __getitem__(self, name: str) -> Ablated:
        return next(found for found in self.results if found.name == name)

    def as_json(self) -> dict[str, Any]:
        """Return it, JSON-ready."""
        return {
            "step": self.step,
            "candidates": self.candidates,
            "pages_wanted": self.wanted,
            "pages": self.pages,
            "tokens": len(self.reference),
            "control": self.control,
            "skipped": dict(self.skipped),
            "results": [found.as_json() for found in self.results],
        }


@dataclass(frozen=True, slots=True)
class _Decode:
    """The recorded decode that is taken up again."""

    before: Ints  # tokens whose rows are there when pages go
    first: int  # the token whose row is the first behind
    n: int  # tokens to say
    ends: frozenset[int]


@torch.inference_mode()
def ablate(
    engine: Probed,
    trace: PageTrace,
    classes: Sequence[str] | None = None,
    how: Eviction | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """Take up a recorded decode, let pages of each class go, and decode on, greedily.

    ``classes`` are some of `CLASSES`, by default all that the trace gives; `none` is always there. Every
    class frees the same bytes: as many pages a head in each layer (`probe/classes.py`). Takes the memory
    of one context a class. ``progress`` is told of each token. Raises InvalidArgument (another model, a
    trace that cannot be taken up, too few steps or pages, a class that it does not give, a model whose
    rows cannot go), ContextTooLong, CannotRun; all before anything is computed.
    """
    backend, how = engine.runner, how or Eviction()
    if any(info.mixer is not None for info in backend.layers):
        reason = "it keeps states, which have seen every row and let go of none"
        raise InvalidArgument("model", reason, "one of attention alone")
    prompt = prompt_of(backend, trace)
    step = round(how.at * trace.n_steps)
    if not 0 < step < trace.n_steps:
        reason = f"{how.at:g} of {trace.n_steps} steps leaves none on one side"
        raise InvalidArgument("at", reason, "decode more, or nearer the middle")
    said: list[int] = trace.notes["tokens"]
    n = how.tokens or trace.n_steps - step
    before = np.concatenate((prompt, np.array(said[:step], np.int64)))
    if len(before) + n > backend.limit:
        raise ContextTooLong(len(before) + n, backend.limit)
    pages = _candidates(trace, len(before), how)
    case = EvictionCase(trace, step, pages, _groups(backend, trace), how.seed)
    orders, skipped = _orders(case, classes)
    wanted = max(1, round(how.share * len(pages)))
    n_pages = min([wanted, *(most(order, case.groups) for order in orders.values())])
    gone = {name: going(order, case.groups, n_pages) for name, order in orders.items()}
    # what a recording went on behind was no end
    ends = backend.ends if backend.ends.isdisjoint(said[:-1]) else frozenset()
    results = _run(backend, trace, _Decode(before, said[step], n, ends), gone, progress)
    reference = results[0].said
    control = _share(reference, said[step + 1 :][:n])
    return Ablation(step, len(pages), wanted, n_pages, reference, control, results, skipped)


def prompt_of(backend: Backend, trace: PageTrace) -> Ints:
    """Return the prompt of a trace that this engine can take up. Raises InvalidArgument, CannotRun."""
    backend.require_run()
    header, notes = trace.header, trace.notes
    model = backend.fingerprint.to_dict()
    wrong = [name for name, own in model.items() if header.model.get(name, "") != own]
    heads = PageRecorder(backend.layers, Recording()).heads
    if wrong or heads != header.heads:
        reason = f"it is of another model: {', '.join(wrong) or 'heads'} differ"
        raise InvalidArgument("trace", reason, "give the model that it was recorded with")
    every: list[int] = []
    for name, n in (("prompt_tokens", header.prompt), ("tokens", trace.n_steps + 1)):
        part = notes.get(name)
        if not isinstance(part, list) or not all(type(token) is int for token in part):
            raise InvalidArgument("trace", f"it has no {name} to go on from", "record anew")
        if len(part) != n:
            raise InvalidArgument("trace", f"{len(part)} {name}, not {n}", "record anew")
        every += part
    return tokens_of(backend, every)[: header.prompt]


def _candidates(trace: PageTrace, n: int, how: Eviction) -> Ints:
    """Return the pages that may go when there are ``n`` rows. Raises InvalidArgument."""
    page = trace.header.page
    first, last = APART.between(-(-n // page))
    if how.where == "decoded":
        first = max(first, -(-trace.header.prompt // page))
    if first >= last:
        reason = f"no page of {page} slots may go when there are {n} rows"
        raise InvalidArgument("trace", reason, "smaller pages, later, more steps, or where='all'")
    return np.arange(first, last)


def _groups(backend: Backend, trace: PageTrace) -> list[Ints]:
    """Return heads whose rows are equal: those of a layer, or, where layers have but one, of all layers
    with rows of that size."""
    layers = trace.header.layers
    if np.unique(layers, return_counts=True)[1].min() > 1:
        keys = layers
    else:
        shapes = [backend.layers[layer].shape for layer in layers]
        keys = np.array([shape.width // shape.k_heads for shape in shapes])
    return [np.flatnonzero(keys == key) for key in np.unique(keys)]


def _orders(
    case: EvictionCase, names: Sequence[str] | None
) -> tuple[dict[str, Orders], dict[str, str]]:
    """Return in which order pages of each class go, and why classes are left out that nobody asked for.
    Raises InvalidArgument for one that was asked for."""
    orders: dict[str, Orders] = {}
    skipped: dict[str, str] = {}
    for name in CLASSES if names is None else dict.fromkeys(names):
        if name == NONE:
            continue
        if name not in CLASSES:
            near = nearest(name, [*CLASSES, NONE], 1)
            hint = f"did you mean {near[0]}?" if near else f"some of {', '.join(CLASSES)}"
            raise InvalidArgument("classes", f"there is no {name!r}", hint)
        try:
            orders[name] = CLASSES[name](case)
            if not most(orders[name], case.groups):
                raise InvalidArgument(
                    "classes",
                    f"too few of {len(case.pages)} pages",
                    "record more steps, with smaller pages, or leave it out",
                )
        except InvalidArgument as error:
            if names is not None:
                raise InvalidArgument("classes", f"{name}: {error.reason}", error.hint) from None
            orders.pop(name, None)
            skipped[name] = str(error.reason)
    return orders, skipped


def _run(
    backend: Backend,
    trace: PageTrace,
    decode: _Decode,
    gone: Mapping[str, Sequence[Ints]],
    progress: Progress | None,
) -> tuple[Ablated, ...]:
    """Compute what is there when pages go, and what becomes of the rest; the control is first."""
    n = len(decode.before)
    whole, _ = prefill(backend, decode.before, n + decode.n)
    pages = {NONE: [np.zeros(0, np.int64)] * len(trace.header.heads), **gone}
    rows = [whole, *(_without(whole.clone(), trace, own) for own in gone.values())]
    freed = [whole.n_bytes - each.n_bytes for each in rows]
    said = _greedily(backend, rows, decode, progress)
    reference = said[0]
    for each in rows:
        each.truncate(n)
    right, kl = _forced(backend, rows, [decode.first, *reference[:-1]], reference)
    return tuple(
        Ablated(
            name,
            tuple(tuple(own.tolist()) for own in pages[name]),
            freed[i],
            right[i],
            kl[i],
            _share(said[i], reference),
            _first_wrong(said[i], reference),
            tuple(said[i]),
        )
        for i, name in enumerate(pages)
    )


def _without(rows: Rows, trace: PageTrace, pages: Sequence[Ints]) -> Rows:
    """Free ``pages`` [head] of rows; return them."""
    header, within = trace.header, np.arange(trace.header.page)
    kept = {layer: rows.kept(layer) for layer, _ in header.heads}
    for (layer, head), own in zip(header.heads, pages, strict=True):
        slots = (own[:, None] * header.page + within).ravel()
        kept[layer][head] = np.setdiff1d(kept[layer][head], slots)
    for layer, slots_kept in kept.items():
        rows.keep(layer, slots_kept)
    return rows


def _greedily(
    backend: Backend, rows: Sequence[Rows], decode: _Decode, progress: Progress | None
) -> list[list[int]]:
    """Return what each of ``rows`` says, in one batch, while the first of them does."""
    said: list[list[int]] = [[] for _ in rows]
    inputs = [decode.first] * len(rows)
    live = list(range(len(rows)))
    while 0 in live and len(said[0]) < decode.n:
        works = []
        for i in live:
            slot = np.array([rows[i].n])
            works.append(Work(rows[i], np.array([inputs[i]]), slot, slot, np.array([0])))
        best = torch.cat(backend.forward(works)).argmax(-1).tolist()
        for i, token in zip(live, best, strict=True):
            said[i].append(token)
            inputs[i] = token
        live = [i for i in live if inputs[i] not in decode.ends]
        if progress is not None:
            progress(1)
    return said


def _forced(
    backend: Backend, rows: Sequence[Rows], inputs: Sequence[int], wanted: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return, of each of ``rows``, how many of ``wanted`` are first behind ``inputs``, and the mean KL
    from the first of ``rows``, in nats."""
    right, kl, n = np.zeros(len(rows)), np.zeros(len(rows)), rows[0].n
    for at in range(0, len(inputs), PIECE):
        tokens = np.array(inputs[at : at + PIECE])
        slots = n + at + np.arange(len(tokens))
        want = np.arange(len(tokens))
        found = backend.forward([Work(each, tokens, slots, slots, want) for each in rows])
        true = _log_shares(found[0])
        there = torch.tensor(wanted[at : at + PIECE], device=true.device)
        for i, logits in enumerate(found):
            mine = _log_shares(logits)
            right[i] += int((logits.argmax(-1) == there).sum())
            kl[i] += float((true.exp() * (true - mine)).sum(-1).clamp_min(0).sum())
    return (right / len(inputs)).tolist(), (kl / len(inputs)).tolist()


def _log_shares(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def _share(said: Sequence[int], wanted: Sequence[int]) -> float:
    """Return which part of ``wanted`` is said at its place."""
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)


def _first_wrong(said: Sequence[int], wanted: Sequence[int]) -> int | None:
    pairs = enumerate(zip(said, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), None)
