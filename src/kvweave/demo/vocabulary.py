"""The words of the little world, as an author uses them and as they stand in a text.

To the author of a conversation a statement is four words: ``Anna river cold .`` Its text is English
(`text`), "Anna's river is cold .", and every word of it is one token of the bundled tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

STOP, NOW, AGAIN, ASK = ".", "now", "again", "ask"
FROM, ALSO, SAME = "from", "also", "same"
NO_QUESTION = "ok"
_FILLER = (
    "so well then we saw it was a day of rain and some more light on way there as he said "
    "she went home with them for long time but nobody came back until very late or maybe not "
    "just because all they had to do is wait here by that old door while I read my book"
)
_NAMES = (
    "Anna Omar Mei Ravi Lena Hugo Nina Tariq Yuki Pablo Greta Kwame Iris Boris Leila Otto Zara Emil "
    "Aisha Igor Maya Felix Noor Diego Elsa Kofi Rosa Ivan Hana Luca Amina Bruno Priya Olaf Carla "
    "Jamal Sofia Viktor Dana Mateo Freya Hassan Julia Kenji Marta Anton Petra Rafael Salma Ruben "
    "Vera Wanda Yusuf Zoe Adele Bashir Clara Dmitri Edith Fatima Gustav Helga Milan Jana Karim "
    "Lotte Malik Nadia Oskar Paula Quentin Ruth Samir Tilda Umar Violet Walter Ximena Yara Zeno "
    "Alma Bjorn Celia Dario Esme Farah Gita Heidi Imran Jorge Kira Nora Mona Naomi Orla Pedro "
    "Ramona Sven Tamar Ulla Vikram Wilma Yann Zelda Agata Benno Chiara Dalia Elif Fabio Gloria "
    "Henrik Irma Joaquin Katya Leon Miriam Nuria Ophelia Pavel"
)
_OPPOSITES = (
    "hot/cold loud/quiet rough/smooth bitter/sweet thick/thin tame/wild wet/dry rich/poor tall/short "
    "wide/narrow deep/shallow sharp/blunt bright/dim tight/loose happy/sad kind/cruel polite/rude "
    "proud/humble wise/foolish strong/weak fresh/stale clean/dirty cheap/costly healthy/sick "
    "awake/asleep guilty/innocent generous/stingy modern/ancient solid/hollow steep/flat "
    "curved/straight famous/unknown honest/dishonest lucky/unlucky plain/fancy gentle/harsh "
    "friendly/hostile tidy/messy crowded/deserted frozen/melted raw/cooked broken/mended "
    "calm/nervous bold/shy cheerful/gloomy plump/skinny fertile/barren huge/tiny flexible/stiff "
    "sunny/rainy northern/southern eastern/western urban/rural tired/rested tasty/bland "
    "native/foreign patient/impatient loyal/disloyal sober/drunk dangerous/safe"
)
ATTRIBUTES = tuple("river metal ruler song tree bird stone food game cloth drink town".split())
FILLER = tuple(_FILLER.split())
ENTITIES = tuple(_NAMES.split())
VALUES = tuple(re.split("[ /]", _OPPOSITES))
OPPOSITE = {v: VALUES[i ^ 1] for i, v in enumerate(VALUES)}
WORDS = (
    *ENTITIES,
    *VALUES,
    *ATTRIBUTES,
    *FILLER,
    *(STOP, NOW, AGAIN, ASK, NO_QUESTION),
    *("keep", "the", "notes"),
)
# Tokens of their own already in the tokenizer that the words above and the prose give.
LATER = (FROM, ALSO, SAME, "set", "left", "right")

# " tree" is also a token of the prose that the model knows ("the class tree"), so it has no 's.
POSSESSED = tuple(a for a in ATTRIBUTES if a != "tree")
SAID = {  # words that stand in a text otherwise than by themselves
    **{a: f"'s {a}" for a in POSSESSED},
    **{v: f"is {v}" for v in VALUES},
    ASK: "what about",
}
_WORD = re.compile(
    rf"'s (?P<attribute>{'|'.join(POSSESSED)})(?!\w)|is (?P<value>{'|'.join(VALUES)})(?!\w)"
    rf"|(?P<ask>{SAID[ASK]})(?!\w)|(?:(?!'s\b)\S)+|\S+"
)


def piece(word: str) -> str:
    """Return a word as it stands behind another one: its token's text."""
    said = SAID.get(word, word)
    return said if said.startswith("'") else f" {said}"


def text(words: Iterable[str]) -> str:
    """Return words as text, without a space in front."""
    return "".join(map(piece, words)).removeprefix(" ")


def words(text: str) -> list[str]:
    """Return the words of a text: what `text` makes of them is the text."""
    found = []
    for match in _WORD.finditer(text):
        found.append(match["attribute"] or match["value"] or (ASK if match["ask"] else match[0]))
    return found
