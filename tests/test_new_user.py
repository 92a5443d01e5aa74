"""Tests pass for a person who already uses kvweave: nothing of theirs is read, nothing is left there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import conftest
import pytest

from kvweave.cli.home import home_of


def test_the_home_of_whoever_runs_this_is_not_read(a_new_user: Path) -> None:
    assert Path.home() == a_new_user
    assert home_of(argparse.Namespace(home=None)) == a_new_user / ".kvweave"


@pytest.mark.parametrize("name", conftest.THEIRS)
def test_no_setting_of_theirs_is_heeded(name: str) -> None:
    assert f"KVWEAVE_{name}" not in os.environ
