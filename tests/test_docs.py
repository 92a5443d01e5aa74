"""What the documents claim is run: Python blocks, command lines, links, and the generated page.

The ``python`` blocks of a file run in order in one namespace, in an empty directory, with the
bundled model for "path/or/hf-id" (and as ``MODEL``). A file's first block imports what it uses.
``console`` blocks show commands after ``$``: those of kvweave must parse, those of make must exist.
docs/http.md has a server at ``$KVWEAVE_URL``, which must answer its curl commands, in order; so has
docs/agents.md.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import ggufs
import httpx
import pytest
from needs import need
from served import served

from kvweave import Engine
from kvweave.cli import home
from kvweave.cli.parser import UsageError, parse
from kvweave.demo.report import WAYS
from kvweave.weave.repair import STRATEGIES

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "kvweave"
MODEL = str(home.BUNDLED)
HTTP = "docs/http.md"
AGENTS = "docs/agents.md"
PLACEHOLDER = '"path/or/hf-id"'
GGUF = "path/to/model.gguf"  # blocks that have it take llama.cpp, and are a test of their own
VLLM = "from vllm import"  # they are run where vLLM is: tests/connect/test_vllm_record.py
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
}


def blocks(text, language):
    """Return (line number, code) of each fenced block in a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def commands(text):
    """Return the commands of console blocks, also those after a pipe or in one line with others."""
    lines = [line for _, block in blocks(text, "console") for line in block.splitlines()]
    for line in lines:
        for part in re.split(r"(?:^|\s)\$ ", line)[1:] if line.startswith("$") else []:
            words = shlex.shlex(part, posix=True, punctuation_chars="|;&<>")
            words.whitespace_split = True
            command = []
            for word in [*words, ";"]:
                if set(word) <= set("|;&<>"):
                    yield command
                    command = []
                else:
                    command.append(word)


WITH_PYTHON = [name for name, text in PAGES.items() if blocks(text, "python")]
WITH_CONSOLE = [name for name, text in PAGES.items() if blocks(text, "console")]


def execute(text, name, namespace, *, of_gguf=False):
    for line, code in blocks(text, "python"):
        if (GGUF in code) != of_gguf or VLLM in code:
            continue
        source = "\n" * (line - 1) + code.replace(PLACEHOLDER, repr(MODEL))
        exec(compile(source, name, "exec"), namespace)


@pytest.fixture
def url(monkeypatch):
    """The address of a server, which is in KVWEAVE_URL too."""
    with Engine(MODEL) as engine, served(engine, model_name="demo") as server:
        monkeypatch.setenv("KVWEAVE_URL", server.url)
        yield server.url


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_blocks_run(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if name == AGENTS:
        need("anthropic"), need("openai")
    if name in (HTTP, AGENTS):
        request.getfixturevalue("url")
    execute(PAGES[name], str(ROOT / name), {"__name__": "docs", "MODEL": MODEL})


def test_blocks_of_llama_cpp_run(tmp_path, monkeypatch):
    need("xllamacpp"), need("llama_cpp_py_sync", "llama-cpp-py-sync")
    monkeypatch.chdir(tmp_path)
    Path(GGUF).parent.mkdir(parents=True)
    with Engine(MODEL) as engine:
        ggufs.write(engine.runner.model, Path(GGUF), engine.runner.tokenizer)
    name = "docs/probe.md"
    execute(PAGES[name], str(ROOT / name), {"__name__": "docs"}, of_gguf=True)
    assert Path("there.kvt").exists()


def check_command(words):
    """Raise UsageError or AssertionError for a command that does not exist."""
    if words[:1] == ["kvweave"] and not {"--help", "--version"} & set(words):
        parse(words[1:])
    if words[:1] == ["make"]:
        makefile = (ROOT / "Makefile").read_text()
        for target in [word for word in words[1:] if "=" not in word]:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"no make {target}"


@pytest.mark.parametrize("name", WITH_CONSOLE)
def test_commands_exist(name):
    for words in commands(PAGES[name]):
        try:
            check_command(words)
        except UsageError as error:
            pytest.fail(f"{name}: {shlex.join(words)}: {error.message}")


def send(words, url):
    """Send what a curl command would, and return the answer."""
    method, body, target, words = "GET", None, "", words[1:]
    while words:
        word = words.pop(0)
        if word == "-X":
            method = words.pop(0)
        elif word == "--json":
            body, method = words.pop(0), "POST" if method == "GET" else method
        elif not word.startswith("-"):
            target = word.replace("$KVWEAVE_URL", url)
    headers = {} if body is None else {"content-type": "application/json"}
    return httpx.request(method, target, content=body, headers=headers, timeout=60)


def test_curl_commands_are_answered(url):
    found = [words for words in commands(PAGES[HTTP]) if words[0] == "curl"]
    assert len(found) > 9
    for words in found:
        answer = send(words, url)
        assert answer.is_success, f"{shlex.join(words)}: {answer.text}"
        assert '"error"' not in answer.text
    assert not send(["curl", f"{url}/v1/chunks/docs/nothing"], url).is_success


def test_the_page_of_routes_has_all_of_them(url):
    def plain(route):
        return re.sub(r"\{\w+\}", "{}", route)

    told = re.findall(r"^\| `([A-Z]+ /\S+)` \|(.*)", PAGES[HTTP], re.M)
    api = httpx.get(f"{url}/openapi.json", timeout=60).json()
    there = {
        plain(f"{method.upper()} {path}"): fields_of(api, route)
        for path, methods in api["paths"].items()
        for method, route in methods.items()
    }
    assert sorted(plain(route) for route, _ in told) == sorted(there)
    for route, rest in told:
        query, body = there[plain(route)]
        assert "dry_run" in query or "dry_run" not in body, f"{route}: also in the query"
        takes = rest.split("|")[0]
        whole = not re.search(r"\.\.\.|\bas (?:of|below|a)\b|the same", takes)
        missing = (query | body) - {"verb"} - set(re.findall(r"\w+", takes))
        if whole and route.startswith(NATIVE):
            assert not missing, f"{route} takes {missing} too"


NATIVE = tuple(
    f"{verb} /v1/{noun}"
    for verb in ("GET", "POST", "PUT", "DELETE")
    for noun in ("chunks", "contexts", "memory")
)


def fields_of(api, route):
    """Return the names of a route's parameters, and of the fields of its body."""

    def found(schema):
        schema = (
            api["components"]["schemas"][ref.split("/")[-1]]
            if (ref := schema.get("$ref"))
            else schema
        )
        inner = [found(each) for each in schema.get("anyOf", [])]
        return set(schema.get("properties", ())).union(*inner)

    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    query = {each["name"] for each in route.get("parameters", ()) if each["in"] == "query"}
    return query, found(content.get("schema", {}))


def test_the_page_of_errors_has_all_of_them():
    need("fastapi")
    from kvweave import errors
    from kvweave.serve.guard import problems

    rows = PAGES[HTTP].split("| status | code |")[1].split("\n\n")[0].splitlines()[2:]
    told = {
        (int(n), code)
        for row in rows
        for n in re.findall(r"\d{3}", row.split("|")[1])
        for code in re.findall(r"`(\w+)`", row)
    }
    named = {"context_too_long": "context_length_exceeded", "over_quota": "insufficient_quota"}
    for name, kind in vars(errors).items():
        known = [n for of, n in problems.STATUS if isinstance(kind, type) and issubclass(kind, of)]
        if known and not kind.__subclasses__() and kind not in problems.INTERNAL:
            code = problems.snake_case(name)
            assert (known[0], named.get(code, code)) in told, f"{known[0]} {code}"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES[name]):
        if "://" not in target and not target.startswith("mailto:"):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


