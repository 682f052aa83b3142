"""First tokens in time: a step that reads the prompt of a request that waits verifies no drafts of the others.

Verification makes such a step longer and the first token of the new request later: with 16 requests on a CPU by a
fifth. So the drafts of one step are given up. Each waiting request has that effect once, and never two steps in a row:
a stream of requests, or one for which there is no memory, does not make all drafts useless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class FirstTokens:
    """Decides for one scheduler, before each step, whether it verifies drafts."""

    def __init__(self) -> None:
        self.served: str | None = None  # the request for which drafts were given up last
        self.gave_up = False  # in the step before

    def gives_up_drafts(self, waiting: Any, running: Sequence[Any], places: int) -> bool:
        """Return whether the next step shall verify none.

        Args:
            waiting: vLLM's queue of requests.
            places: requests that can run at once.
        """
        first = waiting.peek_request().request_id if waiting else None
        drafted = any(request.spec_token_ids for request in running)
        self.gave_up = first not in (None, self.served) and drafted and len(running) < places and not self.gave_up
        if self.gave_up:
            self.served = first
        return self.gave_up


def schedule_first_tokens(stock: Callable[..., Any], is_served: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return vLLM's `Scheduler.schedule` with that decision before it.

    Args:
        is_served: whether the drafts of this scheduler come from this package, with adaptive lengths.
    """

    def schedule(self: Any, *arguments: Any, **named: Any) -> Any:
        if not hasattr(self, "first_tokens"):
            self.first_tokens = FirstTokens() if is_served(self.vllm_config) else None
        decides = self.first_tokens
        if decides and decides.gives_up_drafts(self.waiting, self.running, self.max_num_running_reqs):
            for request in self.running:
                request.spec_token_ids = []
        return stock(self, *arguments, **named)

    return schedule
