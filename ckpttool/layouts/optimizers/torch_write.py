"""One canonical optimizer as torch's state_dict.

Source: torch/optim/optimizer.py, state_dict() and load_state_dict(): parameters are numbered through all
groups; an optimizer takes a state_dict whose groups are as many and as large as its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Default
from ckpttool.layouts.optimizers.families import ADAM, BUFFER, HOW, SGD, VELOCITY, WITHOUT
from ckpttool.layouts.optimizers.known import Known, Setting, is_state
from ckpttool.layouts.optimizers.torch_parameters import Parameter, groups, parameters, settings
from ckpttool.leaf import Leaf, Path, ValueLeaf, index, key
from ckpttool.mapping.numbers import Scaled
from ckpttool.mapping.plan import Plan
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Cast, Rule, ToTensor, ToValue, chain
from ckpttool.tree import Container, Tree

_DICT, _LIST, _TUPLE = Container("dict"), Container("list"), Container("tuple")
# What a default is not worth a word for: it changes no update, or the state itself says it.
_SILENT = frozenset((*HOW, "maximize", "decoupled_weight_decay", "dampening", "centered", "lr_decay"))


class ToTorch:
    """One canonical optimizer as torch's state_dict; `weights` are its network's moves in their order."""

    def __init__(
        self,
        name: str,
        weights: Sequence[Move],
        agent: Tree,
        told: Mapping[str, Setting],
        defaults: Mapping[str, Default],
    ) -> None:
        """Take the canonical optimizer `name` of the canonical `agent`.

        `told` are settings that it may lack, `defaults` those of its library.
        """
        self.known = Known(name, agent, told, defaults)
        self.family = self.known.family
        self.name, self.agent = name, agent
        self.top = key(name)
        self.groups = groups(self.known, parameters(weights))
        self.parameters = [each for group in self.groups for each in group]

    def plan(self, place: Path | None = None) -> Plan:
        """Return the whole state_dict as a plan, at `place` where that is not the optimizer's own name."""
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
            told=self.told(),
        )

    def moves(self) -> list[Move]:
        """Return every moment, the step once per parameter, and the hyperparameters that are known."""
        found = list[Move]()
        for number, parameter in enumerate(self.parameters):
            place = self._state(number)
            step = canonical.setting(self.name, "step")
            if self._begun(parameter) and self.family.counts and step in self.agent:
                rule: Rule = Cast("float32") if isinstance(self.agent[step], Leaf) else ToTensor("float32")
                found.append(Move(step, (*place, key("step")), rule))
            for theirs, weight, slot in self._slots(parameter):
                source = canonical.slot(self.name, slot, weight.source)
                if not self._lacks_rate(slot, weight):
                    rule = chain(weight.rule, self._scale(slot, weight))
                    found.append(Move(source, (*place, key(theirs)), rule))
            for theirs in self.family.torch_slots:
                if self._own(theirs, parameter):
                    source = canonical.slot(self.name, theirs, parameter.weight)
                    found.append(Move(source, (*place, key(theirs)), KEEP))
        return [*found, *self._said()]

    def _said(self) -> Iterator[Move]:
        """Go through the settings and names that the agent has."""
        for number, group in enumerate(self.groups):
            for setting, target in self._settings(number):
                at = self.known.source(setting, group[0].weight)
                if at is not None:
                    yield Move(at, target, ToValue(exact=self.known.exact(setting, group[0].weight)))
            for position, each in enumerate(group if self._named else ()):
                at = self.known.source(canonical.NAMES, each.weight)
                if at is not None:
                    yield Move(at, self._member(number, "param_names", position), KEEP)

    @property
    def started(self) -> bool:
        """Whether there are moments at all; torch keeps no state before the first update."""
        return any(map(self._begun, self.parameters))

    def _begun(self, parameter: Parameter) -> bool:
        """Return whether the parameter has moments; torch keeps none of what never had a gradient."""
        return any(True for _ in self._slots(parameter))

    def added(self) -> dict[Path, Leaf | ValueLeaf]:
        """Return the defaults of what the source does not hold, and the list of parameter numbers."""
        values: dict[Path, Leaf | ValueLeaf] = {}
        count = 0
        for number, group in enumerate(self.groups):
            for setting, target in self._settings(number):
                if self.known.source(setting, group[0].weight) is None:
                    values[target] = ValueLeaf(self.known.value(setting, group[0].weight))
            for position, each in enumerate(group):
                values[self._member(number, "params", position)] = ValueLeaf(count)
                count += 1
                if self._named and self.known.source(canonical.NAMES, each.weight) is None:
                    told = self.known.value(canonical.NAMES, each.weight)
                    name = told or ".".join(str(step.value) for step in each.target[1:])
                    values[self._member(number, "param_names", position)] = ValueLeaf(name)
        for number, each in enumerate(self.parameters):
            if self._begun(each) and self._uncounted:
                values[*self._state(number), key("step")] = ToTensor("float32").leaf(ValueLeaf(0, "counter"))
            for theirs in self.family.torch_slots:
                if self.known.has(theirs, each.weight) and not self._own(theirs, each):
                    values[*self._state(number), key(theirs)] = ValueLeaf(None)
        return values

    def containers(self) -> dict[Path, Container]:
        """Return the dicts, lists and the tuples of a torch optimizer's state_dict."""
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
        """Return what need not be written: torch has no state before the first update, so no count of 0.

        SGD never has a count: the sidecar tells it. What a group says once its weights need not repeat.
        """
        found = [
            path
            for name, path in self.known.flat()
            if len(path) > 2 and path[1].value != canonical.NAMES and not is_state(str(path[1].value))
        ]
        if not self._named:
            found += [path for _, path in self.known.flat() if path[1].value == canonical.NAMES]
        step = canonical.setting(self.name, "step")
        if step in self.agent and (not self.family.counts or (not self.started and self._steps == 0)):
            found.append(step)
        return found

    def missing(self) -> list[str]:
        """Return the moments that other weights of the network have and one lacks, and what scales them."""
        lost = []
        for number, parameter in enumerate(self.parameters):
            wanted = [*self.family.always, *(s for s in self.family.slots if s in self.known.slots)]
            lost += [
                f"{self.name}/state/{number}/{self.family.torch_slot(slot)}"
                for weight in parameter.weights
                for slot in dict.fromkeys(wanted if self._begun(parameter) or not self.family.zeros else ())
                if not self._has(slot, weight) or self._lacks_rate(slot, weight)
            ]
        if self.started and self.family.uses_count and canonical.setting(self.name, "step") not in self.agent:
            lost.append(f"{self.name}/state/0/step")
        if self.known.momentum_unknown:
            lost.append(f"{self.name}/param_groups/0/momentum")
        if any(True for _ in self._decays_beside()):
            lost.append(f"{self.name}/param_groups/0/weight_decay")
        return list(dict.fromkeys(lost))

    def notes(self) -> list[str]:
        """Return what people should know: groups, a count that stays behind, numbers that were computed."""
        found = []
        if len(self.groups) > 1:
            sizes = " and ".join(str(len(group)) for group in self.groups)
            found.append(
                f"{self.name} has {len(self.groups)} parameter groups, of {sizes} parameters"
                f"{': param_names lists them' if self._named else ''}"
            )
        if self.known.momentum_unknown:
            found.append(f"{self.name}: give its momentum, --optimizer {self.name}/momentum=0.9")
        found += [
            f"{self.name}: Keras's {self.family.name} decays weights beside the gradient "
            f"(weight_decay={rate}) and PyTorch's adds the decay to the gradient: {WITHOUT}"
            for rate in sorted(set(self._decays_beside()))
        ]
        if self.started and self._uncounted:
            found.append(
                f"{self.name}: its count of updates is not stored; {self.family.name} does not use it"
            )
        scaled = [
            (slot, weight)
            for parameter in self.parameters
            for _, weight, slot in self._slots(parameter)
            if slot == VELOCITY
        ]
        if any(self._lacks_rate(*each) for each in scaled):
            found.append(
                f"{self.name}: its velocity holds the learning rate, which nobody tells: "
                f"--optimizer {self.name}/learning_rate=..."
            )
        elif any(self._scale(*each) != KEEP for each in scaled):
            found.append(f"{self.name}: momentum is divided by the learning rate, and rounded")
        return found

    def told(self) -> dict[str, dict[str, Setting]]:
        """Return what torch has no place for and the sidecar tells: SGD's count of updates."""
        step = canonical.setting(self.name, "step")
        if self.family is not SGD or step not in self.agent:
            return {}
        return {self.name: {"step": self._steps}}

    def _decays_beside(self) -> Iterator[float]:
        """Go through the decays beside the gradient that PyTorch's class cannot do: Adam's alone can."""
        for parameter in self.parameters if self.family is not ADAM else ():
            rate = self.known.number("weight_decay", parameter.weight)
            decoupled = self.known.value("decoupled_weight_decay", parameter.weight) is True
            # Without momentum both are one subtraction of rate * decay * weight.
            plain = self.family is SGD and self.known.idle(parameter.weight)
            if rate and decoupled and not plain:
                yield rate

    @property
    def _steps(self) -> Setting:
        return self.known.value("step")

    @property
    def _uncounted(self) -> bool:
        counted = canonical.setting(self.name, "step") in self.agent
        return self.family.counts and not self.family.uses_count and not counted

    @property
    def _named(self) -> bool:
        """Whether the groups say their parameters' names: several do, unless the source's groups had none."""
        said = all(self.known.has(canonical.NAMES, each.weight) for each in self.parameters)
        told = any(self.known.has(canonical.GROUP, each.weight) for each in self.parameters)
        return said or (len(self.groups) > 1 and not told)

    def _slots(self, parameter: Parameter) -> Iterator[tuple[str, Move, str]]:
        """Go through a parameter's moments: torch's name, the weight's move, the canonical slot."""
        for theirs, ours in self.family.torch_slots.items():
            for weight in parameter.weights:
                for slot in (ours, VELOCITY) if ours == BUFFER else (ours,):
                    if self._has(slot, weight):
                        yield theirs, weight, slot

    def _has(self, slot: str, weight: Move) -> bool:
        return canonical.slot(self.name, slot, weight.source) in self.agent

    def _own(self, theirs: str, parameter: Parameter) -> bool:
        return canonical.slot(self.name, theirs, parameter.weight) in self.agent

    def _scale(self, slot: str, weight: Move) -> Rule:
        """Return the rule that takes the learning rate out of a velocity; one that nothing reads stays."""
        rate = self.known.number("learning_rate", weight.source)
        if slot != VELOCITY or not rate or self.known.idle(weight.source):
            return KEEP
        return Scaled(self.family.folded * rate, divide=True)

    def _lacks_rate(self, slot: str, weight: Move) -> bool:
        if slot != VELOCITY or self.known.idle(weight.source):
            return False
        told = self.known.has("learning_rate", weight.source)
        return not (told and self.known.number("learning_rate", weight.source))

    def _settings(self, number: int) -> list[tuple[str, Path]]:
        """Return the settings of a group with their places."""
        first = self.groups[number][0].weight
        return [(ours, self._target(number, theirs)) for ours, theirs in settings(self.known, first)]

    def _target(self, number: int, theirs: str) -> Path:
        name, _, position = theirs.partition("/")
        return (*self._group(number), key(name), *((index(int(position)),) if position else ()))

    def _group(self, number: int) -> Path:
        return (self.top, key("param_groups"), index(number))

    def _member(self, number: int, name: str, position: int) -> Path:
        return (*self._group(number), key(name), index(position))

    def _state(self, number: int) -> Path:
        return (self.top, key("state"), key(number))
