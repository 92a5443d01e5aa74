"""A worker's side of the connector without vLLM: blocks that hold rows, and prompts woven into them."""

from __future__ import annotations

import random

import numpy as np
import torch

from kvweave.connect.vllm.asks import WeaveLoad
from kvweave.connect.vllm.spec import PartSpec
from kvweave.run.layers import At

SIZE = 4  # tokens of a block


class Blocks:
    """Rows as vLLM would have them: by slot of its blocks, keys as rotated."""

    def __init__(self, n_layers):
        self.slots = [{} for _ in range(n_layers)]

    def write(self, rows, blocks, start, stop):
        for layer, written in enumerate(self.slots):
            keys, values = rows.read(layer, np.arange(start, stop))
            for i, row in enumerate(range(start, stop)):
                slot = blocks[row // SIZE] * SIZE + row % SIZE
                written[slot] = keys[i].clone(), values[i].clone()

    def read(self, rows, blocks, n):
        rows.expect(np.arange(n), np.arange(n))
        for layer, written in enumerate(self.slots):
            found = [written[blocks[row // SIZE] * SIZE + row % SIZE] for row in range(n)]
            keys, values = (torch.stack(each) for each in zip(*found, strict=True))
            rows.write(layer, At.of(np.arange(n), rows.device), keys, values, keys)
        return True


def ids(n, seed, n_vocab=90):
    rng = random.Random(seed)
    return tuple(rng.randrange(3, n_vocab) for _ in range(n))


def parts_of(sizes, at=0):
    found = []
    for n in sizes:
        found.append(PartSpec(at, at + n))
        at += n
    return tuple(found)


def woven(host, ask, start=0, blocks=None, exact=0):
    n, offer = len(ask.tokens), host.find(ask)
    blocks = tuple(range(50, 50 + -(-n // SIZE))) if blocks is None else blocks
    host.load("r", WeaveLoad(ask, blocks, start, offer.covered, offer.digest, exact))
    for _ in range(1000):
        over = host.step(idle=False)
        if over:
            return over["r"], blocks
    raise AssertionError("it never ended")
