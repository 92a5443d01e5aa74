"""Which decoded steps are milestones, or what phases there are, as a file says it: single ones, or spans with a name.

::

    [3, 9, {"name": "x = 5", "first": 12, "stop": 15}]

Steps count from the first decoded token, 0; ``stop`` is the step behind the span.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from kvweave.errors import InvalidArgument, of_system

HOW = '[3, 9, {"name": "x = 5", "first": 12, "stop": 15}]'


def marks(path: str | Path, n: int) -> dict[str, Any]:
    """Return notes for a recording of ``n`` tokens: ``milestones``, all steps in order, and
    ``milestone_names``, the spans that have one. Raises InvalidArgument."""
    spans = _spans(path, n, "milestones")
    steps = sorted({step for _, first, stop in spans for step in range(first, stop)})
    names = [{"name": name, "first": a, "stop": b} for name, a, b in spans if name is not None]
    return {"milestones": steps} | ({"milestone_names": names} if names else {})


def phases(path: str | Path, n: int) -> dict[str, Any]:
    """Return the note ``phases`` for a recording of ``n`` tokens: spans, each with a name of its own. Raises
    InvalidArgument."""
    spans = _spans(path, n, "phases")
    names = [name for name, _, _ in spans]
    if None in names or len({*names}) < len(names):
        raise InvalidArgument("phases", f"{path} has a span without a name of its own", HOW)
    return {"phases": [{"name": name, "first": a, "stop": b} for name, a, b in spans]}


def _spans(path: str | Path, n: int, what: str) -> list[tuple[str | None, int, int]]:
    try:
        said = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise InvalidArgument(
            what, f"there is no file {str(path)!r}", "give another path"
        ) from None
    except OSError as error:
        raise of_system(error, "read", path) from error
    except ValueError as error:
        raise InvalidArgument(what, f"{path} is no JSON: {error}", HOW) from None
    if not isinstance(said, list) or not said:
        raise InvalidArgument(what, f"{path} has no list of steps", HOW)
    return [_span(one, n, what) for one in said]


def _span(one: object, n: int, what: str) -> tuple[str | None, int, int]:
    """Return the name and the steps ``[first, stop)`` of an entry."""
    if _is_step(one):
        one = {"first": one, "stop": one + 1}
    if isinstance(one, dict) and one.keys() <= {"name", "first", "stop"}:
        name, first, stop = (one.get(key) for key in ("name", "first", "stop"))
    else:
        raise InvalidArgument(what, f"{json.dumps(one)} is no step and no span", HOW)
    if not (name is None or isinstance(name, str)) or not (_is_step(first) and _is_step(stop)):
        raise InvalidArgument(what, f"{json.dumps(one)} is no span", HOW)
    if not 0 <= first < stop <= n:
        raise InvalidArgument(what, f"{json.dumps(one)} is not within {n} tokens", HOW)
    return name, first, stop


def _is_step(one: object) -> TypeGuard[int]:
    return isinstance(one, int) and not isinstance(one, bool)
