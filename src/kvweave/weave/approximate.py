"""What makes the rows of a part, and so an answer over them, approximate: named, never left out.

| name | the rows of the part |
|---|---|
| `reuse` | were computed after something else than what stands before them now |
| `base` | were computed after another base than this context's |
| `patch` | were brought near by a stored difference |
| `turn` | were computed or decoded here, over or beside rows that were approximate |
| `evict` | keep what they saw of what was pruned |
| `thinned:KEEP` | are those that a token policy left of the chunk |
| `codec:NAME` | went through a codec that loses something |
| `rows:NAME` | rest in 8 bits, or some of them, or will, in fewer: a token policy has them do so |
| `freed` | are not all there, or will not be: a token policy lets go of some |

All of them count in one budget: the drift is that of the answer, whatever it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from kvweave.weave.audit import AuditCell, Promised
from kvweave.weave.parts import Placement
from kvweave.weave.plan import Plan

if TYPE_CHECKING:
    from kvweave.weave.repair import Strategy, Wish
    from kvweave.weave.state import State

CODEC, ROWS, THINNED = "codec:", "rows:", "thinned:"
LOST = "lossy"  # a codec's name where its record is gone


def reasons(
    p: Placement,
    *,
    renewed: bool,
    codec: str,
    thinned: str,
    other_base: bool,
    everywhere: tuple[str, ...],
) -> tuple[str, ...]:
    """Return why the rows of a part are not those of a full prefill.

    ``renewed``: all were computed by this weave. ``codec``: what the chunk's KV went through,
    ``thinned``: what left some rows of it only, "" if nothing. ``everywhere``: what is true of all rows of the context.
    """
    found = list(everywhere)
    origin = p.origin if p.source == "kept" else p.source
    if not renewed and p.ready and (p.patched or not p.right):
        if origin == "own":
            found.append("evict" if p.part.frozen else "turn")
        else:
            found.append("patch" if p.patched else "reuse")
            found += ["base"] if other_base else []
        found += [THINNED + thinned] if thinned else []
        found += [CODEC + codec] if codec != "raw" else []
    return tuple(found)


def of_rows(state: State, codec: str, n_rows: int) -> tuple[str, ...]:
    """Return what is true of all rows of a context, ``n_rows`` when an answer ends, which rest as
    ``codec`` says."""
    freed = ("freed",) if state.frees(n_rows) else ()
    forms = [codec] if state.rows.lossy else state.forms(n_rows)
    return (*(ROWS + form for form in forms), *freed)


def cell_of(plan: Plan, strategy: Strategy, wish: Wish, state: State) -> AuditCell | None:
    """Return the cell of answers over a woven context; None where nobody knows any more what some
    of its rows went through."""
    codecs, thinned = _named(plan, CODEC), _named(plan, THINNED)
    if LOST in codecs:
        return None
    share = 0.0 if strategy.name in ("none", "full") else round(wish.share, 3)
    pruned, recipe = "evict" if state.keeps else "forget", suited(wish, state, lambda: plan).recipe
    return AuditCell(
        _spec(strategy) if recipe is None else f"{strategy.name}:{recipe}{_evident(strategy)}",
        share,
        bounded=wish.max_drift is not None,
        codec="+".join(codecs) or "raw",
        rows="+".join(_named(plan, ROWS)) or "raw",
        policy=pruned if state.keeper is None else str(state.keeper.keep),
        tenant=state.tenant,
        bases="others" if "base" in plan.approximate else "own",
        thinned="+".join(thinned),
        positions="keep" if _has_gaps(plan) else "compact",
    )


def suited(wish: Wish, state: State, bare: Callable[[], Plan]) -> Wish:
    """Return a wish without options of `auto` that were measured elsewhere: on rows as they are computed, of
    which none is gone, behind their own base and without gaps. Those that a bound was measured with stay
    as long as that says something. ``bare`` is asked for the plan before any repair."""
    if wish.recipe is None:
        return wish
    plan, known = bare(), wish.calibration is not None
    usual = {"reuse", "turn", "base"} if known else {"reuse", "turn"}
    fits = usual.issuperset(plan.approximate) and (known or not _has_gaps(plan))
    fits = fits and not state.keeps and state.keeper is None
    return wish if fits else replace(wish, recipe=None)


def _has_gaps(plan: Plan) -> bool:
    """Tell whether parts stand elsewhere than one right behind the other."""
    ends = accumulate((span.n_tokens for span in plan.spans), initial=0)
    return any(span.position != end for span, end in zip(plan.spans, ends, strict=False))


def _evident(strategy: Strategy) -> str:
    """Return what says that rows are repaired at random, too, to see how far they change."""
    return "@evidence" if getattr(strategy, "evidence", False) else ""


def _named(plan: Plan, kind: str) -> list[str]:
    """Return what stands behind the names of a kind, in order."""
    return sorted(name.removeprefix(kind) for name in plan.approximate if name.startswith(kind))


def promised(plan: Plan, promise: Promised) -> Plan:
    """Return the plan with what audits say of its drift, where nothing else does."""
    if plan.drift == 0:
        return plan
    if plan.drift is not None and not (promise.alarm or promise.belied):
        return replace(plan, drift_by="calibration", coverage=promise.coverage)
    if promise.bound is None:
        return replace(plan, drift=None)
    return replace(plan, drift=promise.bound, drift_by="audit", coverage=promise.coverage)


def _spec(strategy: Strategy) -> str:
    """Return a strategy's name with its options, as they were when it was made."""
    options = (str(value) for _, value in sorted(vars(strategy).items()))
    return ":".join([strategy.name, *filter(None, ["@".join(options)])])
