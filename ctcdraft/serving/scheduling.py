"""Steps that read the prompt of a waiting request verify no drafts, so that its first token comes sooner.

Verification makes such a step longer and the first token of the new request later. So such a step drops its drafts:
once for each waiting request, and never two steps in a row. Else a stream of requests, or one for which there is no
memory, would make all drafts useless. With many requests drafts are kept: nearly every step reads a prompt then, and
dropping the drafts of every second step costs as much as drafting gains (measured with 16 requests on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MOST_RUNNING = 8  # requests beside which a step may drop its drafts


class DraftDrops:
    """The steps of one scheduler that drop their drafts."""

    def __init__(self) -> None:
        self.request: str | None = None  # for which drafts were dropped last
        self.dropped = False  # in the step before

    def next_step_drops(self, waiting: Any, running: Sequence[Any], places: int) -> bool:
        """Return whether the next step drops its drafts.

        Args:
            waiting: vLLM's queue of requests.
            places: requests that can run at once.
        """
        first = waiting.peek_request().request_id if waiting else None
        drafted = any(request.spec_token_ids for request in running)
        has_place = len(running) < min(places, MOST_RUNNING)
        self.dropped = first not in (None, self.request) and drafted and has_place and not self.dropped
        if self.dropped:
            self.request = first
        return self.dropped


def drop_drafts_for_prompts(stock: Callable[..., Any], is_served: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return vLLM's `Scheduler.schedule`, before which drafts are dropped.

    Args:
        is_served: whether the drafts of this scheduler come from this package, with adaptive lengths.
    """

    def schedule(self: Any, *arguments: Any, **named: Any) -> Any:
        if not hasattr(self, "draft_drops"):
            self.draft_drops = DraftDrops() if is_served(self.vllm_config) else None
        drops = self.draft_drops
        if drops and drops.next_step_drops(self.waiting, self.running, self.max_num_running_reqs):
            for request in self.running:
                request.spec_token_ids = []
        return stock(self, *arguments, **named)

    return schedule
