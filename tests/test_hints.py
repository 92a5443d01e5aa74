"""Every error says what to do: python -m pytest tests/test_hints.py"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "kvweave"
PLAIN = {"KVWeaveError", "ChunkError", "WeaveError", "StoreError", "ServerError"}
# what is wrong is said as what would be right
SAYS = re.compile(
    r"is none of|is neither|is not in |not 1 to|is not between|is not above|is not below|is below"
    r"|is less than|not less than|is negative|is not over|is not from|is not a number from|not below"
    r"|more than|must|should be|outside 0\.\.|wanted|does not hold|is not before|stands for"
    r"|say which|is no text|is no \[first|is no list of|needs psycopg|is text|it is too deep"
    r"|there are \{"
)
# (file, a part of the call): why nobody who is to be told meets it
KNOWN = {
    ("run/schedule.py", ""): "the loop alone calls it",
    ("run/loop.py", ""): "the engine alone calls it",
    ("run/rows.py", ""): "a context asks engine.can() before",
    ("run/sample.py", ""): "the loop alone calls it",
    ("run/sampling.py", "reason"): "each reason names the range",
    ("chunk/match.py", "other tokens"): "the server alone calls it",
    ("chunk/table.py", ""): "the engine alone calls it",
    ("chunk/transactions.py", ""): "the engine alone calls it",
    ("chunk/glob.py", "self.pattern"): "each reason names the character",
    ("chunk/identity.py", "fingerprint"): "who reads a file of it says what to do",
    ("connect/vllm/host.py", ""): "the rows are computed instead",
    ("connect/vllm/paged.py", ""): "the rows are left as before",
    ("connect/vllm/record.py", "reason"): "each reason names what of vLLM it is",
    ("serve/openai/messages.py", "wrong.message"): "pydantic says what it wants",
    ("store/record/encode.py", ""): "the shelf alone calls it",
    ("weave/maker.py", "finite"): "it says what rows may not be",
}


def hintless(text: str) -> list[tuple[int, str]]:
    """Return line and words of the errors in a source that leave their reader alone."""
    nodes = list(ast.walk(ast.parse(text)))
    words = [
        (n.lineno, n.targets[0].id, ast.unparse(n.value))
        for n in nodes
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    ]
    found = []
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        most = 3 if node.func.id == "InvalidArgument" else 99 if node.func.id in PLAIN else 0
        hints = [k.value for k in node.keywords if k.arg in ("hint", None)]
        hints += node.args[2:] if most == 3 else []
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        empty = any(isinstance(h, ast.Constant) and not h.value for h in hints)
        if not most or starred or (hints and not empty):
            continue
        said = ast.unparse(node)
        for name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
            said += max(
                ((line, what) for line, of, what in words if of == name and line <= node.lineno),
                default=(0, ""),
            )[1]
        if not SAYS.search(said):
            found.append((node.lineno, said))
    return found


def test_every_error_says_what_to_do() -> None:
    alone: list[str] = []
    used: set[tuple[str, str]] = set()
    for path in sorted(SRC.rglob("*.py")):
        place = path.relative_to(SRC).as_posix()
        text = path.read_text()
        if not any(f"{name}(" in text for name in (*PLAIN, "InvalidArgument")):
            continue
        for line, said in hintless(text):
            known = {key for key in KNOWN if key[0] == place and key[1] in said}
            used |= known
            if not known:
                alone.append(f"{place}:{line}: {said}")
    assert not alone, "\n".join(alone)
    assert used == KNOWN.keys(), f"no such error any more: {sorted(KNOWN.keys() - used)}"


@pytest.mark.parametrize("call", ['StoreError("a")', 'InvalidArgument("a", "b")',
                                  'InvalidArgument("a", "b", "")', 'StoreError("a", hint="")'])  # fmt: skip
def test_an_error_without_a_hint_is_found(call: str) -> None:
    assert hintless(f"raise {call}")
    assert not hintless('raise InvalidArgument("a", "b", "give c")')
