"""Wraps around messages, found in a model's chat template."""

from __future__ import annotations

import pytest

from kvweave.errors import InvalidArgument
from kvweave.weave.chat import ChatFormat


class Tokenizer:
    """Renders roles in brackets; of a strange one it raises, as templates do."""

    chat_template = "here"

    def get_vocab(self):
        return {}

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt=False):
        for message in conversation:
            if message["role"] not in ("system", "user", "assistant"):
                raise RuntimeError(f"unknown role: {message['role']}")
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in conversation)
        return text + "<assistant>" * add_generation_prompt


def test_a_message_is_its_content_between_what_the_template_puts_there():
    chat = ChatFormat(Tokenizer())
    assert chat.message("user", "hi") == "<user>hi</>"
    assert chat.message("system", "be brief") == "<system>be brief</>"
    assert chat.header() == "<assistant>"


def test_a_role_the_template_refuses_is_an_invalid_argument():
    chat = ChatFormat(Tokenizer())
    for _ in range(2):
        with pytest.raises(
            InvalidArgument, match="role: the model's chat template: unknown role: tool"
        ):
            chat.message("tool", "7")
