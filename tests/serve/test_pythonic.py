"""Calls written as Python, against Python's own reading of them; and what must never be read."""

from __future__ import annotations

import ast
import math
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.serve.chat.pythonic import MOST_CHARS, pythonic_calls

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("true", "false", "null") and name.isidentifier()
)
names = names.filter(lambda name: not __import__("keyword").iskeyword(name))
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text("abc ", max_size=4), each, max_size=3),
    max_leaves=8,
)  # fmt: skip
calls = st.lists(
    st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3
)


def spelt(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(calls, st.sampled_from(["[]", "lines", "bare"]))
def test_it_reads_what_python_writes(given: list[Any], how: str) -> None:
    written = [spelt(*call) for call in given]
    text = "\n".join(written) if how == "lines" else ", ".join(written)
    text = f"[{text}]" if how == "[]" else text
    found = pythonic_calls(f"\n {text} ")
    assert found is not None
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == given
    # and so does Python, a value at a time
    for call, (_, arguments) in zip(found, given, strict=True):
        read = call["function"]["arguments"]
        assert {k: ast.literal_eval(repr(v)) for k, v in arguments.items()} == read


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[f()]", [("f", {})]),
        ("[a.b.f(x=-1, y=+2.5)]", [("a.b.f", {"x": -1, "y": 2.5})]),
        ("f(x=true, y=false, z=null, w=None)", [("f", {"x": True, "y": False, "z": None, "w": None})]),
        ("f(x=(1, 2), y='a' 'b')", [("f", {"x": [1, 2], "y": "ab"})]),
        (r"f(x='\d+ \w', y=r'\d')", [("f", {"x": r"\d+ \w", "y": r"\d"})]),
        ("f(x='''a\nb''')", [("f", {"x": "a\nb"})]),
        ('[{"name": "f", "arguments": {"x": true}}]', [("f", {"x": True})]),
        ('{"name": "f", "parameters": {}}', [("f", {})]),
    ],
)  # fmt: skip
def test_the_forms_it_knows(text: str, wanted: list[Any]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = pythonic_calls(text)
    assert found is not None and not told
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "f", "[f]", "f(1)", "f('Oslo', days=3)", "f(x=1, x=2)", "f(**{'x': 1})", "f(*[1])", "f(x=g())",
        "f(x=y)", "f(x=__import__('os').system('true'))", "f(x=1 + 1)", "f(x=[y for y in z])", "f(x=lambda: 1)",
        "f(x=f'{y}')", "f(x=b'a')", "f(x={1, 2})", "f(x={1: 2})", "f(x={**y})", "f(x=1j)", "f(x=1e999)", "f(x=-1e999)",
        "f(x=-True)", "f(x=not True)", "f(x=...)", "f()()", "f[0]()", "(lambda: f)()", "x = f()", "import os", "f(); x = 1",
        "del f", "[f(x=1)", "f(x='a", "f(x=1)]", "[f(x=1)] so", "[[f(x=1)]]", "await f()", "(x := f())",
        '{"name": "f"}', '{"name": 5, "arguments": {}}', '{"name": "f", "arguments": 5}', "f(x={'a': 1, 'a': 2})",
        '{"name": "f", "arguments": {}, "x": 1}', "\0", "f(x='\0')", "f(x=" + "9" * 5000 + ")", "if f(): pass",
    ],
)  # fmt: skip
def test_what_is_no_call_is_none(text: str) -> None:
    assert pythonic_calls(text) is None


DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        "f(x=" + "[" * DEEP, "f(x=" + "[" * DEEP + "]" * DEEP + ")", "f(x=" + "-" * DEEP + "1)", "f(x=" + "not " * DEEP + "1)",
        "f" + "()" * DEEP, "f" + ".a" * DEEP + "()", "f(x=" + "1+" * DEEP + "1)", "f(x=" + "(" * 150 + "1" + ")" * 150 + ")",
        "f(x=" + "{'a':" * 150 + "1" + "}" * 150 + ")", "f(" * DEEP, "f(x='" + "a" * MOST_CHARS + "')", "[f()," * DEEP,
        "f(x=" + "lambda:" * DEEP + "1)", "f(x=" + "[" * 90 + "]" * 90 + ")",
    ],
    ids=range(14),
)  # fmt: skip
def test_whatever_is_written_comes_to_an_end(text: str) -> None:
    limit = sys.getrecursionlimit()
    found = pythonic_calls(text)
    assert found is None or len(found) == 1
    assert sys.getrecursionlimit() == limit


def test_numbers_are_finite() -> None:
    (call,) = pythonic_calls("f(x=1e308)") or []
    assert math.isfinite(call["function"]["arguments"]["x"])
