"""ctcdraft: CTC draft heads for lossless speculative decoding of a frozen LLM, from training to serving.

One decoding step; every drafter, from autoregression to EAGLE and CTC, runs in the same loop:

    text ──► models/ ──► hidden states ──► drafters/ + nn/ ──► emissions ──► ctc/ ──► token tree ──► verification
             base LLM                      one forward pass     T x C        collapse    N nodes     one forward pass
                ▲                                                                                         │
                └───────────── decoding/loop.py: draft, read tree, verify, keep path, extend ◄────────────┘

    config/       Hydra command line, checks of values, objects from configs, allow-list for foreign files
    models/       the frozen base: loading, compatibility checks, device maps, ZeRO-3, meta device, fingerprints
    decoding/     the loop, token trees, verification, sampling, KV cache, static shapes
    ctc/          pure mathematics: collapse, forward recursion, prefix search, next-label distribution
    nn/           transformer block, bodies that compute frames, heads with a blank, logit correction
    drafters/     every draft method, one file and one YAML each; trees/: from frames to a token tree
    objectives/   training losses on emissions
    corpus/       prompts, filters, responses of the base (generation/), windows (THE label shift), batches
    training/     trainer, engines, run directories, loggers, sweeps
    planning/     parameters, memory, tokens and hours before the first step
    evaluation/   interleaved measurement, metrics, losslessness check, distribution test, replay
    report/       Markdown and HTML pages of an evaluation (html/)
    errors.py     InputError, one sentence about wrong input     io.py           atomic files, folder checks
    batch.py      the batch that data and drafters share         distributed.py  torchrun processes, shards i/N
    hardware.py   speed and memory of devices                    progress.py     progress lines
    renamed.py    old names of classes and keys                  hub.py, model_card.py, published.py  published heads

Imports go downwards: entry points -> hub -> config -> planning, report -> training, evaluation -> corpus, objectives
-> drafters -> models -> decoding, ctc, nn -> the modules of this folder (tests/test_layers.py).

Shape suffixes (`states_BATD` is a tensor [B, A, T, D]):

    B batch       L sequence            A anchors      T frames        S labels
    V vocabulary  C = V + 1 with blank  D width        H heads         G key-value heads
    N tree nodes  M keys attended       K accepted path                P paths
    W chosen tokens                     R scratch rows                 X any leading axes
"""

__version__ = "0.1.0"
