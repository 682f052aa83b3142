"""Exact next-label distribution of a trained CTC head against enumeration: `python benchmarks/law.py RUN`.

The frames of a random head are nearly uniform; those of a trained one are peaked, where rounding and underflow would
show. The enumeration is plain Python: all alignments of T frames, collapsed one by one.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.config.build import load_drafter
from ctcdraft.config.cli import register_resolvers
from ctcdraft.corpus.chat_template import prompt_tokens
from ctcdraft.ctc.next_label import PrefixBatch
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.evaluation.benchmarks import project_prompts
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
GREEDY = DecodingSettings(40, 1, 0.0, 0, 1.0, match, True, True)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    register_resolvers()
    base = load_base(options.base, "float32", "cpu", options.name)
    drafter = load_drafter(Path(options.run), base, None)
    worst_child = worst_stop = worst_sum = 0.0
    laws = children = 0
    for frames_TC in frames(base, drafter, options.prompts, options.anchors):
        for text in likely_texts(frames_TC, options.words):
            words_V, stop = law(frames_TC, text)
            laws += 1
            worst_sum = max(worst_sum, abs(float(words_V.sum() + stop) - 1))
            parent, ends = enumerated(frames_TC, text)
            worst_stop = max(worst_stop, abs(ends / parent - float(stop)))
            for word in words_V.topk(options.words).indices.tolist() + list(text[-1:]) + [options.rare]:
                child, _ = enumerated(frames_TC, (*text, word))
                worst_child = max(worst_child, abs(child / parent - float(words_V[word])))
                children += 1
    steps, classes = frames_TC.shape
    print(
        f"{laws} laws behind texts of up to {options.words} words, {steps} frames of {classes} classes, float64\n"
        f"greatest error of {children} words' probabilities   {worst_child:.1e}\n"
        f"greatest error of the stop                      {worst_stop:.1e}\n"
        f"greatest |children + stop - 1|                  {worst_sum:.1e}"
    )
    if max(worst_child, worst_stop, worst_sum) > 1e-10:
        raise SystemExit("the distribution is not exact to 1e-10")


def frames(base: BaseLM, drafter: torch.nn.Module, prompts: int, anchors: int) -> Iterator[Tensor]:
    """Yield probabilities_TC, float64, at evenly spaced anchors of the base model's responses to held-out prompts."""
    for prompt in project_prompts(str(TINY / "prompts" / "held_out.jsonl"), "benchmark", prompts).prompts:
        asked_L = torch.tensor(prompt_tokens(base.tokenizer, [{"role": "user", "content": prompt.turns[0]}]))
        said = generate(base, Autoregressive(base), asked_L, GREEDY, base.stop_token_ids, 0).tokens
        tokens_BL = torch.cat([asked_L, torch.tensor(said)])[None]
        with torch.inference_mode():
            states_BLD = base.hidden_states(tokens_BL, torch.ones_like(tokens_BL))
            first, last = len(asked_L) - 1, tokens_BL.shape[1] - 2
            anchors_BA = torch.linspace(first, last, anchors).long()[None]
            nothing_BA = torch.zeros_like(anchors_BA)
            roots_BA = tokens_BL.gather(1, anchors_BA + 1)
            position_ids_BL = torch.arange(tokens_BL.shape[1])[None]  # one text
            batch = Batch(
                tokens_BL, states_BLD, anchors_BA, roots_BA, nothing_BA[..., None], nothing_BA, position_ids_BL
            )
            frames_ATC = drafter(batch).logits()[0].double().softmax(dim=-1)
        yield from frames_ATC


def likely_texts(frames_TC: Tensor, words: int) -> list[tuple[int, ...]]:
    """Return the empty text, extensions of it by the most probable token, and one with a repeated token."""
    texts: list[tuple[int, ...]] = [()]
    for _ in range(words - 1):
        words_V, _ = law(frames_TC, texts[-1])
        texts.append((*texts[-1], int(words_V.argmax())))
    return [*texts, texts[1] * 2]


def law(frames_TC: Tensor, text: Sequence[int]) -> tuple[Tensor, Tensor]:
    labels = PrefixBatch.empty(frames_TC, frames_TC.shape[1] - 1, 1)
    for word in text:
        labels = labels.extend(torch.tensor([word]))
    words_1V, stop_1 = labels.next_distribution()
    return words_1V[0], stop_1[0]


def enumerated(frames_TC: Tensor, text: Sequence[int]) -> tuple[float, float]:
    """Return P(the collapsed text begins with `text`) and P(it is exactly `text`), by enumeration of all alignments.

    Tokens that are not in the text share one class, "another": an alignment that emits one of them before the text is
    complete does not begin with it, whichever token it is; after the text it only matters that the text continues.
    """
    blank = frames_TC.shape[1] - 1
    known = [blank, *dict.fromkeys(text)]
    probs = [[row_C[c].item() for c in known] for row_C in frames_TC]
    probs = [[*row, float(row_C.sum() - row_C[known].sum())] for row, row_C in zip(probs, frames_TC, strict=True)]
    wanted = [known.index(word) for word in text]
    begins, ends = [], []
    for alignment in itertools.product(range(len(known) + 1), repeat=len(probs)):
        said = [c for c, _ in itertools.groupby(alignment) if c != 0]
        if said[: len(wanted)] == wanted:
            mass = math.prod(row[c] for row, c in zip(probs, alignment, strict=True))
            begins.append(mass)
            if said == wanted:
                ends.append(mass)
    return math.fsum(begins), math.fsum(ends)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run directory of drafter=ctc or another block drafter read by alignments")
    parser.add_argument("--base", default=str(TINY / "base"), help="folder of the run's base")
    parser.add_argument("--name", default="tiny", help="the base's name in the run")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--anchors", type=int, default=4, help="of each answer")
    parser.add_argument("--words", type=int, default=3, help="of a text at most, and how many next words are checked")
    parser.add_argument("--rare", type=int, default=7, help="a word id that is checked everywhere too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
