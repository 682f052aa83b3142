"""From prompts to the base's own answers: `python data/prepare.py base=tiny corpus=tiny`. It can be resumed."""

from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.corpus import parts, prepared
from ctcdraft.front_door import entry_point, from_command_line


@hydra.main(version_base=None, config_path="../configs", config_name="prepare")
@entry_point
def main(config: DictConfig) -> None:
    corpus = instantiate(config.corpus)
    answers = instantiate(config.answers)
    base = instantiate(config.base)
    out = Path(config.out)
    if config.overwrite and not config.plan_only:
        parts.discard(out)
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
