"""One canonical optimizer as the objects that Keras 2 had, which tf_keras still has."""

from __future__ import annotations

from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.layouts.optimizers.keras_write import ToKeras
from ckpttool.leaf import Path, attr, display


class ToSlots(ToKeras):
    """The object of Keras 2 up to 2.10, since then `optimizers.legacy`: its weights own the moments.

    Sources: keras/optimizer_v2/optimizer_v2.py (`_create_all_weights`), adam.py, rmsprop.py and
    gradient_descent.py beside it. Betas, rho and momentum are variables as well.
    """

    begins_with_zeros = False

    def variables(self) -> dict[str, tuple[Path, str]]:
        """Return the settings that are variables."""
        rates = {name: ((*self.top, attr(name)), "float32") for name in self.family.legacy}
        return {"step": ((*self.top, attr("iter")), "int64"), **rates}

    def moment(self, slot: str, target: Path) -> Path:
        """Return the path of a slot variable, to which no edge leads."""
        return slot_path(self.top, self.family.keras_slots[slot].kind, target)

    def called(self, slot: str, target: Path) -> str:
        """Return the slot's name: its variable's and its own."""
        return f"{display(target[1:])}/{self.variable}/{self.family.keras_slots[slot].kind}"

    def aliases(self) -> dict[Path, tuple[Path, ...]]:
        """Return nothing: every variable has one path."""
        return {}
