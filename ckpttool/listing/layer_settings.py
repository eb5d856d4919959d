"""Settings of layers as text: those other than the defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckpttool.core.kinds import LayerSetting, default_epsilon
from ckpttool.core.text import clean

LONGEST_WORD = 40
# Larger numbers of units are not listed.
MOST_UNITS = 1 << 40


def list_settings(
    settings: Iterable[tuple[LayerSetting, Any, Any]], cls: str, library: str, window: Any
) -> Iterator[str]:
    """Yield the settings other than the defaults, from their defaults and values.

    A pooling's stride is its `window` by default.
    """
    for row, default, value in settings:
        if row.name == "epsilon":
            default = default_epsilon(cls, library)
        elif row.name == "stride" and window is not None:
            default = window
        stated = value is not None and value != () and not isinstance(value, dict)
        if stated and row.text and (default is None or fold_axes(value) != default):
            yield row.text.format(format_axes(fold_axes(value)))


def fold_axes(value: Any) -> Any:
    """Return one number for a tuple of equal ones."""
    equal = isinstance(value, tuple) and value and all(number == value[0] for number in value)
    return value[0] if equal else value


def format_axes(value: Any) -> str:
    """Return a setting of each axis as text: `3x3`."""
    text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return clean(text)[:LONGEST_WORD]
