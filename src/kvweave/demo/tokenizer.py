"""The tokenizer of the bundled model: every word of the little world is one token.

It was learned, and the model trained, when the world's names and values were made-up words. Their
tokens have got English texts since, under the ids they had: what they mean to the model is as
before. A piece of a text that is a token as it stands is taken whole (``ignore_merges``); what
"'s river" and " is cold" are pieces of, `_pieces` says. Prose is cut as it always was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvweave.demo.vocabulary import (
    ASK,
    ATTRIBUTES,
    ENTITIES,
    FILLER,
    POSSESSED,
    SAID,
    VALUES,
    WORDS,
    piece,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

N_TOKENS = 2048
MAX_POSITIONS = 4096
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIALS = (PAD, BOS, END, *(f"<|{role}|>" for role in ROLES))

# One jinja line; each message renders by itself, so renderings concatenate. The bos belongs
# to the system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{% if message['role'] == 'system' %}{{ '<|bos|>' }}{% endif %}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# What ByteLevel cuts a text at when it is left to itself: GPT-2's expression.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build_tokenizer(prose: Iterator[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer in which every word of the world is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learned = _first_words()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_TOKENS,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def corpus() -> Iterator[str]:
        yield from prose
        line = "".join(f" {word}" for word in learned.values())
        for _ in range(5000):
            yield line

    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer = _renamed(tokenizer, {f" {old}": piece(word) for word, old in learned.items()})
    split = [w for w in WORDS if len(tokenizer.encode(piece(w)).ids) != 1]
    if split or tokenizer.get_vocab_size() != N_TOKENS:
        raise RuntimeError(f"not one token each: {split}; {tokenizer.get_vocab_size()} entries")
    return tokenizer


def _first_words() -> dict[str, str]:
    """Return, for every word of the world, the one the tokenizer was learned with."""
    parts = [c + v for c in "bdfghjklmnprstvz" for v in "aeiou"]
    real = {*ATTRIBUTES, *FILLER, "data", "date", "file", "line", "name", "note", "type", "code"}
    made_up = [a + b for a in parts for b in parts if a + b not in real]
    names = (*ENTITIES, *VALUES)
    drawn = random.Random(20261121).sample(made_up, len(names))
    return dict(zip(WORDS, WORDS, strict=True)) | dict(zip(names, drawn, strict=True))


def _renamed(tokenizer: Tokenizer, texts: dict[str, str]) -> Tokenizer:
    """Return the tokenizer with other texts for some tokens, their ids kept."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def spelled(text: str) -> str:  # a token as the vocabulary has it, bytes as characters
        return "".join(part for part, _ in level.pre_tokenize_str(text))

    new = {spelled(a): spelled(b) for a, b in texts.items() if a != b}
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    model = state["model"]
    model["vocab"] = {new.get(token, token): i for token, i in model["vocab"].items()}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in new]
    model["ignore_merges"] = True
    made = Tokenizer.from_str(json.dumps(state))
    cut = pre_tokenizers.Split(Regex(_pieces()), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    return made


def _pieces() -> str:
    """Return the expression for a piece of text, the world's words of several words first."""
    several = f"'s (?:{'|'.join(POSSESSED)})| is (?:{'|'.join(VALUES)})| {SAID[ASK]}"
    return rf"(?:{several})(?!\w)|{_GPT2}"


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, ready for save_pretrained."""
    from transformers import PreTrainedTokenizerFast

    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # untyped upstream
    return make(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
