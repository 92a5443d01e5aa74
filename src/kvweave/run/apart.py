"""Computing as it was verified, whatever the caller's program has set of torch around a verb."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

KINDS = ("cpu", "cuda")  # of devices that models run on


@contextmanager
def apart() -> Iterator[None]:
    """Let nothing round what is computed in the model's dtype (`torch.autocast`), nor put what names no
    device elsewhere (`torch.set_default_device`). KV that is stored is then that of its fingerprint."""
    with ExitStack() as stack:
        for kind in KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
