"""The weights of labels."""

from __future__ import annotations

from math import exp

import pytest
import torch
from hydra.utils import instantiate

from ctcdraft.config.cli import compose_config
from ctcdraft.errors import InputError
from ctcdraft.objectives.cross_entropy import CrossEntropy


def test_no_label_weighs_less_than_the_least_weight():
    values_BAS = torch.tensor([[[4.0, 2.0, 1.0, 1.0, 5.0]]])
    real_BAS = torch.tensor([[[True, True, True, True, False]]])
    value, count = CrossEntropy(5, 0.5, 0.4).mean(values_BAS, real_BAS)
    assert float(count) == pytest.approx(1 + 0.5 + 0.4 + 0.4)
    assert float(value) == pytest.approx((4 + 1 + 0.4 + 0.4) / 2.3)
    plain, _ = CrossEntropy(5, 0.5).mean(values_BAS, real_BAS)
    assert float(plain) == pytest.approx((4 + 1 + 0.25 + 0.125) / 1.875)


# Labels of a window, and the weight of label k + 1 relative to the first, from the publications.
PUBLISHED = {
    "medusa": (4, lambda k: 0.8**k),
    "redrafter": (5, lambda k: 1),
    "dflash": (15, lambda k: exp(-k / 7)),
    "domino": (16, lambda k: exp(-k / 7)),
    "dspark": (7, lambda k: exp(-k / 4)),
    "peagle": (8, lambda k: max(0.7**k, 0.2)),  # the share of positions that its training samples at this depth
    "kangaroo": (1, lambda k: 1),
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_labels_weigh_what_was_published(method):
    objective = instantiate(compose_config("train", f"drafter={method}").objective)
    labels, weight = PUBLISHED[method]
    for real in range(1, labels + 1):
        real_BAS = torch.ones(1, 1, real, dtype=torch.bool)
        _, count = objective.mean(torch.ones(1, 1, real), real_BAS)
        assert float(count) == pytest.approx(sum(weight(k) for k in range(real)), rel=2e-3)
    assert objective.labels == labels


def test_summed_losses_weigh_what_was_published():
    eagle = compose_config("train", "drafter=eagle")
    assert (eagle.objective.hidden_states, eagle.objective.tokens, eagle.drafter.noise) == (1.0, 0.1, 0.1)
    dspark = compose_config("train", "drafter=dspark").objective  # 0.9 of the L1 distance, twice the total variation
    assert (dspark.weights.cross_entropy, dspark.weights.distill) == (0.1, 2 * 0.9)
    assert dspark.distance.path.endswith("total_variation")


def test_an_impossible_least_weight_is_refused():
    with pytest.raises(InputError, match=r"objective\.least must be a number >= 0 and <= 1, got 2"):
        CrossEntropy(5, 0.5, 2)
