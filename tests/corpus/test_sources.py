"""Every format of prompts, every kind of path, and the sentence for everything that is wrong with them."""

import gzip
import json
from functools import partial

import pytest

from ctcdraft.corpus.decontamination import Decontamination
from ctcdraft.corpus.filters import Alternation, Cleaning, Duplicates, Empties, Roles
from ctcdraft.corpus.sources import gsm8k, mixture, project_prompts, sharegpt
from ctcdraft.corpus.types import first_turn_key
from ctcdraft.errors import InputError

HUB = {"hub": "owner/name", "hub_file": "file.json"}
PAIR = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
TALK = [*PAIR, {"from": "human", "value": "Bye"}]
PROMPTS = Cleaning({"empties": Empties(), "duplicates": Duplicates()})
TALKS = Cleaning(
    {
        "roles": Roles(["human", "user"], ["gpt", "assistant"], ["system"]),
        "alternation": Alternation(),
        "empties": Empties(),
        "duplicates": Duplicates(),
    }
)
NOTHING = Decontamination(13, {})
CURATED = {"cleaning": PROMPTS, "leakage": NOTHING, "limit": None, "seed": 0}


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_project(path, limit=None, seed=0):
    return project_prompts(path, "tiny", **CURATED | {"limit": limit, "seed": seed}).prompts


def read_sharegpt(path, limit=None, seed=0):
    return read_corpus(path, limit, seed).prompts


def read_corpus(path, limit=None, seed=0, leakage=NOTHING):
    return sharegpt(path, "sharegpt", cleaning=TALKS, leakage=leakage, limit=limit, seed=seed, **HUB)


def read_gsm8k(path, instruction=None):
    return gsm8k(path, "gsm8k", "openai/gsm8k", "main", "train", instruction, **CURATED).prompts


def test_project_prompts_keep_their_ids_categories_and_references(tmp_path):
    path = jsonl(
        tmp_path / "p.jsonl",
        {"id": "a", "category": "sum", "turns": ["1+1?", "And 2+2?"], "reference": "4"},
        {"id": 7, "turns": ["Hi"]},
    )
    first, second = read_project(path)
    assert (first.id, first.category, first.turns, first.reference) == ("a", "sum", ("1+1?", "And 2+2?"), "4")
    assert (second.id, second.category, second.reference) == ("7", "tiny", None)


def test_sharegpt_keeps_user_turns_and_one_prompt_of_each(tmp_path):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Line\u2028break"}]
    path = jsonl(
        tmp_path / "s.jsonl",
        {"id": "x", "conversations": TALK},
        {"id": "x", "conversations": [TALK[0], {"from": "gpt", "value": "another answer"}, TALK[2]]},
        {"messages": messages},
        {"conversations": [{"from": "gpt", "value": "without a question"}]},
    )
    assert [prompt.turns for prompt in read_sharegpt(path)] == [("Hi", "Bye"), ("Line\u2028break",)]


