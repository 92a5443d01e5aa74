"""Waiting until a server has ended an answer that was hung up on, so that edits can follow."""

from __future__ import annotations

import time

from kvweave.client.link import Link
from kvweave.client.steps import Pause, Steps

SETTLE_SECONDS = 5.0  # a server ends an answer between two steps of the model
LOOK_SECONDS = 0.02


def settle(link: Link, path: str) -> Steps[None]:
    """Wait while the context is busy with an answer that this client left."""
    if path not in link.left:
        return
    link.left.discard(path)
    until = time.monotonic() + SETTLE_SECONDS
    while (yield from link.get(path))["busy"] and time.monotonic() < until:
        yield Pause(LOOK_SECONDS)
