"""Waiting until a server has ended an answer that was hung up on, so that edits can follow."""

from __future__ import annotations

import time

from kvweave.client.course import Course, Pause
from kvweave.client.peer import Peer

SETTLE_SECONDS = 5.0  # a server ends an answer between two steps of the model
LOOK_SECONDS = 0.02


def settle(peer: Peer, path: str) -> Course[None]:
    """Wait while the context is busy with an answer that this client left."""
    if path not in peer.left:
        return
    peer.left.discard(path)
    until = time.monotonic() + SETTLE_SECONDS
    while (yield from peer.get(path))["busy"] and time.monotonic() < until:
        yield Pause(LOOK_SECONDS)
