"""The shape of the code: import rule, budgets, docstrings (DESIGN 3, 8).

A rule is a function from a file to complaints. ``EXCUSED`` names what may break one, and why;
an excuse that nothing needs any more is a failure too.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "kvweave"

# Each may import from those before it and from itself; those in one row not from each other.
ORDER = (
    ("errors", "interrupts"),
    ("verbs",),
    ("config",),
    ("chunk",),
    ("keep",),  # sees ids and sizes only, so the store can ask it who may go
    ("store",),
    ("run",),
    ("keep.tokens",),  # looks at rows, and at who computes them
    ("weave",),
    ("engine",),
    ("memory",),
    ("probe",),
    ("serve",),
    ("connect",),  # inside vLLM the server's own routes answer
    ("client",),
    ("__init__",),  # the public names
    ("demo",),
    ("suite",),
    ("simulate",),
    ("route",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
TORCH_FREE = (
    "chunk/", "keep/", "run/schedule.py", "run/sampling.py",
    "weave/parts.py", "weave/edits.py", "weave/naming.py", "weave/context.py", "weave/contexts.py",
    "weave/settings.py", "weave/template.py", "weave/chat.py", "weave/plan.py", "weave/answer.py",
    "weave/check.py", "weave/calibration.py", "weave/special.py",
)  # fmt: skip
MODEL_SEAM = (
    "run/expand.py", "run/fixed.py", "run/handed.py", "run/load.py", "run/looking.py", "run/model.py", "run/primed.py",
    "run/probe.py", "run/stateful.py", "run/verify.py",
    "serve/chat/parse.py",  # transformers' own parser of answers; no model
)  # fmt: skip
LOCAL_IMPORTS_FREE = ("demo/", "cli/")  # these start fast by importing late
SPEAK_FOR_THEMSELVES = {"property", "cached_property", "setter", "overload", "override"}
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_DEPTH = 400, 60, 7, 2

# (rule, path under src/kvweave, what the complaint is about) -> why it may.
EXCUSED: dict[tuple[str, str, str], str] = {
    ("transformers", "demo/tokenizer.py", "transformers"): "makes the bundled model's tokenizer",
    ("parameters", "engine.py", "compose"): "its holes are keywords too, so options have no object",
    ("parameters", "client/api.py", "compose"): "as the engine's",
    **{
        (
            "parameters",
            "run/fused.py",
            kernel,
        ): "a Triton kernel takes pointers and strides one by one"
        for kernel in ("_turned", "_write", "_attend", "_join", "_add_up")
    },
    **{
        ("local_imports", "run/kernel.py", name): "Triton is there only where a GPU is"
        for name in (
            "_write_rows_on_cuda",
            "_interval_attention_on_cuda",
            "_attention_sums_on_cuda",
        )
    },
    (
        "local_imports",
        "connect/vllm/plugin.py",
        "_prefilled",
    ): "vLLM is there only where its server is",
    ("inheritance", "run/pool.py", "PooledRows"): "raw rows whose memory is a pool's",
    **{
        (
            "inheritance",
            path,
            name,
        ): "transformers asks by isinstance, and such a layer is of both kinds"
        for path, name in (("run/model.py", "_Both"), ("run/stateful.py", "SeenBoth"))
    },
    ("inheritance", "run/states.py", "StateRows"): "raw rows that keep states besides",
    ("inheritance", "run/layers.py", "MovableRows"): "raw rows that keep one tensor more",
    (
        "one_name",
        "memory/scheduler.py",
        "Memory",
    ): "what users call it; the tier in memory is inside",
    ("one_name", "simulate/cost.py", "Tier"): "a tier too, of which only size and speed are known",
    ("one_name", "simulate/trace.py", "Request"): "a request too, of which only blocks are known",
}


@dataclass
class File:
    """One source file, and the rest of the source where a rule needs it."""

    path: str  # under src/kvweave
    text: str
    others: dict[str, File] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return place(self.path.removesuffix(".py").split("/"))

    # what rules ask of every file when they look at one

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def classes(self) -> dict[str, list[str]]:
        """Names of classes and of what they inherit from."""
        return {
            node.name: base_names(node) for node in self.nodes if isinstance(node, ast.ClassDef)
        }

    @cached_property
    def contracts(self) -> set[str]:
        """Names of methods that a protocol or an abstract class documents."""
        return {
            member.name
            for node in self.nodes
            if isinstance(node, ast.ClassDef) and {"Protocol", "ABC"} & {*base_names(node)}
            for member in node.body
            if isinstance(member, ast.FunctionDef) and ast.get_docstring(member)
        }

    @cached_property
    def public_names(self) -> list[tuple[str, int]]:
        return list(public_names(self))

    def forget(self) -> None:
        """Let go of the tree: millions of objects slow down every test of the process."""
        for name in ("tree", "nodes", "classes", "contracts", "public_names"):
            self.__dict__.pop(name, None)


class Complaint(NamedTuple):
    about: str
    line: int
    says: str


FILES = {
    path.relative_to(SRC).as_posix(): File(path.relative_to(SRC).as_posix(), path.read_text())
    for path in sorted(SRC.rglob("*.py"))
}
for _file in FILES.values():
    _file.others = FILES


@pytest.fixture(scope="module", autouse=True)
def trees_go() -> Iterator[None]:
    """And nobody goes through them again and again meanwhile."""
    gc.disable()
    try:
        yield
        for file in FILES.values():
            file.forget()
    finally:
        gc.enable()


def imports(file: File) -> Iterator[tuple[str, ast.stmt]]:
    """Every absolute module name a file imports, anywhere in it."""
    here = ["kvweave", *file.path.removesuffix(".py").split("/")]
    for node in file.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "kvweave":
                for alias in node.names:
                    inside = any(p.split("/")[0].removesuffix(".py") == alias.name for p in FILES)
                    known = alias.name in RANK or inside
                    yield (f"kvweave.{alias.name}" if known else "kvweave.__init__"), node
            else:
                yield module, node


def functions(file: File) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def place(path: list[str]) -> str:
    """Return the name in ORDER that a module's path stands under."""
    both = ".".join(path[:2])
    return both if both in RANK else path[0]