def test_a_u2028_inside_a_line_does_not_end_the_line(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a\u2028b"}]}, ensure_ascii=False))
    assert read_sharegpt(str(path))[0].turns == ("a\u2028b",)


def test_sharegpt_reads_arrays_gz_folders_globs_and_lists(tmp_path):
    (tmp_path / "array.json").write_text(json.dumps([{"conversations": PAIR}]))
    assert [prompt.turns for prompt in read_sharegpt(str(tmp_path))] == [("Hi",)]

    lines = json.dumps({"conversations": TALK}) + "\n"
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    jsonl(tmp_path / "some.jsonl", {"conversations": PAIR})
    both = [("Hi", "Bye"), ("Hi",)]
    assert [prompt.turns for prompt in read_sharegpt(str(tmp_path))] == both  # array.json is a description here
    assert [prompt.turns for prompt in read_sharegpt(str(tmp_path / "*.jsonl*"))] == both
    named = [str(tmp_path / "some.jsonl"), str(tmp_path / "more.jsonl.gz")]
    assert [prompt.turns for prompt in read_sharegpt(named)] == both[::-1]


def test_gsm8k_reads_the_number_after_the_hashes(tmp_path):
    path = jsonl(tmp_path / "g.jsonl", {"question": "How many?", "answer": "5 * 250 = <<5*250=1250>>\n#### 1,250"})
    (prompt,) = read_gsm8k(path)
    assert (prompt.id, prompt.turns, prompt.reference) == ("gsm8k-00000", ("How many?",), "1250")
    assert read_gsm8k(path, "Think.")[0].turns == ("How many?\nThink.",)


def test_a_mixture_adds_up_the_accounts(tmp_path):
    talks = read_corpus(jsonl(tmp_path / "s.jsonl", {"conversations": TALK}, {"conversations": TALK}))
    solved = {"question": "1+1?", "answer": "#### 2"}
    problems = gsm8k(jsonl(tmp_path / "g.jsonl", solved), "gsm8k", "", "", "", None, **CURATED)
    read = {"talks": lambda: talks, "problems": lambda: problems}
    both = mixture(None, "both", read)
    assert both.prompts == [*talks.prompts, *problems.prompts]
    assert (both.account["read"], both.account["kept"], both.account["dropped"]["duplicates"]) == (3, 2, 1)
    others = gsm8k(jsonl(tmp_path / "o.jsonl", solved | {"question": "2+2?"}), "gsm8k", "", "", "", None, **CURATED)
    with pytest.raises(InputError, match=r"2 different prompts of corpus both \(a, b\) have the id gsm8k-00000"):
        mixture(None, "both", {"a": lambda: problems, "b": lambda: others})
    with pytest.raises(InputError, match=r"give corpus\.parts\.a\.path=FILE corpus\.parts\.b\.path=FILE"):
        mixture("x.jsonl", "both", {"a": lambda: 1 / 0, "b": lambda: talks})  # before anything is read
    with pytest.raises(InputError, match=r"as corpus\.parts\.a\.path="):
        mixture(None, "both", {"a": partial(read_corpus, "absent.jsonl")})


def test_a_prompt_of_two_parts_is_in_the_corpus_once_and_counted(tmp_path):
    """Two chat corpora that share a conversation, once in other case, and a third source with an id of its own."""
    louder = [{"from": "human", "value": "HI  "}, PAIR[1], {"from": "human", "value": "bye"}]
    more = [*PAIR, {"from": "human", "value": "Why?"}]
    first = read_corpus(jsonl(tmp_path / "a.jsonl", {"conversations": TALK}, {"conversations": PAIR}))
    second = read_corpus(jsonl(tmp_path / "b.jsonl", {"conversations": louder}, {"conversations": more}))
    others = jsonl(tmp_path / "c.jsonl", {"id": "p1", "turns": ["Hi"]}, {"id": "p2", "turns": ["Who?"]})
    own = project_prompts(others, "own", **CURATED)
    mixed = mixture(None, "mixed", {"first": lambda: first, "second": lambda: second, "own": lambda: own})
    assert [prompt.turns for prompt in mixed.prompts] == [("Hi", "Bye"), ("Hi",), ("Hi", "Why?"), ("Who?",)]
    assert len({prompt.id for prompt in mixed.prompts}) == 4
    account = mixed.account
    assert (account["read"], account["kept"], account["dropped"]["in an earlier part"]) == (6, 4, 2)
    assert account["read"] == account["kept"] + account["not_asked"] + sum(account["dropped"].values())
    assert mixed.summary() == "4 prompts of 6 conversations (without 2 in an earlier part)"
    assert first.account["kept"] == 2  # the account of a part is unchanged


def test_a_limited_sample_grows_with_the_limit_and_ignores_the_order(tmp_path):
    records = [{"id": n, "turns": [f"prompt {n}"]} for n in range(40)]
    forwards = jsonl(tmp_path / "f.jsonl", *records)
    backwards = jsonl(tmp_path / "b.jsonl", *records[::-1])
    assert read_project(forwards, 10) == read_project(backwards, 10) == read_project(forwards, 20)[:10]
    assert read_project(forwards, 10, seed=1) != read_project(forwards, 10)
    assert len(read_project(forwards, 99)) == 40


def test_every_conversation_is_under_exactly_one_count(tmp_path):
    question = "What is the distance between the two old cities if a train goes so fast?"
    jsonl(tmp_path / "bench.jsonl", {"question": question})
    one = [{"from": "human", "value": f"talk {n}"} for n in range(5)]
    path = jsonl(
        tmp_path / "s.jsonl",
        *({"conversations": [talk]} for talk in one),
        {"conversations": [{"from": "human", "value": "TALK  3"}]},
        {"conversations": [{"from": "system", "value": "Be kind."}, *PAIR]},
        {"conversations": [{"from": "gpt", "value": "Before that"}, *TALK]},
        {"conversations": [{"from": "tool", "value": "42"}, *PAIR]},
        {"conversations": [*PAIR, PAIR[1]]},
        {"conversations": [*PAIR, {"from": "human", "value": " "}]},
        {"conversations": [{"from": "human", "value": f"Hello! {question.upper()} Thanks"}]},
    )
    corpus = read_corpus(path, 4, leakage=Decontamination(13, {"bench": str(tmp_path / "bench.jsonl")}))
    account = corpus.account
    assert account["dropped"] == {"roles": 1, "alternation": 1, "empties": 1, "duplicates": 1}
    assert account["leaked"] == {"bench": 1}
    assert account["shortened"] == {"roles": 1, "alternation": 1}
    assert (account["read"], account["kept"], account["not_asked"]) == (12, 4, 3)
    assert account["read"] == account["kept"] + account["not_asked"] + sum(account["dropped"].values()) + 1
    assert corpus.summary() == (
        "4 prompts of 12 conversations (without 1 roles, 1 alternation, 1 empties, 1 duplicates, 1 in benchmark bench, "
        "3 not asked)"
    )
    assert read_corpus(path, 4, leakage=Decontamination(13, {})).account["not_asked"] == 4


def test_prompts_with_the_same_first_turn_share_a_key(tmp_path):
    more = [*PAIR, {"from": "human", "value": "Why?"}]
    path = jsonl(tmp_path / "s.jsonl", *({"conversations": talk} for talk in (PAIR, TALK, more)))
    names = [prompt.id for prompt in read_sharegpt(path)]
    assert len(set(names)) == 3
    assert len({first_turn_key(name) for name in names}) == 1
    assert [first_turn_key(name) for name in ("p7", "math/7", "2024-01/17")] == ["p7", "math/7", "2024-01/17"]


def test_the_hash_of_a_corpus_does_not_depend_on_its_order(tmp_path):
    talks = [{"conversations": PAIR}, {"conversations": TALK}]
    forwards, backwards = (
        read_corpus(jsonl(tmp_path / f"{n}.jsonl", *order)) for n, order in enumerate((talks, talks[::-1]))
    )
    assert forwards.hash == backwards.hash
    assert forwards.hash != read_corpus(jsonl(tmp_path / "one.jsonl", talks[0])).hash


def test_openai_parts_are_text_where_all_of_them_are(tmp_path):
    text_parts = [{"type": "text", "text": "Look"}, {"type": "text", "text": "here"}]
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    path = jsonl(
        tmp_path / "m.jsonl", *({"messages": [{"role": "user", "content": c}]} for c in (text_parts, picture, None))
    )
    corpus = read_corpus(path)
    assert [prompt.turns for prompt in corpus.prompts] == [("Look\nhere",)]
    assert corpus.account["dropped"]["empties"] == 2


@pytest.mark.parametrize(
    ("read", "content", "sentence"),
    [
        (read_project, "", "holds no prompt with a user turn"),
        (read_project, '{"id": 1, "turns": ["a"]}\n{"id": 2,', "line 2 of .*p.jsonl is not JSON"),
        (read_project, '{"id": 1, "text": "a"}', r"line 1 of .* has no column `turns` \(found: id, text\)"),
        (read_project, '{"turns": ["a"]}', "has no column `id`"),
        (read_project, '{"id": 1, "turns": "a"}', "has a str as `turns` instead of a list"),
        (read_project, '{"id": 1, "turns": ["a", " "]}', "has an empty turn"),
        (read_project, '{"id": 1, "turns": ["a"]}\n{"id": 1, "turns": ["b"]}', "two prompts with the id 1"),
        (read_gsm8k, '{"prompt": "How many?"}', r"has no column `question` \(found: prompt\)"),
        (read_sharegpt, "\n  \n\n", "holds no prompt with a user turn"),
        (read_sharegpt, '{"text": "Hi"}', r"has no column `conversations` \(found: text\)"),
        (read_sharegpt, '{"conversations": "[]"}', "has a str as `conversations` instead of a list"),
        (read_sharegpt, '{"messages": [{"content": "Hi"}]}', r"has a message .*content.* without a speaker"),
        (read_sharegpt, '{"conversations": [{"from": "human", "value": " "}]}', "dropped: empties 1"),
        (read_sharegpt, '{"conversations": [{"from": "bot", "value": "Hi"}]}\n' * 3,
         r"3 conversations read; dropped: roles 3; speakers: bot 3\); check corpus.path"),
    ],
)  # fmt: skip
def test_a_wrong_record_is_one_sentence(tmp_path, read, content, sentence):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(InputError, match=sentence):
        read(str(tmp_path / "p.jsonl"))


def test_an_unreachable_hub_is_one_sentence(monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputError, match=r"cannot get owner/name from the hub \(Couldn't .*\); give a local copy"):
        read_sharegpt(None)


def test_rows_of_the_hub_are_read_like_lines(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([{"id": "x", "conversations": TALK}])
    selection = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda hub, **rest: selection.update(hub=hub, **rest) or rows)
    assert read_sharegpt(None)[0].turns == ("Hi", "Bye")
    assert selection == {"hub": "owner/name", "split": "train", "data_files": "file.json"}
