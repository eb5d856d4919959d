"""Writing optimizer state."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpttool.core.errors import MappingError, abbreviate_list
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, attr, display, index, key
from ckpttool.formats.tf_object_graph import slot_path
from ckpttool.libraries import optimizers_read, schema
from ckpttool.libraries.optimizers_read import (
    ADAGRAD,
    ADAM,
    ADAMAX,
    BUFFER,
    FAMILIES,
    HOW,
    PLACES,
    RMSPROP,
    SGD,
    VELOCITY,
    WITHOUT,
    CanonicalOptimizer,
    ParameterGroup,
    Setting,
    is_state,
    make_zero_tensor,
    read_parameter_groups,
)
from ckpttool.libraries.recognize import OptimizerMoves, StoredOptimizer
from ckpttool.libraries.schema import DefaultSetting
from ckpttool.mapping.layers import Name
from ckpttool.mapping.rules import (
    KEEP,
    Cast,
    Label,
    Move,
    Plan,
    Rule,
    Scale,
    ToTensor,
    ToValue,
    compose_rules,
)

# Constructor arguments of a Keras optimizer, and penalties of the loss.

_DECAY, _DECOUPLED = "weight_decay", "decoupled_weight_decay"
_FLAGS = ("amsgrad", "nesterov", "centered")
# Keras 2's learning rate decay, which torch keeps unused, has no effect if it is 0.
_HARMLESS: Mapping[str, Setting] = {"decay": 0, "maximize": False, "dampening": 0, "lr_decay": 0, _DECAY: 0}

_NO_COUNT = f"{{}}: the number of its updates is unknown; {WITHOUT}"


class KerasOptimizerArguments:
    """The settings of an optimizer that are not Keras variables; `weights` are its network's moves."""

    def __init__(self, known: CanonicalOptimizer, weights: Sequence[Move], variables: Sequence[str]) -> None:
        """Store the known settings, and the names of those that are variables."""
        self.known, self.weights, self.variables = known, weights, variables
        self.family = known.family

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is decoupled from the gradient: the class is AdamW."""
        decays = any(self._decay(weight) for weight in self.weights)
        return self.family is ADAM and self.known.value(_DECOUPLED) is True and decays

    @property
    def plain(self) -> list[Move]:
        """The weights that are exempt from a decoupled weight decay."""
        return [weight for weight in self.weights if not self._decay(weight)] if self.decoupled else []

    def kept(self) -> Iterator[tuple[str, Path]]:
        """Yield the settings that are arguments of Keras's class or layers, and not variables.

        The learning rate is both: the variable holds it rounded to float32. Of several groups, Keras has
        the settings of the first. Settings that change the updates and have no counterpart in Keras are
        excluded, and stay unmapped.
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

    def stated_settings(self) -> dict[str, Setting]:
        """Return the sidecar's settings: these, and those it already contained."""
        before = {name: value for name, value in self.known.stated.items() if name != "step"}
        own = {name: self.known.value(str(path[1].value), _weight(path)) for name, path in self.kept()}
        return {**before, **own}

    @property
    def constructor(self) -> str | None:
        """The Python expression that creates the optimizer; None if Keras's defaults are sufficient."""
        known = self.known
        names = [
            n
            for n in self.family.constructed
            if n not in _FLAGS and (known.has(n) or self._is_foreign_default(n))
        ]
        # Keras refuses integers where it expects a float.
        shown = [f"{name}={float(v) if isinstance(v := known.value(name), int) else v}" for name in names]
        flags = [name for name in _FLAGS if name in self.family.constructed]
        shown += [f"{name}=True" for name in flags if known.value(name) is True]
        rates = self._rates()
        if self.decoupled and len(rates) == 1:
            shown.append(f"weight_decay={rates[0]}")
        if not shown:
            return None
        cls = "AdamW" if self.decoupled else self.family.name
        return f"keras.optimizers.{cls}({', '.join(shown)})"

    def _rates(self) -> list[float]:
        """Return the distinct rates of weight decay, without zero."""
        return sorted({rate for weight in self.weights if (rate := self._decay(weight))})

    def notes(self) -> Iterator[str]:
        """Yield what a program must configure so that training resumes unchanged."""
        known, rates = self.known, self._rates()
        if self.constructor is not None:
            yield f"{known.name}: restore into {self.constructor}"
        kept = {path for _, path in self.kept()}
        ours = frozenset(self.family.torch_settings.values())
        lost = [path for _, path in known.flat() if path not in kept and str(path[1].value) in ours]
        for setting in dict.fromkeys(str(path[1].value) for path in lost):
            yield f"{known.name}: Keras's {self.family.name} does not support {setting}; {WITHOUT}"
        plain = [display(weight.target) for weight in self.plain]
        if plain:
            yield f"{known.name}: exclude from weight decay: {', '.join(plain)}"
        if self._decays and not self.decoupled:
            yield from self._penalties(rates)
        for name in ("learning_rate", *self.family.constructed):
            values = list(dict.fromkeys(repr(known.value(name, weight.source)) for weight in self.weights))
            if len(values) > 1:
                yield (
                    f"{known.name}: {name} differs between PyTorch's parameter groups "
                    f"({' and '.join(values)}), but Keras's optimizer has one value for all: {values[0]} "
                    "is used, so updates differ; the sidecar keeps all values"
                )
        if BUFFER in known.slots and known.number("learning_rate") and not known.idle():
            yield f"{known.name}: momentum is multiplied by the learning rate, with rounding"

    def _is_foreign_default(self, name: str) -> bool:
        """Whether the source's library and Keras have different defaults for an argument."""
        found, own = self.known.defaults.get(name), self.family.keras_defaults.get(name)
        return found is not None and own is not None and found.value != own.value

    @property
    def _decays(self) -> bool:
        """Whether Keras can apply the decay: decoupled at one rate, or as L2 in the loss.

        Older versions of torch's Adam do not record which of the two their decay is.
        """
        if self.family is not ADAM:
            return True
        if self.known.value(_DECOUPLED) is not True:
            return self.known.has(_DECOUPLED)
        return len({self._decay(weight) for weight in self.weights} - {0.0}) <= 1

    def _decay(self, weight: Move) -> float:
        return self.known.number(_DECAY, weight.source) or 0.0

    def _penalties(self, rates: Sequence[float]) -> Iterator[str]:
        """Yield the penalties of the loss: torch adds decay * w to a gradient, l2(c) adds 2 * c * w."""
        for rate in rates:
            mine = [display(weight.target) for weight in self.weights if self._decay(weight) == rate]
            yield f"{self.known.name}: build with l2({rate / 2!r}) as the regularizer of {', '.join(mine)}"