def import_order(file: File) -> Iterator[Complaint]:
    if file.package not in RANK:
        yield Complaint(file.package, 1, f"{file.package!r} has no place in ORDER")
        return
    for module, node in imports(file):
        if module.split(".")[0] != "kvweave":
            continue
        other = place([*module.split(".")[1:], "__init__"])
        if other not in RANK:
            yield Complaint(other, node.lineno, f"{other!r} has no place in ORDER")
        elif other != file.package and RANK[other] >= RANK[file.package]:
            says = f"{file.package!r} may not import {other!r}, which stands behind or beside it"
            yield Complaint(other, node.lineno, says)


def transformers(file: File) -> Iterator[Complaint]:
    if file.path in MODEL_SEAM:
        return
    for module, node in imports(file):
        if module.split(".")[0] == "transformers":
            yield Complaint(
                "transformers", node.lineno, f"only {', '.join(MODEL_SEAM)} import transformers"
            )


def torch_free(file: File) -> Iterator[Complaint]:
    if not file.path.startswith(TORCH_FREE) or file.package == "keep.tokens":
        return
    for module, node in imports(file):
        if module.split(".")[0] in {"torch", "transformers", "safetensors"}:
            yield Complaint(module, node.lineno, f"{module} in a file that must run without torch")


def file_size(file: File) -> Iterator[Complaint]:
    n_lines = file.text.count("\n")
    if n_lines > MAX_FILE:
        yield Complaint("file", MAX_FILE, f"{n_lines} lines, the budget is {MAX_FILE}")


def function_size(file: File) -> Iterator[Complaint]:
    for node in functions(file):
        n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if n_lines > MAX_FUNCTION:
            says = f"{node.name}() has {n_lines} lines, the budget is {MAX_FUNCTION}"
            yield Complaint(node.name, node.lineno, says)


def parameters(file: File) -> Iterator[Complaint]:
    for node in functions(file):
        a = node.args
        named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]
        n = sum(arg.arg not in {"self", "cls"} for arg in named)
        if n > MAX_PARAMETERS:
            says = f"{node.name}() has {n} parameters, the budget is {MAX_PARAMETERS}"
            yield Complaint(node.name, node.lineno, says)


def depth(name: str, classes: dict[str, list[str]], seen: frozenset[str] = frozenset()) -> int:
    """Classes of ours on the longest way up from ``name``, itself included."""
    if name not in classes or name in seen:
        return 0
    return 1 + max((depth(base, classes, seen | {name}) for base in classes[name]), default=0)


def base_names(node: ast.ClassDef) -> list[str]:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [ast.unparse(base).split(".")[-1] for base in bases]


def inheritance(file: File) -> Iterator[Complaint]:
    if file.path == "errors.py":
        return
    classes: dict[str, list[str]] = {}
    for each in [*file.others.values(), file]:
        if each.path != "errors.py":
            classes |= each.classes
    for node in file.nodes:
        if isinstance(node, ast.ClassDef) and depth(node.name, classes) > MAX_DEPTH:
            says = f"{node.name} inherits over more than {MAX_DEPTH} classes of ours"
            yield Complaint(node.name, node.lineno, says)


def local_imports(file: File) -> Iterator[Complaint]:
    if file.path.startswith(LOCAL_IMPORTS_FREE):
        return
    optional = {
        node
        for guard in file.nodes
        if isinstance(guard, ast.Try)
        and any("ImportError" in ast.unparse(h.type) for h in guard.handlers if h.type)
        for statement in guard.body
        for node in ast.walk(statement)
    }
    for function in functions(file):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in optional:
                says = f"{ast.unparse(node)!r} in {function.name}(): only optional extras, in a try"
                yield Complaint(function.name, node.lineno, says)


