"""Batches prepared one step ahead in a thread.

The thread cuts windows, reads stored hidden states and copies both to the device, on a CUDA stream of its own where
there is one (not yet tried on an accelerator). Forward passes of the base model stay in the step: on a CPU both would
compete for the same cores. An exception in the thread is raised by the `batch` call that needed its result.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ctcdraft.batch import Batch
from ctcdraft.corpus.batches import Batches, PreparedBatch
from ctcdraft.corpus.hidden_states import HiddenStates


class PrefetchingBatches:
    """The same batches as `batches`, each begun one request ahead; `close` ends the thread.

    Args:
        total: number of batches of the run.
        stride: from one requested step to the next, which is the number of processes that share the batches.
    """

    def __init__(self, batches: Batches, total: int, stride: int = 1) -> None:
        self.batches = batches
        self.total = total
        self.stride = stride
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self.pending: tuple[int, Future[PreparedBatch]] | None = None
        self.stream = torch.cuda.Stream(batches.device) if batches.device.type == "cuda" else None

    @property
    def hidden_states(self) -> HiddenStates:
        return self.batches.hidden_states

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, and start preparing the next one."""
        pending, self.pending = self.pending, None
        if pending is None or pending[0] != step:  # the first step, or one out of order
            pending = (step, self.worker.submit(self.prepare, step))
        prepared = pending[1].result()
        following = step + self.stride
        if following < self.total:
            self.pending = (following, self.worker.submit(self.prepare, following))
        if self.stream is not None:
            # Allocated on the other stream: the allocator must not reuse the memory before this stream has read it.
            for tensor in prepared.tensors():
                tensor.record_stream(torch.cuda.current_stream(self.batches.device))
        return self.batches.complete(prepared)

    def prepare(self, step: int) -> PreparedBatch:
        with torch.cuda.stream(self.stream):  # does nothing for None
            prepared = self.batches.prepare(step)
        if self.stream is not None:
            self.stream.synchronize()
        return prepared

    def close(self) -> None:
        """Wait for the batch in preparation and end the thread."""
        self.worker.shutdown(wait=True, cancel_futures=True)
