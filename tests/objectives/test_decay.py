"""The weights of labels."""

from __future__ import annotations

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


def test_p_eagle_weighs_depths_by_the_share_that_its_published_training_samples():
    objective = instantiate(compose_config("train", "drafter=peagle").objective)
    _, count = objective.mean(torch.ones(1, 1, 8), torch.ones(1, 1, 8, dtype=torch.bool))
    assert float(count) == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401 + 3 * 0.2)


def test_an_impossible_least_weight_is_refused():
    with pytest.raises(InputError, match=r"objective\.least must be a number >= 0 and <= 1, got 2"):
        CrossEntropy(5, 0.5, 2)
