"""The benchmarks that ship as numbers, made anew: `python tests/ship_benchmarks.py GSM8K_TEST MT_BENCH_QUESTIONS`."""

import sys
from pathlib import Path

from ctcdraft.corpus.decontamination import write_hashes
from ctcdraft.corpus.readers import read_records

PLACE = Path(__file__).resolve().parent.parent / "data" / "tiny" / "leakage"

if __name__ == "__main__":
    for name, path in zip(("gsm8k", "mt_bench"), sys.argv[1:], strict=True):
        write_hashes(read_records(path), 13, PLACE / f"{name}.npz")
