"""The memory of a long conversation: anchors, recalled items, summaries and a window of turns.

::

    [anchors][recalled][summaries][turn][turn][turn]      the context
              ^    |     ^          |
              |    v     `- summary of the oldest turns; of summaries, when these are too many
              `- items `memory/...`: every turn that left, every note that was written

An item is a chunk and its name: there is no second copy of a text. See docs/memory.md.
"""

from kvweave.memory.blocks import MemoryBlock, MemoryBlocks
from kvweave.memory.dense import DenseRanking, Embedder, MeanRows
from kvweave.memory.grams import GramRanking, Ranking
from kvweave.memory.limits import MemoryBudget
from kvweave.memory.scheduler import Memory
from kvweave.memory.sleep import Slept
from kvweave.memory.summaries import AskModel, FirstSentences, Said, Segment, Summariser
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
    "MemoryTool",
    "Ranking",
    "Said",
    "Segment",
    "Slept",
    "Summariser",
]
