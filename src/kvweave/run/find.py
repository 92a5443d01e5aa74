"""Find a model's files: in a directory, on the hub, or kept from it; nobody waits long for that."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from kvweave.errors import ModelUnusable
from kvweave.run.trouble import said

ASK_SECONDS = 3.0  # transformers would ask for each file, six times each
ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
KEPT = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # before hub ids had owners some had none

log = logging.getLogger("kvweave.run")


@dataclass(frozen=True)
class Checkpoint:
    """Where transformers finds a model (a directory or hub id), and the names of the files there."""

    path: str
    files: frozenset[str]


def find(path: str) -> Checkpoint:
    """Return where the model of this directory or hub id is. Raises ModelUnusable."""
    where = Path(path)
    try:
        if where.exists():
            return _in(where)
        is_beside = where.parent.is_dir()  # then what is meant is a directory
    except OSError as error:
        raise ModelUnusable(path, said(error)) from error
    reason = "there is no such directory"
    if ON_HUB.fullmatch(path) and not is_beside:
        told = _ask(path)
        if not isinstance(told, str):
            return Checkpoint(path, told)
        reason += f", and {told}"
    if not KEPT.fullmatch(path):
        raise ModelUnusable(path, reason)
    kept = _kept(path)
    if kept is None:
        raise ModelUnusable(path, f"{reason}; nothing of that name was downloaded before")
    log.warning("%s: %s; what was downloaded before is used", path, reason)
    return _in(kept)


def _in(where: Path) -> Checkpoint:
    files = where.iterdir() if where.is_dir() else ()
    return Checkpoint(str(where), frozenset(file.name for file in files))


def _ask(path: str) -> frozenset[str] | str:
    """Return the names of the files the hub has of a model, or why there are none."""
    told: list[frozenset[str] | str] = []

    def ask() -> None:
        try:
            files: Iterable[str] = (
                file.rfilename
                for file in HfApi().model_info(path, timeout=ASK_SECONDS).siblings or ()
            )
            told.append(frozenset(files))
        except RepositoryNotFoundError:
            told.append("the hub has no such model, or shows it to others")
        except Exception as error:
            told.append(f"the hub cannot be asked: {said(error)}")

    # a thread, as the lookup of the hub's own name has no deadline
    thread = threading.Thread(target=ask, name="kvweave-hub", daemon=True)
    thread.start()
    thread.join(ASK_SECONDS)
    return told[0] if told else f"the hub gave no answer in {ASK_SECONDS:g} s"


def _kept(path: str) -> Path | None:
    """Return the directory of what was downloaded of a model, if anything was."""
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception:
        return None
