"""How decoding uses its KV: record it page by page, and ask the traces.

::

    recorder   prompt -> .kvt: mass and reads of each step, head, page     trace: the file
    llamacpp   a GGUF model in llama.cpp, for the recorder
    distance   how far apart the reads of a page are                       KU1
    shares     how unequal pages are                                       KU1
    recalling  which ranking would have had what is read (predict)         KU2
    cost       how far heads' outputs are off without what was missed      KU2
    heads      whether heads stay what they are; milestones                KU3, KU4
    ablation   what becomes of a decode when pages go: which (classes)     KU5
    tiers      what misses cost on tiers that are slower (places: policies of papers)
    report     all of it as one page (paper: as PDF)
"""

from kvweave.keep.tokens.access import Rule
from kvweave.probe.ablation import Ablation, Eviction, ablate
from kvweave.probe.llamacpp import GGUF
from kvweave.probe.recalling import PageBudget, recall
from kvweave.probe.recorder import Recording, record
from kvweave.probe.trace import PageTrace, TraceHeader, TraceSteps, TraceWriter

__all__ = [
    "GGUF",
    "Ablation",
    "Eviction",
    "PageBudget",
    "PageTrace",
    "Recording",
    "Rule",
    "TraceHeader",
    "TraceSteps",
    "TraceWriter",
    "ablate",
    "recall",
    "record",
]