def docstrings(file: File) -> Iterator[Complaint]:
    if file.path != "__init__.py" and file.tree.body and not ast.get_docstring(file.tree):
        yield Complaint("module", 1, "the module has no docstring")
    contracts = set().union(*(each.contracts for each in [*file.others.values(), file]))
    for node in undocumented(file.tree):
        if file.path == "errors.py" and isinstance(node, ast.ClassDef):
            continue  # the tree in the module's docstring says it
        if node.name not in contracts:
            yield Complaint(node.name, node.lineno, f"{node.name} is public, without a docstring")


def public_names(file: File) -> Iterator[tuple[str, int]]:
    """Public classes and type aliases (capitalised, not constants) of a module."""
    for node in file.tree.body:
        if isinstance(node, ast.ClassDef):
            found = [node.name]
        elif isinstance(node, ast.Assign):
            found = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found = [name for name in found if name[0].isupper() and not name.isupper()]
        else:
            continue
        yield from ((name, node.lineno) for name in found if not name.startswith("_"))


def one_name(file: File) -> Iterator[Complaint]:
    """One name for one thing; of two files, the one further up has to find another name."""
    others = [each for path, each in file.others.items() if path != file.path]
    taken = {
        name: other.path
        for other in others
        if (RANK.get(other.package, 0), other.path) < (RANK.get(file.package, 0), file.path)
        for name, _ in other.public_names
    }
    for name, line in file.public_names:
        if name in taken:
            yield Complaint(name, line, f"{taken[name]} has another {name}")
        taken[name] = file.path


Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def undocumented(parent: ast.Module | ast.ClassDef) -> Iterator[Named]:
    """Public classes, functions and methods without docstring; a property's name may do."""
    for node in parent.body:
        if not isinstance(node, Named) or node.name.startswith("_"):
            continue
        marks = {ast.unparse(mark).split("(")[0].split(".")[-1] for mark in node.decorator_list}
        if not ast.get_docstring(node) and not marks & SPEAK_FOR_THEMSELVES:
            yield node
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node)


RULES: dict[str, Callable[[File], Iterator[Complaint]]] = {
    "import_order": import_order,
    "transformers": transformers,
    "torch_free": torch_free,
    "file_size": file_size,
    "function_size": function_size,
    "parameters": parameters,
    "inheritance": inheritance,
    "local_imports": local_imports,
    "docstrings": docstrings,
    "one_name": one_name,
}


