"""The openai package, unchanged: a chat that resends its last turns, and what that costs.

Needs a running server (`kvweave serve MODEL`) and `pip install openai`.
"""

import os

from openai import OpenAI

URL = os.environ.get("KVWEAVE_URL", "http://127.0.0.1:8700/v1")
SYSTEM = {"role": "system", "content": "keep the notes ."}
FILLER = "so well then we saw it was a day of rain and some more light on way there"
FACTS = """pude river ludi,givu metal demu,joti song kegu,pude tree zeja,givu town jaji,
joti stone ruve,pude food tepo,givu cloth biko,joti drink bufo,pude bird seka"""
KEPT = 4  # turns that are sent again

with OpenAI(base_url=URL, api_key=os.environ.get("KVWEAVE_KEY", "none")) as client:
    model = client.models.list().data[0].id
    said = []
    for fact in FACTS.replace("\n", "").split(","):
        entity, attribute, _ = fact.split()
        said = said[-2 * KEPT :]  # the oldest turn goes, as in any client with a limited context
        said.append({"role": "user", "content": f"{fact} . {FILLER} . ask {entity} {attribute}"})
        reply = client.chat.completions.create(
            model=model, messages=[SYSTEM, *said], temperature=0, max_tokens=8
        )
        text = reply.choices[0].message.content
        said.append({"role": "assistant", "content": text})
        kv = reply.usage.model_extra["kv"]
        print(
            f"{text!r:22} of {reply.usage.prompt_tokens:3} tokens: prefilled {kv['prefilled']:3},"
            f" exact {kv['exact']:3}, reused {kv['reused']:3}, repaired {kv['repaired']}"
        )
