"""What kvweave makes of a model, held against plain transformers, without its own verification.

`examine(model_type)` builds a tiny model of `tests/zoo.py`, keeps a copy that kvweave never sees,
and runs contexts of it through `kvweave.Engine`: `Found.verdict` is one of

- ``exact``: every logit is that of the copy's own full prefill, in all of `CHECKS`
- ``fixed``: likewise, but chunks are not moved: what stands elsewhere is computed (`STAYING`)
- ``refused``: nothing is computed; ``why`` is what kvweave says
- ``unbuilt``: there is no tiny model, ``why`` says the reason
- ``WRONG``, ``crash``: what must not be, and what was seen
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import zoo
from layer_kinds import class_of, words_of
from oracle import Float64, stay_in_float64
from torch import Tensor
from transformers import PreTrainedModel

from kvweave import Engine
from kvweave.errors import CannotMove, CannotRun, KVWeaveError
from kvweave.run.base import Work, gapless
from kvweave.run.model import Runner
from kvweave.weave.oracle import forced

TOLERANCE = 1e-4  # of the largest logit, in float32
TURNED = 5e-4  # of keys turned there: angles of far positions are rounded
LENGTH = 76  # crosses every window and aligned chunk of a tiny model several times
CUT = 30  # where a prefix ends that is reused
FAR = 352  # as above; over 256, where half precision cannot tell positions apart
SIZES = (9, 23, 17, 11)  # of stored chunks
ORDER = (2, 0, 3, 1)  # in which they are composed
QUESTION = LENGTH - sum(SIZES)
SCATTERED = (7, 8, 20, 33, 34, 50, 60, 70)  # rows computed again among others
DECODED = 4
TABLES = ("codegen", "gptj")  # whose angles are rounded to the dtype: no rotation any more
OWN = "attention of its own"
# queries that are scaled by their position: a chunk elsewhere is another text to them
SCALES_BY_POSITION = ("llama4", "llama4_text")


@dataclass(frozen=True, slots=True)
class Found:
    """What was found about one model type."""

    verdict: str
    why: str = ""
    kind: str = ""  # one of CLASSES of tests/layer_kinds.py
    layers: str = ""
    errors: dict[str, float] = field(default_factory=dict)  # of CHECKS, relative


class Wrong(Exception):
    """Something that is not just inexact; the message says what."""


def text(n: int, seed: int) -> list[int]:
    """Return random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, zoo.VOCAB, (n,), generator=generator).tolist()


@torch.inference_mode()
def plainly(model: PreTrainedModel, tokens: list[int], **options: Any) -> Tensor:
    """Return the logits [token, vocab] of transformers' own forward without a cache."""
    ids = torch.tensor([tokens])
    if model.dtype == torch.float64:
        with Float64():
            return model(input_ids=ids, use_cache=False, **options).logits[0]  # type: ignore[no-any-return]
    return model(input_ids=ids, use_cache=False, **options).logits[0]  # type: ignore[no-any-return]


