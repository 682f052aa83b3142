"""Which weights a draft reads, and how many rows are multiplied with them."""

from types import SimpleNamespace

import pytest
import torch

from studies.comparison.costs import WeightReads

OBSERVERS: list = []


def reads_of(calls, first=0, last=1, **weights):
    """Return the reads of `last` drafts that make these calls, (operation, operands, results); the first ones twice."""
    reads = WeightReads({name: SimpleNamespace(elem=weight) for name, weight in weights.items()}, first, last)

    def draft(number):
        for kind, operands, results in calls * (2 if number < first else 1):
            operation = SimpleNamespace(overloadpacket=SimpleNamespace(__name__=kind))
            for observe in OBSERVERS:
                observe(operation, operands, results)

    watched = reads.watch(draft)
    for number in range(last + 1):
        watched(number)
    return reads


@pytest.fixture(autouse=True)
def observers(monkeypatch):
    monkeypatch.setattr("studies.comparison.costs.OBSERVERS", OBSERVERS)
    yield
    assert OBSERVERS == []


def test_a_product_with_joined_weights_reads_each_of_them():
    joined = torch.zeros(6, 4)  # as gate, up and another matrix that are read at once
    gate, up, other = joined[:2], joined[2:4], joined[4:]
    both = ("mm", [torch.zeros(3, 4), joined[:4].T], [torch.zeros(3, 4)])
    last = ("addmm_", [torch.zeros(5, 4), other.T], [torch.zeros(5, 2)])
    reads = reads_of([both, last], gate=gate, up=up, other=other, never=torch.zeros(2))
    assert reads.per_draft() == {"gate": (1, 3), "up": (1, 3), "other": (1, 5)}
    assert reads.unread(["gate", "never"]) == ["never"]


def test_views_and_lookups_read_no_weight():
    weight = torch.zeros(4, 4)
    view = ("t", [weight], [weight.T])
    lookup = ("embedding", [weight, torch.zeros(1)], [torch.zeros(1, 4)])
    reads = reads_of([view, lookup], weight=weight)
    assert reads.per_draft() == {}
    assert reads.unread(["weight"]) == [], "single rows of it are looked up"


def test_only_the_named_drafts_are_counted():
    weight = torch.zeros(4, 4)
    product = ("mm", [torch.zeros(3, 4), weight], [torch.zeros(3, 4)])
    reads = reads_of([product], first=1, last=3, weight=weight)
    assert reads.per_draft() == {"weight": (1, 3)}
