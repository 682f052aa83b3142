"""Rows by turn against rows of conversations, and the start of a process that reads them.

    python benchmarks/conversations.py FILES --before CHECKOUT

Counts rows and tokens of the ShareGPT conversations that cleaning keeps, through the embedded base's tokenizer and
chat template, with the recorded responses cut to --max-new-tokens in place of a model's. Then a corpus of synthetic
tokens of these lengths is read by a process of its own: as parts by turn by the package in CHECKOUT (a version before
the shards), and as shards by this one. Seconds are those of the processor, so other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.utils import instantiate
from tqdm import tqdm

from ctcdraft.config.cli import compose_config
from ctcdraft.corpus import arrow_files, part_files
from ctcdraft.corpus.generation.requests import GenerateFn, Response, ResponseGenerator, Sample
from ctcdraft.corpus.lines import Line, count_lines, join_turns
from ctcdraft.corpus.readers import read_records
from ctcdraft.corpus.token_store import generation_prompt_tokens
from ctcdraft.corpus.types import prompt_id
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base

BASE = Path(__file__).resolve().parent.parent / "data" / "tiny" / "base"
PART = 32  # conversations
# Bytes of a token's hidden states in bfloat16 at a width of 4,096, as of a 7B base.
STATE_BYTES = 8192
READER = """
import json, resource, sys, time
from pathlib import Path
from ctcdraft.corpus import prepared
from ctcdraft.corpus.token_store import refuse_wrong_masks
from ctcdraft.models.loading import load_base
from ctcdraft.training.validation import split_held_out
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
base = load_base(sys.argv[2], "float32", "cpu")
times, before = [time.process_time()], peak()
rows = prepared.read_corpus(Path(sys.argv[1]), base.fingerprint()).rows
times.append(time.process_time())
refuse_wrong_masks(rows, base.tokenizer, base.stop_token_ids)
times.append(time.process_time())
kept = split_held_out(rows, 16, 2048)[0]
lengths = getattr(kept, "lengths", None) or [len(tokens) for tokens in kept.tokens]
times.append(time.process_time())
steps = [round(b - a, 2) for a, b in zip(times, times[1:])]
private = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_"))
print(json.dumps({"rows": len(rows), "tokens": sum(lengths), "read s": steps[0], "masks s": steps[1],
    "split s": steps[2], "peak GB": round(peak(), 2), "of it before GB": round(before, 2),
    "private GB at the end": round(private / 1e6, 2)}))
