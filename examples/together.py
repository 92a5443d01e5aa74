"""Two contexts decode together, one packed model pass a step; each gets what it gets alone."""

import sys
from importlib.resources import files

from kvweave import Engine

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(files("kvweave") / "demo" / "model")
QUESTIONS = ["Anna's river", "Omar's metal"]

with Engine(MODEL) as engine:
    engine.put("notes", " Anna's river is cold . so well Omar's metal is hot .")
    prompt = "<|user|>{notes} what about {what}<|end|><|assistant|>"

    alone = []
    for question in QUESTIONS:
        context = engine.compose(prompt, what=question)
        alone.append(context.generate(max_tokens=6).text)
        engine.close_context(context.name)

    contexts = [engine.compose(prompt, what=q) for q in QUESTIONS]
    together = engine.generate_many(contexts, max_tokens=6)

    for question, answer, text in zip(QUESTIONS, together, alone, strict=True):
        print(f"{question}: {answer.text!r}, alone {text!r}")
    assert [answer.text for answer in together] == alone
