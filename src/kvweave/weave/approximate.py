"""What makes the rows of a part, and so an answer over them, approximate: named, never left out.

| name | the rows of the part |
|---|---|
| `reuse` | were computed after something else than what stands before them now |
| `base` | were computed after another base than this context's |
| `patch` | were brought near by a stored difference |
| `turn` | were computed or decoded here, over or beside rows that were approximate |
| `evict` | keep what they saw of what was pruned |
| `thinned` | are those that a token policy left of the chunk |
| `codec:NAME` | went through a codec that loses something |
| `rows:NAME` | rest in 8 bits, or some of them, or will, in fewer: a token policy has them do so |
| `freed` | are not all there, or will not be: a token policy lets go of some |

All of them count in one budget: the drift is that of the answer, whatever it comes from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvweave.weave.audit import AuditCell, Promised
from kvweave.weave.parts import Placement
from kvweave.weave.plan import Plan

if TYPE_CHECKING:
    from kvweave.weave.repair import Strategy, Wish
    from kvweave.weave.state import State

CODEC, ROWS = "codec:", "rows:"


def reasons(
    p: Placement,
    *,
    renewed: bool,
    codec: str,
    thinned: bool,
    other_base: bool,
    everywhere: tuple[str, ...],
) -> tuple[str, ...]:
    """Return why the rows of a part are not those of a full prefill.

    ``renewed``: all were computed by this weave. ``codec``: what the chunk's KV went through,
    ``thinned``: whether some rows are gone. ``everywhere``: what is true of all rows of the context.
    """
    found = list(everywhere)
    origin = p.origin if p.source == "kept" else p.source
    if not renewed and p.ready and (p.patched or not p.right):
        if origin == "own":
            found.append("evict" if p.part.frozen else "turn")
        else:
            found.append("patch" if p.patched else "reuse")
            found += ["base"] if other_base else []
        found += ["thinned"] if thinned else []
        found += [CODEC + codec] if codec != "raw" else []
    return tuple(found)


def of_rows(state: State, codec: str, n_rows: int) -> tuple[str, ...]:
    """Return what is true of all rows of a context, ``n_rows`` when an answer ends, which rest as
    ``codec`` says."""
    freed = ("freed",) if state.frees(n_rows) else ()
    forms = [codec] if state.rows.lossy else state.forms(n_rows)
    return (*(ROWS + form for form in forms), *freed)


def cell_of(plan: Plan, strategy: Strategy, wish: Wish, state: State) -> AuditCell:
    """Return the cell of answers over a woven context."""
    names = sorted(plan.approximate)
    codecs = "+".join(name.removeprefix(CODEC) for name in names if name.startswith(CODEC))
    rows = "+".join(name.removeprefix(ROWS) for name in names if name.startswith(ROWS))
    policy = "thinned" if "freed" in names else "evict" if state.keeps else "forget"
    policy = policy if state.keeper is None else str(state.keeper.keep)
    share = 0.0 if strategy.name in ("none", "full") else round(wish.share, 3)
    bounded = wish.max_drift is not None
    spec = _spec(strategy)
    bases = "others" if "base" in names else "own"
    how = codecs or "raw", rows or "raw", policy
    return AuditCell(spec, share, bounded, *how, state.tenant, bases)


def promised(plan: Plan, promise: Promised) -> Plan:
    """Return the plan with what audits say of its drift, where nothing else does."""
    if plan.drift == 0:
        return plan
    if plan.drift is not None and not promise.alarm:
        return replace(plan, drift_by="calibration", coverage=promise.coverage)
    if promise.bound is None:
        return replace(plan, drift=None)
    return replace(plan, drift=promise.bound, drift_by="audit", coverage=promise.coverage)


def _spec(strategy: Strategy) -> str:
    """Return a strategy's name with its options, as they were when it was made."""
    options = (str(value) for _, value in sorted(vars(strategy).items()))
    return ":".join([strategy.name, *filter(None, ["@".join(options)])])
