"""What the command's help says of limits is what a server does: python -m pytest tests/serve/test_defaults.py"""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from kvweave.cli.command import UsageError, command_parser
from kvweave.cli.commands import COMMANDS
from kvweave.cli.parser import parse
from kvweave.cli.serve import LIMITS
from kvweave.config import n_bytes
from kvweave.serve.options import Options

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