def _weight(path: Path) -> Path | None:
    """Return a path that ends like a setting of one weight, None for a setting of all."""
    return schema.get_weight_key(path) if len(path) > 2 else None


# One canonical optimizer as an object of Keras 3.
#
# Sources: keras/src/optimizers/{adam,rmsprop,sgd}.py, `build`; keras/src/optimizers/base_optimizer.py,
# `build` and `add_optimizer_variables`: `_variables` lists the iteration count, the learning rate, then the
# slots, in rounds over the trained variables (Adam's momentum and velocity in one, its velocity_hats in the
# next).


def make_tensor_rule(leaf: Leaf | ValueLeaf, dtype: str) -> Rule:
    """Return the rule that converts a number to a tensor of the dtype."""
    return KEEP if isinstance(leaf, Leaf) and leaf.dtype == dtype else ToTensor(dtype)


class KerasOptimizerWriter:
    """One canonical optimizer as Keras 3's object at `top`.

    `weights` are its networks' moves in the order of their variables; several may form one variable.
    `told` are settings from a sidecar, `defaults` those of the source's library. An optimizer that is
    `scheduled` has no variable for its learning rate, which the program computes with a schedule.
    """

    # Whether an optimizer has moments before its first update.
    begins_with_zeros = True

    def __init__(
        self,
        known: CanonicalOptimizer,
        variable: str,
        weights: Sequence[Move],
        top: Path,
        *,
        scheduled: bool = False,
    ) -> None:
        """Store a canonical optimizer, which trains the `weights`, for the object at `top`.

        Keras names its variables `variable/...` (adam, adam_1), those of another class after that class.
        """
        self.known, self.family, self.scheduled = known, known.family, scheduled
        self.name, self.weights, self.agent, self.top = known.name, weights, known.agent, top
        self.arguments = KerasOptimizerArguments(self.known, weights, tuple(self.variables()))
        own = "adam_w" if self.arguments.decoupled else self.family.keras_name
        self.variable = variable.replace("adam", own, 1)
        targets = dict.fromkeys(weight.target for weight in weights)
        self.numbers = {target: number for number, target in enumerate(targets)}

    def plan(self) -> Plan:
        """Return the optimizer's part of a plan; missing state gets Keras's initial values."""
        moves: list[Move] = []
        added: dict[Path, Leaf | ValueLeaf] = {}
        labels: dict[Path, Label] = {}
        for name, (path, dtype) in self.variables().items():
            title = "iteration" if name == "step" else name
            labels[path] = Label("counter" if name == "step" else "other", f"{self.variable}/{title}")
            source = self.known.source(name, self._first)
            if source is not None:
                moves.append(Move(source, path, make_tensor_rule(self.agent[source], dtype)))
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
                    rule = compose_rules(self._scale(source, weight), weight.rule)
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
            settings={self.name: self.arguments.stated_settings()},
        )

    def _notes(self) -> Iterator[str]:
        if self._lacks_count():
            yield _NO_COUNT.format(self.name)
        if any(self._without_rate()):
            yield (
                f"{self.name}: Keras's momentum includes the learning rate, which is 0 in the checkpoint; "
                f"{WITHOUT}"
                if self.known.has("learning_rate", self._first)
                else f"{self.name}: Keras's momentum includes the learning rate, which is missing from the "
                f"checkpoint; pass --optimizer {self.name}/learning_rate=0.001"
            )
        yield from self.arguments.notes()
        yield from self._schedule()

    def variables(self) -> dict[str, tuple[Path, str]]:
        """Return the settings that are variables, each with its path and dtype."""
        step = {"step": ((*self.top, attr("_iterations")), "int64")}
        rate = {"learning_rate": ((*self.top, attr("_learning_rate")), "float32")}
        return step if self.scheduled else step | rate

    def moment(self, slot: str, target: Path) -> Path:
        """Return the path of a variable's moment."""
        return (*self.top, attr(self.family.keras_slots[slot].edge), index(self.numbers[target]))

    def called(self, slot: str, target: Path) -> str:
        """Return the library's name of the moment."""
        flat = "_".join(display(target[1:]).split("/"))
        return f"{self.variable}/{flat}_{self.family.keras_slots[slot].ending}"

    def aliases(self) -> dict[Path, tuple[Path, ...]]:
        """Return Keras's lists of the same variables, as further paths of each."""
        found = self.listed([path for path, _ in self.variables().values()])
        for target, number in self.numbers.items():
            found[target] = ((*self.top, attr("_trainable_variables"), index(number)),)
        return found

    def listed(self, settings: Sequence[Path]) -> dict[Path, tuple[Path, ...]]:
        """Return the positions in `_variables`: the settings, then the slots, round by round."""
        rounds = (tuple(slot for slot in kinds if slot in self.slots) for kinds in self.family.keras)
        order = [self.moment(slot, target) for kinds in rounds for target in self.numbers for slot in kinds]
        every = enumerate((*settings, *order))
        return {path: ((*self.top, attr("_variables"), index(number)),) for number, path in every}

    @property
    def started(self) -> bool:
        """Whether the source has moments; before the first update torch has none, and Keras has zeros."""
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
        paths = (schema.canonical_slot_path(self.name, kind, weight.source) for kind in kinds)
        return next((path for path in paths if path in self.agent), None)

    def _scale(self, source: Path, weight: Move) -> Rule:
        """Return the rule that multiplies gradient sums without a learning rate by it."""
        rate = self.known.number("learning_rate", weight.source)
        if source[1] != attr(BUFFER) or not rate or self.known.idle(weight.source):
            return KEEP
        return Scale(self.family.folded * rate)

    def _begins(self, slot: str) -> bool:
        """Return whether a missing moment starts at zero, like new momentum."""
        if not self.started:
            return self.begins_with_zeros
        return slot == VELOCITY and not self.known.slots & {BUFFER, VELOCITY}

    def _begun(self, weight: Move) -> bool:
        """Return whether the source has moments of the weight; torch has none without a gradient."""
        return any(self._source(slot, weight) is not None for slot in self.slots)

    def _zeros(self, weight: Move) -> Leaf:
        leaf = weight.rule.leaf(self.agent[weight.source])
        if not isinstance(leaf, Leaf):
            raise MappingError("a weight is not a tensor", path=display(weight.target))
        return make_zero_tensor(leaf)

    def _missing(self) -> tuple[str, ...]:
        lost = [
            display(self.moment(slot, weight.target))
            for weight in self.weights
            for slot in self.slots
            if self._source(slot, weight) is None
            and (not self.family.zeros or (self._begun(weight) and not self._begins(slot)))
        ]
        if self._lacks_count():
            lost.append(display(self.variables()["step"][0]))
        lost += [display(self.moment(slot, weight.target)) for slot, weight in self._without_rate()]
        return tuple(dict.fromkeys(lost))

    def _lacks_count(self) -> bool:
        return bool(self.started and self.family.uses_count and not self.known.has("step"))

    def _without_rate(self) -> Iterator[tuple[str, Move]]:
        """Yield the gradient sums that Keras multiplies by a learning rate that is missing."""
        for weight in self.weights if VELOCITY in self.slots else ():
            source = self._source(VELOCITY, weight)
            buffer = source is not None and source[1] == attr(BUFFER)
            rate = self.known.has("learning_rate", weight.source) and self.known.number(
                "learning_rate", weight.source
            )
            if buffer and not rate and not self.known.idle(weight.source):
                yield VELOCITY, weight

    def _schedule(self) -> Iterator[str]:
        if self.scheduled:
            yield (
                f"{self.name} has no learning rate: build it with its schedule, or pass --optimizer "
                f"{self.name}/learning_rate=... for a constant one"
            )

    def _assumed(self) -> Iterator[str]:
        for name in self.variables():
            if name in self.known.defaults and not self.known.has(name, self._first):
                yield self.known.assumed(name)
        if self.family is SGD and not self.known.has("step"):
            yield f"{self.name} iterations = 0 (the source's SGD does not count its updates)"
        without = sum(not self._begun(weight) for weight in self.weights)
        if self.started and without and self.family.zeros:
            yield f"{self.name}: zero moments for {without} tensors that it never updated"

    def _idle(self) -> Iterator[Path]:
        """Yield the gradient sums that Keras does not keep, because they are unused."""
        for weight in self.weights if VELOCITY in self.family.slots and VELOCITY not in self.slots else ():
            source = self._source(VELOCITY, weight)
            if source is not None:
                yield source


