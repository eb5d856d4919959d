"""One canonical Adam as Keras 3's optimizer object.

Sources: keras/src/optimizers/adam.py, `Adam.build`; keras/src/optimizers/base_optimizer.py, `build` and
`add_optimizer_variables`: `_variables` lists the iteration count, the learning rate, then for each trained
variable its momentum and velocity, and after all of them the velocity_hats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool import dtypes
from ckpttool.errors import MappingError
from ckpttool.layouts import canonical
from ckpttool.layouts.adam import KERAS_DEFAULTS, TORCH_DEFAULTS
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display, index
from ckpttool.mapping.plan import Label, Plan
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Rule, ToTensor, ToValue
from ckpttool.tree import Tree

_LISTS = {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"}
_NAMES = {"m": "momentum", "v": "velocity", "vhat": "velocity_hat"}
_CONSTRUCTED = ("beta_1", "beta_2", "epsilon", "amsgrad")
# torch/optim/adam.py: which kernel computes the step, not which step.
_HOW = ("foreach", "capturable", "differentiable", "fused")
# Keras 2's decay of the learning rate, which torch keeps unused, is none if it is 0.
_DEFAULTS = {**{name: default.value for name, default in TORCH_DEFAULTS.items()}, "decay": 0}


@dataclass(frozen=True, slots=True)
class _Zeros:
    """A tensor of zeros that is made when it is read."""

    nbytes: int

    def read(self) -> bytes:
        return bytes(self.nbytes)


def as_tensor(leaf: Leaf | ValueLeaf, dtype: str) -> Rule:
    """Return the rule that makes a number a tensor of the type."""
    return KEEP if isinstance(leaf, Leaf) and leaf.dtype == dtype else ToTensor(dtype)


class ToKeras:
    """One canonical Adam below `root`; `weights` are its network's moves in the order of its variables."""

    def __init__(self, name: str, variable: str, weights: Sequence[Move], agent: Tree, root: Path) -> None:
        """Take the canonical optimizer `name`; Keras calls its variables `variable/...` (adam, adam_1)."""
        self.name = name
        self.variable = variable
        self.weights = weights
        self.agent = agent
        self.top = (*root, attr(name))

    def plan(self) -> Plan:
        """Return the optimizer's part of a plan; what the source lacks Keras begins with."""
        moves: list[Move] = []
        added: dict[Path, Leaf | ValueLeaf] = {}
        labels = {self._step: Label("counter", f"{self.variable}/iteration")}
        labels[self._rate] = Label("other", f"{self.variable}/learning_rate")
        for path, name, dtype, default in (
            (self._step, "step", "int64", 0),
            (self._rate, "learning_rate", "float32", KERAS_DEFAULTS["learning_rate"].value),
        ):
            source = canonical.setting(self.name, name)
            if source in self.agent:
                moves.append(Move(source, path, as_tensor(self.agent[source], dtype)))
            else:
                added[path] = ToTensor(dtype).leaf(ValueLeaf(default, labels[path].role))
        for number, weight in enumerate(self.weights):
            for slot in self._slots:
                path = (*self.top, attr(_LISTS[slot]), index(number))
                flat = "_".join(display(weight.target[1:]).split("/"))
                name = f"{self.variable}/{flat}_{_NAMES[slot]}"
                labels[path] = Label("slot", name, weight.target, slot)
                source = canonical.slot(self.name, slot, weight.source)
                if source in self.agent:
                    moves.append(Move(source, path, weight.rule))
                elif not self.started:
                    added[path] = self._zeros(weight)
        return Plan(
            tuple(moves),
            added,
            labels=labels,
            aliases=self._aliases(),
            assumed=self._assumed(),
            missing=self._missing(),
            consumed=tuple(canonical.setting(self.name, name) for name in self._told()),
            notes=self._notes(),
            told={self.name: self._told()},
        )

    @property
    def started(self) -> bool:
        """Whether the source has moments; torch keeps none before the first update, and Keras zeros."""
        return any(self._has(slot, weight) for slot in canonical.SLOTS for weight in self.weights)

    @property
    def _slots(self) -> tuple[str, ...]:
        hats = any(self._has("vhat", weight) for weight in self.weights)
        return canonical.SLOTS if hats or self._value("amsgrad") is True else canonical.SLOTS[:2]

    @property
    def _step(self) -> Path:
        return (*self.top, attr("_iterations"))

    @property
    def _rate(self) -> Path:
        return (*self.top, attr("_learning_rate"))

    def _has(self, slot: str, weight: Move) -> bool:
        return canonical.slot(self.name, slot, weight.source) in self.agent

    def _zeros(self, weight: Move) -> Leaf:
        leaf = weight.rule.leaf(self.agent[weight.source])
        if not isinstance(leaf, Leaf):
            raise MappingError("a weight is no tensor", path=display(weight.target))
        nbytes = math.prod(leaf.shape) * dtypes.BY_NAME[leaf.dtype].itemsize
        return Leaf(leaf.dtype, leaf.shape, _Zeros(nbytes), "")

    def _aliases(self) -> dict[Path, tuple[Path, ...]]:
        def variable(number: int) -> tuple[Path, ...]:
            return ((*self.top, attr("_variables"), index(number)),)

        found = {self._step: variable(0), self._rate: variable(1)}
        for number, weight in enumerate(self.weights):
            found[weight.target] = ((*self.top, attr("_trainable_variables"), index(number)),)
            for position, slot in enumerate(self._slots):
                at = 2 + 2 * number + position if position < 2 else 2 + 2 * len(self.weights) + number
                found[(*self.top, attr(_LISTS[slot]), index(number))] = variable(at)
        return found

    def _missing(self) -> tuple[str, ...]:
        lost = [
            display((*self.top, attr(_LISTS[slot]), index(number)))
            for number, weight in enumerate(self.weights)
            for slot in self._slots
            if self.started and not self._has(slot, weight)
        ]
        if self.started and canonical.setting(self.name, "step") not in self.agent:
            lost.append(display(self._step))
        return tuple(lost)

    def _assumed(self) -> tuple[str, ...]:
        if canonical.setting(self.name, "learning_rate") in self.agent:
            return ()
        default = KERAS_DEFAULTS["learning_rate"]
        sentence = f"{self.name} learning_rate = {default.value} (default of {default.whose}; "
        return (f"{sentence}the checkpoint does not hold it)",)

    def _told(self) -> dict[str, float | bool | None]:
        """Return the settings that are arguments of Keras's Adam and no variables.

        The learning rate is both: the variable has it rounded to float32. What changes the updates and has
        no counterpart in Keras is not among them, and stays unmapped.
        """
        found: dict[str, float | bool | None] = {}
        for path in self.agent:
            if path[0] != attr(self.name) or len(path) != 2:
                continue
            name = str(path[1].value)
            value = self._value(name)
            harmless = name in _DEFAULTS and value == _DEFAULTS[name]
            decay = name == "decoupled_weight_decay" or (
                name == "weight_decay" and self._value("decoupled_weight_decay") is True
            )
            if name in (*_CONSTRUCTED, *_HOW, "learning_rate") or harmless or decay:
                found[name] = value
        return found

    def _notes(self) -> tuple[str, ...]:
        names = (*_CONSTRUCTED[:3], *(("amsgrad",) if "vhat" in self._slots else ()))
        told = self._told()
        if told.get("weight_decay"):
            names = (*names, "weight_decay")
        shown = ", ".join(f"{name}={told[name]}" for name in names if name in told)
        return (f"{self.name}: restore into keras.optimizers.Adam({shown})",) if shown else ()

    def _value(self, name: str) -> float | bool | None:
        leaf = self.agent.get(canonical.setting(self.name, name))
        value = ToValue().leaf(leaf) if leaf is not None else None
        found = value.value if isinstance(value, ValueLeaf) else None
        return found if isinstance(found, int | float) else None
