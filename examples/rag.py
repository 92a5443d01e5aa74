"""Documents are computed once, then stand in any prompt, in any order; the oracle says how well."""

import sys
from importlib.resources import files
from pydoc_data.topics import topics

from kvweave import Engine

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(files("kvweave") / "demo" / "model")
PROMPT = "Answer from the manual.\n{docs}\nQuestion: {question}\nAnswer:"

with Engine(MODEL) as engine:
    for topic in ("lambda", "if", "while", "break"):
        entry = engine.put(f"python/{topic}", topics[topic])
        print(f"stored {entry.name}: {entry.n_tokens} tokens")

    for names in (["lambda", "if"], ["while", "lambda", "break"]):
        with_docs = engine.compose(
            PROMPT,
            docs=[f"python/{name}" for name in names],
            question="what is an anonymous function?",
            share=0.1,  # recompute a tenth of the reused rows, those the question looks at
        )
        print(f"\n{names}: {with_docs.check()}")
        print(with_docs.plan)
        print(repr(with_docs.generate(max_tokens=12).text))
        engine.close_context(with_docs.name)
