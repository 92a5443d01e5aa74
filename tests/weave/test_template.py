"""Templates: parsing, filling, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import HoleNotFilled, InvalidArgument
from kvweave.weave.template import Hole, Literal, Ref, Template, Text


def never(name: str) -> bool:
    raise AssertionError(f"asked for {name}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ()),
        ("plain", (Literal("plain"),)),
        ("{a}", (Hole("a"),)),
        ("x {a} y", (Literal("x "), Hole("a"), Literal(" y"))),
        ("{a}{b}", (Hole("a"), Hole("b"))),
        ("{docs/faq}{#17}", (Hole("docs/faq"), Hole("#17"))),
        ("{chat/42/u-007}", (Hole("chat/42/u-007"),)),
        ("{wiki/Zürich}", (Hole("wiki/Zürich"),)),
        ("{{a}}", (Literal("{a}"),)),
        ("{{{a}}}", (Literal("{"), Hole("a"), Literal("}"))),
        ('{{"n": {n}}}', (Literal('{"n": '), Hole("n"), Literal("}"))),
        ("{{}}", (Literal("{}"),)),
        ("a\n{b}\n", (Literal("a\n"), Hole("b"), Literal("\n"))),
    ],
)
def test_parse(text, parts):
    assert Template(text).parse() == parts


def test_holes_are_named_once_in_order_of_first_use():
    assert Template("{b} {a} {b} {#3}").holes == ("b", "a", "#3")


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("ab {c", 3, "never closed"),
        ("ab {c {d}", 3, "never closed"),
        ("{", 0, "never closed"),
        ("ab }", 3, "closes nothing"),
        ("{a}}", 3, "closes nothing"),
        ("x{}", 1, "without a name"),
        ("x{ a}", 1, "not a hole's name"),
        ("x{a }", 1, "not a hole's name"),
        ("x{a/}", 1, "not a hole's name"),
        ("x{/a}", 1, "not a hole's name"),
        ("x{#a}", 1, "not a hole's name"),
        ('{"n": 1}', 0, "not a hole's name"),
    ],
)
def test_a_wrong_brace_is_refused_with_its_position(text, position, says):
    with pytest.raises(InvalidArgument, match=f"{says}, at character {position} ") as error:
        Template(text)
    assert error.value.hint


def test_the_position_is_also_a_line_and_a_column():
    with pytest.raises(InvalidArgument, match=r"at character 7 \(line 3, column 4\)"):
        Template("ab\n\ncde}")


def test_a_list_is_chunks_and_a_string_is_text():
    template = Template("Answer from {docs}.\nQ: {question}\n")
    values = {"docs": ["wiki/oslo", "#17"], "question": "Is it wet?"}
    assert template.fill(values, never) == [
        Text("Answer from "),
        Ref("wiki/oslo"),
        Ref("#17"),
        Text(".\nQ: Is it wet?\n"),
    ]


def test_a_hole_that_nothing_fills_is_a_chunk_if_there_is_one():
    pieces = Template("{docs/faq} {#17}").fill({}, {"docs/faq", "#17"}.__contains__)
    assert pieces == [Ref("docs/faq"), Text(" "), Ref("#17")]


def test_a_value_goes_before_a_chunk_of_the_same_name():
    assert Template("{docs/faq}").fill({"docs/faq": "text"}, never) == [Text("text")]


def test_refs_and_tuples_are_references_too():
    values = {"a": Ref("x"), "b": ("y", Ref("z"))}
    assert Template("{a}{b}").fill(values, never) == [Ref("x"), Ref("y"), Ref("z")]


def test_a_hole_used_twice_is_filled_twice():
    assert Template("{a}-{a}").fill({"a": ["x"]}, never) == [Ref("x"), Text("-"), Ref("x")]


def test_empty_values_leave_no_piece_and_join_the_texts_around():
    template = Template("a{x}b{y}c")
    assert template.fill({"x": "", "y": []}, never) == [Text("abc")]
    assert Template("{x}").fill({"x": ""}, never) == []


def test_braces_in_a_value_are_text():
    assert Template("{q}").fill({"q": "{docs/faq} }"}, never) == [Text("{docs/faq} }")]


def test_nothing_for_a_hole():
    with pytest.raises(HoleNotFilled) as error:
        Template("{a} {b}").fill({"a": "x"}, lambda name: False)
    assert error.value.hole == "b"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("{question} {docs}", "did you mean {question}?"),
        ("{docs}", "did you mean {docs}?"),
        ("none", "it has no holes at all"),
    ],
)
def test_a_value_without_a_hole_is_refused_with_the_nearest_names(text, hint):
    with pytest.raises(InvalidArgument) as error:
        Template(text).fill({"qestion": "x"}, lambda name: True)
    assert error.value.argument == "qestion"
    assert error.value.hint == hint


@pytest.mark.parametrize("value", [3, None, b"x", {"a": 1}, [1], [""], ["ok", None], [["x"]]])
def test_a_value_of_another_type_is_refused(value):
    with pytest.raises(InvalidArgument) as error:
        Template("{a}").fill({"a": value}, never)
    assert error.value.argument == "a"


@given(st.text())
def test_any_text_survives_being_escaped(text):
    pieces = Template(text.replace("{", "{{").replace("}", "}}")).fill({}, never)
    assert pieces == ([Text(text)] if text else [])


@given(st.text(alphabet="ab{}#/ \n", max_size=20))
def test_any_text_is_refused_or_its_parts_write_it_back(text):
    try:
        parts = Template(text).parse()
    except InvalidArgument:
        return
    assert all(part.text for part in parts if isinstance(part, Literal))
    written = "".join(
        f"{{{part.name}}}"
        if isinstance(part, Hole)
        else part.text.replace("{", "{{").replace("}", "}}")
        for part in parts
    )
    assert written == text


@given(st.lists(st.text(), max_size=3))
def test_filled_texts_read_as_the_filled_template(values):
    template = Template("<" + "|".join(f"{{v{i}}}" for i in range(len(values))) + ">")
    pieces = template.fill({f"v{i}": value for i, value in enumerate(values)}, never)
    assert pieces == [Text("<" + "|".join(values) + ">")]
