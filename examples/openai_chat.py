"""The openai package, unchanged: a chat that resends its last turns, and what that costs.

Needs a running server (`kvweave serve MODEL`) and `pip install openai`.
"""

import os

from openai import OpenAI

URL = os.environ.get("KVWEAVE_URL", "http://127.0.0.1:8700/v1")
SYSTEM = {"role": "system", "content": "keep the notes ."}
FILLER = "so well then we saw it was a day of rain and some more light on way there"
FACTS = """Anna's river is cold,Omar's metal is hot,Mei's song is loud,Anna's game is rough,
Omar's town is quiet,Mei's stone is smooth,Anna's food is sweet,Omar's cloth is thick,
Mei's drink is thin,Anna's bird is tame"""
KEPT = 4  # turns that are sent again

with OpenAI(base_url=URL, api_key=os.environ.get("KVWEAVE_KEY", "none")) as client:
    model = client.models.list().data[0].id
    said = []
    for fact in FACTS.replace("\n", "").split(","):
        asked = fact.partition(" is ")[0]
        said = said[-2 * KEPT :]  # the oldest turn goes, as in any client with a limited context
        said.append({"role": "user", "content": f"{fact} . {FILLER} . what about {asked}"})
        reply = client.chat.completions.create(
            model=model, messages=[SYSTEM, *said], temperature=0, max_tokens=8
        )
        text = reply.choices[0].message.content
        said.append({"role": "assistant", "content": text})
        kv = reply.usage.model_extra["kv"]
        print(
            f"{text!r:26} of {reply.usage.prompt_tokens:3} tokens: prefilled {kv['prefilled']:3},"
            f" exact {kv['exact']:3}, reused {kv['reused']:3}, repaired {kv['repaired']}"
        )
