"""Makes JSONL of public runs: ``python bench/pruning/convert.py GIT_DIRECTORY --out FOLDER``.

Reads mini-swe-agent's trajectories (``*.traj.json``, MIT) out of a clone, bare or not, without a work
tree. Tokens are those that the provider counted: what one request had more than the one before it is
the answer and the output between them, split by their letters.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if (
    __name__ == "__main__"
):  # and not for whoever imports it: `bench/serve.py` would be found as `serve`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pruning.trace import AgentRun, TracedMessage, write

UNDER = "swebench_results/20251118_gemini-3-pro-74pct/trajs"
_COMMAND = re.compile(r"```bash\n(.*?)```", re.DOTALL)
_CODE = re.compile(r"<returncode>(-?\d+)</returncode>")


def sizes(messages: Sequence[dict[str, Any]], asked: Sequence[int]) -> list[int]:
    """Return the tokens of each message, so that each request has as many as were counted."""
    found = [max(1, len(m["content"]) // 4) for m in messages]
    before, start = 0, 0
    for index in asked:
        usage = messages[index]["extra"]["response"]["usage"]
        n = max(index - start, int(usage["prompt_tokens"]) - before)
        letters = [max(1, len(m["content"])) for m in messages[start:index]]
        cut = [0] + [round(n * sum(letters[:i]) / sum(letters)) for i in range(1, len(letters) + 1)]
        found[start:index] = [max(1, b - a) for a, b in itertools.pairwise(cut)]
        before, start = before + n, index
    return found


def converted(name: str, told: dict[str, Any]) -> AgentRun | None:
    """Return a run, or None for one without answers that were counted."""
    messages = [m for m in told["messages"] if isinstance(m.get("content"), str)]
    asked = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if len(asked) < 2 or any(
        "usage" not in m.get("extra", {}).get("response", {})
        for m in map(messages.__getitem__, asked)
    ):
        return None
    made, call = [], ""
    for i, (message, n) in enumerate(zip(messages, sizes(messages, asked), strict=True)):
        role, text = message["role"], message["content"]
        if role == "assistant":
            command = _COMMAND.search(text)
            said = command[1].strip() if command else text
            call = hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
        if role == "user" and i > asked[0]:
            code = _CODE.search(text)
            failed = code is None or code[1] != "0"
            made.append(TracedMessage("tool", n, "bash", call, failed, text))
        else:
            made.append(TracedMessage(role, n, text=text))
    return AgentRun(name, tuple(made))


def trajectories(repository: Path, under: str) -> Iterator[AgentRun]:
    """Yield the runs of a clone below a folder, by name."""
    git = ["git", "-C", str(repository)]
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", "HEAD", under],
        capture_output=True,
        text=True,
        check=True,
    )
    for file in sorted(listed.stdout.splitlines()):
        if file.endswith(".traj.json"):
            shown = subprocess.run([*git, "show", f"HEAD:{file}"], capture_output=True, check=True)
            run = converted(Path(file).name.removesuffix(".traj.json"), json.loads(shown.stdout))
            if run is not None:
                yield run


def main() -> None:
    """Convert, and say how many runs there were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--under", default=UNDER)
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder outside of this repository"
    )
    options = parser.parse_args()
    n = write(options.out / "mini-swe-agent.jsonl", trajectories(options.repository, options.under))
    print(f"{n} runs in {options.out}")


if __name__ == "__main__":
    main()