# Map an agent's weights to torch's parameters and parameter groups.
#
# Source: torch/optim/optimizer.py: a group is a dict of settings and the parameters that they apply to.

_OURS = frozenset(ours for family in FAMILIES for ours in family.torch_settings.values())


class TorchParameter(NamedTuple):
    """One torch parameter, and the agent's weights in it: two if a layer is split in two."""

    target: Path
    weights: tuple[Move, ...]

    @property
    def weight(self) -> Path:
        """The canonical path that identifies its settings."""
        return self.weights[0].source


def build_parameters(weights: Sequence[Move]) -> list[TorchParameter]:
    """Return the parameters in a network's moves, in order."""
    places: dict[Path, list[Move]] = {}
    for move in weights:
        places.setdefault(move.target, []).append(move)
    return [TorchParameter(path, tuple(moves)) for path, moves in places.items()]


def build_parameter_groups(
    known: CanonicalOptimizer, every: Sequence[TorchParameter]
) -> list[list[TorchParameter]]:
    """Return the groups: as in the source if known, else one per set of settings."""
    marks = [known.value(schema.GROUP, each.weight) for each in every]
    wanted = [_signature(known, each) for each in every]
    numbered = all(isinstance(mark, int) for mark in marks)
    fits = numbered and len(set(zip(marks, wanted, strict=True))) == len(set(marks))
    found: dict[object, list[TorchParameter]] = {}
    for each, mark, own in zip(every, marks, wanted, strict=True):
        found.setdefault(mark if fits else own, []).append(each)
    order = sorted(found, key=lambda mark: int(str(mark))) if fits else list(found)
    return [sorted(found[mark], key=lambda each: _parameter_rank(known, each)) for mark in order]


def _parameter_rank(known: CanonicalOptimizer, parameter: TorchParameter) -> float:
    return known.number(schema.NUMBER, parameter.weight) or 0.0


def _signature(known: CanonicalOptimizer, parameter: TorchParameter) -> tuple[str, ...]:
    names = [name for name in known.settings if name not in (*PLACES, "step") and not is_state(name)]
    return tuple(repr(known.value(name, parameter.weight)) for name in names)


def build_group_settings(known: CanonicalOptimizer, weight: Path) -> list[tuple[str, str]]:
    """Return a group's settings, canonical and torch's names: torch's own first, then other known ones."""
    own = {ours: theirs for theirs, ours in known.family.torch_settings.items()}
    others = [
        name
        for name in known.settings
        if name not in (*own, *PLACES, "step")
        and not is_state(name)
        and (known.source(name, weight) is not None or name not in _OURS)
    ]
    return [*own.items(), *((other, other) for other in others)]


# One canonical optimizer as torch's state_dict.
#
# Source: torch/optim/optimizer.py, state_dict() and load_state_dict(): parameters are numbered through all
# groups; an optimizer loads a state_dict with the same number and sizes of groups as its own.

_DICT, _LIST, _TUPLE = Container("dict"), Container("list"), Container("tuple")
# Defaults that need no note: they do not affect updates, or the state determines them.
_SILENT = frozenset((*HOW, "maximize", "decoupled_weight_decay", "dampening", "centered", "lr_decay"))