def paths(text):
    """Return the files and folders a page names, but for those that a reader is to write."""
    found = re.findall(r"`((?:\w+/)+\w*(?:\.py)?|\w+\.py)`", text)
    return [path for path in found if not path.endswith("mine.py")]


@pytest.mark.parametrize("name", ["docs/map.md", "CONTRIBUTING.md"])
def test_files_that_pages_of_the_code_name_exist(name):
    for path in paths(PAGES[name]):
        assert any((base / path).exists() for base in (ROOT, ROOT / "src/kvweave")), path


def test_the_map_says_of_every_module_what_belongs_there():
    table = PAGES["docs/map.md"].split("## Where a line belongs")[1].split("\n## ")[0]
    named = [path for line in re.findall(r"^\| (`.*?) \|", table, re.M) for path in paths(line)]
    modules = [*SRC.glob("run/*.py"), *SRC.glob("weave/**/*.py")]
    there = [path.relative_to(SRC).as_posix() for path in modules if path.read_text()]
    assert sorted(named) == sorted(there), "each module once"


def test_the_map_has_every_package():
    rows = re.findall(r"^\| `(\w+)[/.]", PAGES["docs/map.md"].split("## The packages")[1], re.M)
    there = {path.stem for path in SRC.iterdir() if not path.name.startswith("_")}
    assert sorted(rows) == sorted(there)


def test_where_to_register_what_is_so():
    registered = re.findall(r"`([A-Z_]+)` in `([\w/]+\.py)`", PAGES["CONTRIBUTING.md"])
    assert len(registered) > 4
    for registry, path in registered:
        file = next(base / path for base in (SRC, ROOT) if (base / path).exists())
        assert re.search(rf"^{registry}\b", file.read_text(), re.M), f"no {registry} in {path}"


def test_the_strategies_are_all_explained():
    table = PAGES["docs/concepts.md"].split("| strategy |")[1].split("\n\n")[0]
    rows = "".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert {name.split(":")[0] for name in re.findall(r"`([\w:@]+)`", rows)} == set(STRATEGIES)


@pytest.mark.parametrize("name", [name for name in PAGES if name != "docs/LOG.md"])
def test_no_page_counts_lines_of_code(name):
    """They are wrong the next day; `test_layout.py` has the budgets."""
    assert not re.search(r"\d[\d,.]*k? (lines|LOC)\b", PAGES[name])


def test_the_page_of_commands_is_current():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert PAGES["docs/cli.md"] == generate.page(), "run `make docs`"
    assert "%%" not in PAGES["docs/cli.md"], "it is written twice for argparse only"


def test_the_demo_has_as_many_ways_as_the_first_page_says():
    said = dict(zip(("two", "three", "four", "five"), range(2, 6), strict=True))
    assert said[re.search(r"make demo .* (\w+) ways", PAGES["README.md"])[1]] == len(WAYS)


def test_these_checks_can_fail():
    page = (
        "```python\nfrom kvweave import Engine\nx = 'path/or/hf-id'\n```\ntext\n"
        "```python\nassert x == MODEL, x\n```\n"
        "```console\n$ date | kvweave put x  # comment\n$ kvweave ls   $ kvweave lss '#1'\n```\n"
    )
    with pytest.raises(AssertionError, match="path/or/hf-id"):
        execute(page, "page.md", {"MODEL": MODEL})
    execute(page.replace("'path/or/hf-id'", PLACEHOLDER), "page.md", {"MODEL": MODEL})
    found = list(commands(page))
    assert found == [["date"], ["kvweave", "put", "x"], ["kvweave", "ls"], ["kvweave", "lss", "#1"]]
    with pytest.raises(UsageError, match="no command 'lss'"):
        check_command(found[-1])
    with pytest.raises(AssertionError, match="no make nothing"):
        check_command(["make", "nothing"])
