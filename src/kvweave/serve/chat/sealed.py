"""What clients are given to send back as it is: ``encrypted_content``, as the APIs call it.

It is not encrypted: it is what the server needs to go on without having kept anything, and whoever
holds it may read it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

SEAL = "kvw1."


def seal(data: Mapping[str, Any]) -> str:
    """Return what clients send back as it is, to be read again by `unseal`."""
    return SEAL + base64.urlsafe_b64encode(json.dumps(data).encode()).decode()


def unseal(text: object) -> dict[str, Any]:
    """Return what was sealed; {} for what another server made."""
    if not isinstance(text, str) or not text.startswith(SEAL):
        return {}
    try:
        found = json.loads(base64.urlsafe_b64decode(text.removeprefix(SEAL)))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