class TorchOptimizerWriter:
    """One canonical optimizer as torch's state_dict; `weights` are its network's moves in order."""

    def __init__(
        self,
        name: str,
        weights: Sequence[Move],
        agent: Tree,
        settings: Mapping[str, Setting],
        defaults: Mapping[str, DefaultSetting],
    ) -> None:
        """Store the canonical optimizer `name` of the canonical `agent`.

        `settings` are settings that the agent may lack, `defaults` those of its library.
        """
        self.known = CanonicalOptimizer(name, agent, settings, defaults)
        self.family = self.known.family
        self.name, self.agent = name, agent
        self.top = key(name)
        self.groups = build_parameter_groups(self.known, build_parameters(weights))
        self.parameters = [each for group in self.groups for each in group]

    def plan(self, place: Path | None = None) -> Plan:
        """Return the whole state_dict as a plan, at `place` if that differs from the optimizer's name."""
        top = (self.top,) if place is None else place

        def moved(path: Path) -> Path:
            return (*top, *path[1:])

        return Plan(
            tuple(replace(move, target=moved(move.target)) for move in self.moves()),
            {moved(path): leaf for path, leaf in self.added().items()},
            {moved(path): container for path, container in self.containers().items()},
            tuple(self.assumed()),
            tuple(self.missing()),
            tuple(self.consumed()),
            tuple(self.notes()),
            settings=self.stated_settings(),
        )

    def moves(self) -> list[Move]:
        """Return every moment, the step once per parameter, and the known hyperparameters."""
        found = list[Move]()
        for number, parameter in enumerate(self.parameters):
            place = self._state(number)
            step = schema.canonical_setting_path(self.name, "step")
            if self._begun(parameter) and self.family.counts and step in self.agent:
                rule: Rule = Cast("float32") if isinstance(self.agent[step], Leaf) else ToTensor("float32")
                found.append(Move(step, (*place, key("step")), rule))
            for theirs, weight, slot in self._slots(parameter):
                source = schema.canonical_slot_path(self.name, slot, weight.source)
                if not self._lacks_rate(slot, weight):
                    rule = compose_rules(weight.rule, self._scale(slot, weight))
                    found.append(Move(source, (*place, key(theirs)), rule))
            for theirs in self.family.torch_slots:
                if self._own(theirs, parameter):
                    source = schema.canonical_slot_path(self.name, theirs, parameter.weight)
                    found.append(Move(source, (*place, key(theirs)), KEEP))
        return [*found, *self._said()]

    def _said(self) -> Iterator[Move]:
        """Yield the agent's settings and names."""
        for number, group in enumerate(self.groups):
            for setting, target in self._settings(number):
                at = self.known.source(setting, group[0].weight)
                if at is not None:
                    yield Move(at, target, ToValue(exact=self.known.exact(setting, group[0].weight)))
            for position, each in enumerate(group if self._named else ()):
                at = self.known.source(schema.NAMES, each.weight)
                if at is not None:
                    yield Move(at, self._member(number, "param_names", position), KEEP)

    @property
    def started(self) -> bool:
        """Whether there are any moments; torch has no state before the first update."""
        return any(map(self._begun, self.parameters))

    def _begun(self, parameter: TorchParameter) -> bool:
        """Return whether the parameter has moments; torch has none for parameters without a gradient."""
        return any(True for _ in self._slots(parameter))

    def added(self) -> dict[Path, Leaf | ValueLeaf]:
        """Return the defaults of missing settings, and the list of parameter numbers."""
        values: dict[Path, Leaf | ValueLeaf] = {}
        count = 0
        for number, group in enumerate(self.groups):
            for setting, target in self._settings(number):
                if self.known.source(setting, group[0].weight) is None:
                    values[target] = ValueLeaf(self.known.value(setting, group[0].weight))
            for position, each in enumerate(group):
                values[self._member(number, "params", position)] = ValueLeaf(count)
                count += 1
                if self._named and self.known.source(schema.NAMES, each.weight) is None:
                    recorded = self.known.value(schema.NAMES, each.weight)
                    name = recorded or ".".join(str(step.value) for step in each.target[1:])
                    values[self._member(number, "param_names", position)] = ValueLeaf(name)
        for number, each in enumerate(self.parameters):
            if self._begun(each) and self._uncounted:
                values[*self._state(number), key("step")] = ToTensor("float32").leaf(ValueLeaf(0, "counter"))
            for theirs in self.family.torch_slots:
                if self.known.has(theirs, each.weight) and not self._own(theirs, each):
                    values[*self._state(number), key(theirs)] = ValueLeaf(None)
        return values

    def containers(self) -> dict[Path, Container]:
        """Return the dicts, lists and tuples of a torch optimizer's state_dict."""
        top = (self.top,)
        found = {top: _DICT, (*top, key("state")): _DICT, (*top, key("param_groups")): _LIST}
        for number in range(len(self.groups)):
            group = self._group(number)
            found |= {group: _DICT, (*group, key("params")): _LIST}
            if self.family.uses_count:
                found[*group, key("betas")] = _TUPLE
            if self._named:
                found[*group, key("param_names")] = _LIST
        states = (path[:4] for path in (*(m.target for m in self.moves()), *self.added()))
        found |= {path[:3]: _DICT for path in states if path[1] == key("state")}
        return found

    def assumed(self) -> list[str]:
        """Return a sentence for every default that training depends on."""
        found = [
            self.known.assumed(setting)
            for number, group in enumerate(self.groups)
            for setting, _ in self._settings(number)
            if setting in self.known.defaults
            and setting not in _SILENT
            and not self.known.certain.get(setting)
            and not self.known.has(setting, group[0].weight)
        ]
        without = sum(not self._begun(each) for each in self.parameters)
        if self.started and without:
            found.append(f"{self.name} never updated {without} of {len(self.parameters)} parameters")
        return list(dict.fromkeys(found))

    def consumed(self) -> list[Path]:
        """Return what need not be written: without state torch has no count, so a count of 0 is dropped.

        SGD never has a count: the sidecar stores it. Settings stored once per group need not repeat per
        weight.
        """
        found = [
            path
            for name, path in self.known.flat()
            if len(path) > 2 and path[1].value != schema.NAMES and not is_state(str(path[1].value))
        ]
        if not self._named:
            found += [path for _, path in self.known.flat() if path[1].value == schema.NAMES]
        step = schema.canonical_setting_path(self.name, "step")
        if step in self.agent and (not self.family.counts or (not self.started and self._steps == 0)):
            found.append(step)
        return found

    def missing(self) -> list[str]:
        """Return the moments that other weights of the network have and one lacks, and unknown scales."""
        lost = []
        for number, parameter in enumerate(self.parameters):
            wanted = [*self.family.always, *(s for s in self.family.slots if s in self.known.slots)]
            lost += [
                f"{self.name}/state/{number}/{self.family.torch_slot(slot)}"
                for weight in parameter.weights
                for slot in dict.fromkeys(wanted if self._begun(parameter) or not self.family.zeros else ())
                if not self._has(slot, weight) or self._lacks_rate(slot, weight)
            ]
        if self._lacks_count():
            lost.append(f"{self.name}/state/0/step")
        if self.known.momentum_unknown:
            lost.append(f"{self.name}/param_groups/0/momentum")
        if any(True for _ in self._decays_beside()):
            lost.append(f"{self.name}/param_groups/0/weight_decay")
        return list(dict.fromkeys(lost))

    def _lacks_count(self) -> bool:
        step = schema.canonical_setting_path(self.name, "step")
        return bool(self.started and self.family.uses_count and step not in self.agent)

    def notes(self) -> list[str]:
        """Return notes for people: groups, an update count that is not converted, computed numbers."""
        found = [_NO_COUNT.format(self.name)] if self._lacks_count() else []
        if len(self.groups) > 1:
            sizes = " and ".join(str(len(group)) for group in self.groups)
            found.append(
                f"{self.name} has {len(self.groups)} parameter groups, of {sizes} parameters"
                f"{': param_names lists them' if self._named else ''}"
            )
        if self.known.momentum_unknown:
            found.append(f"{self.name}: momentum is missing; pass --optimizer {self.name}/momentum=0.9")
        found += [
            f"{self.name}: Keras's {self.family.name} applies weight decay separately from the gradient "
            f"(weight_decay={rate}), PyTorch's adds it to the gradient; {WITHOUT}"
            for rate in sorted(set(self._decays_beside()))
        ]
        decay = self.known.number("decay")
        if decay:
            found.append(
                f"{self.name}: the learning rate is divided by 1 + {decay} * updates at each update (decay); "
                "in PyTorch use torch.optim.lr_scheduler.LambdaLR"
            )
        if self.started and self._uncounted:
            found.append(f"{self.name}: its update count is not stored; {self.family.name} does not use it")
        scaled = [
            (slot, weight)
            for parameter in self.parameters
            for _, weight, slot in self._slots(parameter)
            if slot == VELOCITY
        ]
        if any(self._lacks_rate(*each) for each in scaled):
            found.append(
                f"{self.name}: its velocity includes the learning rate, which changes with every update; "
                f"{WITHOUT}"
                if decay
                else f"{self.name}: its velocity includes the learning rate, which is unknown; pass "
                f"--optimizer {self.name}/learning_rate=..."
            )
        elif any(self._scale(*each) != KEEP for each in scaled):
            found.append(f"{self.name}: momentum is divided by the learning rate, with rounding")
        return found

    def stated_settings(self) -> dict[str, dict[str, Setting]]:
        """Return the settings that torch cannot store and the sidecar does: SGD's update count."""
        step = schema.canonical_setting_path(self.name, "step")
        if self.family is not SGD or step not in self.agent:
            return {}
        return {self.name: {"step": self._steps}}

    def _decays_beside(self) -> Iterator[float]:
        """Yield the decoupled decay rates that PyTorch's class does not support: only Adam's does."""
        for parameter in self.parameters if self.family is not ADAM else ():
            rate = self.known.number("weight_decay", parameter.weight)
            decoupled = self.known.value("decoupled_weight_decay", parameter.weight) is True
            # Without momentum both subtract rate * decay * weight.
            plain = self.family is SGD and self.known.idle(parameter.weight)
            if rate and decoupled and not plain:
                yield rate

    @property
    def _steps(self) -> Setting:
        return self.known.value("step")

    @property
    def _uncounted(self) -> bool:
        counted = schema.canonical_setting_path(self.name, "step") in self.agent
        return self.family.counts and not self.family.uses_count and not counted

    @property
    def _named(self) -> bool:
        """Whether the groups list parameter names: several do, unless the source's groups had none."""
        all_named = all(self.known.has(schema.NAMES, each.weight) for each in self.parameters)
        any_grouped = any(self.known.has(schema.GROUP, each.weight) for each in self.parameters)
        return all_named or (len(self.groups) > 1 and not any_grouped)

    def _slots(self, parameter: TorchParameter) -> Iterator[tuple[str, Move, str]]:
        """Yield a parameter's moments: torch's name, the weight's move, the canonical slot."""
        for theirs, ours in self.family.torch_slots.items():
            for weight in parameter.weights:
                for slot in (ours, VELOCITY) if ours == BUFFER else (ours,):
                    if self._has(slot, weight):
                        yield theirs, weight, slot

    def _has(self, slot: str, weight: Move) -> bool:
        return schema.canonical_slot_path(self.name, slot, weight.source) in self.agent

    def _own(self, theirs: str, parameter: TorchParameter) -> bool:
        return schema.canonical_slot_path(self.name, theirs, parameter.weight) in self.agent

    def _scale(self, slot: str, weight: Move) -> Rule:
        """Return the rule that divides a velocity by the learning rate; an unused one stays unchanged."""
        rate = self.known.number("learning_rate", weight.source)
        if slot != VELOCITY or not rate or self.known.idle(weight.source):
            return KEEP
        return Scale(self.family.folded * rate, divide=True)

    def _lacks_rate(self, slot: str, weight: Move) -> bool:
        if slot != VELOCITY or self.known.idle(weight.source):
            return False
        recorded = self.known.has("learning_rate", weight.source)
        known = recorded and self.known.number("learning_rate", weight.source)
        return not known or bool(self.known.number("decay"))

    def _settings(self, number: int) -> list[tuple[str, Path]]:
        """Return the settings of a group with their paths."""
        first = self.groups[number][0].weight
        return [
            (ours, self._target(number, theirs)) for ours, theirs in build_group_settings(self.known, first)
        ]

    def _target(self, number: int, theirs: str) -> Path:
        name, _, position = theirs.partition("/")
        return (*self._group(number), key(name), *((index(int(position)),) if position else ()))

    def _group(self, number: int) -> Path:
        return (self.top, key("param_groups"), index(number))

    def _member(self, number: int, name: str, position: int) -> Path:
        return (*self._group(number), key(name), index(position))

    def _state(self, number: int) -> Path:
        return (self.top, key("state"), key(number))


