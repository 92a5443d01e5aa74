"""Computing as it was verified, whatever the caller's program has set of torch around a verb.

Passes run so, and so does all that a verb does besides: token policies choose and count, patches and
repairs are computed, codecs read. `kvweave.verbs.Gate` enters it with each verb, and what a verb calls back
runs within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

KINDS = ("cpu", "cuda")  # of devices that models run on


@contextmanager
def apart() -> Iterator[None]:
    """Let nothing round what is computed in the model's dtype (`torch.autocast`), nor put what names no
    device elsewhere (`torch.set_default_device`). KV that is stored is then that of its fingerprint."""
    rounds = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
    elsewhere = torch.get_default_device().type != "cpu"
    if not (rounds or elsewhere):
        yield
        return
    with ExitStack() as stack:
        for kind in rounds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if elsewhere:
            stack.enter_context(torch.device("cpu"))
        yield
