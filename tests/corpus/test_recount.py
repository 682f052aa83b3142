"""The recount finds a question in a prompt, in a response, and in a response repeated in a later prompt."""

import json

from recount_leakage import recount
from tiny_models import tiny_tokenizer

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def part(folder, *rows):
    tokenizer = tiny_tokenizer()
    lines = []
    for prompt, answer in rows:
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        lines.append(json.dumps({"tokens": before + after, "spans": [(len(before), len(before + after), True)]}) + "\n")
    (folder / "part-00000.jsonl").write_text("".join(lines))
    return folder


def ask(*turns):
    return "<bos>" + "".join(f"<|user|>{turn}<|end|><|assistant|>" for turn in turns)


def test_a_question_is_found_in_prompts_and_in_responses(tmp_path):
    part(tmp_path, (ask("Who are you?"), "a model<|end|>"), (ask(f"Say: {LONG}."), "no<|end|>"), (ask("Hi"), LONG))
    users, answers = recount(tmp_path, tiny_tokenizer(), [LONG, "WHO are you"])
    assert users == {"Who are you?", f"Say: {LONG}."}
    assert answers == {LONG}


def test_responses_in_a_history_do_not_count_as_prompts(tmp_path):
    later = f"<bos><|user|>Hi<|end|><|assistant|>{LONG}<|end|><|user|>Thanks<|end|><|assistant|>"
    part(tmp_path, (ask("Hi"), f"{LONG}<|end|>"), (later, "yes<|end|>"))
    assert recount(tmp_path, tiny_tokenizer(), [LONG, "Bye"]) == (set(), {LONG})
