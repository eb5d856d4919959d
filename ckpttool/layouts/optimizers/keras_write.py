"""One canonical optimizer as an object of Keras 3.

Sources: keras/src/optimizers/{adam,rmsprop,sgd}.py, `build`; keras/src/optimizers/base_optimizer.py, `build`
and `add_optimizer_variables`: `_variables` lists the iteration count, the learning rate, then the slots in
rounds over the trained variables (Adam's momentum and velocity in one, its velocity_hats in the next).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.errors import MappingError
from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Default
from ckpttool.layouts.optimizers.families import BUFFER, SGD, VELOCITY
from ckpttool.layouts.optimizers.keras_settings import Arguments
from ckpttool.layouts.optimizers.known import Known, Setting
from ckpttool.layouts.optimizers.zeros import zeros
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display, index
from ckpttool.mapping.numbers import Scaled
from ckpttool.mapping.plan import Label, Plan
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Rule, ToTensor, chain
from ckpttool.tree import Tree


def as_tensor(leaf: Leaf | ValueLeaf, dtype: str) -> Rule:
    """Return the rule that makes a number a tensor of the type."""
    return KEEP if isinstance(leaf, Leaf) and leaf.dtype == dtype else ToTensor(dtype)


class ToKeras:
    """One canonical optimizer as Keras 3's object at `top`.

    `weights` are its networks' moves in the order of their variables; several may make one variable. `told`
    are settings that a sidecar tells, `defaults` those of the source's library. An optimizer that is
    `scheduled` has no variable for its learning rate, which a schedule of the program computes.
    """

    # Whether an optimizer has moments before its first update.
    begins_with_zeros = True

    def __init__(
        self,
        name: str,
        variable: str,
        weights: Sequence[Move],
        agent: Tree,
        top: Path,
        told: Mapping[str, Setting] | None = None,
        defaults: Mapping[str, Default] | None = None,
        *,
        scheduled: bool = False,
    ) -> None:
        """Take the canonical optimizer `name`.

        Keras calls its variables `variable/...` (adam, adam_1), those of another class by that class.
        """
        self.known = Known(name, agent, told or {}, defaults or {})
        self.family = self.known.family
        self.scheduled = scheduled
        self.name, self.weights, self.agent, self.top = name, weights, agent, top
        self.arguments = Arguments(self.known, weights, tuple(self.variables()))
        own = "adam_w" if self.arguments.decoupled else self.family.keras_name
        self.variable = variable.replace("adam", own, 1)
        targets = dict.fromkeys(weight.target for weight in weights)
        self.numbers = {target: number for number, target in enumerate(targets)}

    def plan(self) -> Plan:
        """Return the optimizer's part of a plan; what the source lacks Keras begins with."""
        moves: list[Move] = []
        added: dict[Path, Leaf | ValueLeaf] = {}
        labels: dict[Path, Label] = {}
        for name, (path, dtype) in self.variables().items():
            title = "iteration" if name == "step" else name
            labels[path] = Label("counter" if name == "step" else "other", f"{self.variable}/{title}")
            source = self.known.source(name, self._first)
            if source is not None:
                moves.append(Move(source, path, as_tensor(self.agent[source], dtype)))
            else:
                value = self.known.number(name) or 0
                added[path] = ToTensor(dtype).leaf(ValueLeaf(value, labels[path].role))
        for weight in self.weights:
            for slot in self.slots:
                path = self.moment(slot, weight.target)
                kind = self.family.keras_slots[slot].kind
                labels[path] = Label("slot", self.called(slot, weight.target), weight.target, kind)
                source = self._source(slot, weight)
                if source is not None:
                    rule = chain(self._scale(source, weight), weight.rule)
                    moves.append(Move(source, path, rule))
                elif self.family.zeros and (self._begins(slot) or not self._begun(weight)):
                    added[path] = self._zeros(weight)
        return Plan(
            tuple(moves),
            added,
            labels=labels,
            aliases=self.aliases(),
            assumed=tuple(self._assumed()),
            missing=self._missing(),
            consumed=(*(path for _, path in self.arguments.kept()), *self._idle()),
            notes=tuple(self._notes()),
            told={self.name: self.arguments.told()},
        )

    def _notes(self) -> Iterator[str]:
        if any(self._without_rate()):
            yield (
                f"{self.name}: Keras's momentum holds the learning rate, which the checkpoint lacks: "
                f"give it with --optimizer {self.name}/learning_rate=0.001"
            )
        yield from self.arguments.notes()
        yield from self._schedule()

    def variables(self) -> dict[str, tuple[Path, str]]:
        """Return the settings that are variables, each with its path and type."""
        step = {"step": ((*self.top, attr("_iterations")), "int64")}
        rate = {"learning_rate": ((*self.top, attr("_learning_rate")), "float32")}
        return step if self.scheduled else step | rate

    def moment(self, slot: str, target: Path) -> Path:
        """Return the path of a variable's moment."""
        return (*self.top, attr(self.family.keras_slots[slot].edge), index(self.numbers[target]))

    def called(self, slot: str, target: Path) -> str:
        """Return the name that the library gives the moment."""
        flat = "_".join(display(target[1:]).split("/"))
        return f"{self.variable}/{flat}_{self.family.keras_slots[slot].ending}"

    def aliases(self) -> dict[Path, tuple[Path, ...]]:
        """Return Keras's lists of the same variables: further paths of each."""
        found = self.listed([path for path, _ in self.variables().values()])
        for target, number in self.numbers.items():
            found[target] = ((*self.top, attr("_trainable_variables"), index(number)),)
        return found

    def listed(self, settings: Sequence[Path]) -> dict[Path, tuple[Path, ...]]:
        """Return the places in `_variables` of the settings, and after them of the slots, round by round."""
        rounds = (tuple(slot for slot in kinds if slot in self.slots) for kinds in self.family.keras)
        order = [self.moment(slot, target) for kinds in rounds for target in self.numbers for slot in kinds]
        every = enumerate((*settings, *order))
        return {path: ((*self.top, attr("_variables"), index(number)),) for number, path in every}

    @property
    def started(self) -> bool:
        """Whether the source has moments; torch keeps none before the first update, and Keras zeros."""
        return bool(self.known.slots)

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that Keras's optimizer has with these settings, in its order."""
        has = {
            "vhat": "vhat" in self.known.slots or self.known.value("amsgrad") is True,
            VELOCITY: not self.known.idle(self._first),
            "mg": "mg" in self.known.slots or self.known.value("centered") is True,
        }
        return tuple(slot for kinds in self.family.keras for slot in kinds if has.get(slot, True))

    @property
    def _first(self) -> Path | None:
        return self.weights[0].source if self.weights else None

    def _source(self, slot: str, weight: Move) -> Path | None:
        kinds = (VELOCITY, BUFFER) if slot == VELOCITY else (slot,)
        paths = (canonical.slot(self.name, kind, weight.source) for kind in kinds)
        return next((path for path in paths if path in self.agent), None)

    def _scale(self, source: Path, weight: Move) -> Rule:
        """Return the rule that puts the learning rate into a sum of gradients that has none."""
        rate = self.known.number("learning_rate", weight.source)
        if source[1] != attr(BUFFER) or not rate or self.known.idle(weight.source):
            return KEEP
        return Scaled(self.family.folded * rate)

    def _begins(self, slot: str) -> bool:
        """Say whether a moment that the source lacks begins with zeros, as a new momentum does."""
        if not self.started:
            return self.begins_with_zeros
        return slot == VELOCITY and not self.known.slots & {BUFFER, VELOCITY}

    def _begun(self, weight: Move) -> bool:
        """Return whether the source has moments of the weight; torch keeps none without a gradient."""
        return any(self._source(slot, weight) is not None for slot in self.slots)

    def _zeros(self, weight: Move) -> Leaf:
        leaf = weight.rule.leaf(self.agent[weight.source])
        if not isinstance(leaf, Leaf):
            raise MappingError("a weight is no tensor", path=display(weight.target))
        return zeros(leaf)

    def _missing(self) -> tuple[str, ...]:
        lost = [
            display(self.moment(slot, weight.target))
            for weight in self.weights
            for slot in self.slots
            if self._source(slot, weight) is None
            and (not self.family.zeros or (self._begun(weight) and not self._begins(slot)))
        ]
        if self.started and self.family.uses_count and not self.known.has("step"):
            lost.append(display(self.variables()["step"][0]))
        lost += [display(self.moment(slot, weight.target)) for slot, weight in self._without_rate()]
        return tuple(dict.fromkeys(lost))

    def _without_rate(self) -> Iterator[tuple[str, Move]]:
        """Go through the sums of gradients that Keras multiplies by a learning rate that nothing holds."""
        for weight in self.weights if VELOCITY in self.slots else ():
            source = self._source(VELOCITY, weight)
            buffer = source is not None and source[1] == attr(BUFFER)
            if buffer and not self.known.has("learning_rate", weight.source):
                yield VELOCITY, weight

    def _schedule(self) -> Iterator[str]:
        if self.scheduled:
            yield (
                f"{self.name} has no learning rate: build it with its schedule, or give "
                f"--optimizer {self.name}/learning_rate=... for a constant one"
            )

    def _assumed(self) -> Iterator[str]:
        for name in self.variables():
            if name in self.known.defaults and not self.known.has(name, self._first):
                yield self.known.assumed(name)
        if self.family is SGD and not self.known.has("step"):
            yield f"{self.name} iterations = 0 (the source's SGD does not count its updates)"
        without = sum(not self._begun(weight) for weight in self.weights)
        if self.started and without and self.family.zeros:
            yield f"{self.name}: zeros for the moments of {without} tensors that it never updated"

    def _idle(self) -> Iterator[Path]:
        """Go through the sums of gradients that Keras does not keep, because nothing reads them."""
        for weight in self.weights if VELOCITY in self.family.slots and VELOCITY not in self.slots else ():
            source = self._source(VELOCITY, weight)
            if source is not None:
                yield source
