"""Hours as people say them. It knows numbers alone."""

from __future__ import annotations


def spelled(hours: float, kind: str = "") -> str:
    """Never 0.00: minutes or seconds where they are few, with two significant digits or more.

    1,234.5 -> 1,234 hours    12.34 -> 12.3 hours    0.5 -> 0.50 hours    0.05 -> 3 minutes    0.0005 -> 1.8 seconds
    """
    if hours >= 0.1:
        digits = 0 if hours >= 100 else 1 if hours >= 10 else 2
        return f"{hours:,.{digits}f} {kind}hours"
    number, unit = (60 * hours, "minutes") if 60 * hours >= 0.1 else (3600 * hours, "seconds")
    return f"{number:.2g} {kind}{unit}"
