"""An agent's loop: tools are read one after the other, and old results leave the context.

The little model calls no tools: here the program decides what is read, a real agent would take it
from the reply. Needs a running server (`kvweave serve MODEL`) and `pip install openai`.
"""

import json
import os
import sys

from openai import OpenAI

URL = os.environ.get("KVWEAVE_URL", "http://127.0.0.1:8700/v1")
ROLE = sys.argv[1] if len(sys.argv) > 1 else "user"  # "tool" if the model's template knows it
SYSTEM = {"role": "system", "content": "keep the notes ."}
FILLER = "so well then we saw it was a day of rain and some more light on way there"
PAGES = {
    "Anna": f"{FILLER} . Anna's river is cold . Anna's metal is hot . {FILLER} .",
    "Omar": f"and {FILLER} . Omar's song is loud . Omar's town is rough . {FILLER} .",
    "Mei": f"but {FILLER} . Mei's stone is smooth . Mei's bird is sweet . {FILLER} .",
}
TASK = ["Anna's river", "Omar's town", "Mei's stone", "Anna's metal", "Omar's song", "Mei's bird"]
KEPT = 2  # results that stay; the questions and answers all do


def read_page(number, name):
    """Call the tool; return what that adds to the conversation, the result last."""
    result = {"role": ROLE, "content": PAGES[name]}
    if ROLE != "tool":
        return [result]
    function = {"name": "read_page", "arguments": json.dumps({"name": name})}
    calls = [{"id": f"call-{number}", "type": "function", "function": function}]
    asked = {"role": "assistant", "content": "ok", "tool_calls": calls}
    return [asked, {**result, "tool_call_id": f"call-{number}"}]


with OpenAI(base_url=URL, api_key=os.environ.get("KVWEAVE_KEY", "none")) as client:
    model = client.models.list().data[0].id
    messages, results = [SYSTEM], []
    for number, question in enumerate(TASK):
        added = read_page(number, question.partition("'")[0])
        results.append(added)
        if len(results) > KEPT:
            for message in results.pop(0):
                messages.remove(message)
        messages += [*added, {"role": "user", "content": f"what about {question}"}]
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=8
        )
        text = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        kv = reply.usage.model_extra["kv"]
        print(
            f"{question}: {text!r:26} of {reply.usage.prompt_tokens:3} tokens:"
            f" prefilled {kv['prefilled']:3}, repaired {kv['repaired']},"
            f" known {kv['exact'] + kv['reused']:3}"
        )
