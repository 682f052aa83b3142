"""Steps that read the prompt of a waiting request have no drafts, so that its first token comes sooner.

Drafting and verification make the steps around a prompt longer and the first token of the new request later. So such a
step gets no drafts: once for each waiting request, and never two steps in a row. Else a stream of requests, or one for
which there is no memory, would make all drafts useless. With many requests they are kept: nearly every step reads a
prompt then, and every second step without drafts costs as much as drafting gains (measured with 16 requests on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_RUNNING = 8  # requests beside which a step may have no drafts


class DraftDrops:
    """The steps of one scheduler that have no drafts because they read a prompt."""

    def __init__(self) -> None:
        self.request: str | None = None  # for which a step had no drafts last
        self.next_step, self.latest = 2, 0  # numbers of the next step, and of the latest one without drafts

    def next_step_drops(self, waiting: str | None, running: int, places: int) -> bool:
        """Return whether the next step, which otherwise would have drafts, has none.

        Args:
            waiting: id of the first waiting request.
            running: number of running requests.
            places: requests that can run at once.
        """
        has_place, in_a_row = running < min(places, MOST_RUNNING), self.latest == self.next_step - 1
        drops = waiting not in (None, self.request) and has_place and not in_a_row
        if drops:
            self.request, self.latest = waiting, self.next_step
        return drops


def drop_drafts_for_prompts(stock: Callable[..., Any], is_served: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return vLLM's `Scheduler.schedule`, before which drafts are dropped that were computed before a request came.

    Args:
        is_served: whether the drafts of this scheduler come from this package, with adaptive lengths.
    """

    def schedule(self: Any, *arguments: Any, **named: Any) -> Any:
        if drops := drops_of(self, self.vllm_config, is_served):
            drafted = any(request.spec_token_ids for request in self.running)
            waiting = first_waiting(self.waiting, None)
            if drafted and drops.next_step_drops(waiting, len(self.running), self.max_num_running_reqs):
                for request in self.running:
                    request.spec_token_ids = []
            drops.next_step += 1
        return stock(self, *arguments, **named)

    return schedule


def skip_drafts_for_prompts(stock: Callable[..., Any], is_served: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return vLLM's `EngineCore.post_step`, which asks for no drafts where a request has come during the step."""

    def post_step(self: Any, model_executed: bool) -> None:
        scheduler = self.scheduler
        if model_executed and (drops := drops_of(scheduler, self.vllm_config, is_served)):
            running = scheduler.running
            waiting = first_waiting(scheduler.waiting, getattr(self, "input_queue", None))
            answering = any(request.num_output_tokens for request in running)  # others have no drafts
            if answering and drops.next_step_drops(waiting, len(running), scheduler.max_num_running_reqs):
                return
        stock(self, model_executed)

    return post_step


def drops_of(scheduler: Any, config: Any, is_served: Callable[[Any], bool]) -> Any:
    """Return the DraftDrops of a scheduler; None if its drafts are not of this package."""
    if not hasattr(scheduler, "draft_drops"):  # asked once: the answer reads the files of the head
        scheduler.draft_drops = DraftDrops() if is_served(config) else None
    return scheduler.draft_drops


def first_waiting(waiting: Any, arrived: Any) -> str | None:
    """Return the id of the first request that waits in vLLM's queue or has arrived since the step began.

    Args:
        arrived: the queue.Queue of messages to the engine, pairs of a type and, of an ADD, a request and a number; None
            where there is no such queue.
    """
    if waiting:
        return waiting.peek_request().request_id
    messages = [] if arrived is None else list(arrived.queue)  # one operation, which no other thread interrupts
    return next((content[0].request_id for kind, content in messages if kind.name == "ADD"), None)
