"""A tiny model that writes what it is told to: its logits are forced, all else is real.

The bundled model cannot call tools. This one has the tokenizer of it, another chat template, and
writes the next line of a script whatever it reads; what is placed, rendered, parsed and found again
is the server's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
import pytest
from torch import Tensor
from transformers import AutoTokenizer

from kvweave import Engine, Runner
from kvweave.run import loop
from kvweave.run.sample import Choice, Sampler, sample

# ChatML, with tools as models of the Hermes family are told of them.
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\n' }}{% endif %}{{ '<tools>' }}{% for t in tools %}{{ t | tojson }}"
    "{% endfor %}{{ '</tools> answer with <tool_call></tool_call><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if not (tools and loop.first and m['role'] == 'system') %}"
    "{% if m['role'] == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + "
    "'\n</tool_response><|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.get('reasoning_content') and not loop.first and messages[-1]['role'] == 'tool' %}"
    "{{ '<think>\n' + m['reasoning_content'] + '\n</think>\n\n' }}{% endif %}{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}{{ '\n<tool_call>\n' if m['content'] or not loop.first "
    "else '<tool_call>\n' }}{{ c['function'] | tojson }}{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TAGS = ("<tool_call>", "</tool_call>")  # of Qwen's tokenizers: added, and not special


class Script:
    """The lines that are written, one an answer."""

    def __init__(self, tokenizer: Any, end: str = "<|im_end|>") -> None:
        self.tokenizer = tokenizer
        self.lines: deque[str] = deque()
        self.end = int(tokenizer.convert_tokens_to_ids(end))
        self._left: dict[int, deque[int]] = {}  # of each sampler
        self._kept: list[Sampler] = []

    def say(self, *lines: str) -> None:
        """Have these written next."""
        self.lines.extend(lines)

    def sample(self, logits: Tensor, samplers: list[Sampler]) -> list[Choice | Exception]:
        """Choose the script's tokens; what has a grammar or no line is drawn as ever."""
        found: list[Choice | Exception] = []
        for row, sampler in enumerate(samplers):
            if id(sampler) not in self._left and self.lines and sampler.sampling.constraint is None:
                ids = self.tokenizer.encode(self.lines.popleft(), add_special_tokens=False)
                self._left[id(sampler)] = deque([*ids, self.end])
                self._kept.append(sampler)  # an id is given again when its object is gone
            left = self._left.get(id(sampler))
            if left:
                found.append(Choice(left.popleft(), 0.0, ()))
            else:
                found += sample(logits[row : row + 1], [sampler])
        return found


def scripted(
    bundled: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str = HERMES,
    n: int = 4096,
    special: Sequence[str] = SPECIAL,
    added: Sequence[str] = (),
    layers: int = 2,
    **more: Any,
) -> tuple[Engine, Script]:
    """Return an engine of a tiny random model with ``n`` positions, and what it writes.

    The last of the ``special`` tokens ends answers; those ``added`` besides are not special.
    """
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.add_tokens(["<think>", "</think>", *added])
    tokenizer.chat_template = template
    tokenizer.eos_token = special[-1]
    script = Script(tokenizer, special[-1])
    # a first and a last layer: most of a test is the passes of answers that are forced
    sizes = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": n,
        "num_hidden_layers": layers,
    }
    model = oracle.build("qwen3", sizes | {"eos_token_id": script.end})
    model.generation_config.eos_token_id = script.end
    monkeypatch.setattr(loop, "sample", script.sample)
    return Engine(Runner(model, tokenizer), **{"repair": "none"} | more), script