# Differences between frameworks with the same state and the same settings.
#
# Sources: keras/src/optimizers/{adam,rmsprop,adagrad,adamax}.py,
# tensorflow/python/training/{adam,rmsprop}.py, torch/optim/{adam,rmsprop,adagrad,adamax}.py;
# tf_keras/src/optimizers/legacy/rmsprop.py, which adds epsilon as torch does unless there is momentum.

_PLACES: Mapping[str, str] = {
    ADAM.name: "TensorFlow adds it before the bias correction, PyTorch after it",
    RMSPROP.name: "TensorFlow adds it inside the square root, PyTorch outside",
    ADAGRAD.name: "TensorFlow adds it inside the square root, PyTorch outside",
    ADAMAX.name: "Keras adds it to the maximum, PyTorch to the gradient inside the maximum",
}


def list_epsilon_notes(
    agent: Tree, source: str, target: str, names: Iterable[str] = schema.OPTIMIZERS
) -> tuple[str, ...]:
    """Return a note for each kind of optimizer whose epsilon means different things in the two frameworks."""
    if source == target:
        return ()
    named: dict[str, list[str]] = {}
    for name in names:
        if any(path[0] == attr(name) for path in agent):
            named.setdefault(CanonicalOptimizer(name, agent, {}, {}).family.name, []).append(name)
    return tuple(
        f"{' and '.join(mine)}: epsilon keeps its value, but {_PLACES[family]}; updates differ where "
        "gradients are about as small as epsilon"
        for family, mine in named.items()
        if family in _PLACES
    )