"""


@dataclass(frozen=True)
class Recorded(ResponseGenerator):
    """Gives the recorded responses of every prompt, and an empty one where there is none."""

    responses: dict[str, Sequence[str]]

    def start(self, base: BaseLM) -> GenerateFn:
        def answer(request: Any) -> Response:
            said = self.responses.get(request.id, ())
            text = said[request.turn] if request.turn < len(said) else ""
            tokens = base.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return Response([*tokens, min(base.stop_token_ids)][: self.max_response_tokens(base, request)])

        return lambda requests: [answer(request) for request in requests]


def recorded_responses(files: Sequence[str]) -> dict[str, Sequence[str]]:
    found: dict[str, Sequence[str]] = {}
    for _, record in read_records(list(files)):
        talk = record["conversations"]
        users = [turn["value"] for turn in talk if turn["from"] == "human"]
        found.setdefault(prompt_id(users), [turn["value"] for turn in talk if turn["from"] == "gpt"])
    return found


def lines_of(options: argparse.Namespace, base: BaseLM) -> Iterator[list[Line]]:
    """Yield the lines by turn of every kept conversation."""
    files = "[" + ",".join(options.files) + "]"
    corpus = instantiate(compose_config("prepare", "corpus=sharegpt", f"corpus.path={files}").corpus)
    print(corpus.summary(), flush=True)
    reader: Any = SimpleNamespace(
        tokenizer=base.tokenizer, stop_token_ids=base.stop_token_ids, context_length=options.context
    )
    settings = (1, options.max_new_tokens, 0.0, 0, 1)
    prompts = tqdm(corpus.prompts[:: options.every], mininterval=10)
    batches = ((number, [Sample(prompt, 0)]) for number, prompt in enumerate(prompts))
    recorded = Recorded(*settings, recorded_responses(options.files))
    yield from (lines for _, lines in recorded.answer_batches(reader, batches))


def count(options: argparse.Namespace, base: BaseLM) -> list[list[Line]]:
    """Print the counts both ways and return the joined lines, with the number of tokens in place of the tokens."""
    shapes, totals = [], {"by turn": count_lines([]), "conversations": count_lines([])}
    for lines in lines_of(options, base):
        rows = join_turns(lines)
        for name, one in (("by turn", lines), ("conversations", rows)):
            totals[name].update(count_lines(one))
        shapes.append([row | {"tokens": len(row["tokens"])} for row in rows])
    for name, counts in totals.items():
        print(name, dict(counts), f"states {counts['tokens'] * STATE_BYTES / 1e12:.3f} TB", flush=True)
    print(f"tokens by turn / of conversations: {totals['by turn']['tokens'] / totals['conversations']['tokens']:.3f}")
    return shapes


def synthetic(shapes: Sequence[Sequence[Line]], base: BaseLM) -> Iterator[list[Line]]:
    """Yield parts of random tokens in which every response follows the generation prompt and ends where it ended."""
    rng, opening, stop = random.Random(0), generation_prompt_tokens(base.tokenizer), min(base.stop_token_ids)
    plain = [token for token in range(base.vocabulary) if token not in base.stop_token_ids]
    for start in range(0, len(shapes), PART):
        part = []
        for line in (row for rows in shapes[start : start + PART] for row in rows):
            tokens = rng.choices(plain, k=line["tokens"])
            for first, end, ended in line["spans"]:
                tokens[first - len(opening) : first] = opening
                tokens[end - 1] = stop if ended else tokens[end - 1]
            part.append(line | {"tokens": tokens})
        yield part


def by_turn(part: Sequence[Line]) -> Iterator[Line]:
    """Yield the lines as older versions wrote them: one for every turn, with a mask."""
    for row in part:
        for turn, (start, end, ended) in enumerate(row["spans"], row["turn"]):
            mask = [0] * start + [1] * (end - start)
            line = row | {"turn": turn, "tokens": row["tokens"][:end], "mask": mask, "ended": bool(ended)}
            yield {key: value for key, value in line.items() if key != "spans"}


def write(folder: Path, shapes: Sequence[Sequence[Line]], base: BaseLM, shards: bool) -> None:
    manifest: dict[str, Any] = {"complete": True, "base": base.fingerprint(), "prompts": "", "answers": {}}
    manifest |= {"counts": {}, "hash": "", "parts": {}}
    folder.mkdir()
    if shards:
        written = arrow_files.write_shards(folder, synthetic(shapes, base))
        manifest["arrow"] = {file.name: part_files.file_checksum(file) for file in written}
    for number, part in enumerate([] if shards else synthetic(shapes, base)):
        file = part_files.part_path(folder, number)
        part_files.write_part(file, list(by_turn(part)))
        manifest["parts"][file.name] = part_files.file_checksum(file)
    part_files.write_manifest(folder, manifest)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name}: {size / 1e9:.2f} GB in {len(list(folder.iterdir())) - 1:,} files", flush=True)


def measure(name: str, folder: Path, package: Path) -> None:
    command = [sys.executable, "-c", READER, str(folder), str(BASE)]
    for _ in range(2):  # the first run also fills the page cache
        done = subprocess.run(
            command, cwd=package, env={**os.environ, "PYTHONPATH": str(package)}, capture_output=True, text=True
        )
        print(f"{name:12} {done.stdout.strip() or done.stderr[-2000:]}", flush=True)


def main() -> None:
    options = arguments()
    base = load_base(str(BASE), "float32", "cpu")
    if options.lengths is not None and options.lengths.exists():
        shapes = json.loads(options.lengths.read_text())
    else:
        shapes = count(options, base)
        if options.lengths is not None:
            options.lengths.write_text(json.dumps(shapes))
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        if options.before is not None:
            write(Path(place) / "parts", shapes, base, shards=False)
            measure("parts", Path(place) / "parts", options.before.resolve())
        write(Path(place) / "shards", shapes, base, shards=True)
        measure("shards", Path(place) / "shards", BASE.parent.parent.parent)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="in ShareGPT's form")
    parser.add_argument("--before", type=Path, help="a checkout of a version that reads parts")
    parser.add_argument("--lengths", type=Path, help="a file that keeps the lengths for another run")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--every", type=int, default=1, help="take every N-th conversation only")
    parser.add_argument("--place", help="where the temporary folder is made; a few GB")
    return parser.parse_args()


if __name__ == "__main__":
    main()
