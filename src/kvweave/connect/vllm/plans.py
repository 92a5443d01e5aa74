"""What a report says of a weave whose first rows are vLLM's own, and whose last ones vLLM computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from kvweave.errors import KVWeaveError
from kvweave.weave.plan import Plan, Span


def of_ours(plan: Plan, start: int, max_drift: float | None) -> Plan:
    """Return the plan without its bound, where rows that are not exact in it are vLLM's own up to
    ``start``: it is of rows of ours, over which all others were computed. Raises KVWeaveError where
    a bound was asked for."""
    exact = sum(span.n_tokens for span in takewhile(lambda span: span.exact, plan.spans))
    if not plan.drift or start <= exact:
        return plan
    if max_drift is not None:
        raise KVWeaveError(
            f"vLLM has {start} tokens in front, of which {exact} are exact here: no bound is known",
            hint="leave max_drift out, or chunks in front as they were",
        )
    return replace(plan, drift=None, drift_by=None, coverage=None)


def of_all(plan: Plan, n: int) -> Plan:
    """Return the plan of all ``n`` tokens of a prompt, of which vLLM computes the last."""
    at = plan.n_tokens
    if at == n:
        return plan
    rest = Span("new", 0, n - at, "prefill", "-", 0, at, 0, n_prefilled=n - at)
    return replace(plan, spans=(*plan.spans, rest))
