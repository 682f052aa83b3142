"""Comparisons of draft methods at equal budgets: config -> train (and matching) -> evaluate -> statistics -> page."""
