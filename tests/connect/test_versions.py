"""kvweave also runs on the transformers that vLLM pins, which is older than the one of the other tests."""

from __future__ import annotations

import ast
from pathlib import Path

import kvweave

# names that transformers 5.19 has, looked up there: `make setup-vllm` installs it
THERE = {
    "transformers": "AttentionInterface AttentionMaskInterface AutoConfig AutoModelForCausalLM"
    " AutoTokenizer Cache DynamicCache PreTrainedModel PreTrainedTokenizerBase"
    " PreTrainedTokenizerFast cache_utils",
    "transformers.cache_utils": "CacheLayerMixin DynamicLayer DynamicSlidingWindowLayer"
    " LinearAttentionCacheLayerMixin LinearAttentionLayer",
    "transformers.utils": "logging",
}


def test_what_is_imported_of_transformers_is_in_the_version_that_vllm_has():
    found = set()
    for path in Path(kvweave.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in THERE:
                found |= {(node.module, each.name) for each in node.names}
    there = {(module, name) for module, names in THERE.items() for name in names.split()}
    assert found and not found - there, "look whether vLLM's transformers has it, then add it here"
