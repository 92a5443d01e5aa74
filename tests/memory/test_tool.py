"""The memory tool of agents and memory blocks: thin, over items, with errors that help a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loaded import short_runner

from kvweave import Engine, Memory
from kvweave.errors import InvalidArgument, NameTaken
from kvweave.memory import FirstSentences, MemoryBlocks, MemoryTool

TEXT = "# Plan\nfirst, wait\nthen, wait <|end|> and é\n"


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    with Engine(short_runner()) as engine:
        context = engine.context("chat", system="keep the notes .")
        yield Memory(engine, context, summarise=FirstSentences())
        engine.check_integrity()


@pytest.fixture
def tool(memory: Memory) -> Iterator[MemoryTool]:
    made = MemoryTool(memory)
    assert not made(
        {"command": "create", "path": "/memories/p/plan.md", "file_text": TEXT}
    ).is_error
    yield made
    memory.delete("files/")


def do(tool: MemoryTool, command: str, **call: object) -> str:
    reply = tool({"command": command, **call})
    assert not reply.is_error, reply.text
    return reply.text


def refused(tool: MemoryTool, command: str, **call: object) -> str:
    before = {item.name: tool.memory.read(item.name) for item in tool.memory.items()}
    reply = tool({"command": command, **call})
    assert reply.is_error and reply.text.startswith("Error: ")
    assert before == {item.name: tool.memory.read(item.name) for item in tool.memory.items()}
    return reply.text


PLAN = "/memories/p/plan.md"


def test_a_file_is_an_item_word_by_word(tool: MemoryTool, memory: Memory) -> None:
    assert memory.read("files/p/plan.md") == TEXT
    assert "     2\tfirst, wait" in do(tool, "view", path=PLAN)
    part = do(tool, "view", path=PLAN, view_range=[2, -1])
    assert "# Plan" not in part and "<|end|> and é" in part
    do(tool, "str_replace", path=PLAN, old_str="first, wait", new_str="first, go")
    do(tool, "insert", path=PLAN, insert_line=0, insert_text="(mine)")
    do(tool, "insert", path=PLAN, insert_line=4, insert_text="the end")
    changed = "(mine)\n" + TEXT.replace("first, wait", "first, go") + "the end"
    assert memory.read("files/p/plan.md") == changed
    memory.write("files/p/plan.md", "by hand")
    assert "by hand" in do(tool, "view", path=PLAN)
    memory.undo()
    assert memory.read("files/p/plan.md") == changed


def test_directories(tool: MemoryTool, memory: Memory) -> None:
    do(tool, "create", path="/memories/p/deep/er/x.md", file_text="")
    listed = do(tool, "view", path="/memories")
    assert "/memories/p/plan.md" in listed and "/memories/p/deep/" in listed
    assert "x.md" not in listed and "x.md" in do(tool, "view", path="/memories/p/deep/")
    do(tool, "rename", old_path="/memories/p", new_path="/memories/q")
    assert memory.read("files/q/deep/er/x.md") == ""
    assert "2 files" in do(tool, "delete", path="/memories/q")
    assert "0 files" in do(tool, "view", path="/memories")


@pytest.mark.parametrize(
    "path",
    ["/memories/../x", "/etc/passwd", "memories/x", "/memories/a/../../x", "/memories/./x",
     "/memories//x", "/memoriesx", "/memories/a\\..\\b", "/memories/%2e%2e/x", "/memories/a*b",
     "/memories/\x00", 7, None],
)  # fmt: skip
def test_paths_that_lead_elsewhere(tool: MemoryTool, path: object) -> None:
    for command in ("view", "create", "delete", "str_replace", "insert"):
        refused(
            tool, command, path=path, file_text="x", old_str="a", insert_line=0, insert_text="b"
        )
    refused(tool, "rename", old_path=PLAN, new_path=path)
    refused(tool, "rename", old_path=path, new_path="/memories/new")


def test_errors_say_what_to_do(tool: MemoryTool) -> None:
    says = {
        "str_replace, create": refused(tool, "chmod", path=PLAN) and "view, create",
        "nearest line is 'first, wait'": refused(
            tool, "str_replace", path=PLAN, old_str="first wait"
        ),
        "2 times in /memories/p/plan.md, in lines 2, 3": refused(
            tool, "str_replace", path=PLAN, old_str="wait"
        ),
        "did you mean /memories/p/plan.md": refused(tool, "view", path="/memories/p/plan"),
        "0..3": refused(tool, "insert", path=PLAN, insert_line=9, insert_text="x"),
        "there already": refused(tool, "create", path=PLAN, file_text="x"),
        "is a directory": refused(tool, "create", path="/memories/p", file_text="x"),
        "is a file": refused(tool, "create", path=PLAN + "/x", file_text="x"),
        "within the 4 lines": refused(tool, "view", path=PLAN, view_range=[3, 99]),
        "is inside": refused(tool, "rename", old_path="/memories/p", new_path="/memories/p/q/r"),
        "cannot be changed": refused(tool, "delete", path="/memories"),
        "needs file_text": refused(tool, "create", path="/memories/new"),
        "is no [first, last]": refused(tool, "view", path=PLAN, view_range="all"),
        "it is empty": refused(tool, "str_replace", path=PLAN, old_str="", new_str="x"),
    }
    for wanted, text in list(says.items())[1:]:
        assert wanted in text
    assert "view, create, str_replace" in tool({"command": "chmod"}).text


def test_blocks_are_anchors(memory: Memory) -> None:
    blocks = MemoryBlocks(memory)
    block = blocks.add("human", "Anna's river is cold .", limit=60, description="who asks")
    assert (block.value, block.limit) == ("Anna's river is cold .", 60)
    assert [part.name for part in memory.zone("anchor")][-1] == "memory/anchors/human"
    assert blocks.append("human", "so well .").value == "Anna's river is cold .\nso well ."
    blocks.replace("human", "cold", "hot")
    assert memory.read("anchors/human").startswith("Anna's river is hot")
    memory.write("anchors/human", "by hand")
    assert [each.value for each in blocks] == ["by hand"]
    assert memory.items("anchors/human")[0].pinned
    with pytest.raises(InvalidArgument, match="shorten it by 40"):
        blocks.set("human", "x" * 100)
    with pytest.raises(InvalidArgument, match="0 times"):
        blocks.replace("human", "cold", "hot")
    with pytest.raises(InvalidArgument, match="there are human"):
        blocks.get("humans")
    with pytest.raises(NameTaken):
        blocks.add("human")
    assert memory.undo() == "write" and blocks.get("human").value.startswith("Anna's river is hot")
    memory.delete("anchors/human")
