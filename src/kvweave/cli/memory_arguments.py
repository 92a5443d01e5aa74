"""The arguments of ``kvweave memory ...``. No logic."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable

from kvweave.cli.arguments import sampling
from kvweave.cli.values import positive
from kvweave.memory.told import WAYS

ROLES = ("user", "assistant", "tool")
ITEM = "an item: its whole name, or what stands below the root"
ITEMS = "a name, a glob, or a directory/"


def ls(p: ArgumentParser) -> None:
    """Add nothing."""


def one(p: ArgumentParser) -> None:
    """Add the name of a memory."""
    p.add_argument("name", metavar="NAME", help="the context whose memory it is")


def new(p: ArgumentParser) -> None:
    """Add what `kvweave memory open` takes."""
    one(p)
    p.add_argument("--root", metavar="PATH", default="memory", help="where its items are (memory)")
    for zone, what in (
        ("window", "tokens of turns (1024)"),
        ("turns", "turns at most (any number)"),
        ("summaries", "tokens of all summaries (256)"),
        ("summary", "tokens of one summary (96)"),
        ("recalled", "tokens of recalled items (512)"),
        ("warm", "tokens of items whose KV stays in memory (4096)"),
    ):
        p.add_argument(f"--{zone}", type=positive, metavar="N", help=what)
    p.add_argument(
        "--sentences",
        type=positive,
        metavar="N",
        help="summaries are the first N sentences of each message (the model writes them)",
    )


def items(p: ArgumentParser) -> None:
    """Add what lists items."""
    one(p)
    p.add_argument("pattern", metavar="ITEMS", nargs="?", default="**", help=f"{ITEMS} (all)")


def some(p: ArgumentParser) -> None:
    """Add what removes items."""
    one(p)
    p.add_argument("pattern", metavar="ITEMS", help=ITEMS)
    p.add_argument("-n", "--dry-run", action="store_true", help="only print what would go")


def item(p: ArgumentParser) -> None:
    """Add one item."""
    one(p)
    p.add_argument("item", metavar="ITEM", help=ITEM)


def write(p: ArgumentParser) -> None:
    """Add what `kvweave memory write` takes."""
    item(p)
    p.add_argument("text", metavar="TEXT", nargs="?", help="- or none reads stdin")
    p.add_argument("--new", action="store_true", help="an item of that name is an error")


def anchor(p: ArgumentParser) -> None:
    """Add what `kvweave memory anchor` takes."""
    one(p)
    p.add_argument("label", metavar="LABEL", help="what it is called, below ROOT/anchors")
    p.add_argument("text", metavar="TEXT", nargs="?", help="- or none reads stdin")


def rename(p: ArgumentParser) -> None:
    """Add what `kvweave memory mv` takes."""
    item(p)
    p.add_argument("to", metavar="NEW", help="its new name")


def tell(p: ArgumentParser) -> None:
    """Add what `kvweave memory tell` takes."""
    one(p)
    p.add_argument("text", metavar="TEXT", nargs="?", help="- or none reads stdin")
    p.add_argument("--role", choices=ROLES, default="user", help="whose message it is (user)")


def ask(p: ArgumentParser) -> None:
    """Add what `kvweave memory ask` takes."""
    one(p)
    p.add_argument("text", metavar="TEXT", nargs="?", help="the message; - or none reads stdin")
    p.add_argument(
        "--recall", choices=(*WAYS, "none"), default="embedding", help="by what (embedding)"
    )
    p.add_argument("--question", metavar="TEXT", help="what to recall by (the message)")
    sampling(p)
    p.add_argument("--explain", action="store_true", help="print the plan on stderr")


def ranked(p: ArgumentParser) -> None:
    """Add what ranks items."""
    one(p)
    p.add_argument("question", metavar="TEXT", help="a question; with --by name, a name or a glob")
    p.add_argument("--by", choices=WAYS, default="embedding", help="what ranks items (embedding)")
    p.add_argument("--limit", type=positive, metavar="N", help="only the best so many")


def tool(p: ArgumentParser) -> None:
    """Add what `kvweave memory tool` takes."""
    one(p)
    p.add_argument("call", metavar="CALL", nargs="?", help="its input, JSON; - or none reads stdin")


Add = Callable[[ArgumentParser], None]
OF_A_SERVER = "Memories are of a server: give --url or KVWEAVE_URL."
VERBS: tuple[tuple[str, str, Add, str, tuple[str, ...]], ...] = (
    ("ls", "List the memories.", ls, OF_A_SERVER, ()),
    (
        "open",
        "Open a memory over a context.",
        new,
        "What stands in the context then is in the window, but for system messages in front.",
        ("kvweave memory open chat/42 --window 2000 --recalled 800",),
    ),
    ("show", "Show which part of the context is in which zone.", one, "", ()),
    ("items", "List the items of a memory.", items, "", ("kvweave memory items chat/42 'notes/*'",)),
    ("read", "Print what an item says.", item, "", ("kvweave memory read chat/42 notes/plan",)),
    (
        "ask",
        "Put a message to a conversation, and print the answer; room is made, and what it calls for recalled.",
        ask,
        "What is interrupted stays as far as it was written; `kvweave memory undo` takes it back.",
        ("kvweave memory ask chat/42 'What did we decide on the lid?'",),
    ),
    ("tell", "Add a message without an answer.", tell, "", ()),
    ("settle", "Bring window and summaries under their budgets now.", one, "", ()),
    ("search", "Rank items, and change nothing.", ranked, "", ("kvweave memory search chat/42 'the lid'",)),
    (
        "recall",
        "Let items stand in the context, in place of what was recalled before.",
        ranked,
        "",
        ("kvweave memory recall chat/42 'notes/*' --by name",),
    ),
    ("release", "Take recalled items out of the context; they stay items.", items, "", ()),
    ("anchor", "Pin a text in front.", anchor, "", ("kvweave memory anchor chat/42 rules 'Be brief.'",)),
    (
        "write",
        "Write an item, in the context too where it stands there.",
        write,
        "",
        ("date | kvweave memory write chat/42 notes/today",),
    ),
    ("rm", "Remove items, from the context too.", some, "", ("kvweave memory rm chat/42 'notes/*' -n",)),
    ("mv", "Rename an item, or all below a directory/.", rename, "", ()),
    ("undo", "Take back the last step, whatever it was.", one, "", ()),
    ("idle", "Do one step of what can wait.", one, "", ()),
    (
        "tool",
        "Answer a call of the memory tool that agents use.",
        tool,
        "The status is 1 where the tool says that something went wrong.",
        ("""kvweave memory tool chat/42 '{"command": "view", "path": "/memories"}'""",),
    ),
    ("blocks", "List the memory blocks.", one, "", ()),
    ("close", "Close a memory; context and items stay.", one, "", ()),
)  # fmt: skip
