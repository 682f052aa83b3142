"""ctcdraft: CTC draft heads that make a frozen LLM decode faster without changing a single token.

The way of a guess, and the room each step lives in:

    text ──► base.py ──► states ──► nn/ + drafters/ ──► frames ──► ctc/ ──► decoding/tree.py ──► decoding/verify.py
             frozen LLM             one parallel pass   T x C      collapse, then a tree        the base's own word
                ▲                                                                                     │
                └──────────────── decoding/loop.py: draft, read, verify, keep, extend ◄───────────────┘

    base.py          the frozen LLM: tokens in, states and logits out; readable.py: which LLMs can be one;
                     fingerprints.py: how one is known again; base_values.py: its values;
                     adapters.py: peft adapters merged into it;
                     placing.py, sharding.py: one on several devices;
                     deepspeed_door.py: the one way in to DeepSpeed; leaving.py: how processes part
    paper.py         a base that is not here, from its config alone; size.py, machine.py, rate.py and
                     duration.py: what plans count
    decoding/        loop, tree, verify, sampling, KV cache; has never heard of CTC
    ctc/             pure mathematics: collapse, the forward recursion, prefix search, the next-label law
    nn/              the block, the body that makes frames, the head with a blank; few_rows.py: how weights lie
    drafters/        whatever guesses: one file and one YAML each
    objectives/      what is learned from emissions
    corpus/          prompts, chat templates, the base's own answers, windows (THE shift), batches
    training/        trainer, engine, checkpoint, logger, probe, plan
    evaluation/      benchmarks, interleaved measurement, metrics, certificate, report
    front_door.py    config becomes objects; a bad input becomes one sentence
    allowed.py       what a config file from elsewhere may have instantiated
    command_line.py  paths as a shell hands them over; early.py: what is refused before the slow imports;
                     folders.py: where runs and reports are written
    contestants.py   a word on evaluate.py's command line becomes a drafter; contestant_files.py: the file it names
    published.py     a head in other hands: the hub's layout, a model card, `generate`
    arena/           whole comparisons at equal budget: it writes command lines of the entry points and reads reports

Who may look at whom, downwards only: entry points -> training, evaluation, corpus -> drafters, objectives ->
decoding, ctc, nn -> torch.

The letters of shape suffixes (`states_BATD` is a tensor [B, A, T, D]):

    B rows        L sequence    A anchors    T frames       S labels
    V words       C = V + 1, with blank      D width        H heads    G key-value heads
    N tree nodes  M keys attended (past + N) K accepted path           P paths
    W chosen words               R rows of scratch          X any leading axes
"""

__version__ = "0.1.0"
