"""Peak memory for a corpus of a million conversations: `python benchmarks/million.py`.

Conversations in ShareGPT's form are written into a temporary folder, and the commands of a user are run on them, each
in a process of its own, whose peak resident memory the system reports when it ends:

    plan       data/prepare.py plan_only=true     reading, cleaning, decontamination, cost
    prepare    data/prepare.py                    the same, and a part file for every batch of responses
    read       train.py plan_only=true            the prepared corpus as training reads it, masks checked

`prepare` uses a stand-in for the base model, defined below, that gives the same response to every prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctcdraft.corpus.generation.requests import GenerateFn, Request, Response, ResponseGenerator
from ctcdraft.models.base_model import BaseLM

REPOSITORY = Path(__file__).resolve().parent.parent
WORDS = """
the of and to in is you that it for on are as with his they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over
did down only way find use may water long little very after words called just where most know get through back
much before go good new write our used me man too any day same right look think also around another came come
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class StandIn(ResponseGenerator):
    """Gives the same response of forty words to every prompt, without running a model."""

    def start(self, base: BaseLM) -> GenerateFn:
        tokens = base.tokenizer(" ".join(WORDS[:40]), add_special_tokens=False)["input_ids"]
        return lambda requests: [self.reply(base, request, tokens) for request in requests]

    def reply(self, base: BaseLM, question: Request, tokens: list[int]) -> Response:
        return Response([*tokens[: self.max_response_tokens(base, question) - 1], min(base.stop_token_ids)])


def write_conversations(file: Path, lines: int, exchanges: int) -> None:
    """Write conversations in which no two users write the same text; responses are present and longer than the
    prompts.
    """
    rng = random.Random(0)
    with file.open("w") as stream:
        for number in range(lines):
            talk = []
            for _ in range(rng.randint(1, exchanges)):
                talk.append({"from": "human", "value": " ".join(rng.choices(WORDS, k=rng.randint(5, 60)))})
                talk.append({"from": "gpt", "value": " ".join(rng.choices(WORDS, k=rng.randint(20, 200)))})
            stream.write(json.dumps({"id": f"c{number}", "conversations": talk}) + "\n")


def measured(name: str, command: Sequence[str], folder: Path) -> None:
    """Run a command; print its last lines, its seconds and its peak memory."""
    start = time.perf_counter()
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "benchmarks")])
    with (folder / f"{name}.log").open("w+") as log:
        child = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
        )
        _, status, used = os.wait4(child.pid, 0)
        log.seek(0)
        printed = [line.strip() for line in log.read().replace("\r", "\n").splitlines() if line.strip()]
    code = child.returncode = os.waitstatus_to_exitcode(status)
    print(f"{name}: status {code}, {time.perf_counter() - start:,.0f} s, peak {peak(used):.2f} GB resident")
    for line in printed if code else dict.fromkeys(printed[:4] + printed[-8:]):
        print(f"    {line.replace(str(folder), 'FOLDER')}")
    if code:
        sys.exit(code)


def peak(used: resource.struct_rusage) -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes here
    return used.ru_maxrss * unit / 1e9


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        folder = Path(place)
        lines = folder / "million.jsonl"
        write_conversations(lines, options.lines, options.exchanges)
        print(f"{options.lines:,} lines, {lines.stat().st_size / 1e6:,.0f} MB, 1 to {options.exchanges} exchanges each")
        prepared = folder / "prepared"
        prepare = [
            str(REPOSITORY / "data" / "prepare.py"), "base=tiny", "corpus=sharegpt", f"corpus.path={lines}",
            "device=cpu", f"out={prepared}", "answers._target_=million.StandIn", "answers.batch_size=256",
        ]  # fmt: skip
        measured("plan", [*prepare, "plan_only=true"], folder)
        measured("prepare", prepare, folder)
        size = sum(file.stat().st_size for file in prepared.iterdir())
        print(f"prepared: {len(list(prepared.iterdir())):,} files, {size / 1e6:,.0f} MB")
        read = [
            str(REPOSITORY / "train.py"), "base=tiny", f"corpus.path={prepared}", f"run={folder / 'run'}", "device=cpu",
            "plan_only=true",
        ]  # fmt: skip
        measured("read", read, folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--exchanges", type=int, default=1, help="of a conversation, at most")
    parser.add_argument("--place", default=None, help="where the temporary folder is made; a few GB")
    return parser.parse_args()


if __name__ == "__main__":
    main()
