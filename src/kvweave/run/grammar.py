"""Grammars that an answer keeps to: JSON of a schema, a regular expression, Lark, a choice.

llguidance (the extra ``structured``) says which tokens may come next. Where a model thinks first,
its grammar begins behind the thinking.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import InvalidArgument
from kvweave.run.sampling import Follower

GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "choice"]
# JSON without white space but that of `json.dumps`: a weak model writes blanks for ever
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar as it was asked for; ``argument`` is what its errors name."""

    kind: GrammarKind
    source: Any = None
    argument: str = "response_format"


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """The tokens around thinking, and whether it ``waits`` for the second one from the start."""

    open: int
    close: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar; a `Constraint`."""

    matcher: Any
    n_words: int
    ends: tuple[int, ...]
    think: ThinkTokens | None = None

    def begin(self) -> Follower:
        """Return the follower of one more answer."""
        return _Following(self)

    def behind(self, think: ThinkTokens | None) -> Grammar:
        """Return the same, to begin behind thinking."""
        return replace(self, think=think)


class _PlainTokens:
    """llguidance's view of a tokenizer, in which text is never a special token.

    What a grammar wants as it stands, a constant or a name, may read like one (`<tool_call>`): the
    tokenizer takes it for that, and llguidance, which told the model to write it, is at its end then.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, made: Any) -> None:
        self._made, self.eos_token_id = made, made.eos_token
        self.tokens = [made.decode_bytes([id]) for id in range(made.vocab_size)]
        self.special_token_ids = [i for i in range(made.vocab_size) if made.is_special_token(i)]
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._made.tokenize_str(text)
        return ids if self._special.isdisjoint(ids) else list(self._made.greedy_tokenize(text))


class _Following:
    """Where one answer is in a grammar. It never raises: one answer's fault is not its batch's."""

    def __init__(self, grammar: Grammar) -> None:
        self.matcher, self.think = grammar.matcher.deep_copy(), grammar.think
        self.waits = grammar.think is not None and grammar.think.waits
        self.may_think = grammar.think is not None and not grammar.think.waits
        self._ends = np.zeros(grammar.n_words, np.int32)
        for end in grammar.ends:
            _set(self._ends, end)
        self._mask = np.zeros((1, grammar.n_words), np.int32)

    @property
    def fault(self) -> str:
        return str(self.matcher.get_error()).splitlines()[0] if self.matcher.is_error() else ""

    def allowed(self) -> NDArray[np.int32] | None:
        if self.waits:
            return ~self._ends  # to end there would be an answer without what it is held to
        if self.matcher.is_error() or self.matcher.is_stopped():
            return self._ends
        try:
            import llguidance.numpy
        except ImportError:  # it was there when the grammar was compiled
            return self._ends
        llguidance.numpy.fill_next_token_bitmask(self.matcher, self._mask)
        words: NDArray[np.int32] = self._mask[0]
        if self.may_think and self.think is not None:
            _set(words, self.think.open)
        return words

    def took(self, token: int) -> None:
        if self.waits:
            self.waits = self.think is None or token != self.think.close
            return
        thinks = self.may_think and self.think is not None and token == self.think.open
        self.may_think = False
        if thinks:
            self.waits = True
        elif not self.matcher.is_stopped():
            self.matcher.consume_token(token)


class Grammars:
    """Compiles grammars for one model. From any thread."""

    def __init__(self, tokenizer: Any, n_vocab: int, ends: Iterable[int]) -> None:
        self.tokenizer, self.n_vocab, self.ends = tokenizer, n_vocab, tuple(sorted(ends))
        self._lock = threading.Lock()
        self._tokens: Any = None  # llguidance's view of the tokenizer; takes a second to make

    def compile(self, asked: GrammarText) -> Grammar:
        """Return a grammar. Raises InvalidArgument for one that is none, or where it cannot be kept."""
        tokens = self._ready(asked.argument)
        try:
            from llguidance import LLMatcher

            text = _text_of(asked, LLMatcher)
            wrong = LLMatcher.validate_grammar(text, tokens)
        except (ImportError, ValueError, TypeError, RecursionError) as error:
            wrong = str(error)
        if wrong:
            raise InvalidArgument(
                asked.argument,
                f"no grammar: {wrong.splitlines()[0]}",
                "mend it, or ask for text without a format",
            )
        matcher = LLMatcher(tokens, text, log_level=0)
        if matcher.is_error():
            raise InvalidArgument(
                asked.argument,
                f"no grammar: {matcher.get_error()[:200]}",
                "mend it, or ask for text without a format",
            )
        return Grammar(matcher, (tokens.vocab_size + 31) // 32, self.ends)

    def _ready(self, argument: str) -> Any:
        """Return llguidance's view of the tokenizer. Raises InvalidArgument where there is none."""
        try:
            import llguidance.hf
        except ImportError as error:
            hint = "pip install 'kvweave[structured]'"
            raise InvalidArgument(argument, "llguidance is not installed", hint) from error
        if self.tokenizer is None:
            raise InvalidArgument(
                argument,
                "this model came without a tokenizer",
                "leave it out, or load a model that has one",
            )
        with self._lock:
            if self._tokens is None:
                n_vocab = max(self.n_vocab, len(self.tokenizer))
                ends = list(self.ends) or None
                made = llguidance.hf.from_tokenizer(self.tokenizer, n_vocab=n_vocab, eos_token=ends)
                plain: Any = _PlainTokens(made)
                self._tokens = llguidance.LLTokenizer(plain, n_vocab=n_vocab, eos_token=ends)
        return self._tokens

    def literal(self, text: str) -> str:
        """Return Lark for exactly this text; special tokens of it are the model's own."""
        # llguidance calls more tokens special than the tokenizer does: Qwen's <tool_call>
        tokens, added = self._ready("tools"), self.tokenizer.added_tokens_decoder.items()
        special = {str(token): id for id, token in added if tokens.is_special_token(id)}
        pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        pieces = re.split(f"({pattern})", text)
        made = [f"<[{special[p]}]>" if p in special else json.dumps(p) for p in pieces if p]
        return " ".join(made)


def _text_of(asked: GrammarText, matcher: Any) -> str:
    kind, source = asked.kind, asked.source
    if kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if kind == "json_object" else source
        text = json.dumps(schema) if not isinstance(schema, str) else schema
        made = matcher.grammar_from_json_schema(text, overrides=COMPACT)
    elif kind == "regex":
        made = matcher.grammar_from_regex(str(source))
    elif kind == "choice":
        if not isinstance(source, Sequence) or isinstance(source, str) or not source:
            raise ValueError("a choice is a list of texts")
        made = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(str(c)) for c in source))
    else:
        made = matcher.grammar_from_lark(str(source))
    return str(made)


def _set(words: NDArray[np.int32], token: int) -> None:
    words.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
