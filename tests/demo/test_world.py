"""The world generator, its text shape and its tokenizer."""

from __future__ import annotations

from collections import Counter
from pydoc_data import topics

import pytest

from kvweave.demo import world
from kvweave.demo.world import Conversation, Exchange, Spec


def stated(text: str) -> list[tuple[str, str, str, str]]:
    """(mark, entity, attribute, value) of each statement, read from the text alone."""
    words = text.split(" ")
    found = []
    for at, word in enumerate(words):
        if word == world.STOP:
            before = words[at - 4] if at >= 4 else ""
            mark = before if before in (world.NOW, world.AGAIN) else ""
            found.append((mark, words[at - 3], words[at - 2], words[at - 1]))
    return found


def test_word_sets_are_disjoint_and_stable() -> None:
    assert len(set(world.WORDS)) == len(world.WORDS) == 318
    assert (len(world.ENTITIES), len(world.VALUES), len(world.ATTRIBUTES)) == (120, 120, 12)
    assert world.ENTITIES[:3] == ("pude", "givu", "joti")


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
                if mark == world.AGAIN:
                    assert latest[key][0] == value
                if mark == world.NOW:
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
        assert turn.user.endswith(f" ask {turn.entity} {turn.attribute}")
        assert turn.reply == f"{turn.entity} {turn.attribute} {turn.value} ."
        assert turn.kind == ("override" if key in changed else "recall")
        assert answered.get(key, -1) not in window  # not restated by a reply still in context
        answered[key] = index
    assert kinds["none"] < 30 and kinds["recall"] > 50 and kinds["override"] >= 10


def test_turns_have_the_promised_size() -> None:
    talk = Conversation(11)
    sizes = [len(talk.turn().user.split()) for _ in range(100)]
    assert 44 <= min(sizes) and max(sizes) <= 60 + 5 * 5 + 3
    assert 62 <= sum(sizes) / 100 <= 74


def test_one_key_gives_each_entity_one_attribute() -> None:
    talk = Conversation(5, Spec(one_key=True, entities=(30, 30), override=0, again=0))
    said = [s for _ in range(6) for s in stated(talk.turn().user)]
    assert len({entity for _, entity, _, _ in said}) == len(said) >= 18


def test_correct_needs_the_value() -> None:
    turn = Exchange(0, "ask pude river", "pude river ludi .", "pude", "river", "ludi", 0, "recall")
    assert turn.correct("pude river ludi .") and turn.correct(" pude river ludi")
    assert not turn.correct("pude river demu .") and not turn.correct("ludi")
    assert not Exchange(0, "so", "ok").correct("ok")


def test_tokenizer_and_template() -> None:
    tokenizer = world.wrap_tokenizer(world.build_tokenizer(iter(topics.topics.values())))
    assert len(tokenizer) == world.VOCABULARY
    for word in world.WORDS:
        assert len(tokenizer.encode(f" {word}")) == 1, word
    for text in (topics.topics["lambda"], " a\n\tb  c", "ünïcode 漢字 🙂", "pude. Foze river!"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    turn = Exchange(0, "ask pude river", "pude river joti .")
    messages = [{"role": "system", "content": "keep the notes ."}, *turn.messages()]

    def render(part: list[dict[str, str]], **options: bool) -> str:
        return str(tokenizer.apply_chat_template(part, tokenize=False, **options))

    assert render(messages) == (
        "<|bos|><|system|> keep the notes .<|end|><|user|> ask pude river<|end|>"
        "<|assistant|> pude river joti .<|end|>"
    )
    assert render(messages) == "".join(render([m]) for m in messages)
    asked = render(messages[:2], add_generation_prompt=True)
    assert asked.endswith("<|end|><|assistant|>") and render(messages).startswith(asked)
    assert len(tokenizer.encode(asked)) == 13
    with pytest.raises(Exception, match="unknown role"):
        render([{"role": "tool", "content": "x"}])
