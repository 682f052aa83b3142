"""From prompts to the base's own answers: `python data/prepare.py base=tiny corpus=tiny`. It can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from ctcdraft.config.build import paper_of, written_down
from ctcdraft.config.cli import entry_point, from_command_line
from ctcdraft.config.early_checks import begin
from ctcdraft.corpus import part_files, prepared, template_warnings
from ctcdraft.corpus.generation.requests import Answers, Dialogue, Interview
from ctcdraft.corpus.part_files import writing
from ctcdraft.corpus.preview import legend, shown
from ctcdraft.corpus.settings import refuse_impossible
from ctcdraft.corpus.token_store import Row, row
from ctcdraft.corpus.types import Corpus
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.hardware import HardwareSpec
from ctcdraft.models.base_model import BaseLM
from ctcdraft.planning import corpus as planning_corpus

if __name__ == "__main__":
    begin("prepare")  # above the imports below, which take seconds


def rows_to_show(base: BaseLM, corpus: Corpus, answers: Answers, out: Path) -> Iterator[Row]:
    """What is in `out` already, or else what the base says now to the first prompts; nothing is written."""
    for file in part_files.part_files(out):
        yield from (row(line) for line in part_files.read_part(file) or [] if "dropped" not in line)
    if part_files.part_files(out):
        return
    interview = Interview(base, answers)
    for prompt in corpus.prompts:
        for line in interview([Dialogue(prompt, 0)]):
            if "dropped" not in line:
                yield row(line)


@hydra.main(version_base=None, config_path="../configs", config_name="prepare")
@entry_point
def main(config: DictConfig) -> None:
    refuse_impossible(config)
    shard = Shard.parse(config.shard)
    corpus = instantiate(config.corpus)
    answers = instantiate(config.answers)
    paper = paper_of(config.base) if config.plan_only and not config.show else None
    if paper is not None:
        print(planning_corpus.on_paper(paper, corpus, answers, HardwareSpec.of(config.plan), shard))
        return
    base = instantiate(config.base)
    out = Path(config.out)
    if config.overwrite and not config.plan_only and not config.show:
        start_afresh(out, shard)
    if config.show:
        print(legend())
        for one in islice(rows_to_show(base, corpus, answers, out), config.show):
            print(f"\n{shown(one, base.tokenizer, config.show_labels)}")
        return
    planned = planning_corpus.plan(base, corpus, answers, out, shard)
    print(planned)
    if config.plan_only:
        return
    settings = written_down(config.corpus)
    manifest = prepared.prepare(base, corpus, answers, out, {"corpus": settings}, shard, planned)
    print(summary(manifest, shard, out))


def start_afresh(out: Path, shard: Shard) -> None:
    if shard.of > 1:
        raise InputError(
            f"overwrite=true with shard={shard.number}/{shard.of} would throw away what the other shards have made; "
            f"remove {out} once, then start all shards without it"
        )
    with writing(out, shard):
        part_files.discard(out)


def summary(manifest: part_files.Manifest, shard: Shard, out: Path) -> str:
    if not manifest["complete"]:
        return (
            f"shard {shard.number} of {shard.of} is finished in {out}, others are not; the last to finish completes "
            "the corpus, and so does running once more without shard="
        )
    counts = manifest["counts"]
    said = (
        f"{counts['answers']:,} answers to {counts['prompts']:,} prompts in {out}\n"
        f"{counts['answer_tokens']:,} answer tokens of {counts['tokens']:,}, "
        f"{counts['ended_share']:.1%} of the answers ended, {counts['cut_prompts']:,} prompts cut to fit"
    )
    if counts["reencoded"] or counts["dropped"]:
        said += f"\n{counts['reencoded']:,} answers re-encoded from text, {counts['dropped']:,} dropped"
    return "\n".join([said, *template_warnings.of_corpus(manifest)])


if __name__ == "__main__":
    from_command_line(main)
