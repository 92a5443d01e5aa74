"""The world's texts for models that were not trained on it: sentences with nothing left out.

The bundled model's text has one token a word, and some of its sentences are short of one:
"Anna's ruler Omar ." Another model is told "Anna's ruler is Omar."
"""

from __future__ import annotations

import re

from kvweave.demo.vocabulary import ATTRIBUTES, ENTITIES, VALUES, words

RULES = (  # its names are none of the world's: nobody asks for them
    'You keep notes. Among chatter they say things such as "Bob\'s river is cold." or "Bob\'s '
    'ruler is Tom." What begins with "Now" replaces what was said before. "Tom\'s river is the same '
    "as Bob's river.\" gives Tom's river the value that Bob's has at that place. "
    '"From here on every value means its opposite." is about all that is said later (then "cold" '
    'means "hot"), until "From here on every value means what it says." Answer every question with '
    'one sentence and nothing else, from the latest notes: "What is Bob\'s river?" with "Bob\'s '
    'river is cold.", "What is Bob\'s ruler\'s river?" step by step, with "Bob\'s ruler is Tom, '
    'Tom\'s river is cold." Reply "ok" to a message without a question.'
)
_E, _A, _V = ("|".join(names) for names in (ENTITIES, ATTRIBUTES, VALUES))
_SENTENCES = re.compile(
    rf"\bfrom (?P<old>{_E}) (?P<same>{_A}) same (?P<new>{_E}) (?:{_A}) also \."
    rf"|\b(?P<mark>now |again )?(?P<who>{_E})(?P<steps>(?: (?:{_A}) (?:{_E}|{_V}))+) \."
    rf"|\bset (?P<mode>left|right) \."
    rf"|\bask (?P<asked>{_E})(?P<path>(?: (?:{_A}))+)"
)
_MODES = {"left": "what it says", "right": "its opposite"}


def plain(text: str) -> str:
    """Return a text of the world with its statements and questions as whole sentences."""
    return _SENTENCES.sub(_sentence, " ".join(words(text)))


def value_of(text: str) -> str | None:
    """Return the last value that the first line of a reply names, or None."""
    line = text.strip().partition("\n")[0].lower()
    found = [word for word in re.findall(r"\w+", line) if word in VALUES]
    return found[-1] if found else None


def _sentence(found: re.Match[str]) -> str:
    if found["old"]:
        return f"{found['new']}'s {found['same']} is the same as {found['old']}'s {found['same']}."
    if found["mode"]:
        return f"From here on every value means {_MODES[found['mode']]}."
    if found["asked"]:
        return "'s ".join([f"What is {found['asked']}", *found["path"].split()]) + "?"
    here, said, steps = found["who"], [], found["steps"].split()
    for attribute, value in zip(steps[::2], steps[1::2], strict=True):
        said.append(f"{here}'s {attribute} is {value}")
        here = value
    return (found["mark"] or "").title() + ", ".join(said) + "."
