"""Documents in another order each time: pasted as text, and as chunks the server knows by name.

Needs a running server (`kvweave serve MODEL`) and `pip install openai`.
"""

import os

from openai import OpenAI

URL = os.environ.get("KVWEAVE_URL", "http://127.0.0.1:8700/v1")
SYSTEM = {"role": "system", "content": "keep the notes ."}
FILLER = "so well then we saw it was a day of rain and some more light on way there"
MORE = "nobody came back until very late or maybe not just because all they had to do is wait here"
DOCS = {
    "Anna": f"{FILLER} . Anna's river is cold . {MORE} . Anna's metal is hot .",
    "Omar": f"{MORE} . Omar's song is loud . {FILLER} . Omar's town is rough .",
    "Mei": f"and {FILLER} . Mei's stone is smooth . but {MORE} . Mei's bird is sweet .",
}
ASKED = [
    (("Anna", "Omar", "Mei"), "Anna's river"),
    (("Mei", "Anna", "Omar"), "Omar's town"),
    (("Omar", "Mei", "Anna"), "Mei's stone"),
]

with OpenAI(base_url=URL, api_key=os.environ.get("KVWEAVE_KEY", "none")) as client:
    model = client.models.list().data[0].id

    def ask(how, content):
        """Send one prompt without history; print what of it was known."""
        reply = client.chat.completions.create(
            model=model,
            messages=[SYSTEM, {"role": "user", "content": content}],
            temperature=0,
            max_tokens=8,
        )
        kv = reply.usage.model_extra["kv"]
        known = kv["exact"] + kv["reused"]
        text = reply.choices[0].message.content
        print(f"{how}: {text!r:26} known {known:3}, prefilled {kv['prefilled']:3}")

    for names, question in ASKED:  # nothing is declared: the server finds the text again
        ask("pasted", " ".join([*(DOCS[name] for name in names), f"what about {question}"]))

    for name, text in DOCS.items():  # computed once, here
        client.put(
            f"/chunks/docs/{name}", cast_to=object, body={"text": f" {text}", "replace": True}
        )
    for names, question in ASKED:
        parts = [{"type": "chunk", "name": f"docs/{name}"} for name in names]
        ask("named ", [*parts, {"type": "text", "text": f" what about {question}"}])
