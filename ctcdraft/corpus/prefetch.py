"""The next batch, prepared in a thread while a step runs. It knows that steps follow each other; no loss."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ctcdraft.batch import Batch
from ctcdraft.corpus.batches import Batches, PreparedBatch
from ctcdraft.corpus.hidden_states import HiddenStates


class PrefetchingBatches:
    """The batches of another, one ahead of whoever asks; `close` it, and no thread is left.

    total: batches there will be; stride: from one that is asked for to the next, which is how many processes share
    them.

    The thread cuts windows, reads what is stored and copies both to the device, there on a stream of its own (not
    tried on an accelerator yet). What a base must read stays with the step: on a CPU both would want the same
    cores. What goes wrong in the thread is raised by the `batch` that would have needed it.
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
        """The batch of a step, the same as without a thread; the next one is begun."""
        expected, self.pending = self.pending, None
        if expected is None or expected[0] != step:  # the first step, or one that nobody foresaw
            expected = (step, self.worker.submit(self.prepare, step))
        ready = expected[1].result()
        following = step + self.stride
        if following < self.total:
            self.pending = (following, self.worker.submit(self.prepare, following))
        if self.stream is not None:
            # Made on the other stream: until this one has used them, that memory is not given out again.
            for part in ready.tensors():
                part.record_stream(torch.cuda.current_stream(self.batches.device))
        return self.batches.complete(ready)

    def prepare(self, step: int) -> PreparedBatch:
        with torch.cuda.stream(self.stream):  # nothing, where there is none
            ready = self.batches.prepare(step)
        if self.stream is not None:
            self.stream.synchronize()
        return ready

    def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        self.worker.shutdown(wait=True, cancel_futures=True)
