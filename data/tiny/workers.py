"""Gradients from several single-threaded processes, each taking the next piece of the batch when it is idle.

On a shared machine two threads of one process would wait for the slower of them in every operation.
"""

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn


class Workers:
    """Processes that compute pieces of a batch and add gradients to a buffer of their own in shared memory."""

    def __init__(self, count: int, model: nn.Module, new_model: Callable, loss_of: Callable, pad: int):
        context = mp.get_context("spawn")
        self.weights, self.pad = list(model.parameters()), pad
        model.share_memory()
        shared = [weight.detach() for weight in self.weights]
        self.pieces, self.losses = context.SimpleQueue(), context.SimpleQueue()
        size = sum(weight.numel() for weight in self.weights)
        self.gradients = [torch.zeros(size).share_memory_() for _ in range(count)]
        self.processes = [
            context.Process(
                target=_work,
                daemon=True,
                args=(new_model, loss_of, shared, gradient, self.pieces, self.losses),
            )
            for gradient in self.gradients
        ]
        for process in self.processes:
            process.start()

    def gradient(self, tokens_BL: Tensor, micro: int) -> float:
        """Write the mean gradient of a batch to `.grad` and return its loss."""
        words = int((tokens_BL[:, 1:] != self.pad).sum())
        parts = tokens_BL.split(max(1, micro // tokens_BL.shape[1]))
        for part in parts:
            self.pieces.put((part.numpy(), int((part[:, 1:] != self.pad).sum()) / words))
        loss = sum(self._next_loss() for _ in parts)
        total = torch.stack(self.gradients).sum(0)
        for weight, piece in zip(self.weights, total.split([w.numel() for w in self.weights]), strict=True):
            weight.grad = piece.view_as(weight)
        for gradient in self.gradients:
            gradient.zero_()
        return loss

    def _next_loss(self) -> float:
        while self.losses.empty():
            if not all(process.is_alive() for process in self.processes):
                raise RuntimeError("a worker died, perhaps for want of memory; run again with fewer --threads")
            time.sleep(0.002)
        return self.losses.get()

    def close(self) -> None:
        for _ in self.processes:
            self.pieces.put(None)
        for process in self.processes:
            process.join()


def _work(new_model: Callable, loss_of: Callable, shared: list[Tensor], gradient: Tensor, pieces, losses) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    model = new_model()
    sizes = [weight.numel() for weight in model.parameters()]
    for weight, values, piece in zip(model.parameters(), shared, gradient.split(sizes), strict=True):
        weight.data = values
        weight.grad = piece.view_as(weight)  # backward adds to it in place
    loss_of = torch.compile(loss_of, dynamic=False)
    while (piece := pieces.get()) is not None:
        tokens, share = piece
        loss = loss_of(model, torch.from_numpy(np.ascontiguousarray(tokens))) * share
        loss.backward()
        losses.put(float(loss.detach()))


def _leave_with_parent(parent: int) -> None:
    """Exit when the training that started this worker has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