# Write one canonical optimizer as the objects of Keras 2, which tf_keras still has.


class LegacyKerasOptimizerWriter(KerasOptimizerWriter):
    """The optimizer object of Keras 2 up to 2.10, later `optimizers.legacy`: its weights own the moments.

    Sources: keras/optimizer_v2/optimizer_v2.py (`_create_all_weights`), adam.py, rmsprop.py and
    gradient_descent.py beside it. Betas, rho and momentum are variables as well.
    """

    begins_with_zeros = False

    def variables(self) -> dict[str, tuple[Path, str]]:
        """Return the settings that are variables."""
        rates = {name: ((*self.top, attr(name)), "float32") for name in self.family.legacy}
        return {"step": ((*self.top, attr("iter")), "int64"), **rates}

    def moment(self, slot: str, target: Path) -> Path:
        """Return the path of a slot variable, which has no edge."""
        return slot_path(self.top, self.family.keras_slots[slot].kind, target)

    def called(self, slot: str, target: Path) -> str:
        """Return the slot's name: its variable's name and its own."""
        return f"{display(target[1:])}/{self.variable}/{self.family.keras_slots[slot].kind}"

    def aliases(self) -> dict[Path, tuple[Path, ...]]:
        """Return nothing: every variable has one path."""
        return {}


# Write one canonical Adam as Sonnet's: an update count, and lists of moments named after their variables.
#
# Source: sonnet/src/optimizers/adam.py in github.com/google-deepmind/sonnet.


class SonnetOptimizerWriter(KerasOptimizerWriter):
    """Sonnet's Adam at `top`; its settings are arguments, not variables."""

    def variables(self) -> dict[str, tuple[Path, str]]:
        """Return the update count, the only setting that is a variable."""
        return {"step": ((*self.top, attr("step")), "int64")}

    def moment(self, slot: str, target: Path) -> Path:
        """Return the moment's position in the list."""
        return (*self.top, attr(slot), index(self.numbers[target]))

    def called(self, slot: str, target: Path) -> str:
        """Return the moment's name: `adam/m/` and its variable's name."""
        return f"adam/{slot}/{display(target[1:])}"

    def aliases(self) -> dict[Path, tuple[Path, ...]]:
        """Return nothing: every variable has one path."""
        return {}


# The order of a PyTorch model's parameters, where a file holds them sorted by name.
#
# `parameters()` yields a module's own parameters, then those of its submodules, one submodule at a time
# (torch/nn/modules/module.py, `named_parameters`). A weight comes before its bias in the modules of torch.nn;
# submodules whose names differ in a number only (`0`, `1`; `fc1`, `fc2`) come in the order of the numbers.

Shape = tuple[int, ...]
# Limit on the positions in one module's chains that are searched at once.
_MOST_STATES = 5_000
_RECURRENT = re.compile(r"(weight|bias)_(ih|hh|hr)_l(\d+)(_reverse)?")
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _ModuleNode:
    """A module: its own parameters by number, and its submodules."""

    own: dict[str, int] = field(default_factory=dict)
    inner: dict[str, _ModuleNode] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.own) + sum(each.size for each in self.inner.values())


def find_only_order(
    parameters: Sequence[tuple[Sequence[str], Shape]], wanted: Sequence[Shape], *, numbered: bool
) -> list[int] | None:
    """Return the numbers of named parameters in the only order with these shapes, None if not unique.

    With `numbered`, submodules such as `fc1` and `fc2` are ordered by their numbers; those whose names
    are numbers always are.
    """
    root = _ModuleNode()
    for number, (name, _) in enumerate(parameters):
        module = root
        for step in name[:-1]:
            module = module.inner.setdefault(step, _ModuleNode())
        module.own[name[-1]] = number
    if root.size != len(wanted):
        return None
    return _OrderSearch([shape for _, shape in parameters], wanted, numbered=numbered).only(root)


class _AmbiguousOrderError(Exception):
    """Several orders fit, or there are too many to try."""


class _OrderSearch:
    """Searches for parameter orders in which `shapes` equal the shapes `wanted`."""

    def __init__(self, shapes: Sequence[Shape], wanted: Sequence[Shape], *, numbered: bool) -> None:
        self.shapes, self.wanted, self.numbered = shapes, wanted, numbered

    def only(self, root: _ModuleNode) -> list[int] | None:
        """Return the only order of a module's parameters, None if it is not unique."""
        try:
            return self._module(root, 0)
        except _AmbiguousOrderError:
            return None

    def _module(self, module: _ModuleNode, start: int) -> list[int] | None:
        """Return the only order, None if none fits; raise _AmbiguousError for several."""
        own = self._chained(_parameter_chains(module.own), start)
        if own is None:
            return None
        inner = self._chained(_submodule_chains(module.inner, numbered=self.numbered), start + len(own))
        return None if inner is None else [*own, *inner]

    def _item(self, item: int | _ModuleNode, start: int) -> list[int] | None:
        if isinstance(item, _ModuleNode):
            return self._module(item, start)
        fits = start < len(self.wanted) and self.shapes[item] == self.wanted[start]
        return [item] if fits else None

    def _chained(self, chains: Sequence[Sequence[int | _ModuleNode]], start: int) -> list[int] | None:
        """Return the only merge of chains of parameters or modules; each chain keeps its order."""
        ways: dict[tuple[int, ...], list[int]] = {(0,) * len(chains): []}
        for _ in range(sum(map(len, chains))):
            after: dict[tuple[int, ...], list[int]] = {}
            several: set[tuple[int, ...]] = set()
            for taken, order in ways.items():
                for n, chain in enumerate(chains):
                    if taken[n] == len(chain):
                        continue
                    more = self._item(chain[taken[n]], start + len(order))
                    if more is None:
                        continue
                    now = (*taken[:n], taken[n] + 1, *taken[n + 1 :])
                    if now in after:
                        several.add(now)
                    after[now] = [*order, *more]
            if len(after) > _MOST_STATES or several:
                raise _AmbiguousOrderError
            ways = after
        (found,) = ways.values() or (None,)
        return found


