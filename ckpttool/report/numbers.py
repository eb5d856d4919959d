"""How numbers are set on the page: with the sign that a minus has in print."""

from __future__ import annotations

import math

_MINUS, _NONE = "\u2212", "\u2013"


def set_minus(text: str) -> str:
    """Return a number's text with a minus as wide as a digit."""
    return text.replace("-", _MINUS)


def shown(value: float) -> str:
    """Return a number as charts and tables have it: 12,500, -650.30, 0.25, 1.5e+09; a dash for none."""
    if not math.isfinite(value):
        return _NONE
    if abs(value) >= 1e7:
        return set_minus(f"{value:.4g}")
    digits = 0 if value == int(value) else 2 if abs(value) >= 10 else 4
    return set_minus(f"{value:,.{digits}f}")


def exact(value: float, digits: int = 6) -> str:
    """Return a number with so many significant digits, a whole one with all of them."""
    whole = value == round(value) if math.isfinite(value) else False
    return set_minus(f"{value:,.0f}" if whole and abs(value) < 1e9 else f"{value:.{digits}g}")
