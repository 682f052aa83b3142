"""Entry point that generates the base model's responses to a corpus: `python data/prepare.py base=tiny corpus=tiny`.

An interrupted run is resumed by running the same command again.
"""

from __future__ import annotations

from ctcdraft.config.early_checks import check_before_imports

if __name__ == "__main__":
    check_before_imports("prepare")  # above the imports below, which take seconds

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from ctcdraft.config.build import meta_base, planned_processes, portable_config
from ctcdraft.config.cli import entry_point, run_hydra_main
from ctcdraft.config.schema import check_config
from ctcdraft.corpus import finished, part_files, prepared
from ctcdraft.corpus.chat_template import corpus_warnings
from ctcdraft.corpus.generation.requests import ResponseGenerator, Sample
from ctcdraft.corpus.lines import join_turns
from ctcdraft.corpus.preview import legend, render_row
from ctcdraft.corpus.token_store import Row, row_from_line
from ctcdraft.corpus.types import Corpus
from ctcdraft.distributed import Shard, from_environment, init_distributed
from ctcdraft.errors import InputError
from ctcdraft.hardware import HardwareSpec
from ctcdraft.models.base_model import BaseLM
from ctcdraft.planning import corpus as planning_corpus


def preview_rows(base: BaseLM, corpus: Corpus, answers: ResponseGenerator, out: Path) -> Iterator[Row]:
    """Yield the rows in `out`, or responses generated now if it is empty; nothing is written."""
    if prepared.is_complete(out):
        yield from prepared.read_corpus(out, base.fingerprint()).rows
        return
    parts = part_files.list_parts(out)
    batches = ((number, [Sample(prompt, 0)]) for number, prompt in enumerate(corpus.prompts))
    generated = (join_turns(lines) for _, lines in answers.answer_batches(base, batches))
    for lines in (part_files.read_part(file) or [] for file in parts) if parts else generated:
        yield from (row_from_line(line) for line in lines if "dropped" not in line)


@hydra.main(version_base=None, config_path="../configs", config_name="prepare")
@entry_point
def main(config: DictConfig) -> None:
    check_config(config)
    processes = from_environment()
    if config.export is not None:
        if processes.is_main:
            exported = finished.export_parts(Path(config.out), Path(config.export))
            print(f"{len(exported['parts']):,} parts in {config.export}")
        return
    shard, only_shown = Shard.parse(config.shard), config.plan_only or config.show
    # The processes of torchrun share the batches of this shard; what only prints is one process's work.
    if not only_shown:
        processes = init_distributed(config.device, config.timeout_minutes, tensors=False)
    if only_shown and not processes.is_main:
        return
    share = Shard(shard.number, shard.of * planned_processes(config))
    corpus = instantiate(config.corpus) if only_shown else processes.from_main(lambda: instantiate(config.corpus))
    answers = instantiate(config.answers)
    # Without weights the plan is made from the config of the base model. show= generates absent responses, so it needs
    # weights.
    dry_run_base = meta_base(config.base) if config.plan_only and not config.show else None
    if dry_run_base is not None:
        hardware = HardwareSpec.of(config.plan)
        print(planning_corpus.plan_corpus_dry_run(dry_run_base, corpus, answers, hardware, share))
        return
    base = instantiate(config.base)
    out = Path(config.out)
    if config.show:
        print(legend())
        for row in islice(preview_rows(base, corpus, answers, out), config.show):
            print(f"\n{render_row(row, base.tokenizer, config.show_labels)}")
        return
    if config.plan_only:
        print(planning_corpus.plan_corpus(base, corpus, answers, out, share))
        return
    if config.overwrite:
        processes.main_process_first(lambda: discard_previous(out, shard) if processes.is_local_main else None)
    planned = processes.from_main(lambda: planning_corpus.plan_corpus(base, corpus, answers, out, share))
    if processes.is_main:
        print(planned)
    settings = {"corpus": portable_config(config.corpus)}
    manifest = prepared.prepare(base, corpus, answers, out, settings, shard, planned, processes)
    if processes.is_main:
        print(describe_result(manifest, shard, out))


def discard_previous(out: Path, shard: Shard) -> None:
    if shard.of > 1:
        raise InputError(
            f"overwrite=true with shard={shard.number}/{shard.of} would throw away what the other shards have made; "
            f"remove {out} once, then start all shards without it"
        )
    with part_files.writer_lock(out, shard):
        part_files.delete_corpus(out)


def describe_result(manifest: part_files.Manifest, shard: Shard, out: Path) -> str:
    if not manifest["complete"]:
        return (
            f"shard {shard.number} of {shard.of} is finished in {out}, others are not; the last to finish completes "
            "the corpus, and so does running once more without shard="
        )
    counts = manifest["counts"]
    text = (
        f"{counts['answers']:,} answers to {counts['prompts']:,} prompts in {out}\n"
        f"{counts['answer_tokens']:,} answer tokens of {counts['tokens']:,}, "
        f"{counts['ended_share']:.1%} of the answers ended, {counts['cut_prompts']:,} prompts cut to fit"
    )
    if "rows" in counts:  # older versions had a row for every response
        several = counts["conversations_in_several_rows"]
        why = ", because a later prompt does not begin with what came before it"
        text += f"\n{counts['rows']:,} rows: {counts['conversations_in_one_row']:,} conversations in one, "
        text += f"{several:,} in several{why if several else ''}"
    if counts["reencoded"] or counts["dropped"]:
        text += f"\n{counts['reencoded']:,} answers re-encoded from text, {counts['dropped']:,} dropped"
    return "\n".join([text, *corpus_warnings(manifest)])


if __name__ == "__main__":
    run_hydra_main(main)
