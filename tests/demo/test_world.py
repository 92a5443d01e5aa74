"""The world generator, its text shape and its tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from pydoc_data import topics

import pytest
from conftest import BUNDLED
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from kvweave.demo import tokenizer as made
from kvweave.demo import vocabulary
from kvweave.demo.plain import plain, value_of
from kvweave.demo.world import Conversation, Exchange, Spec

TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def without_words() -> Tokenizer:
    """The bundled tokenizer as it cuts text in which it knows none of the world's words."""
    state = json.loads(TOKENIZER.to_str())
    state["model"]["ignore_merges"] = False
    found = Tokenizer.from_str(json.dumps(state))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return found


PLAIN_BPE = without_words()


def spelled(text: str) -> str:
    """A token's text as the vocabulary has it."""
    return text.replace(" ", "\u0120")


def stated(text: str) -> list[tuple[str, str, str, str]]:
    """(mark, entity, attribute, value) of each statement, read from the text alone."""
    words = vocabulary.words(text)
    found = []
    for at, word in enumerate(words):
        if word == vocabulary.STOP:
            before = words[at - 4] if at >= 4 else ""
            mark = before if before in ("now", "again") else ""
            found.append((mark, words[at - 3], words[at - 2], words[at - 1]))
    return found


def test_word_sets_are_disjoint_and_stable() -> None:
    assert len(set(vocabulary.WORDS)) == len(vocabulary.WORDS) == 318
    sets = vocabulary.ENTITIES, vocabulary.VALUES, vocabulary.ATTRIBUTES
    assert [len(words) for words in sets] == [120, 120, 12]
    assert vocabulary.ENTITIES[:3] == ("Anna", "Omar", "Mei")
    assert vocabulary.OPPOSITE["cold"] == "hot" and vocabulary.OPPOSITE["hot"] == "cold"


def test_same_seed_same_conversation() -> None:
    first, second, other = Conversation(3), Conversation(3), Conversation(4)
    turns = [first.turn() for _ in range(30)]
    assert turns == [second.turn() for _ in range(30)]
    assert turns != [other.turn() for _ in range(30)]
    assert [t.index for t in turns] == list(range(30))


@pytest.mark.parametrize("size", [1, 20])
def test_answers_follow_from_the_text_in_the_window(size: int) -> None:
    """An independent reader that keeps the latest statement agrees, over 150 turns."""
    talk, texts, kinds = Conversation(size), list[str](), Counter[str]()
    answered: dict[tuple[str, str], int] = {}
    for index in range(150):
        window = range(max(0, index - size), index)
        turn = talk.turn(window)
        texts.append(turn.user)
        kinds[turn.kind] += 1
        latest: dict[tuple[str, str], tuple[str, int]] = {}
        changed = set()
        for at in range(index + 1):
            for mark, entity, attribute, value in stated(texts[at]):
                key = entity, attribute
                if mark == "again":
                    assert latest[key][0] == value
                if mark == "now":
                    assert latest[key][0] != value
                    changed.add(key)
                    answered.pop(key, None) if at == index else None
                assert (mark == "") == (key not in latest)
                latest[key] = value, at
        if not turn.asks:
            assert (turn.reply, turn.value, turn.stated) == ("ok", None, None)
            continue
        assert turn.entity is not None and turn.attribute is not None
        key = turn.entity, turn.attribute
        assert latest[key] == (turn.value, turn.stated)
        assert turn.stated in {*window, index}
        assert vocabulary.words(turn.user)[-3:] == ["ask", *key]
        assert vocabulary.words(turn.reply) == [*key, turn.value, "."]
        assert turn.kind == ("override" if key in changed else "recall")
        assert answered.get(key, -1) not in window  # not restated by a reply still in context
        answered[key] = index
    assert kinds["none"] < 30 and kinds["recall"] > 50 and kinds["override"] >= 10


def test_turns_have_the_promised_size() -> None:
    talk = Conversation(11)
    sizes = [len(vocabulary.words(talk.turn().user)) for _ in range(100)]
    assert 44 <= min(sizes) and max(sizes) <= 60 + 5 * 5 + 3
    assert 62 <= sum(sizes) / 100 <= 74


def test_one_key_gives_each_entity_one_attribute() -> None:
    talk = Conversation(5, Spec(one_key=True, entities=(30, 30), override=0, again=0))
    said = [s for _ in range(6) for s in stated(talk.turn().user)]
    assert len({entity for _, entity, _, _ in said}) == len(said) >= 18