def _parameter_chains(own: Mapping[str, int]) -> list[list[int]]:
    """Return parameters in chains: weight before bias; those of a recurrent layer in a fixed order."""
    chains: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for name, number in own.items():
        recurrent = _RECURRENT.fullmatch(name)
        if recurrent is not None:
            kind, gate, layer, reverse = recurrent.groups()
            place = (int(layer), bool(reverse), gate == "hr", kind == "bias", gate == "hh")
            chains.setdefault("recurrent", []).append((place, number))
        else:
            chains.setdefault(name.replace("bias", "weight"), []).append((("bias" in name,), number))
    return [[number for _, number in sorted(chain)] for chain in chains.values()]


def _submodule_chains(inner: Mapping[str, _ModuleNode], *, numbered: bool) -> list[list[int | _ModuleNode]]:
    """Return submodules in chains: those whose names differ only in a number are ordered by it."""
    chains: dict[str, list[tuple[list[int], _ModuleNode]]] = {}
    for name, module in inner.items():
        numbers = [int(number) for number in _NUMBER.findall(name)]
        chains.setdefault(_NUMBER.sub("#", name) if numbered or name.isdecimal() else name, []).append(
            (numbers, module)
        )
    return [[module for _, module in sorted(chain, key=_numbers)] for chain in chains.values()]


def _numbers(item: tuple[list[int], _ModuleNode]) -> list[int]:
    return item[0]


# Find the parameters that each optimizer of a PyTorch checkpoint trains, without a layout.
#
# Names decide (`param_names`). Without names PyTorch's own rule does: param_groups list the parameters in the
# order of the module, which the shapes of all slots must confirm, and only one network or one choice of
# parameters may fit (torch/optim/optimizer.py, state_dict()). A file that sorts its tensors by name, as
# safetensors does, loses that order: then only one module order may fit (see above).

