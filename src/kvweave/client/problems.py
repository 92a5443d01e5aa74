"""From a server's error to the exception it was there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvweave import errors
from kvweave.errors import ServerError


def error_of(body: object, status: int) -> errors.KVWeaveError:
    """Return the exception a server's error body describes: of the class it was, if that is known."""
    told = dict(error_part(body))
    code, message = str(told.pop("code", "")), str(told.pop("message", ""))
    hint = str(told.pop("hint", None) or "")
    told.pop("type", None)
    request_id = str(told.pop("request_id", None) or "")
    param = told.pop("param", None)
    data = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
    kind = _CLASSES.get(code.replace("_", "").lower())
    if kind is errors.InvalidArgument:
        data["argument"] = param
    if kind is None:
        kind, data = ServerError, data | {"status": status}
        message = message or f"the server answers with status {status}"
    made = kind.__new__(kind)
    errors.KVWeaveError.__init__(made, message.removesuffix(f" ({hint})"), hint=hint, **data)
    made.request_id = request_id
    return made


def _classes(root: type[errors.KVWeaveError]) -> dict[str, type[errors.KVWeaveError]]:
    found = {root.__name__.lower(): root}
    for kind in root.__subclasses__():
        found |= _classes(kind)
    return found


# By code without underscores; some have the codes OpenAI's clients know.
_CLASSES = _classes(errors.KVWeaveError) | {
    "invalidrequest": errors.InvalidArgument,
    "contextlengthexceeded": errors.ContextTooLong,
    "insufficientquota": errors.OverQuota,
}


def error_part(body: object) -> Mapping[str, Any]:
    """Return what a body says of an error; nothing where it is no error of a kvweave server."""
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}
