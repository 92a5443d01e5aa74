"""LangChain's ChatOpenAI with another base_url: a chat whose oldest turn is dropped.

Needs a running server (`kvweave serve MODEL`) and `pip install langchain-openai`.
"""

import os

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

URL = os.environ.get("KVWEAVE_URL", "http://127.0.0.1:8700/v1")
KEY = os.environ.get("KVWEAVE_KEY", "none")
MODEL = os.environ.get("KVWEAVE_MODEL", "demo")  # the bundled one; /v1/models says the name
FILLER = " ".join(
    ["so well then we saw it was a day of rain and some more light on way there"] * 4
)  # a context of a hundred tokens is quicker computed than looked at
FACTS = [
    "Anna's river is cold",
    "Omar's metal is hot",
    "Mei's song is loud",
    "Anna's game is rough",
]
FACTS += ["Omar's town is quiet", "Mei's stone is smooth"]
KEPT = 2  # turns that are sent again

model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, temperature=0, max_tokens=8)
history = []
for fact in FACTS:
    asked = fact.partition(" is ")[0]
    history = history[-2 * KEPT :]
    history.append(HumanMessage(f"{fact} . {FILLER} . what about {asked}"))
    reply = model.invoke([SystemMessage("keep the notes ."), *history])
    history.append(reply)
    usage = reply.usage_metadata
    cached = usage["input_token_details"]["cache_read"]
    print(f"{reply.content!r:26} cached {cached:3} of {usage['input_tokens']:3} tokens")