def test_correct_needs_the_value() -> None:
    asked, reply = "what about Anna's river", "Anna's river is cold ."
    turn = Exchange(0, asked, reply, "Anna", "river", "cold", 0, "recall")
    assert turn.correct(reply) and turn.correct(" Anna's river is cold")
    assert not turn.correct("Anna's river is hot .") and not turn.correct("cold")
    assert not Exchange(0, "so", "ok").correct("ok")


def test_tokenizer_and_template() -> None:
    tokenizer = made.wrap_tokenizer(made.build_tokenizer(iter(topics.topics.values())))
    assert len(tokenizer) == made.N_TOKENS
    for word in vocabulary.WORDS:
        assert len(tokenizer.encode(vocabulary.piece(word))) == 1, word
    for text in (topics.topics["lambda"], " a\n\tb  c", "ünïcode 漢字 🙂", "Anna. Foze river!"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    turn = Exchange(0, "what about Anna's river", "Anna's river is cold .")
    messages = [{"role": "system", "content": "keep the notes ."}, *turn.messages()]

    def render(part: list[dict[str, str]], **options: bool) -> str:
        return str(tokenizer.apply_chat_template(part, tokenize=False, **options))

    assert render(messages) == (
        "<|bos|><|system|> keep the notes .<|end|><|user|> what about Anna's river<|end|>"
        "<|assistant|> Anna's river is cold .<|end|>"
    )
    assert render(messages) == "".join(render([m]) for m in messages)
    asked = render(messages[:2], add_generation_prompt=True)
    assert asked.endswith("<|end|><|assistant|>") and render(messages).startswith(asked)
    assert len(tokenizer.encode(asked)) == 13
    with pytest.raises(Exception, match="unknown role"):
        render([{"role": "tool", "content": "x"}])


WORDS = st.lists(st.sampled_from((*vocabulary.WORDS, *vocabulary.LATER)), min_size=1, max_size=30)
STATEMENTS = st.lists(
    st.tuples(
        st.sampled_from((*vocabulary.FILLER, "now", "again")),
        st.sampled_from(vocabulary.ENTITIES),
        st.sampled_from(vocabulary.ATTRIBUTES),
        st.sampled_from((*vocabulary.VALUES, *vocabulary.ENTITIES)),
        st.just(vocabulary.STOP),
    ),
    max_size=8,
)


@given(WORDS)
def test_words_and_their_text_are_one_token_each_in_any_order(words: list[str]) -> None:
    """Whatever stands beside a word; only an 's has a name or an attribute in front of it."""
    words = [w for i, w in enumerate(words) if w not in vocabulary.POSSESSED or words[i - 1] != "."]
    text = "".join(map(vocabulary.piece, words))
    ids = [TOKENIZER.token_to_id(spelled(vocabulary.piece(word))) for word in words]
    assert TOKENIZER.encode(text).ids == ids and None not in ids
    assert TOKENIZER.decode(ids) == text


@given(STATEMENTS)
def test_words_come_back_from_their_text(statements: list[tuple[str, ...]]) -> None:
    words = [word for statement in statements for word in statement]
    assert vocabulary.words(vocabulary.text(words)) == words


@given(st.text(alphabet=" '.isworclda\nTtreAn", max_size=40))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_text_near_the_worlds_words_is_no_word_of_it() -> None:
    plain_ids = PLAIN_BPE.encode
    for text in (
        " is colder",
        " is isolated",
        "'s riverside",
        " what aboutness",
        " Annabel",
        "Anna",
    ):
        assert TOKENIZER.encode(text).ids == plain_ids(text).ids


def test_plain_sentences_leave_nothing_out() -> None:
    for said, told in {
        "so Anna's river is cold . well": "so Anna's river is cold. well",
        "again Anna tree is cold . Omar's ruler Mei .": "Again Anna's tree is cold. Omar's ruler is Mei.",
        "from Anna's river same Omar's river also .": "Omar's river is the same as Anna's river.",
        "set right . now Mei's song is loud .": "From here on every value means its opposite. "
        "Now Mei's song is loud.",
        "as what about Anna's ruler tree's song": "as What is Anna's ruler's tree's song?",
        "Anna's ruler Mei tree Omar's song is loud .": "Anna's ruler is Mei, Mei's tree is Omar, "
        "Omar's song is loud.",
        "ok": "ok",
    }.items():
        assert plain(said) == told


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Anna's river is cold.", "cold"),
        ("\n The answer: **Cold**\nnot hot", "cold"),
        ("It was hot, now it is cold", "cold"),
        ("It is impolite", None),
        ("", None),
    ],
)
def test_the_last_value_of_the_first_line_counts(reply: str, value: str | None) -> None:
    assert value_of(reply) == value
