"""A chat that never outgrows 150 tokens: the oldest turn goes, and only the new one is computed."""

import sys
from importlib.resources import files

from kvweave import Engine

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(files("kvweave") / "demo" / "model")
LIMIT = 150  # tokens

with Engine(MODEL) as engine:
    chat = engine.context("chat/1", system="keep the notes .")
    for day in range(12):
        said = "Anna's river is cold . so well then we saw it"
        message = f"day {day} : {said} . what about Anna's river"
        answer = chat.ask(message, max_tokens=8)
        while chat.n_tokens > LIMIT:
            chat.drop(chat.oldest())
        kv = answer.usage["kv"]
        print(f"{answer.text!r:24}  {kv['prefilled']:3} tokens computed, context {chat.n_tokens}")
    print(chat.plan.explain())
