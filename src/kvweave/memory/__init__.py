"""The memory of a long conversation: anchors, recalled items, summaries and a window of turns.

::

    [anchors][recalled][summaries][turn][turn][turn]      the context
              ^    |     ^          |
              |    v     `- summary of the oldest turns; of summaries, when these are too many
              `- items `memory/...`: every turn that left, every note that was written

An item is a chunk and its name: there is no second copy of a text. See docs/memory.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvweave.memory.blocks import MemoryBlocks
    from kvweave.memory.dense import DenseRanking, Embedder, MeanRows
    from kvweave.memory.grams import GramRanking, Ranking
    from kvweave.memory.limits import MemoryBudget
    from kvweave.memory.scheduler import Memory
    from kvweave.memory.summaries import AskModel, FirstSentences, Said, Segment, Summariser
    from kvweave.memory.told import MemoryBlock, MemoryItem, Slept, ToolReply
    from kvweave.memory.tool import MemoryTool

__all__ = [
    "AskModel",
    "DenseRanking",
    "Embedder",
    "FirstSentences",
    "GramRanking",
    "MeanRows",
    "Memory",
    "MemoryBlock",
    "MemoryBlocks",
    "MemoryBudget",
    "MemoryItem",
    "MemoryTool",
    "Ranking",
    "Said",
    "Segment",
    "Slept",
    "Summariser",
    "ToolReply",
]

# Imported when first asked for: a client wants plain data of this package, and no torch.
_MODULES = {
    "blocks": ("MemoryBlocks",),
    "dense": ("DenseRanking", "Embedder", "MeanRows"),
    "grams": ("GramRanking", "Ranking"),
    "limits": ("MemoryBudget",),
    "scheduler": ("Memory",),
    "summaries": ("AskModel", "FirstSentences", "Said", "Segment", "Summariser"),
    "told": ("MemoryBlock", "MemoryItem", "Slept", "ToolReply"),
    "tool": ("MemoryTool",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvweave.memory' has no attribute {name!r}")
    value: object = getattr(import_module(f"kvweave.memory.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