def far_apart(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error relative to the largest wanted value; inf where it is not finite."""
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))
    return error if np.isfinite(error) else float("inf")


class Case:
    """One model under examination: an engine over it, and the copy that kvweave never saw."""

    def __init__(self, runner: Runner, plain: PreTrainedModel, model_type: str) -> None:
        self.runner, self.plain, self.model_type = runner, plain, model_type
        self.engine = Engine(runner, repair="none")
        self.n = 0

    def context(self, *pieces: list[int]) -> Any:
        """Return a woven context of these texts, each woven before the next one comes."""
        self.n += 1
        context = self.engine.context(f"c{self.n}")
        for piece in pieces:
            context.append(piece)
            context.weave()
        return context

    def after(self, context: Any, start: int) -> Tensor:
        """Return the logits of a woven context's tokens from ``start`` on, over its rows before."""
        rows, tokens = context.session.state.rows, list(context.tokens())
        return forced(self.runner, [(rows, start, tokens[start:])])[0]


def prefill(case: Case) -> float:
    """In one pass, and the last rows over those that the weave left."""
    tokens = text(LENGTH, 1)
    context, wanted = case.context(tokens), plainly(case.plain, tokens)
    late = far_apart(case.after(context, LENGTH - 8), wanted[LENGTH - 8 :])
    return max(far_apart(case.after(context, 0), wanted), late)


def prefix(case: Case) -> float:
    """Over an exact prefix that another context left, then more of it."""
    tokens = text(LENGTH, 2)
    case.context(tokens[:CUT], text(9, 3))
    context = case.context(tokens[:CUT], tokens[CUT:])
    if context.plan.drift != 0:
        raise Wrong(f"fresh text is called approximate: {context.plan.drift}")
    wanted = plainly(case.plain, tokens)
    late = far_apart(case.after(context, LENGTH - 8), wanted[LENGTH - 8 :])
    return max(far_apart(case.after(context, CUT), wanted[CUT:]), late)


def decode(case: Case) -> float:
    """The log-probabilities of all tokens while it writes, token by token."""
    tokens = text(LENGTH, 4)
    answer = case.context(tokens).generate(max_tokens=DECODED, logprobs=zoo.VOCAB, ignore_eos=True)
    written = [choice.token for choice in answer.choices]
    wanted = plainly(case.plain, tokens + written)[LENGTH - 1 : -1].log_softmax(-1)
    worst = 0.0
    for choice, row in zip(answer.choices, wanted, strict=True):
        at, values = zip(*choice.top, strict=True)
        found = torch.tensor(values, dtype=row.dtype)
        worst = max(worst, far_apart(found, row[list(at)]))
    return worst


def composed(case: Case) -> float:
    """Stored chunks in another order, repaired fully; unrepaired they must not be called exact."""
    chunks = [text(n, 10 + i) for i, n in enumerate(SIZES)]
    for i, chunk in enumerate(chunks):
        case.engine.put(f"doc/{i}", chunk)
    question = text(QUESTION, 20)
    context = case.engine.compose("".join(f"{{doc/{i}}}" for i in ORDER))
    context.append(question)
    rough = context.weave("none")
    start = LENGTH - QUESTION
    tokens = [token for i in ORDER for token in chunks[i]] + question
    wanted = plainly(case.plain, tokens)
    placed = far_apart(case.after(context, start), wanted[start:])
    if rough.drift == 0 and placed > TOLERANCE:
        raise Wrong(f"a context without repair is called exact and is {placed:.0e} off")
    if not np.isfinite(placed):
        raise Wrong("a context without repair has logits that are not finite")
    if not case.runner.can_move and rough.drift != 0:
        raise Wrong(f"chunks in another order are not computed: {rough}")
    context.weave("full")
    return far_apart(case.after(context, start), wanted[start:])


def scattered(case: Case) -> float:
    """Rows computed again among others, theirs poisoned before."""
    tokens, slots = text(LENGTH, 5), np.array(SCATTERED)
    rows = case.context(tokens).session.state.rows.clone()
    poison = case.runner.new_kv(len(slots))
    for tensor in (*poison.k, *poison.v):
        tensor.fill_(float("nan"))
    rows.put(slots, poison)
    some = np.array([tokens[slot] for slot in SCATTERED])
    work = Work(rows, some, slots, slots, want=np.arange(len(slots)))
    found = case.runner.forward([work])[0]
    return far_apart(found, plainly(case.plain, tokens)[slots])


def far(case: Case) -> float:
    """At far positions, behind a text of that length."""
    tokens = text(FAR + LENGTH, 6)
    context = case.context(tokens[:FAR], tokens[FAR:])
    return far_apart(case.after(context, FAR), plainly(case.plain, tokens)[FAR:])


def moved(case: Case) -> float:
    """A stored chunk alone at far positions is what it is at 0, where only distances count."""
    tokens, cut = text(LENGTH, 7), LENGTH - 8
    kv, slots = case.runner.new_kv(LENGTH), np.arange(LENGTH)
    rows = case.runner.new_rows()
    rows.reserve(LENGTH)
    case.runner.forward([Work(rows, np.array(tokens), slots, slots, raw=kv)])
    placed = case.runner.new_rows()
    placed.reserve(LENGTH)
    placed.place([(0, [kv])], slots + FAR)
    late = slots[cut:]
    work = Work(placed, np.array(tokens[cut:]), late, late + FAR, want=np.arange(len(late)))
    return far_apart(case.runner.forward([work])[0], plainly(case.plain, tokens)[cut:])


def stayed(case: Case) -> float:
    """Where an edit moves what stands behind it, that is computed; what would move rows is refused."""
    one, two = text(SIZES[0], 30), text(SIZES[1], 31)
    front, question = text(5, 32), text(QUESTION, 33)
    case.engine.put("stay/1", one), case.engine.put("stay/2", two)
    context = case.engine.compose("{stay/1}{stay/2}")
    context.append(question)
    worst = 0.0
    for edit, tokens, computed in (
        (lambda: None, one + two + question, two + question),
        (
            lambda: context.insert(0, front),
            front + one + two + question,
            front + one + two + question,
        ),
        (lambda: context.reorder([0, 2, 1, 3]), front + two + one + question, two + one + question),
        (lambda: context.drop(0, 1), one + question, question),
    ):
        edit()
        plan = context.weave("none")
        if plan.drift != 0 or plan.prefilled != len(computed):
            raise Wrong(f"not just what would have to move is computed: {plan}")
        worst = max(worst, far_apart(case.after(context, 0), plainly(case.plain, tokens)))
    kv = case.runner.new_kv(2)
    for tensor in (*kv.k, *kv.v):
        tensor.zero_()
    for use in (
        lambda: case.engine.put_rows("stay/rows", kv),
        lambda: case.engine.context("closing", prune="evict"),
        lambda: case.runner.new_rows(moves=True),
    ):
        try:
            use()
        except CannotMove as error:
            if isinstance(error, CannotRun) or case.runner.can_move.reason not in str(error):
                raise Wrong(f"two reasons: {error}") from error
        else:
            raise Wrong("rows that cannot be moved are taken to be moved")
    return worst


CHECKS: dict[str, Callable[[Case], float]] = {
    check.__name__: check for check in (prefill, prefix, decode, composed, scattered, far, moved)
}
STAYING = {name: check for name, check in CHECKS.items() if name != "moved"} | {"stayed": stayed}


def examine(model_type: str) -> Found:
    """Return what kvweave makes of a type: in float32, and where that is not enough in float64.

    Some models are not continuous (a router's choice between experts that are nearly as good).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about sizes that nobody has
        found = _examined(model_type, torch.float32)
        if found.verdict == "WRONG" and found.errors:
            again = _examined(model_type, torch.float64)
            return again if again.verdict in ("exact", "fixed") else found
        return found


def _examined(model_type: str, dtype: torch.dtype) -> Found:
    try:
        model = zoo.tiny(model_type, dtype)
    except zoo.Unbuilt as why:
        return Found("unbuilt", str(why))
    plain, layers = copy.deepcopy(model), (class_of(model), words_of(model))
    if dtype == torch.float64:
        stay_in_float64(model), stay_in_float64(plain)
    errors: dict[str, float] = {}
    try:
        runner = Runner(model, name=model_type)
        if not torch.equal(plainly(model, text(LENGTH, 1)), plainly(plain, text(LENGTH, 1))):
            return Found("WRONG", "the caller's model was changed", *layers)
        if narrower := _narrower(runner, model_type):
            return Found("WRONG", narrower, *layers)
        if not runner.can_run:
            return _refused(runner, layers)
        errors = _errors(Case(runner, plain, model_type))
    except Wrong as wrong:
        return Found("WRONG", str(wrong), *layers, errors)
    except Exception as error:
        return Found("crash", f"{type(error).__name__}: {error}", *layers, errors)
    limits = dict.fromkeys((*CHECKS, *STAYING), TOLERANCE) | {"moved": TURNED}
    bad = [name for name, value in errors.items() if not value < limits[name]]
    far_off = ", ".join(f"{name} {errors[name]:.0e}" for name in bad)
    if bad or runner.can_move:
        own = any(info.handed is not None for info in runner.layers)
        return Found("WRONG" if bad else "exact", far_off or own * OWN, *layers, errors)
    return Found("fixed", said(runner.can_move.reason), *layers, errors)


def _narrower(runner: Runner, model_type: str) -> str | None:
    """Say what is learned of the model in half precision that is not so in its own."""
    if model_type in TABLES:
        return None
    narrow = Runner(zoo.tiny(model_type, torch.bfloat16))
    for ours, its in ((runner.can_run, narrow.can_run), (runner.can_move, narrow.can_move)):
        if bool(ours) != bool(its) or (ours and said(ours.reason) != said(its.reason)):
            return f"in half precision: {said(its.reason)}; else: {said(ours.reason)}"
    return None


def _errors(case: Case) -> dict[str, float]:
    # nor do scores depend on distances alone where a norm comes behind the rotation
    normed = any(info.rotation.ratio is not None for info in case.runner.layers)
    scaled = case.model_type in SCALES_BY_POSITION
    # nor can a chunk stand there alone where rows are pooled by their position
    skipped = ("moved",) if normed or scaled or gapless(case.runner.layers) else ()
    checks = CHECKS if case.runner.can_move else STAYING
    with case.engine:
        return {name: check(case) for name, check in checks.items() if name not in skipped}


def _refused(runner: Runner, layers: tuple[str, str]) -> Found:
    """The reason has to come as an error, too, before anything is stored."""
    with Engine(runner) as engine:
        for use in (lambda: engine.put("a", text(5, 1)), lambda: engine.context("c")):
            try:
                use()
            except CannotRun as error:
                if runner.can_run.reason not in str(error):
                    return Found("WRONG", f"two reasons: {error}", *layers)
            except KVWeaveError as error:
                return Found("WRONG", f"refused as {type(error).__name__}", *layers)
            else:
                return Found("WRONG", "refused, and then used", *layers)
    return Found("refused", said(runner.can_run.reason), *layers)


def said(reason: str) -> str:
    """Return a reason on one line, without numbers that depend on the machine."""
    return re.sub(r"[\d.]+e[-+]\d+ at position \d+", "...", " ".join(reason.split()))
