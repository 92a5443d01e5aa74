"""What benches, examples and tools import of this repository is there: mypy reads ``src`` alone, and most
benches are run by hand, so a name that moved would be missed on the day of the measurement."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(
    p for folder in ("bench", "docs", "examples") for p in (ROOT / folder).rglob("*.py")
)


def module(name: str, program: Path) -> Path | None:
    """Return the file of a module as a program would find it; None for one of another project."""
    bench = next((p for p in program.parents if p.name == "bench"), program.parent)
    for root in (ROOT / "src", program.parent, bench):
        path = root.joinpath(*name.split("."))
        for found in (path / "__init__.py", path.with_suffix(".py")):
            if found.is_file():
                return found
        if path.is_dir() and list(path.glob("*.py")):
            return path
    return None


@cache
def names(path: Path) -> frozenset[str] | None:
    """Return what a module binds; None for one that makes names when they are asked for."""
    if path.is_dir():
        return frozenset(p.stem for p in path.iterdir())
    found = set()
    if path.name == "__init__.py":
        found |= {p.stem for p in path.parent.iterdir()}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return None if "__getattr__" in found else frozenset(found)


def missing(program: Path, text: str) -> Iterator[str]:
    """Yield what a program asks of a module of ours that does not have it."""
    tree, whole = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            path = module(node.module, program)
            known = names(path) if path else None
            if known is not None:
                yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in known)
            elif path is None and node.module.split(".")[0] == "kvweave":
                yield node.module
        elif isinstance(node, ast.Import):
            whole.update({a.asname or a.name: module(a.name, program) for a in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            path = whole.get(node.value.id)
            known = names(path) if path else None
            if known is not None and node.attr not in known:
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_program_imports_of_ours_is_there(program: Path) -> None:
    assert not list(missing(program, program.read_text("utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "from regret import Counted",
        "import regret\nregret.frontier",
        "from kvweave.suite.computed import Spent",
        "from kvweave.suite.spent import PASS",
        "from kvweave.suite import spent",
    ],
)
def test_what_has_moved_is_seen(text: str) -> None:
    assert list(missing(ROOT / "bench" / "asked_again.py", text))
