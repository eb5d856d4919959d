"""What an optimizer of Keras is told by the program: arguments of its class, penalties of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.layouts import canonical
from ckpttool.layouts.optimizers.families import ADAM, BUFFER, HOW, WITHOUT
from ckpttool.layouts.optimizers.known import PLACES, Known, Setting, is_state
from ckpttool.leaf import Path, display
from ckpttool.mapping.report import Move

_DECAY, _DECOUPLED = "weight_decay", "decoupled_weight_decay"
_FLAGS = ("amsgrad", "nesterov", "centered")
# Keras 2's decay of the learning rate, which torch keeps unused, is none if it is 0.
_HARMLESS: Mapping[str, Setting] = {"decay": 0, "maximize": False, "dampening": 0, "lr_decay": 0, _DECAY: 0}


class Arguments:
    """The settings of an optimizer that are no variables in Keras; `weights` are its network's moves."""

    def __init__(self, known: Known, weights: Sequence[Move], variables: Sequence[str]) -> None:
        """Take what is known, and the names of the settings that are variables."""
        self.known, self.weights, self.variables = known, weights, variables
        self.family = known.family

    @property
    def decoupled(self) -> bool:
        """Whether weights decay beside the gradient: the class is AdamW."""
        decays = any(self._decay(weight) for weight in self.weights)
        return self.family is ADAM and self.known.value(_DECOUPLED) is True and decays

    def kept(self) -> Iterator[tuple[str, Path]]:
        """Go through the settings that are arguments of Keras's class or of its layers and no variables.

        The learning rate is both: the variable has it rounded to float32. Of several groups Keras has the
        settings of the first. What changes the updates and has no counterpart in Keras is not among them, and
        stays unmapped.
        """
        for name, path in self.known.flat():
            setting = str(path[1].value)
            value = self.known.value(setting, _weight(path))
            how = setting in (*HOW, *PLACES) or is_state(setting)
            harmless = setting in _HARMLESS and value == _HARMLESS[setting]
            arguments = (*self.family.constructed, *self.variables, "learning_rate", _DECOUPLED)
            argument = setting in arguments
            if how or harmless or argument or (setting == _DECAY and self._decays):
                yield name, path

    def told(self) -> dict[str, Setting]:
        """Return what the sidecar tells: those settings, and what it told before."""
        before = {name: value for name, value in self.known.told.items() if name != "step"}
        own = {name: self.known.value(str(path[1].value), _weight(path)) for name, path in self.kept()}
        return {**before, **own}

    def notes(self) -> Iterator[str]:
        """Go through what a program must say so that training goes on as it did."""
        known = self.known
        names = [
            n
            for n in self.family.constructed
            if n not in _FLAGS and (known.has(n) or self._is_foreign_default(n))
        ]
        shown = [f"{name}={known.value(name)}" for name in names]
        flags = [name for name in _FLAGS if name in self.family.constructed]
        shown += [f"{name}=True" for name in flags if known.value(name) is True]
        rates = sorted({rate for weight in self.weights if (rate := self._decay(weight))})
        if self.decoupled and len(rates) == 1:
            shown.append(f"weight_decay={rates[0]}")
        if shown:
            cls = "AdamW" if self.decoupled else self.family.name
            yield f"{known.name}: restore into keras.optimizers.{cls}({', '.join(shown)})"
        kept = {path for _, path in self.kept()}
        ours = frozenset(self.family.torch_settings.values())
        lost = [path for _, path in known.flat() if path not in kept and str(path[1].value) in ours]
        for setting in dict.fromkeys(str(path[1].value) for path in lost):
            yield f"{known.name}: Keras's {self.family.name} has no {setting}: {WITHOUT}"
        plain = [display(weight.target) for weight in self.weights if not self._decay(weight)]
        if self.decoupled and plain:
            yield f"{known.name}: exclude from weight decay: {', '.join(plain)}"
        if self._decays and not self.decoupled:
            yield from self._penalties(rates)
        for name in ("learning_rate", *self.family.constructed):
            values = list(dict.fromkeys(repr(known.value(name, weight.source)) for weight in self.weights))
            if len(values) > 1:
                yield (
                    f"{known.name}: {name} differs between the groups of PyTorch's optimizer "
                    f"({' and '.join(values)}), and Keras's optimizer has one for all: {values[0]} is "
                    "taken, and updates differ; the sidecar keeps all"
                )
        if BUFFER in known.slots and known.number("learning_rate") and not known.idle():
            yield f"{known.name}: momentum is multiplied by the learning rate, and rounded"

    def _is_foreign_default(self, name: str) -> bool:
        """Whether the source's library has another default of an argument than Keras."""
        found, own = self.known.defaults.get(name), self.family.keras_defaults.get(name)
        return found is not None and own is not None and found.value != own.value

    @property
    def _decays(self) -> bool:
        """Whether Keras can do the decay: beside the gradient at one rate, or as L2 in the loss.

        torch's Adam of old says nowhere which of the two its decay is.
        """
        if self.family is not ADAM:
            return True
        if self.known.value(_DECOUPLED) is not True:
            return self.known.has(_DECOUPLED)
        return len({self._decay(weight) for weight in self.weights} - {0.0}) <= 1

    def _decay(self, weight: Move) -> float:
        return self.known.number(_DECAY, weight.source) or 0.0

    def _penalties(self, rates: Sequence[float]) -> Iterator[str]:
        """Go through the penalties of the loss: torch adds decay * w to a gradient, l2(c) adds 2 * c * w."""
        for rate in rates:
            mine = [display(weight.target) for weight in self.weights if self._decay(weight) == rate]
            yield f"{self.known.name}: build with l2({rate / 2!r}) as regularizer of {', '.join(mine)}"


def _weight(path: Path) -> Path | None:
    """Return a path whose tail is that of a setting of one weight, None for a setting of all."""
    return canonical.owner(path) if len(path) > 2 else None
