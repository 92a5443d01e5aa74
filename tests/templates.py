"""Chat templates of several habits, for the tests of rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

ROLE = "{{ '<|im_start|>' + m['role'] + '\n' }}"
HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

# Renders every message by itself, with tools in the first.
PLAIN = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\n' }}{% endif %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if not (tools and loop.first and m['role'] == 'system') %}"
    + ROLE
    + "{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}{{ '<call>' + c['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}" + HEADER
)
# As PLAIN, but a default system message where there is none, and content is trimmed.
DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    + ROLE
    + "{{ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    + HEADER
)
# Thinking of older answers is left out: before the last question.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}" + ROLE + "{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ text + '<|im_end|>\n' }}{% endfor %}" + HEADER
)
# No system role: it is put into the first question.
MERGING = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{% set head = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ '<turn>' + m['role'] + '\n' + (head if loop.first else '') }}"
    "{{ m['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)
TEMPLATES = {"plain": PLAIN, "default": DEFAULT, "thinking": THINKING, "merging": MERGING}


def tokenizer_with(bundled: Path, template: str | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    tokenizer.chat_template = template
    return tokenizer


def say(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]
