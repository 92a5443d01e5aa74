"""LangChain's ChatOpenAI with another base_url: a chat whose oldest turn is dropped.

Needs a running server (`kvweave serve MODEL`) and `pip install langchain-openai`.
"""

import os

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

URL = os.environ.get("KVWEAVE_URL", "http://127.0.0.1:8700/v1")
KEY = os.environ.get("KVWEAVE_KEY", "none")
MODEL = os.environ.get("KVWEAVE_MODEL", "demo")  # the bundled one; /v1/models says the name
FILLER = "so well then we saw it was a day of rain and some more light on way there"
FACTS = ["pude river ludi", "givu metal demu", "joti song kegu", "pude tree zeja"]
FACTS += ["givu town jaji", "joti stone ruve"]
KEPT = 2  # turns that are sent again

model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, temperature=0, max_tokens=8)
history = []
for fact in FACTS:
    entity, attribute, _ = fact.split()
    history = history[-2 * KEPT :]
    history.append(HumanMessage(f"{fact} . {FILLER} . ask {entity} {attribute}"))
    reply = model.invoke([SystemMessage("keep the notes ."), *history])
    history.append(reply)
    usage = reply.usage_metadata
    cached = usage["input_token_details"]["cache_read"]
    print(f"{reply.content!r:22} cached {cached:3} of {usage['input_tokens']:3} tokens")
