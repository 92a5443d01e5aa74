"""Try an answer two ways from the same state, and take a turn back as if it had never been."""

import sys
from importlib.resources import files

from kvweave import Engine

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(files("kvweave") / "demo" / "model")

with Engine(MODEL) as engine:
    chat = engine.context("chat/1", system="keep the notes .")
    chat.ask("Anna's river is cold . Omar's metal is hot . what about Anna's river", max_tokens=8)

    before = chat.snapshot()
    chat.ask("now Anna's river is deep . what about Anna's river", max_tokens=8)
    chat.restore(before)  # undo: the rows up to there were never touched
    print("after undo, prefilled:", chat.preview().prefilled)

    other = engine.fork(chat, "chat/2")
    first = chat.ask("what about Omar's metal", max_tokens=8)
    second = other.ask("what about Omar's metal", max_tokens=8, temperature=1.0, seed=7)
    print("first: ", repr(first.text), first.usage["kv"])
    print("second:", repr(second.text), second.usage["kv"])
