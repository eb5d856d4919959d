"""One canonical Adam as Sonnet's: a count of updates, and lists of moments whose names say whose they are.

Source: sonnet/src/optimizers/adam.py in github.com/google-deepmind/sonnet.
"""

from __future__ import annotations

from ckpttool.layouts.optimizers.keras_write import ToKeras
from ckpttool.leaf import Path, attr, display, index


class ToSonnet(ToKeras):
    """Sonnet's Adam at `top`; its settings are arguments and no variables."""

    def variables(self) -> dict[str, tuple[Path, str]]:
        """Return the count of updates, the only setting that is a variable."""
        return {"step": ((*self.top, attr("step")), "int64")}

    def moment(self, slot: str, target: Path) -> Path:
        """Return the place in the list of the moments."""
        return (*self.top, attr(slot), index(self.numbers[target]))

    def called(self, slot: str, target: Path) -> str:
        """Return the moment's name: `adam/m/` and its variable's."""
        return f"adam/{slot}/{display(target[1:])}"

    def aliases(self) -> dict[Path, tuple[Path, ...]]:
        """Return nothing: every variable has one path."""
        return {}
