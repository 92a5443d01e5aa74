"""What makes a command's process start sooner."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import torch and transformers inside of this, if anything does: unseen by the collector for good.

    They make half a million objects that live as long as the process. To go through them again and
    again takes a quarter of the time until a model is loaded. Nothing is done where torch is there.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        if "torch" in sys.modules:
            gc.freeze()
    finally:
        gc.enable()