# Words that do not distinguish one network or optimizer from another.
_COMMON = frozenset(
    (
        "optimizer",
        "optimizers",
        "optim",
        "opt",
        "state",
        "states",
        "dict",
        "model",
        "net",
        "network",
        "module",
    )
) | {"weights", "params", "nets", "networks", "models"}
# Words for copies of a network, which no optimizer trains.
_COPIES = frozenset(("ema", "swa", "average", "averaged", "target", "targ", "teacher", "old"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class BoundOptimizer(NamedTuple):
    """One optimizer of the source: its name, where it is, and its bound state."""

    name: str
    top: Path
    moves: OptimizerMoves
    weights: tuple[Path, ...]


def _words(name: str) -> frozenset[str]:
    words = (word.lower() for word in _WORD.findall(name))
    return frozenset(word for word in words if word not in _COMMON and word != "0")


def _match_title(
    title: str, candidates: Sequence[tuple[str, OptimizerMoves, tuple[Path, ...]]]
) -> int | None:
    """Return the index of the network that the optimizer's name refers to, None if not unique."""
    named = [n for n, (name, _, _) in enumerate(candidates) if _words(name) == _words(title)]
    trained = [n for n, (name, _, _) in enumerate(candidates) if not _words(name) & _COPIES]
    return next((found[0] for found in (named, trained) if len(found) == 1), None)


def list_torch_optimizers(tree: Tree) -> dict[Path, list[Path]]:
    """Return the leaves of every optimizer's state_dict, by its path."""
    groups_, states = key("param_groups"), key("state")
    tops = dict.fromkeys(
        path[: path.index(groups_)] for path in tree if groups_ in path and path[-2:-1] == (key("params"),)
    )
    depths = sorted({len(top) for top in tops})
    found: dict[Path, list[Path]] = {top: [] for top in tops}
    for path in tree:
        for depth in depths:
            if path[:depth] in found and path[depth : depth + 1] in ((groups_,), (states,)):
                found[path[:depth]].append(path)
                break
    return found


def bind_torch_optimizers(
    tree: Tree,
    tops: Mapping[Path, object],
    networks: Mapping[str, tuple[Path, ...]],
    names: Mapping[Path, Path],
) -> tuple[list[BoundOptimizer], list[str], list[str]]:
    """Assign each optimizer to the network that it trains; return the states, notes, and assumptions.

    `networks` are the parameters of each in their order, `names` the weights' canonical paths.
    """
    states: list[BoundOptimizer] = []
    notes: list[str] = []
    assumed: list[str] = []
    for top in tops:
        title = display(top)
        orders = {name: _order_parameters(tree, top, own) for name, own in networks.items()}
        fits = [
            (name, bound, order)
            for name, order in orders.items()
            if order is not None and (bound := _bind_torch(tree, top, title, order, names)) is not None
        ]
        lost = [name for name, order in orders.items() if order is None]
        if lost:
            notes.append(
                f"{title}: the file sorts the tensors of {lost[0] or 'the network'} by name, and their "
                "shapes fit several module orders; the optimizer state is not converted: use --part "
                f"{shlex.quote(lost[0] or '.')} to convert the network alone"
            )
            continue
        sure = {name: own for name, own in networks.items() if not _is_sorted(tree, own)}
        fits = fits or list(_fit_joint(tree, top, sure, names)) or list(_fit_subsets(tree, top, sure, names))
        chosen = 0 if len(fits) == 1 else _match_title(title, fits)
        if chosen is None:
            fitting = abbreviate_list([name for name, _, _ in fits], 3)
            why = f"fit several networks ({fitting})" if fits else "match the parameters of no network"
            notes.append(f"{title}: its param_groups {why}; its state is not converted; {WITHOUT}")
            continue
        name, bound, own = fits[chosen]
        if bound.note:
            notes.append(bound.note)
            continue
        named = any(move.target[1] == attr(schema.NAMES) for move in bound.moves)
        how = (
            "matched by param_names"
            if named
            else "matched by the order of param_groups and the shapes of all slots"
        )
        if not named and own != networks.get(name, own) and len(own) == len(networks[name]):
            how = "matched by the only module order that fits the shapes of all slots"
            assumed.append(
                f"{title}: the file sorts tensors by name; they are read in PyTorch's order: weight "
                "before bias, numbered modules in numeric order"
            )
        notes.append(f"{title} trains {name or 'the network'}, {how}")
        if len(own) < len(networks.get(name, own)):
            assumed.append(
                f"{title} trains {len(own)} of {len(networks[name])} parameters of {name or 'the network'}: "
                "the only ones whose shapes fit its slots in this order"
            )
        states.append(BoundOptimizer(title, top, bound, own))
    return states, notes, assumed


def _order_parameters(tree: Tree, top: Path, own: tuple[Path, ...]) -> tuple[Path, ...] | None:
    """Return a network's parameters in PyTorch's order, None if the file does not determine it."""
    if not _is_sorted(tree, own):
        return own
    found = _read_groups(tree, top)
    members = [member for group in found or () for member in group.members]
    if found is None or len(members) != len(own) or all(member.named is not None for member in members):
        return own  # names decide, or nothing fits
    shapes = [shape for group in found for shape in _slot_shapes(tree, top, group)]
    leaves = [leaf for path in own if isinstance(leaf := tree[path], Leaf)]
    if not any(shapes) and len(found) == 1:
        return own
    if all(len(each) == 1 for each in shapes) and Counter(leaf.shape for leaf in leaves) != Counter(
        shape for each in shapes for shape in each
    ):
        return own  # nothing fits
    if len(found) > 1 or not all(len(each) == 1 for each in shapes):
        return None
    parameters = [
        (tuple(str(path[-1].value).split(".")), leaf.shape) for path, leaf in zip(own, leaves, strict=True)
    ]
    wanted = [next(iter(each)) for each in shapes]
    order = find_only_order(parameters, wanted, numbered=False)
    order = order or find_only_order(parameters, wanted, numbered=True)
    return None if order is None else tuple(own[number] for number in order)


def _is_sorted(tree: Tree, own: tuple[Path, ...]) -> bool:
    """Whether a plain dict contains a network's parameters sorted by name, as safetensors writes them."""
    held = tree.containers.get(own[0][:-1]) if own else None
    if held is not None and held.kind != "dict":
        return False
    by_type: dict[str, list[str]] = {}
    for path in own:
        leaf = tree[path]
        if isinstance(leaf, Leaf):
            by_type.setdefault(leaf.dtype, []).append(str(path[-1].value))
    return len(own) > 1 and all(names == sorted(names) for names in by_type.values())


_Fit = tuple[str, OptimizerMoves, tuple[Path, ...]]
_MOST_TOGETHER = 4  # networks that one optimizer may train, in any order


def _fit_joint(
    tree: Tree, top: Path, networks: Mapping[str, tuple[Path, ...]], names: Mapping[Path, Path]
) -> Iterator[_Fit]:
    """Yield the orders of networks that one optimizer may train jointly."""
    if not 1 < len(networks) <= _MOST_TOGETHER:
        return
    for count in range(2, len(networks) + 1):
        for order in itertools.permutations(networks, count):
            own = tuple(path for name in order for path in networks[name])
            bound = _bind_torch(tree, top, display(top), own, names)
            if bound is not None:
                yield " and ".join(order), bound, own


def _fit_subsets(
    tree: Tree, top: Path, networks: Mapping[str, tuple[Path, ...]], names: Mapping[Path, Path]
) -> Iterator[_Fit]:
    """Yield the networks of which an optimizer trains a subset, if only one subset of parameters fits.

    Every parameter of the optimizer must have a slot with the parameter's shape.
    """
    title = display(top)
    found = _read_groups(tree, top)
    if found is None or len(found) != 1:
        return
    every = _slot_shapes(tree, top, found[0])
    if not all(len(each) == 1 for each in every):
        return
    shapes = [next(iter(each)) for each in every]
    for name, own in networks.items():
        chosen = _only_choice(
            shapes, [(path, leaf.shape) for path in own if isinstance(leaf := tree[path], Leaf)]
        )
        bound = _bind_torch(tree, top, title, chosen, names) if chosen else None
        if bound is not None and chosen is not None:
            yield name, bound, chosen


def _optimizer_leaves(tree: Tree, top: Path) -> Mapping[Name, Path]:
    title = display(top)
    return StoredOptimizer(title, tuple(title.split("/")) if top else (), tree, ()).own


def _read_groups(tree: Tree, top: Path) -> tuple[ParameterGroup, ...] | None:
    return read_parameter_groups(_optimizer_leaves(tree, top), tree)


def _slot_shapes(tree: Tree, top: Path, group: ParameterGroup) -> list[set[tuple[int, ...]]]:
    """Return the shapes of each parameter's slots in group order."""
    mine = _optimizer_leaves(tree, top)
    return [
        {
            leaf.shape
            for name, path in mine.items()
            if name[:2] == ("state", member.number)
            and name[2:] != ("step",)
            and isinstance(leaf := tree[path], Leaf)
        }
        for member in group.members
    ]


def _only_choice(
    wanted: Sequence[tuple[int, ...]], own: Sequence[tuple[Path, tuple[int, ...]]]
) -> tuple[Path, ...] | None:
    """Return the parameters with these shapes in this order, None unless exactly one choice fits."""
    if not wanted or len(wanted) > len(own):
        return None
    first = _match_shapes(wanted, own)
    last = _match_shapes(wanted[::-1], own[::-1])
    # The earliest and the latest choice are only equal if there is no other.
    return first if first is not None and last is not None and first == last[::-1] else None


def _match_shapes(
    wanted: Sequence[tuple[int, ...]], own: Sequence[tuple[Path, tuple[int, ...]]]
) -> tuple[Path, ...] | None:
    left = iter(own)
    found = []
    for shape in wanted:
        path = next((path for path, other in left if other == shape), None)
        if path is None:
            return None
        found.append(path)
    return tuple(found)


def _bind_torch(
    tree: Tree, top: Path, title: str, own: Sequence[Path], names: Mapping[Path, Path]
) -> OptimizerMoves | None:
    """Return the optimizer's state bound to these parameters, None if it does not fit them."""
    prefix = tuple(display(top).split("/")) if top else ()
    weights = tuple((path, names[path], KEEP) for path in own)
    optimizer = StoredOptimizer(title, prefix, tree, weights)
    mine = optimizer.own
    found = read_parameter_groups(mine, tree)
    if found is None or sum(len(group.members) for group in found) != len(own):
        return None
    bound = optimizers_read.from_torch(optimizer)
    if not bound.moves and "do not match" in bound.note:
        return None
    return bound
