"""Calls of tools that are written as Python calls them: ``[f(a=1), g(b="x")]``, or a line each.

They are read as a syntax tree, and nothing is ever evaluated: a tree that is anything but calls with
plain values by name is no call.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

MOST_CHARS = 1 << 20  # of one region
SOURCE = "<calls of tools>"  # what Python's warnings name
PLAIN = {"true": True, "false": False, "null": None}  # JSON's names, as models mix them in
SPELT = (int, float, str)  # of values beside True, False and None


class NoCall(Exception):
    """A tree is no call, or has no plain value."""


def pythonic_calls(text: str) -> list[dict[str, Any]] | None:
    """Return the calls that a text is, as `_call_of` reads them; None if it is anything else.

    A call may also be an object with ``name`` and ``parameters`` or ``arguments``.
    """
    if len(text) > MOST_CHARS:
        return None
    # an unknown escape in a string is that string; Python would warn of it
    warnings.filterwarnings("ignore", module=re.escape(SOURCE))
    try:
        calls = _calls(ast.parse(text.strip(), SOURCE).body)
    except (SyntaxError, ValueError, NoCall, RecursionError, MemoryError):
        return None
    return calls or None


def _calls(statements: list[ast.stmt]) -> list[dict[str, Any]]:
    made = []
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            raise NoCall
        value = statement.value
        several = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        made += [_call(each) for each in several]
    return made


def _call(node: ast.expr) -> dict[str, Any]:
    if isinstance(node, ast.Dict):
        told = _value(node)
        given = told.get("parameters", told.get("arguments"))
        if len(told) != 2 or not isinstance(told.get("name"), str) or not isinstance(given, dict):
            raise NoCall
        return {"function": {"name": told["name"], "arguments": given}}
    if not isinstance(node, ast.Call) or node.args:
        raise NoCall
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:  # ** of something; twice
            raise NoCall
        arguments[keyword.arg] = _value(keyword.value)
    return {"function": {"name": _name(node.func), "arguments": arguments}}


def _name(node: ast.expr) -> str:
    """Return a name, which may have dots."""
    found: list[str] = []
    while isinstance(node, ast.Attribute):
        found.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise NoCall
    return ".".join(reversed([*found, node.id]))


def _value(node: ast.expr) -> Any:
    """Return a plain value. Raises NoCall for what JSON does not have."""
    if isinstance(node, ast.Constant):
        if node.value is None or isinstance(node.value, SPELT):
            return _finite(node.value)
    elif isinstance(node, ast.Name) and node.id in PLAIN:
        return PLAIN[node.id]
    elif isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    elif isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
            raise NoCall
        return dict(zip(keys, map(_value, node.values), strict=True))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise NoCall


def _finite(value: object) -> object:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise NoCall
    return value
