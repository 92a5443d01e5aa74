"""What the command's help says of limits is what a server does: python -m pytest tests/serve/test_defaults.py"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from unittest.mock import Mock

import pytest

from kvweave.cli.command import UsageError, command_parser
from kvweave.cli.commands import COMMANDS
from kvweave.cli.parser import parse
from kvweave.cli.serve import LIMITS
from kvweave.client.context import sent
from kvweave.config import n_bytes
from kvweave.errors import InvalidArgument
from kvweave.run.sampling import Constraint, Sampling
from kvweave.serve.options import Options
from kvweave.serve.routes.turns import Sampled

DEFAULTS = {field.name: field.default for field in fields(Options)}
OTHER = {"max_active", "max_prompt"}  # the engine's and the model's


def test_the_help_names_the_defaults() -> None:
    actions = {action.dest: action for action in command_parser(COMMANDS["serve"])._actions}
    told = {}
    for name in LIMITS:
        found = re.search(r"\((\w+)\)$", actions[name].help or "")
        if found and name not in OTHER:
            told[name] = found[1]
    assert {"max_waiting", "max_contexts", "max_parts", "max_body", "retain"} <= told.keys()
    for name, text in told.items():
        default = DEFAULTS[name]
        said = {"max_body": lambda t: n_bytes(t), "retain": lambda t: 86400.0 * int(t[:-1])}
        assert said.get(name, type(default))(text) == default, name


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon", ""])
@pytest.mark.parametrize("command", ["serve", "route"])
def test_a_grace_that_is_no_time_is_refused(command: str, seconds: str) -> None:
    with pytest.raises(UsageError):
        parse([command, "--grace", seconds])


NOT_SENT = {"constraint"}  # an object of a process


def test_a_context_over_http_takes_every_way_to_choose_tokens() -> None:
    """The client sends what an engine takes: a field that the server lacks breaks every answer."""
    told = {f.name for f in fields(Sampling)} - NOT_SENT
    assert told <= set(Sampled.model_fields)
    usual, sampled = Sampling(), Sampled()
    for name in told:
        theirs = getattr(sampled, name)
        assert (tuple(theirs) if isinstance(theirs, list) else theirs) == getattr(usual, name)


def test_a_client_sends_what_is_not_usual() -> None:
    given = Sampling(max_tokens=9, min_p=0.1, logit_bias={7: -3.0}, shown=(4,), stop=("so",))
    body = Sampled(**json.loads(json.dumps(sent(given))))
    assert sent(Sampling()) == {} and body.logit_bias == {7: -3.0} and body.shown == [4]
    with pytest.raises(InvalidArgument, match="cannot be sent"):
        sent(Sampling(constraint=Mock(spec=Constraint)))
