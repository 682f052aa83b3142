"""The answer mask of every conversation of many files against the slow, obvious one.

    python tests/recount_masks.py TOKENIZER END FILE ...        END: the text of the token that ends an answer

For where a thousand conversations, as in corpus/test_masks.py, are not enough. Ends with status 1 where two masks
differ; what the fast one refuses is counted under its reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import transformers
from recount_account import records
from truths_corpus import slow_answer_mask

from ctcdraft.corpus.masks import conversation_tokens
from ctcdraft.errors import InputError

SPEAKERS = {"human": "user", "gpt": "assistant"}

if __name__ == "__main__":
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
    end, counts = sys.argv[2], Counter[str]()
    for file in map(Path, sys.argv[3:]):
        for record in records(file):
            spoken = [
                {"role": SPEAKERS[turn["from"]], "content": turn["value"].strip()} for turn in record["conversations"]
            ]
            try:
                ids, mask = conversation_tokens(tokenizer, spoken, {tokenizer.convert_tokens_to_ids(end)})
            except InputError as refusal:
                counts[f"refused: {refusal}"[:100]] += 1
                continue
            counts["equal" if (ids, mask) == slow_answer_mask(tokenizer, spoken, end, "") else "different"] += 1
            counts["tokens"] += len(ids)
            counts["tokens of answers"] += sum(mask)
    for name, count in counts.most_common():
        print(f"{count:12,} {name}")
    sys.exit(counts["different"] > 0)
