"""The names that a server's one model has."""

from __future__ import annotations

from fastapi.responses import Response

from kvweave.serve.guard.problems import make
from kvweave.serve.state import ServerState


def other_model(state: ServerState, wanted: str | None) -> Response | None:
    """Return the refusal of a request for a model that is not here; None for one that is."""
    if wanted is None or state.options.answers_to(wanted):
        return None
    hint = f"it is {state.options.model_name!r}"
    return make(
        404, f"no model {wanted!r}", code="model_not_found", param="model", hint=hint
    ).response
