"""Old name of `ctcdraft.hub`, from which the cards of heads published before the renaming import PublishedHead."""

from ctcdraft import hub


class PublishedHead(hub.PublishedHead):
    """The present class, with the former name of `from_run`."""

    of_run = hub.PublishedHead.from_run
