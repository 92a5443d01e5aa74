"""Keys as text: what is given and holds no key never opens the server."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.cli import app, parser
from kvweave.cli import serve as command
from kvweave.cli.serve import keys_of, options_of
from kvweave.errors import InvalidArgument, StoreError
from kvweave.serve.guard.keys import parse_key, parse_keys
from kvweave.serve.options import Options

NO_KEY = [
    "",
    " ",
    "\t\n",
    "# only a comment",
    "#a-comment-without-space",
    " # x\n\n#y",
    ",",
    " , ,\n",
]


@pytest.fixture(autouse=True)
def without_keys(monkeypatch):
    for name in ("KVWEAVE_KEYS", "KVWEAVE_METRICS_KEY"):
        monkeypatch.delenv(name, raising=False)


def args(*words):
    return parser.parse(["serve", *words])


def refused(*words):
    with pytest.raises(InvalidArgument) as found:
        options_of(args(*words))
    assert found.value.hint
    return str(found.value)


# ---- one key


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("abcdefgh", ("abcdefgh", "")),
        ("abcdefgh:alice", ("abcdefgh", "alice")),
        ("abcdefgh#ijkl:alice", ("abcdefgh#ijkl", "alice")),
        ("#abcdefgh", ("#abcdefgh", "")),
    ],
)
def test_an_option_is_taken_as_it_is(text, pair):
    assert parse_key(text) == pair
    assert keys_of(args("--key", text)) == dict([pair])
    assert options_of(args("--key", text)).keys == dict([pair])


@pytest.mark.parametrize(
    "text",
    ["", "  ", "\n", ":alice", " :alice", "abcdefgh:", "abcdefgh: ", "#secret", "abcdefgh:a:b",
     "abcdefgh,ijklmnop", "abcdefgh:a,ijklmnop:b", "abcdefgh # hers", " abcdefgh", "abcdefgh\n"],
)  # fmt: skip
def test_an_option_that_is_no_key_is_refused(text):
    said = refused("--key", text)
    assert "abcdefgh" not in said and "ijkl" not in said and "secret" not in said
    assert refused("--key", "good-enough", "--key", text)  # one good key beside it changes nothing


@given(st.text(max_size=20))
def test_an_option_gives_its_whole_key_or_is_refused(text):
    try:
        key, namespace = parse_key(text)
        Options(keys={key: namespace})
    except InvalidArgument:
        return
    assert text in (key, f"{key}:{namespace}")


# ---- many


def test_keys_are_read_from_text():
    text = "key-of-anna:anna\n# a comment\n\nkey-of-root, key-of-berta:berta # hers\n"
    assert parse_keys(text) == {"key-of-anna": "anna", "key-of-root": "", "key-of-berta": "berta"}
    with pytest.raises(InvalidArgument, match="two namespaces"):
        parse_keys("key-of-anna:a, key-of-anna:b")
    with pytest.raises(InvalidArgument):
        parse_keys(":anna")
    with pytest.raises(InvalidArgument):
        parse_keys("key-of-anna:anna\nkey-of-berta:")


def test_a_comment_begins_behind_white_space_and_ends_with_its_line():
    assert parse_keys("abcdefgh#ijkl:alice") == {"abcdefgh#ijkl": "alice"}
    assert parse_keys("key-of-a:a\t#b, key-of-old:b\nkey-of-c,#key-of-d") == {
        "key-of-a": "a", "key-of-c": "", "#key-of-d": "",
    }  # fmt: skip
    assert parse_keys("# was: key-of-old, key-of-older\r\nkey-of-new\r\n") == {"key-of-new": ""}


@pytest.mark.parametrize("text", NO_KEY)
def test_a_source_without_a_key_is_refused(text, tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(text)
    assert "--keys" in refused("--keys", str(file))
    assert refused("--keys", str(file), "--key", "good-enough")
    monkeypatch.setenv("KVWEAVE_KEYS", text)
    assert "KVWEAVE_KEYS" in refused()
    assert refused("--key", "good-enough")


def test_a_file_is_found_below_the_users_home_and_may_have_a_mark_of_its_encoding(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf# ours\nkey-of-anna:anna\n")
    assert keys_of(args("--keys", "~/keys")) == {"key-of-anna": "anna"}
    with pytest.raises(StoreError):
        keys_of(args("--keys", "~nobody-of-that-name/keys"))
    with pytest.raises(StoreError):
        keys_of(args("--keys", str(tmp_path)))


def test_a_file_without_a_name_or_without_text_is_refused(tmp_path):
    assert refused("--keys", "")
    (tmp_path / "keys").write_bytes(b"\xff\xfe\x00")
    assert refused("--keys", str(tmp_path / "keys"))


# ---- the command


def test_a_metrics_key_comes_from_the_option_or_the_environment(monkeypatch):
    key = ("--key", "key-of-anna:anna")
    assert options_of(args(*key)).metrics_key is None
    assert options_of(args(*key, "--metrics-key", "key-of-metrics")).metrics_key == "key-of-metrics"
    monkeypatch.setenv("KVWEAVE_METRICS_KEY", "key-of-others")
    assert options_of(args(*key)).metrics_key == "key-of-others"
    assert options_of(args(*key, "--metrics-key", "key-of-metrics")).metrics_key == "key-of-metrics"
    assert refused()  # there is no other key: /metrics would be open all the same
    monkeypatch.setenv("KVWEAVE_METRICS_KEY", "")
    assert refused(*key)


def test_names_it_answers_under_come_from_options():
    found = options_of(args("--allowed-host", "box.example", "--allowed-host", "fd00::1"))
    assert found.allowed_hosts == ("box.example", "fd00::1")
    assert refused("--allowed-host", "")


@pytest.mark.parametrize(
    "words", [("--key", ""), ("--keys", os.devnull), ("--allowed-host", "a/b")]
)
def test_it_is_refused_before_the_model_is_loaded(words, monkeypatch, capsys):
    def open_engine(*args, **options):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(command, "open_engine", open_engine)
    assert app.main(["serve", *words]) == 1
    assert "hint: " in capsys.readouterr().err
