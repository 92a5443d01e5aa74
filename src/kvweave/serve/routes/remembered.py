"""What ``/v1/memory`` takes and gives: bodies and answers, checked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt

from kvweave.chunk.identity import Kind, TierName
from kvweave.memory import MemoryBlock, MemoryBlocks
from kvweave.memory.told import BLOCK_LIMIT, RANKED, By, Zone
from kvweave.serve.routes.base import STRICT, ChunkRef, Content, Int, Num
from kvweave.serve.routes.strict import DryRun
from kvweave.serve.routes.turns import Sampled
from kvweave.weave.special import PlainText

MOST_SUMMARY = 1024  # tokens of one summary, which the model may have to write
_Size = Annotated[Int, Field(ge=0, le=2**31)]
_Count = Annotated[Int, Field(ge=1, le=1000)]
Line = Annotated[str, Field(max_length=4096)]
TAKES_NOTHING = ("view", "delete", "rename")  # commands of the tool that store nothing new


class ZoneBudget(BaseModel):
    """Tokens of each zone; what is null is as `kvweave.MemoryBudget` has it."""

    model_config = STRICT

    window: _Size | None = None
    turns: _Size | None = None
    keep: Annotated[Num, Field(ge=0, le=1)] | None = None
    summaries: _Size | None = None
    summary: Annotated[Int, Field(ge=1, le=MOST_SUMMARY)] | None = None
    recalled: _Size | None = None
    warm: _Size | None = None
    cold: TierName | None = None


class Open(BaseModel):
    """A memory to open: items are the names below ``root``.

    Summaries are written by the model, or are the first ``sentences`` (0: all) of each message.
    """

    model_config = STRICT

    root: ChunkRef = "memory"
    budget: ZoneBudget = Field(default_factory=ZoneBudget)
    summarise: Literal["model", "sentences"] = "model"
    sentences: Annotated[Int, Field(ge=0, le=1000)] = 1


class Tell(Content):
    """A message to add."""

    kind: Literal["user", "assistant", "tool"] = "user"


class MemoryAsked(Sampled):
    """A message to answer, and what to recall before; ``none`` leaves what is recalled as it is."""

    content: str
    recall: By | Literal["none"] = "embedding"
    question: str | None = None


class RankBy(BaseModel):
    """What to rank items by: text, token ids, or with ``name`` a name or a glob."""

    model_config = STRICT

    question: Annotated[str, Field(min_length=1)] | list[StrictInt]
    by: By = "embedding"


class Search(RankBy):
    """What to rank items by, and how many to tell."""

    n: _Count = RANKED


class Recall(RankBy):
    """What to recall, and how many at most."""

    n: _Count | None = None


class Matching(BaseModel):
    """Which items: a name, a glob, or a ``directory/``."""

    model_config = STRICT

    pattern: ChunkRef = "**"


class DryMatching(DryRun):
    """Which items; nothing is the default."""

    pattern: ChunkRef


class Anchor(Content):
    """A text to stand in front."""

    label: ChunkRef


class Write(Content):
    """An item."""

    name: ChunkRef
    replace: StrictBool = True


class RenameItem(BaseModel):
    """An item, or a ``directory/``, and its new name."""

    model_config = STRICT

    name: ChunkRef
    to: ChunkRef


class BlockVerb(BaseModel):
    """What to do with a block."""

    model_config = STRICT

    label: ChunkRef
    value: str

    def texts(self) -> list[str]:
        """Return the text that comes into it."""
        return [PlainText(self.value)]


class AddBlock(BlockVerb):
    """Make a block."""

    verb: Literal["add"]
    value: str = ""
    limit: Annotated[Int, Field(ge=1, le=2**20)] | None = None
    description: Line | None = None

    def apply(self, blocks: MemoryBlocks) -> MemoryBlock:
        """Do it."""
        more = self.limit or BLOCK_LIMIT, self.description or ""
        return blocks.add(self.label, self.value, *more)


class SetBlock(BlockVerb):
    """Give it another value."""

    verb: Literal["set"]

    def apply(self, blocks: MemoryBlocks) -> MemoryBlock:
        """Do it."""
        return blocks.set(self.label, self.value)


class AppendToBlock(BlockVerb):
    """Put a line behind its value."""

    verb: Literal["append"]

    def apply(self, blocks: MemoryBlocks) -> MemoryBlock:
        """Do it."""
        return blocks.append(self.label, self.value)


class ReplaceInBlock(BlockVerb):
    """Put ``value`` in the place of ``old``, which occurs once."""

    verb: Literal["replace"]
    old: Annotated[str, Field(min_length=1)]

    def apply(self, blocks: MemoryBlocks) -> MemoryBlock:
        """Do it."""
        return blocks.replace(self.label, self.old, self.value)


BlockCall = Annotated[
    AddBlock | SetBlock | AppendToBlock | ReplaceInBlock, Field(discriminator="verb")
]


class MemoryToolCall(BaseModel):
    """The input of a call of the memory tool (``memory_20250818``)."""

    model_config = STRICT

    command: Annotated[str, Field(max_length=32)]
    path: Line | None = None
    view_range: Annotated[list[StrictInt], Field(max_length=2)] | None = None
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: StrictInt | None = None
    insert_text: str | None = None
    old_path: Line | None = None
    new_path: Line | None = None

    def texts(self) -> list[str]:
        """Return the texts that come into files."""
        return [text for text in (self.file_text, self.new_str, self.insert_text) if text]


# ---- what comes back


class MemorySummary(BaseModel):
    """One memory, in short: the name of its context, and where its items are."""

    name: str
    root: str


class MemoryList(BaseModel):
    """Memories by name; ``next`` is what to give as ``after`` for those that follow."""

    object: Literal["list"] = "list"
    data: list[MemorySummary]
    next: str | None = None


class PartTold(BaseModel):
    """A part of the context."""

    uid: int
    id: int
    name: str
    start: int
    n_tokens: int


class BudgetTold(BaseModel):
    """Tokens of each zone."""

    window: int
    turns: int | None
    keep: float
    summaries: int
    summary: int
    recalled: int
    warm: int
    cold: TierName | None


class MemoryView(MemorySummary):
    """One memory in full. ``n_steps``: how many ``undo`` can take back; ``busy``: an answer is under way."""

    version: int
    n_tokens: int
    n_items: int
    n_steps: int
    busy: bool
    summarise: str
    budget: BudgetTold
    zones: dict[Zone, list[PartTold]]


class ItemEntry(BaseModel):
    """One item."""

    name: str
    id: int
    kind: Kind
    n_tokens: int
    tier: TierName
    pinned: bool
    in_context: bool


class ItemList(BaseModel):
    """Items by name."""

    object: Literal["list"] = "list"
    data: list[ItemEntry]


class ItemText(BaseModel):
    """What an item says."""

    name: str
    text: str


class Name(BaseModel):
    """The whole name of an item."""

    name: str


class ItemNames(BaseModel):
    """Whole names of items, in order."""

    names: list[str]


class Scored(BaseModel):
    """An item, and how well it fits."""

    name: str
    score: float


class FoundItems(BaseModel):
    """Items, the best first."""

    object: Literal["list"] = "list"
    data: list[Scored]


class Undone(BaseModel):
    """The step that was taken back."""

    undone: str | None


class SleptEntry(BaseModel):
    """What was done, with which item, of how many tokens."""

    what: str
    name: str
    n_tokens: int


class SleptTold(BaseModel):
    """What one step of sleep did."""

    slept: SleptEntry | None


class BlockTold(BaseModel):
    """A memory block."""

    label: str
    value: str
    limit: int
    description: str


class BlockList(BaseModel):
    """Memory blocks by label."""

    object: Literal["list"] = "list"
    data: list[BlockTold]


class ToolTold(BaseModel):
    """The tool's result, for the model."""

    text: str
    is_error: bool
