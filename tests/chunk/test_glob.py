"""Globs match as the backtracking translation did, in time that no pattern can make long."""

from __future__ import annotations

import re
import time
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvweave.chunk.glob import matcher
from kvweave.errors import InvalidArgument

STARS = "{" + ",".join(["*a*b"] * 45) + "}"


def slow(pattern: str) -> re.Pattern[str]:
    """The translation to Python's ``re`` that this one replaced; raises ValueError, re.error."""
    left, parts, depth = pattern + "**" * pattern.endswith("/"), [], 0
    before = ""
    while left:
        taken = 1
        if left.startswith("**"):
            taken = 3 if left.startswith("**/") and before in ("", *"/{,") else 2
            parts.append("(?:.*/)?" if taken == 3 else ".*")
        elif left[0] == "[":
            end = left.index("]", 3 if left[1:2] == "!" else 2)
            negated = left[1] == "!"
            inside = re.sub(r"([\\\[\]^&|~])", r"\\\1", left[1 + negated : end])
            parts.append(f"(?!/)[{'^' * negated}{inside}]")
            taken = end + 1
        elif left[0] in "{}" or (left[0] == "," and depth):
            depth += {"{": 1, "}": -1, ",": 0}[left[0]]
            parts.append({"{": "(?:", "}": ")", ",": "|"}[left[0]])
        elif left[0] == "]":
            raise ValueError(left)
        else:
            parts.append({"*": "[^/]*", "?": "[^/]"}.get(left[0]) or re.escape(left[0]))
        if depth < 0:
            raise ValueError(left)
        before, left = left[taken - 1], left[taken:]
    if depth:
        raise ValueError(pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "--" in a set may mean something else one day
        return re.compile("".join(parts), re.DOTALL)


pieces = st.sampled_from(
    [*"abé/.-,*?{}[]!^\\&|~+ $(", "**", "**/", "[a-z]", "[!b-d]", "[+-9]", "[!/]", "[/]", "[.-0a]",
     "{a,b}", "{,a*}", "[é-\U0001f600]", "[!\x00-\U0010ffff]", "\ud800"]
)  # fmt: skip
patterns = st.lists(pieces, max_size=7).map("".join)
names = st.text(alphabet="abcé/.-,+\\^!\n\U0001f600", max_size=8)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(patterns, st.lists(names, min_size=1, max_size=8))
@example("[*-~]", ["/", "a", "."])
@example("[a--]", ["a"])
@example("[---/]", ["-", "/", "."])
@example("[]-a]", ["]", "^", "a", "-"])
@example("[!]]", ["]", "a"])
@example("[\ud800a]", ["a", "b"])
def test_it_matches_as_the_slow_twin(pattern: str, among: list[str]) -> None:
    try:
        wanted = slow(pattern)
    except (ValueError, re.error):
        with pytest.raises(InvalidArgument, match="pattern"):
            matcher(pattern)
        return
    match = matcher(pattern)
    for name in among:
        assert bool(match(name)) == bool(wanted.fullmatch(name)), (pattern, name)


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 100, "**/*a" * 40, "{*,**}" * 35, STARS, "?" * 256, "[!a-c]" * 42, "*[!x]" * 51],
)  # fmt: skip
def test_no_pattern_of_a_client_takes_long(pattern: str) -> None:
    among = [f"{'a' * 40}/{'ab' * 40}{i}" for i in range(1000)]
    start = time.perf_counter()
    assert len([name for name in among if matcher(pattern)(name)]) in (0, 1000)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("pattern", ["[!é]" * 20_000, "a" * 10**6])
def test_what_no_automaton_holds_is_refused_in_silence(
    pattern: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidArgument, match="too long"):
        matcher(pattern)
    assert capfd.readouterr() == ("", "")
