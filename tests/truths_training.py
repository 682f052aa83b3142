"""Slow reference implementations of optimiser steps."""

import torch
from torch import Tensor


def slow_orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Muon's quintic, with the coefficients of Jordan et al. (2024), of every singular value, by an SVD."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right
