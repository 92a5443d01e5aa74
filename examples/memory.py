"""A conversation far longer than its context: a fact of the first turn is found when it is asked for."""

import sys
from importlib.resources import files

from kvweave import Engine, Memory, MemoryBudget
from kvweave.memory import FirstSentences

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(files("kvweave") / "demo" / "model")
WHO = "Omar Mei Ravi Lena Hugo Nina Tariq Yuki Pablo Greta Kwame Iris Boris Leila Otto Zara".split()

with Engine(MODEL) as engine:
    chat = engine.context("chat", system="keep the notes .")
    budget = MemoryBudget(window=120, summaries=80, summary=40, recalled=60)
    memory = Memory(engine, chat, budget=budget, summarise=FirstSentences())
    memory.tell("so well Anna's river is cold . then we saw it")
    for name in WHO:
        memory.tell(f"so well {name}'s metal is hot . then we saw it")
        memory.tell("ok", "assistant")
        while memory.idle():  # what can wait
            pass
    print(f"{len(memory.items())} items, {chat.n_tokens} tokens in the context")
    answer = memory.ask("what about Anna's river", max_tokens=8)
    print(f"{answer.text!r}, recalled {[part.name for part in memory.zone('recalled')]}")
    print("undone:", memory.undo(), "recalled", memory.zone("recalled"))
