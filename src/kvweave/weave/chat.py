"""What a model's chat template puts around a message, found by rendering sentinels.

A message's text does not depend on the messages before it, so its chunk can stand anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvweave.errors import InvalidArgument

THINK_END = "</think>"
SENTINEL = "\u2039content\u203a"


class ChatTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    chat_template: str | None

    def get_vocab(self) -> dict[str, int]:
        """Return token text -> id."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """Render messages."""
        ...


@dataclass(frozen=True, slots=True)
class Wrap:
    """Text before and after the content of one message."""

    before: str
    after: str


class ChatFormat:
    """Wraps of each role, and the header that asks the model to answer."""

    def __init__(self, tokenizer: ChatTokenizer | None) -> None:
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
        self.think_end = vocabulary.get(THINK_END)  # id of the token that ends thinking, if any
        self._wraps: dict[str, Wrap] = {}
        self._history = [{"role": "system", "content": "s"}]
        if self.has_template:
            try:
                self._render(self._history)
            except Exception:
                self._history = []  # templates without a system role, such as Gemma's

    @property
    def has_template(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def message(self, role: str, content: str) -> str:
        """Return the text of one message. Raises InvalidArgument for a role the template refuses."""
        wrap = self.wrap(role)
        return wrap.before + content + wrap.after

    def header(self) -> str:
        """Return the text that makes the model answer."""
        if not self.has_template:
            return "Assistant:"
        before = [*self._history, {"role": "user", "content": "u"}]
        return self._delta(before, before, add_generation_prompt=True)

    def wrap(self, role: str) -> Wrap:
        """Return what stands around a message of ``role``. Raises InvalidArgument."""
        if role not in self._wraps:
            try:
                self._wraps[role] = self._find(role)
            except Exception as error:  # whatever a template raises
                reason = f"the model's chat template: {error}"
                raise InvalidArgument("role", reason, "take another role") from error
        return self._wraps[role]

    def _find(self, role: str) -> Wrap:
        if not self.has_template:
            return Wrap("", "\n\n") if role == "system" else Wrap(f"{role.capitalize()}: ", "\n")
        message = {"role": role, "content": SENTINEL}
        if role == "system":
            if not self._history:
                return Wrap("", "\n\n")
            text = self._render([message])
        else:
            user = {"role": "user", "content": "u"}
            before = self._history if role == "user" else [*self._history, user]
            text = self._delta(before, [*before, message])
        before_text, _, after = text.partition(SENTINEL)
        return Wrap(before_text, after)

    def _delta(
        self, before: list[dict[str, str]], after: list[dict[str, str]], **options: Any
    ) -> str:
        head = self._render(before) if before else ""
        whole = self._render(after, **options)
        return whole[len(head) :] if whole.startswith(head) else whole

    def _render(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