@pytest.mark.parametrize("rule", RULES)
def test_source_keeps_the_rule(rule):
    complaints = [
        f"src/kvweave/{path}:{complaint.line}: {complaint.says}"
        for path, file in FILES.items()
        for complaint in RULES[rule](file)
        if (rule, path, complaint.about) not in EXCUSED
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("excuse", EXCUSED, ids=" ".join)
def test_excuse_is_still_needed(excuse):
    rule, path, about = excuse
    assert path in FILES, f"{path} is gone: delete its excuse"
    assert about in {complaint.about for complaint in RULES[rule](FILES[path])}, (
        f"nothing needs the excuse {excuse} any more: delete it"
    )


def body(n_lines: int) -> str:
    return "def long():\n" + "    x = 1\n" * (n_lines - 1)


BASES = "class A: ...\nclass B(A): ...\n"
DOC = '"""Doc."""\n'


def module_of(name: str) -> str | None:
    """Return the file that a dotted name means, None for what is none of ours."""
    path = name.removeprefix("kvweave").lstrip(".").replace(".", "/")
    found = (f"{path}.py", f"{path}/__init__.py".lstrip("/"))
    return next((each for each in found if name.startswith("kvweave") and each in FILES), None)


def modules(file: File) -> set[str]:
    """Return the files a file imports, anywhere in it; a package's own file where it must."""
    found: set[str | None] = set()
    for node in file.nodes:
        if isinstance(node, ast.Import):
            found |= {module_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.add(module_of(f"{node.module}.{alias.name}") or module_of(node.module))
    return {path for path in found if path is not None} - {file.path}


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {path: modules(file) for path, file in FILES.items()}
    assert "run/base.py" in graph["weave/weaver.py"] and "run/attention.py" in graph["run/model.py"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_name_is_taken_by_the_file_further_down():
    both = {path: File(path, "class A: ...") for path in ("run/one.py", "weave/other.py")}
    for file in both.values():
        file.others = both
    assert not list(one_name(both["run/one.py"]))
    assert [each.about for each in one_name(both["weave/other.py"])] == ["A"]


BROKEN = [
    ("import_order", "chunk/table.py", "from kvweave.engine import Engine"),
    ("import_order", "chunk/table.py", "def f():\n    import kvweave.store.tier.pool"),
    ("import_order", "chunk/table.py", "from kvweave import store"),
    ("import_order", "chunk/table.py", "from kvweave import Engine"),
    ("import_order", "chunk/table.py", "from ..run import loop"),
    ("import_order", "keep/lru.py", "if TYPE_CHECKING:\n    from kvweave.run import loop"),
    ("import_order", "probe/replay.py", "from kvweave.serve import app"),
    ("import_order", "errors.py", "import kvweave"),
    ("import_order", "utils/misc.py", ""),
    ("import_order", "cli.py", "from kvweave.utils import misc"),
    ("transformers", "run/loop.py", "import transformers"),
    ("transformers", "weave/context.py", "def f():\n    from transformers.cache_utils import X"),
    ("torch_free", "chunk/table.py", "import torch"),
    ("torch_free", "weave/plan.py", "from torch.nn import functional"),
    ("torch_free", "run/schedule.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
    ("file_size", "cli.py", "x = 1\n" * (MAX_FILE + 1)),
    ("function_size", "cli.py", body(MAX_FUNCTION + 1)),
    (
        "function_size",
        "cli.py",
        "class A:\n" + body(99).replace("\n", "\n  ").replace("def", "  def", 1),
    ),
    ("parameters", "cli.py", "def f(self, a, b, c, d, e, /, f, *g, h): ..."),
    ("inheritance", "cli.py", BASES + "class C(B): ..."),
    ("inheritance", "cli.py", BASES + "class C(Generic[T], base.B): ..."),
    ("local_imports", "engine.py", "def f():\n    import json"),
    (
        "local_imports",
        "engine.py",
        "def f():\n    try:\n        import x\n    except KeyError: ...",
    ),
    ("docstrings", "cli.py", "x = 1"),
    ("docstrings", "cli.py", DOC + "def f(): ..."),
    ("docstrings", "cli.py", DOC + "class A: ..."),
    ("docstrings", "cli.py", DOC + f"class A:\n    {DOC}    def f(self): ..."),
    ("docstrings", "errors.py", DOC + "def f(): ..."),
    ("one_name", "run/loop.py", "class Abc: ...\nAbc = tuple[int, int]"),
]

KEPT = [
    ("one_name", "run/loop.py", "class _Abc: ...\n_Abc = int\nAbc = int\nSIZE = 1\nSIZE = 2"),
    (
        "import_order",
        "engine.py",
        "from kvweave.weave import plan\nimport kvweave.errors\nimport os",
    ),
    ("import_order", "weave/context.py", "from kvweave.weave.plan import Plan\nfrom . import plan"),
    ("import_order", "cli.py", "from kvweave import Engine, demo"),
    (
        "import_order",
        "__init__.py",
        "from kvweave.engine import Engine\nfrom kvweave import errors",
    ),
    ("transformers", "run/model.py", "import transformers"),
    ("transformers", "run/probe.py", "from transformers import Cache"),
    ("torch_free", "weave/rotate.py", "import torch"),
    ("file_size", "cli.py", "x = 1\n" * MAX_FILE),
    ("function_size", "cli.py", body(MAX_FUNCTION)),
    ("parameters", "cli.py", "def f(self, a, b, c, d, e, /, f, *g): ..."),
    ("inheritance", "cli.py", BASES + "class C(A, nn.Module): ..."),
    ("local_imports", "engine.py", "import json\nif TYPE_CHECKING:\n    import torch"),
    (
        "local_imports",
        "engine.py",
        "def f():\n try:\n  import x\n except (OSError, ImportError): ...",
    ),
    ("local_imports", "demo/chat.py", "def f():\n    import json"),
    ("docstrings", "cli.py", DOC + "def _f(): ...\nclass _A:\n    def f(self): ..."),
    ("docstrings", "errors.py", DOC + "class A(KVWeaveError): ..."),
    (
        "docstrings",
        "cli.py",
        DOC + f"class P(Protocol):\n    {DOC}    def f(self):\n        {DOC}"
        f"class A:\n    {DOC}    def f(self): ...\n    def __len__(self): ...",
    ),
]


@pytest.mark.parametrize(("rule", "path", "snippet"), BROKEN)
def test_rule_can_fail(rule, path, snippet):
    assert list(RULES[rule](File(path, snippet))), f"{rule} lets this pass:\n{snippet}"


@pytest.mark.parametrize(("rule", "path", "snippet"), KEPT)
def test_rule_lets_good_code_pass(rule, path, snippet):
    assert not list(RULES[rule](File(path, snippet)))


def test_every_rule_is_tested_both_ways():
    assert {rule for rule, _, _ in BROKEN} == {rule for rule, _, _ in KEPT} == set(RULES)
