"""Our CTC loss against `F.ctc_loss` on full emissions: `python benchmarks/projection.py`.

Forward and backward, in turns in one process, medians; the head is frozen and the gradient goes to the hidden states
(with logits given: to the logits). `native` is the shortest implementation: one matrix of tokens and blank, none of it
trained; ours also trains the blank. Peak memory is the growth of the resident set of a child process that takes one
step, over its size with inputs and weights; --large takes one step of ours alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from ctc_loss import ctc_losses
from torch import Tensor

from ctcdraft.ctc.forward import log_likelihood
from ctcdraft.nn.linear_logsumexp import label_and_blank_log_probs

WIDTHS = (64, 256, 1024)


class Problem:
    """Random hidden states, weights and labels.

    In one window of sixteen all labels are the same token, which needs more frames than labels and is infeasible with
    frames < 2 labels - 1."""

    def __init__(self, options: argparse.Namespace, width: int, windows: int) -> None:
        rng = torch.Generator().manual_seed(0)
        blank = options.classes - 1
        self.blank, self.frames = blank, options.frames
        self.states_XTD = torch.randn(windows, options.frames, width, generator=rng)
        self.rows_CD = torch.randn(options.classes, width, generator=rng) * 3 / width**0.5
        self.labels_XS = torch.randint(blank, (windows, options.labels), generator=rng)
        self.labels_XS[::16] = self.labels_XS[::16, :1].clone()
        self.lengths_X = torch.full((windows,), options.labels)
        for name in ("states_XTD", "rows_CD", "labels_XS", "lengths_X"):
            setattr(self, name, getattr(self, name).to(options.device))
        self.states_XTD.requires_grad_()

    def logits(self) -> Tensor:
        return F.linear(self.states_XTD.detach(), self.rows_CD).requires_grad_()

    def native_of(self, logits_XTC: Tensor) -> Tensor:
        frames_X = torch.full_like(self.lengths_X, self.frames)
        log_probs_TXC = logits_XTC.log_softmax(dim=-1).transpose(0, 1)
        return F.ctc_loss(
            log_probs_TXC, self.labels_XS, frames_X, self.lengths_X, self.blank, "none", zero_infinity=True
        ).mean()

    def ours_of(self, logits_XTC: Tensor) -> Tensor:
        losses_X = ctc_losses(logits_XTC, self.labels_XS, self.lengths_X, self.blank)
        return losses_X.where(losses_X.isfinite(), 0).mean()

    def native(self) -> Tensor:
        return self.native_of(F.linear(self.states_XTD, self.rows_CD))

    def ours(self) -> Tensor:
        words_VD = self.rows_CD[:-1]
        blank_D = self.rows_CD[-1].clone().requires_grad_()
        blank_bias = blank_D.new_zeros((), requires_grad=True)
        scores = label_and_blank_log_probs(self.states_XTD, words_VD, None, blank_D, blank_bias, self.labels_XS)
        value_X = log_likelihood(*scores, self.labels_XS, self.lengths_X)
        return -value_X.where(value_X.isfinite(), 0).mean()


def step(loss: Callable[[], Tensor], leaf: Tensor) -> tuple[float, Tensor]:
    """Return the seconds of one forward and backward pass, and the leaf's gradient."""
    synchronise(leaf)
    since = time.perf_counter()
    loss().backward()
    synchronise(leaf)
    seconds = time.perf_counter() - since
    assert leaf.grad is not None
    gradient, leaf.grad = leaf.grad, None
    return seconds, gradient


def synchronise(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def compared(ways: dict[str, Callable[[], Tensor]], leaf: Tensor, repeats: int) -> dict[str, float]:
    """Return median seconds of both, in turns, their ratio, and the relative difference in norm of the gradients."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients = {name: step(way, leaf)[1] for name, way in ways.items()}  # the first call is a warm-up
    apart = float((gradients["ours"] - gradients["native"]).norm() / gradients["native"].norm())
    del gradients
    for _ in range(repeats):
        for name, way in ways.items():
            seconds[name].append(step(way, leaf)[0])
    medians = {name: statistics.median(several) for name, several in seconds.items()}
    ratios = sorted(n / o for n, o in zip(seconds["native"], seconds["ours"], strict=True))
    return medians | {
        "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1], "gradients_apart": apart,
    }  # fmt: skip


def given(options: argparse.Namespace) -> dict[str, float]:
    """Compare with logits given, which are the leaf."""
    problem = Problem(options, 8, options.windows)
    logits = problem.logits()
    ways = {"native": lambda: problem.native_of(logits), "ours": lambda: problem.ours_of(logits)}
    return compared(ways, logits, options.repeats)


def peak_in_child(options: argparse.Namespace, way: str, width: int, windows: int) -> dict[str, float]:
    """Return seconds and the growth of a child's peak memory (bytes) over one step of one way."""
    command = [sys.executable, __file__, "--child", way, "--width", str(width), "--windows", str(windows)]
    for name in ("frames", "labels", "classes", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made: dict[str, float] = json.loads(done.stdout)
    return made


def child(options: argparse.Namespace) -> dict[str, float]:
    problem = Problem(options, options.width, options.windows)
    small = Problem(options, options.width, 1)
    for way in (small.native, small.ours):  # libraries allocate their own buffers on the first call
        step(way, small.states_XTD)
    forget_peak(options.device)
    before = peak(options.device)
    seconds, _ = step(getattr(problem, options.child), problem.states_XTD)
    return {"seconds": seconds, "bytes": peak(options.device) - before}


def forget_peak(device: str) -> None:
    """Reset the peak: what was held while weights were made is not part of a step."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    # ru_maxrss of a child would begin with the parent's peak; VmHWM does not.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(child(options)))
        return
    shape = f"T={options.frames} S={options.labels} C={options.classes:,}"
    print(f"{shape}, {options.windows} windows, float32, one thread, {options.device}, torch {torch.__version__}")
    report("logits given", given(options))
    for width in WIDTHS:
        one = Problem(options, width, options.windows)
        figures = compared({"native": one.native, "ours": one.ours}, one.states_XTD, options.repeats)
        del one
        held = {way: peak_in_child(options, way, width, options.windows)["bytes"] for way in ("native", "ours")}
        report(f"projection, width {width}", figures)
        print(
            f"    peak memory {held['native'] / 2**20:8,.0f} MiB native, {held['ours'] / 2**20:6,.0f} MiB ours: "
            f"{held['ours'] / held['native']:.3f} of it"
        )
    large = peak_in_child(options, "ours", 256, options.large)
    whole = options.large * options.frames * options.classes * 4
    print(
        f"{options.large:,} windows, width 256: ours {large['seconds']:.1f} s and {large['bytes'] / 2**20:,.0f} MiB; "
        f"one buffer of full emissions is {whole / 1e9:.1f} GB and native holds four: {4 * whole / 1e9:.1f} GB"
    )


def report(what: str, figures: dict[str, float]) -> None:
    print(
        f"{what:24} native {figures['native']:6.3f} s  ours {figures['ours']:6.3f} s  {figures['ratio']:5.2f} times as "
        f"fast ({figures['least']:.2f} to {figures['most']:.2f}), gradients apart by {figures['gradients_apart']:.1e}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--labels", type=int, default=4)
    parser.add_argument("--classes", type=int, default=32_001, help="tokens and the blank")
    parser.add_argument("--windows", type=int, default=512)
    parser.add_argument("--large", type=int, default=8192, help="windows of the step that only ours can take")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", choices=["native", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=256, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
