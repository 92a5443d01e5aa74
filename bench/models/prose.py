"""Prose for language models: the documentation and source that ship with Python, some held out."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from models.worlds import BOS, END, PAD, SPECIALS
from models.zoo import Kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LENGTHS = ((0.0, 384, 4), (0.8, 1536, 1), (0.93, 8192, 1))  # spent, tokens of a row, rows
BYTES = 600_000  # a file is read up to here


def texts(held_out: bool) -> list[str]:
    """Return the topics of Python's help and its library's sources; every tenth is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        f for f in sorted(library.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"} & set(f.parts)
    ]  # fmt: skip
    found = [topics.topics[name] for name in sorted(topics.topics)]
    found += [f.read_text(errors="replace")[:BYTES] for f in files]
    return [text for i, text in enumerate(found) if (i % 10 == 5) == held_out]


def tokenizer_of(kind: Kind) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model: one token a word of its world, pieces of prose, or bytes."""
    if kind.wording is not None:
        return word_tokenizer(kind.wording.words())
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    size = kind.vocab or 256 + len(SPECIALS)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIALS), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    made.train_from_iterator(texts(held_out=False) if kind.vocab else [], trainer)
    return _wrapped(made)


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a world: one token a word, in this order."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(made)


def _wrapped(made: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=END, pad_token=PAD)  # fmt: skip


class Prose:
    """Rows of prose in a model's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        rng, made = random.Random(0), texts(held_out=False)
        rng.shuffle(made)
        ids = [tokenizer(text).input_ids for text in made]
        self.tokens = torch.tensor([t for each in ids for t in each], dtype=torch.int32)

    def loss(self, model: Any, step: int, spent: float) -> tuple[torch.Tensor, int]:
        """Return the next-token loss on random rows, and how many tokens they have."""
        length, rows = next((n, r) for since, n, r in reversed(LENGTHS) if spent >= since)
        rng = random.Random(step)
        starts = [rng.randrange(len(self.tokens) - length) for _ in range(rows)]
        inputs = torch.stack([self.tokens[s : s + length] for s in starts]).long()
        return model(input_ids=inputs, labels=inputs, use_cache=False).loss, inputs.numel()
