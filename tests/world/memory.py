"""Bytes of tensors that are really alive, whoever accounts for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from oracle import DEVICE


@contextmanager
def only_from_here() -> Iterator[None]:
    """What is alive already does not count: `alive` sees what is made from here on.

    Python looks for circles when it likes: what they keep is alive, so here it does not. What is
    frozen stays so: else all that was imported is gone through each time, here and in tests behind.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive() -> int:
    """Return the bytes of all storages that a tensor uses.

    On a GPU 0: pools and recorded passes have room to spare there, which no budget counts.
    """
    if DEVICE.type != "cpu":
        return 0
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
