"""Builders of token trees from a drafter's output."""
