"""Every command of the shell and its help. No logic; docs/cli.md is generated from here."""

from __future__ import annotations

from kvweave.cli import (
    arguments,
    context_arguments,
    memory_arguments,
    probe_arguments,
    serve_arguments,
)
from kvweave.cli.command import Command
from kvweave.cli.route_arguments import route as route_arguments
from kvweave.cli.simulate_arguments import simulate as simulate_arguments

CONTEXTS, OF_A_SERVER = (
    "kvweave.cli.contexts",
    "Contexts are of a server: give --url or KVWEAVE_URL.",
)
VERBS = (
    (
        "ls",
        "List the open contexts.",
        context_arguments.ls,
        OF_A_SERVER,
        ("kvweave context ls -l",),
    ),
    ("show", "Show the parts of a context.", context_arguments.one, "", ()),
    (
        "new",
        "Open a context.",
        context_arguments.new,
        "",
        ("kvweave context new chat/42 --system 'You are brief.'",),
    ),
    (
        "append",
        "Add text, a message or a stored chunk to a context.",
        context_arguments.append,
        "",
        (
            "kvweave context append chat/42 'The button is behind the lid.'",
            "kvweave context append chat/42 --chunk docs/faq --at 1",
        ),
    ),
    (
        "ask",
        "Put a message to a context, and print the answer; both stay in it.",
        context_arguments.ask,
        "What is interrupted leaves no trace.",
        ("kvweave context ask chat/42 'How do I reset?'",),
    ),
    (
        "drop",
        "Remove parts of a context: all that are named, or none.",
        context_arguments.drop,
        "",
        ("kvweave context drop chat/42 docs/faq 3",),
    ),
    (
        "amend",
        "Add an erratum of a part at the end of a context; nothing else is computed anew.",
        context_arguments.amend,
        "What was wrong can still be read. It goes when the part is dropped.",
        ("kvweave context amend chat/42 docs/faq 'Correction: the button is red.'",),
    ),
    ("ledger", "Say what each answer of a context cost, in nats.", context_arguments.one, "", ()),
    ("log", "List what was done to a context, the latest first.", context_arguments.log, "", ()),
    (
        "diff",
        "Say which parts two versions of a context have added, removed or moved.",
        context_arguments.diff,
        "",
        ("kvweave context diff chat/42 3 7",),
    ),
    (
        "revert",
        "Bring back the parts of a version; that is a new version.",
        context_arguments.revert,
        "",
        (),
    ),
    (
        "why",
        "Say what the next answer computes, part by part, and which edit is the cause.",
        context_arguments.one,
        "",
        (),
    ),
    (
        "refine",
        "Make rows exact that are approximate, while the server has nothing else to do.",
        context_arguments.refine,
        "",
        ("kvweave context refine chat/42",),
    ),
    ("fork", "Copy a context under another name.", context_arguments.two("of the copy"), "", ()),
    ("mv", "Rename a context.", context_arguments.two("its new name"), "", ()),
    (
        "rm",
        "Close contexts: their rows are freed, names of chunks stay.",
        context_arguments.several,
        "",
        ("kvweave context rm chat/42",),
    ),
)
FILES, TEXT, UPKEEP = "kvweave.cli.files", "kvweave.cli.text", "kvweave.cli.upkeep"
COMMANDS = {
    command.name: command
    for command in (
        Command(
            "put",
            "kvweave.cli.put:put",
            "Store text as a chunk with its KV.",
            arguments.put,
            "All files are stored or none. With --cut and --replace, old pieces past the new last\n"
            "one are removed.",
            (
                "kvweave put docs/faq faq.md",
                "kvweave put docs/ a.md b.md          # docs/a, docs/b",
                "kvweave put docs/manual manual.md --cut paragraph --piece-tokens 400",
                "date | kvweave put memory/today --kind memory --replace",
            ),
        ),
        Command(
            "ls",
            f"{FILES}:ls",
            "List names.",
            arguments.ls,
            "A glob that matches nothing lists nothing, and the status is 0; a name or docs/ that is not\n"
            "there is an error, and the status is 1.",
            ("kvweave ls -l docs/", "kvweave ls --sort n_bytes --reverse --limit 10"),
        ),
        Command("stat", f"{FILES}:stat", "Tell all about one chunk.", arguments.stat),
        Command(
            "cat",
            f"{FILES}:cat",
            "Print what a chunk says.",
            arguments.stat,
            examples=("kvweave cat docs/faq", "kvweave cat docs/faq --json"),
        ),
        Command(
            "rm",
            f"{FILES}:rm",
            "Remove names; a chunk without names is freed.",
            arguments.rm,
            examples=("kvweave rm 'chat/42/*-00[1-3]' --dry-run",),
        ),
        Command(
            "mv",
            f"{FILES}:mv",
            "Rename; the KV stays where it is.",
            arguments.rename,
            examples=("kvweave mv docs/ archive/",),
        ),
        Command(
            "cp", f"{FILES}:cp", "Give chunks another name; no KV is copied.", arguments.rename
        ),
        Command(
            "pin",
            f"{FILES}:pin",
            "Keep chunks from being removed or evicted.",
            arguments.one_pattern,
        ),
        Command(
            "unpin",
            f"{FILES}:unpin",
            "Take back pin; nothing is freed by it.",
            arguments.one_pattern,
        ),
        Command(
            "place",
            f"{TEXT}:place",
            "Move KV to a tier.",
            arguments.place,
            "none keeps only the tokens: the KV is computed again when it is needed. ram lasts as\n"
            "long as the process, so from a shell it ends on disk.",
            ("kvweave place 'docs/**' none",),
        ),
        Command(
            "compress",
            f"{TEXT}:compress",
            "Leave of a chunk's KV what a token policy keeps.",
            arguments.compress,
            "It stands wherever the whole chunk would, approximately, and keeps its tokens. Its rows\n"
            "rest on disk like any chunk's; `compress REF full` gives all of it back.",
            ("kvweave compress docs/faq kvzip:0.3 --to docs/faq.small",),
        ),
        Command("du", f"{FILES}:du", "Add up tokens and bytes.", arguments.du),
        Command(
            "find",
            f"{FILES}:find",
            "List names by what stands behind them.",
            arguments.find,
            examples=("kvweave find 'chat/**' --unused-for 7d --min-tokens 500",),
        ),
        Command(
            "run",
            f"{TEXT}:run",
            "Weave a context from text and chunks, and continue it.",
            arguments.run,
            "The continuation goes to stdout as it comes; everything else to stderr.",
            (
                "kvweave run 'Use {docs/faq}. Q: how do I reset?'",
                "kvweave run 'Read {docs}. {ask}' --docs docs=wiki/oslo,wiki/b* --set ask=Why?",
                "kvweave run --explain --repair none 'Use {docs/faq}. Q: how do I reset?'",
            ),
        ),
        Command(
            "chat",
            "kvweave.cli.chat:chat",
            "Talk to the model; old turns can be dropped one by one.",
            arguments.chat,
            "Lines from stdin are messages; /help lists the commands. --json prints one object a\n"
            "line and answer.",
            (
                "kvweave chat --system 'You are brief.' --limit 2000",
                "kvweave chat --context chat/42 --url http://127.0.0.1:8700",
            ),
        ),
        Command(
            "check",
            f"{TEXT}:check",
            "Weave a context and compare it with a full prefill.",
            arguments.check,
            "With --suite, ask seeded questions over woven notes under several methods, and say how\n"
            "many replies are right and how far their predictions are from a full prefill's.\n"
            "--calibrate writes the bounds --max-drift needs, and tells what they are worth: fitted on\n"
            "every other protocol, tested on the rest, and the other way round.",
            (
                "kvweave check 'Use {docs/faq}. Q: how do I reset?' --share 0.2",
                "kvweave check --suite --protocols P1,P8 --strategies none,query,deviation:k@2",
                "kvweave check --suite --calibrate",
            ),
        ),
        Command(
            "calibrate",
            "kvweave.cli.calibrate:calibrate",
            "Measure how auto should choose rows for this model, and what bounds it keeps, on text of your own.",
            arguments.calibrate,
            "Cuts text into chunks, prunes one or swaps two, as real use does, and compares what the\n"
            "model says with a full prefill; or does so with prompts and replies you have logged. A part\n"
            "of the cases chooses among options of auto (--only rows: at each share); with these the rest gives\n"
            "what --max-drift needs. The bounds are for text like this: half of the documents is\n"
            "tested on the other half, and you are told how that went.",
            (
                "kvweave calibrate --text docs/*.md",
                "kvweave calibrate --prompts log.jsonl --out calibration.json",
                "kvweave calibrate --text docs/*.md --only rows",
                "kvweave calibrate --text docs/*.md --vllm --out in-vllm.json",
            ),
            remote=False,
        ),
        Command(
            "can",
            f"{TEXT}:can",
            "Tell what the model can do, and why not.",
            arguments.nothing,
        ),
        Command(
            "status",
            "kvweave.cli.status:status",
            "Tell how a server is doing: health, load, budgets.",
            arguments.nothing,
            examples=("kvweave status --url http://127.0.0.1:8700",),
        ),
        *(
            Command(
                f"probe {verb}", f"kvweave.cli.probe:{verb}", summary, add, more, examples, False
            )
            for verb, summary, add, more, examples in probe_arguments.VERBS
        ),
        *(
            Command(f"context {verb}", f"{CONTEXTS}:{verb}", summary, add, more, examples)
            for verb, summary, add, more, examples in VERBS
        ),
        *(
            Command(f"memory {verb}", f"kvweave.cli.memory:{verb}", summary, add, more, examples)
            for verb, summary, add, more, examples in memory_arguments.VERBS
        ),
        Command(
            "serve",
            "kvweave.cli.serve:serve",
            "Serve chunks, contexts and OpenAI's endpoints over HTTP.",
            serve_arguments.serve,
            "One line on stdout says when and where. SIGINT or SIGTERM ends it when the running answers\n"
            "have ended. Without a key it answers this machine only. Takes what `pip install\n"
            "'kvweave[serve]'` brings.",
            (
                "kvweave serve",
                "kvweave serve path/to/model --port 0 --json",
                "kvweave serve path/to/model --host 0.0.0.0 --keys keys.txt --quota 1GiB",
            ),
            remote=False,
        ),
        Command(
            "route",
            "kvweave.cli.route:route",
            "Put several servers behind one endpoint, by the chunks and text each has.",
            route_arguments,
            "Needs no model, and no torch. Requests go where their first token comes first: queue, loads,\n"
            "repair, and prefill of what is not there. Contexts stay where they are. A worker that dies is\n"
            "left out, and taken back when it is there again. SIGINT or SIGTERM ends it when the running\n"
            "answers have ended. Takes what `pip install 'kvweave[serve]'` brings.",
            (
                "kvweave route --worker http://127.0.0.1:8701 --worker http://127.0.0.1:8702",
                "kvweave route --worker http://gpu1:8000 --worker http://gpu2:8000 --policy prefix --json",
            ),
            remote=False,
        ),
        Command(
            "fsck",
            f"{UPKEEP}:fsck",
            "Check a home: every row of its index, every byte of its KV.",
            serve_arguments.fsck,
            "The status is 1 when something is wrong. --repair rebuilds a damaged index from the rows\n"
            "that verify (the old file is kept), and removes records that do not. Needs no model; no\n"
            "other process may have the home open.",
            ("kvweave fsck", "kvweave fsck --repair --json"),
            remote=False,
        ),
        Command(
            "sweep",
            f"{UPKEEP}:sweep",
            "Remove from a shared tier what no index names any more.",
            serve_arguments.sweep,
            "Give every index that uses the tier: homes, or postgresql:// addresses. Those that are\n"
            "registered there and not given are told, and nothing is removed. Engines may go on meanwhile.",
            (
                "kvweave sweep 'redis url=redis://127.0.0.1:6379' --index ~/.kvweave --dry-run",
                "kvweave sweep 's3 url=s3://bucket' --index homes/a --index homes/b --grace 1d",
            ),
            remote=False,
        ),
        Command(
            "simulate",
            "kvweave.cli.simulate:simulate",
            "Replay a trace against tiers and policies, or serve it under a load.",
            simulate_arguments,
            "Needs no model. Without a load the requests are replayed one after the other and nobody waits:\n"
            "hits, bytes moved, and times that follow from costs. With --load they come to nodes with a queue,\n"
            "a device, decode slots and tiers of their own, and there are waits, percentiles, an SLO and a\n"
            "bill; with --slo alone, the largest load that keeps it. With --sizes, a star marks what nothing\n"
            "else beats in price, time and (without a load) requests a second together.",
            (
                "kvweave simulate trace.jsonl --policy lru,declared,belady --tiers ram:10%,disk:50%",
                "kvweave simulate generated --pauses lognormal --regret 0.1 --policy all",
                "kvweave simulate trace.jsonl --tiers ram:1%,disk:1% --sizes 1%,3%,10% --plot front.png",
                "kvweave simulate generated --load 2 --arrivals bursty --nodes 4 --router all --slo 2",
                "kvweave simulate generated --slo 2 --tiers ram:5%,disk:20%::0.1:3600 --json",
            ),
            remote=False,
        ),
        Command(
            "completion",
            "kvweave.cli.completion:completion",
            "Print what a shell needs to complete commands, options and names.",
            arguments.completion,
            'Where it goes: bash, `eval "$(kvweave completion bash)"` in ~/.bashrc; zsh, a file _kvweave\n'
            "in a directory of $fpath; fish, ~/.config/fish/completions/kvweave.fish.",
            ("kvweave completion bash",),
            remote=False,
        ),
        Command(
            "demo",
            f"{TEXT}:demo",
            "Hold a long conversation, pruned, and measure it.",
            arguments.demo,
            remote=False,
        ),
    )
}
