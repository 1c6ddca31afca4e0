"""Distances: what a GPU computes in another way."""

from __future__ import annotations

import torch

from keyfed.federated import distance


def test_the_largest_eigenvalue_by_squaring_is_that_of_a_solver():
    drawn = torch.randn(4, 30, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn[1] *= 1e-12
    drawn[2, :, 1:] = drawn[2, :, :1]  # all but one eigenvalue are zero
    drawn[3] = torch.eye(30, 12, dtype=torch.float64) * 7  # all are the same: the bound is at its worst
    grams = drawn.mT @ drawn
    solved = torch.linalg.eigvalsh(grams)[:, -1]
    torch.testing.assert_close(distance._largest_eigenvalues(grams), solved, rtol=1e-6, atol=0)
    assert distance._largest_eigenvalues(torch.zeros(1, 3, 3, dtype=torch.float64)).item() < 1e-300
    drawn[0, 0, 0] = torch.nan
    found = distance._largest_singulars(drawn.float())
    assert torch.isnan(found[0])
    torch.testing.assert_close(found[1:], solved[1:].sqrt(), rtol=1e-5, atol=0)
