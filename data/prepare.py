"""From prompts to the base's own answers: `python data/prepare.py base=tiny corpus=tiny`. It can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.base import BaseLM
from ctcdraft.corpus import parts, prepared
from ctcdraft.corpus.answers import Answers, questions
from ctcdraft.corpus.chat import answer_text
from ctcdraft.corpus.conversations import Corpus
from ctcdraft.corpus.show import legend, shown
from ctcdraft.front_door import entry_point, from_command_line


def rows_to_show(base: BaseLM, corpus: Corpus, answers: Answers, out: Path) -> Iterator[prepared.Row]:
    """What is in `out` already, or else what the base says now to the first prompts; nothing is written."""
    for file in parts.part_files(out):
        yield from map(prepared.row, parts.read_part(file) or [])
    if parts.part_files(out):
        return
    for prompt in corpus.prompts:
        said: dict[str, list[str]] = {prompt.id: []}
        for turn in range(len(prompt.turns)):
            for line in prepared.answered(base, questions(base, [prompt], said, turn), answers):
                row = prepared.row(line)
                yield row
                said[prompt.id].append(answer_text(base.tokenizer, row.tokens_L[row.mask_L].tolist(), base.stop_tokens))


@hydra.main(version_base=None, config_path="../configs", config_name="prepare")
@entry_point
def main(config: DictConfig) -> None:
    corpus = instantiate(config.corpus)
    answers = instantiate(config.answers)
    base = instantiate(config.base)
    out = Path(config.out)
    if config.overwrite and not config.plan_only and not config.show:
        parts.discard(out)
    if config.show:
        print(legend())
        for row in islice(rows_to_show(base, corpus, answers, out), config.show):
            print(f"\n{shown(row, base.tokenizer, config.show_labels)}")
        return
    print(prepared.plan(base, corpus, answers, out))
    if config.plan_only:
        return
    settings = OmegaConf.to_container(config.corpus, resolve=True)
    counts = prepared.prepare(base, corpus, answers, out, {"corpus": settings})["counts"]
    print(
        f"{counts['answers']:,} answers to {counts['prompts']:,} prompts in {out}\n"
        f"{counts['answer_tokens']:,} answer tokens of {counts['tokens']:,}, "
        f"{counts['ended_share']:.1%} of the answers ended, {counts['cut_prompts']:,} prompts cut to fit"
    )


if __name__ == "__main__":
    from_command_line(main)
