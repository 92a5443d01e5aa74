"""Tell errors of the machine from errors of a model."""

from __future__ import annotations

import re

import torch

MACHINE = re.compile(r"out of memory|allocat|(cuda|hip|driver) error|cublas|cudnn|nccl", re.I)


def is_resource_error(error: BaseException) -> bool:
    """Whether an error tells of the machine (memory, device, files), not of the model."""
    if isinstance(error, MemoryError | OSError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and MACHINE.search(str(error)) is not None


def said(error: BaseException) -> str:
    """Return an error in one line."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
