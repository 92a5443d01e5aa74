"""API keys as text: one of an option, or many of a file or the environment.

What was given and holds no key is an error: else an empty variable would open the server to all.
No error repeats a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvweave.errors import InvalidArgument

MIN_KEY = 8  # characters; shorter keys can be guessed
_COMMENT = re.compile(r"(?:^|\s)#.*")
_FORM = "write KEY or KEY:NAMESPACE"


def key_given(authorization: str, api_key: str) -> str:
    """Return the key of a request by its two headers, "" where neither has one: a bearer's goes first,
    then ``x-api-key``, as Anthropic's clients send it."""
    scheme, _, key = authorization.partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    return key or api_key.strip()


def parse_key(text: str, source: str = "key") -> tuple[str, str]:
    """Return key and namespace of ``KEY`` or ``KEY:NAMESPACE``, taken as it is.

    Raises InvalidArgument for what is empty or could be read in two ways.
    """
    key, colon, namespace = text.partition(":")
    if not key.strip():
        raise InvalidArgument(source, "there is an empty key", _FORM)
    if colon and not namespace.strip():
        reason = "there is no namespace after the colon"
        raise InvalidArgument(source, reason, "leave the colon away for the default namespace")
    if ":" in namespace:
        raise InvalidArgument(source, "there are two colons", "a key has none; " + _FORM)
    if "," in text:
        hint = "give --key once for each; a file of --keys and KVWEAVE_KEYS may have several"
        raise InvalidArgument(source, "there is a comma, which no key has", hint)
    return key, namespace


def parse_keys(text: str, source: str = "keys") -> dict[str, str]:
    """Return the keys of a text with one ``KEY[:NAMESPACE]`` a line or comma.

    ``#`` begins a comment at the start of a line or after white space. Raises InvalidArgument when
    there is no key, or when one stands for two namespaces.
    """
    words = [
        word.strip() for line in text.splitlines() for word in _COMMENT.sub("", line).split(",")
    ]
    found = joined((parse_key(word, source) for word in words if word), source)
    if not found:
        raise InvalidArgument(source, "there is no key in it", f"{_FORM}, or leave it away")
    return found


def joined(pairs: Iterable[tuple[str, str]], source: str = "keys") -> dict[str, str]:
    """Return keys and namespaces. Raises InvalidArgument when a key stands for two namespaces."""
    keys: dict[str, str] = {}
    for key, namespace in pairs:
        if keys.setdefault(key, namespace) != namespace:
            raise InvalidArgument(
                source, "one key is given for two namespaces", "make another key for one of them"
            )
    return keys


def check_key(key: str, source: str, whose: str) -> None:
    """Raise InvalidArgument unless ``key`` is long enough and plain; ``whose`` stands for it."""
    if len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
        reason = f"{whose} is not {MIN_KEY} or more plain characters"
        raise InvalidArgument(source, reason, "take letters, digits and signs, no spaces")
