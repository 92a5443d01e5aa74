"""The arguments of ``kvweave context ...``. No logic."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable

from kvweave.chunk.identity import KINDS
from kvweave.cli.arguments import repair, sampling
from kvweave.cli.values import from_0, positive

ROLES = ("system", "user", "assistant", "tool")
MODES = ("forget", "evict")
PART = "a part: its name, its chunk's '#17', or its number"
VERSION = "a version, as `kvweave context log` lists them"


def ls(p: ArgumentParser) -> None:
    """Add what `kvweave context ls` takes."""
    p.add_argument("pattern", metavar="PATTERN", nargs="?", default="", help="a name or a glob")
    p.add_argument("-l", "--long", action="store_true", help="tokens, parts, and if it is busy")


def one(p: ArgumentParser) -> None:
    """Add the name of a context."""
    p.add_argument("name", metavar="NAME", help="a context, as `kvweave context ls` lists them")


def new(p: ArgumentParser) -> None:
    """Add what `kvweave context new` takes."""
    p.add_argument("name", metavar="NAME", help="such as chat/42")
    p.add_argument("--system", metavar="TEXT", help="the first message, never dropped")
    p.add_argument("--prune", choices=MODES, help="what dropping a part does (forget)")
    repair(p)


def log(p: ArgumentParser) -> None:
    """Add what `kvweave context log` takes."""
    one(p)
    p.add_argument("--limit", type=positive, metavar="N", help="only the latest so many")


def diff(p: ArgumentParser) -> None:
    """Add what `kvweave context diff` takes."""
    one(p)
    p.add_argument("before", metavar="FROM", type=from_0, help=VERSION)
    p.add_argument("after", metavar="TO", type=from_0, nargs="?", help="another (what it is now)")


def revert(p: ArgumentParser) -> None:
    """Add what `kvweave context revert` takes."""
    one(p)
    p.add_argument("version", metavar="VERSION", type=from_0, help=VERSION)


def refine(p: ArgumentParser) -> None:
    """Add what `kvweave context refine` takes."""
    one(p)
    p.add_argument("--rows", type=positive, metavar="N", help="so many at most (all)")


def drop(p: ArgumentParser) -> None:
    """Add what `kvweave context drop` takes."""
    one(p)
    p.add_argument("parts", metavar="PART", nargs="+", help=PART)
    p.add_argument("--mode", choices=MODES, help="forget them, or evict only their memory (forget)")
    version(p)


def amend(p: ArgumentParser) -> None:
    """Add what `kvweave context amend` takes."""
    one(p)
    p.add_argument("part", metavar="PART", help=PART)
    p.add_argument("text", metavar="TEXT", nargs="?", help="the erratum; - or none reads stdin")
    p.add_argument("--role", choices=ROLES, help="as a message of this role")
    p.add_argument("--kind", choices=KINDS, help="what it is (document)")
    version(p)


def two(what: str) -> Callable[[ArgumentParser], None]:
    """Return what adds a context and another name."""

    def add(p: ArgumentParser) -> None:
        one(p)
        p.add_argument("to", metavar="NEW", help=what)

    return add


def several(p: ArgumentParser) -> None:
    """Add names of contexts."""
    p.add_argument("names", metavar="NAME", nargs="+", help="a context")


def append(p: ArgumentParser) -> None:
    """Add what `kvweave context append` takes."""
    one(p)
    p.add_argument("text", metavar="TEXT", nargs="?", help="- or none reads stdin")
    p.add_argument("--chunk", metavar="REF", help="instead: a stored chunk, by name or '#17'")
    p.add_argument("--role", choices=ROLES, help="as a message of this role")
    p.add_argument("--kind", choices=KINDS, default="document", help="what it is (document)")
    p.add_argument("--as", dest="stored", metavar="CHUNK", help="store the text by this name too")
    p.add_argument("--at", type=int, metavar="N", help="before part N (at the end)")


def ask(p: ArgumentParser) -> None:
    """Add what `kvweave context ask` takes."""
    one(p)
    p.add_argument("text", metavar="TEXT", nargs="?", help="the message; - or none reads stdin")
    sampling(p)
    p.add_argument("--explain", action="store_true", help="print the plan on stderr")


def version(p: ArgumentParser) -> None:
    """Add the version an edit is for."""
    p.add_argument(
        "--if-version",
        type=from_0,
        metavar="N",
        help="only if nobody has edited it since version N",
    )
