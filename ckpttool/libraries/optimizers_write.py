"""Writing optimizer state: one canonical optimizer as an object of Keras or as torch's state_dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpttool.core.errors import MappingError
from ckpttool.core.optimizers import (
    ADAM,
    BUFFER,
    FLAGS,
    HOW,
    SGD,
    VELOCITY,
    OptimizerFamily,
    SlotSpec,
    list_torch_settings,
)
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, attr, display, index, key
from ckpttool.libraries import schema
from ckpttool.libraries.optimizer_entries import WITHOUT
from ckpttool.libraries.optimizers_read import PLACES, CanonicalOptimizer, Setting, is_state, make_zero_tensor
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

_DECAY, _DECOUPLED = "weight_decay", "decoupled_weight_decay"
# Keras 2's learning rate decay, which torch keeps unused, has no effect if it is 0.
_HARMLESS: Mapping[str, Setting] = {"decay": 0, "maximize": False, "dampening": 0, "lr_decay": 0, _DECAY: 0}

_NO_COUNT = f"{{}}: the number of its updates is unknown; {WITHOUT}"


def make_tensor_rule(leaf: Leaf | ValueLeaf, dtype: str) -> Rule:
    """Return the rule that converts a number to a tensor of the dtype."""
    return KEEP if isinstance(leaf, Leaf) and leaf.dtype == dtype else ToTensor(dtype)


def _setting(path: Path) -> tuple[str, Path | None]:
    """Return the name of a setting, and the weight that it belongs to, None for a setting of all."""
    weight = path[2:] if path[0].value == schema.JOINT else path[1:]  # as in schema.canonical_slot_path
    return str(path[1].value), weight if len(path) > 2 else None


# Keras 3; Keras 2 up to 2.10, later `optimizers.legacy`; Sonnet.
KERAS, LEGACY, SONNET = "keras", "legacy", "sonnet"
_PLACES = {KERAS: {"step": "_iterations", "learning_rate": "_learning_rate"}, LEGACY: {"step": "iter"}}


class _OptimizerWriter:
    """One canonical optimizer in a target; `weights` are its networks' moves in the target's order."""

    def __init__(self, known: CanonicalOptimizer, weights: Sequence[Move]) -> None:
        self.known, self.weights = known, weights
        self.name, self.family, self.agent = known.name, known.family, known.agent
        self._moves: list[Move] = []
        self._added: dict[Path, Leaf | ValueLeaf] = {}

    def _put(self, target: Path, source: Path | None, rule: Rule, value: Leaf | ValueLeaf) -> None:
        """Write what the agent stores, or a value if it stores nothing."""
        if source is not None:
            self._moves.append(Move(source, target, rule))
        else:
            self._added[target] = value

    def _stored(self, slot: str, weight: Move) -> Path | None:
        """Return where the agent stores a slot of a weight; gradient sums have two forms."""
        kinds = (VELOCITY, BUFFER) if slot in (VELOCITY, BUFFER) else (slot,)
        paths = (schema.canonical_slot_path(self.name, kind, weight.source) for kind in kinds)
        return next((path for path in paths if path in self.agent), None)

    def _rescaled(self, source: Path, weight: Move, form: str) -> tuple[Rule, bool]:
        """Return the rule that converts gradient sums to a form, and whether their learning rate is given.

        Unused sums stay unchanged.
        """
        stored = source[1].value
        if stored not in (VELOCITY, BUFFER) or stored == form or self.known.idle(weight.source):
            return KEEP, True
        rate = self.known.number("learning_rate", weight.source)
        rule = Scale(self.family.folded * rate, divide=form == BUFFER) if rate else KEEP
        return rule, bool(rate) and self.known.has("learning_rate", weight.source)


class KerasOptimizerWriter(_OptimizerWriter):
    """One canonical optimizer as an object at `top`, in one of the forms above.

    Several weights may form one variable. An optimizer that is `scheduled` has no variable for its learning
    rate, which the program computes with a schedule.

    Sources: keras/src/optimizers/base_optimizer.py, `build` and `add_optimizer_variables`: `_variables`
    lists the iteration count, the learning rate, then the slots, in rounds over the trained variables
    (Adam's momentum and velocity in one, its velocity_hats in the next). The weights of Keras 2 own the
    moments, and betas, rho and momentum are variables as well (keras/optimizer_v2/optimizer_v2.py,
    `_create_all_weights`). Sonnet's Adam has an update count and lists of moments named after their
    variables (sonnet/src/optimizers/adam.py in github.com/google-deepmind/sonnet).
    """

    def __init__(
        self,
        known: CanonicalOptimizer,
        variable: str,
        weights: Sequence[Move],
        top: Path,
        *,
        form: str = KERAS,
        scheduled: bool = False,
    ) -> None:
        """Store a canonical optimizer, which trains the `weights`, for the object at `top`.

        Keras names its variables `variable/...` (adam, adam_1), those of another class after that class.
        """
        super().__init__(known, weights)
        self.form, self.scheduled, self.top = form, scheduled, top
        self.decays = [known.number(_DECAY, weight.source) or 0.0 for weight in weights]
        self.rates = sorted({rate for rate in self.decays if rate})
        self.variable = variable.replace("adam", "adam_w" if self.decoupled else self.family.keras_name, 1)
        targets = dict.fromkeys(weight.target for weight in weights)
        self.numbers = {target: number for number, target in enumerate(targets)}

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is decoupled from the gradient: the class is AdamW."""
        return self.family is ADAM and self.known.value(_DECOUPLED) is True and bool(self.rates)

    @property
    def plain(self) -> list[Path]:
        """The variables that are exempt from a decoupled weight decay."""
        pairs = zip(self.weights, self.decays, strict=True)
        return [weight.target for weight, rate in pairs if not rate] if self.decoupled else []

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that Keras's optimizer has with these settings, in its order."""
        return tuple(spec.name for spec in self.family.specs if self._exists(spec))

    def _exists(self, spec: SlotSpec) -> bool:
        if spec.name == VELOCITY:
            return not self.known.idle(self._first)
        return not spec.setting or spec.name in self.known.slots or self.known.value(spec.setting) is True

    @property
    def constructor(self) -> str | None:
        """The Python expression that creates the optimizer; None if Keras's defaults are sufficient."""
        known, arguments = self.known, self.family.arguments
        # Defaults of the source's library that Keras's class does not share.
        own = {name: default.value for name, default in self.family.defaults.items()}
        foreign = {n for n, default in known.defaults.items() if n in own and default.value != own[n]}
        names = [n for n in arguments if n not in FLAGS and (known.has(n) or n in foreign)]
        # Keras refuses integers where it expects a float.
        shown = [f"{name}={float(v) if isinstance(v := known.value(name), int) else v}" for name in names]
        shown += [f"{name}=True" for name in arguments if name in FLAGS and known.value(name) is True]
        if self.decoupled and len(self.rates) == 1:
            shown.append(f"weight_decay={self.rates[0]}")
        cls = "AdamW" if self.decoupled else self.family.name
        return f"keras.optimizers.{cls}({', '.join(shown)})" if shown else None

    def plan(self) -> Plan:
        """Return the optimizer's part of a plan; missing state gets Keras's initial values."""
        known, family, slots = self.known, self.family, self.slots
        variables, started = self._variables(), bool(known.slots)
        # Before the first update torch has no moments, nor has Keras 2, and Keras has zeros; later only new
        # momentum starts at zero.
        zeros = set(slots) if self.form != LEGACY else set()
        if started:
            zeros = set() if known.slots & {BUFFER, VELOCITY} else {VELOCITY}
        labels: dict[Path, Label] = {}
        lost: list[str] = []
        unscaled: list[str] = []
        without = 0
        for name, (path, dtype) in variables.items():
            title = "iteration" if name == "step" else name
            labels[path] = Label("counter" if name == "step" else "other", f"{self.variable}/{title}")
            source = known.source(name, self._first)
            value = ValueLeaf(known.number(name) or 0, labels[path].role)
            rule = make_tensor_rule(value if source is None else self.agent[source], dtype)
            self._put(path, source, rule, ToTensor(dtype).leaf(value))
        for weight in self.weights:
            sources = {slot: self._stored(slot, weight) for slot in slots}
            has_state = any(sources.values())  # torch has no moments without a gradient
            without += not has_state
            for slot, source in sources.items():
                path = self._moment(slot, weight.target)
                labels[path] = self._label(slot, weight.target)
                if source is not None:
                    scale, exact = self._rescaled(source, weight, VELOCITY)
                    self._moves.append(Move(source, path, compose_rules(scale, weight.rule)))
                    unscaled += [] if exact else [display(path)]
                elif family.zeros and (slot in zeros or not has_state):
                    self._added[path] = self._zeros(weight)
                else:
                    lost.append(display(path))
        if started and family.uses_count and not known.has("step"):
            lost.append(display(variables["step"][0]))
        kept = list(self._kept(variables))
        # Gradient sums that Keras does not keep, because they are unused.
        unused = VELOCITY in family.keras_slots and VELOCITY not in slots
        idle = [sums for weight in self.weights if unused and (sums := self._stored(VELOCITY, weight))]
        stated = {name: value for name, value in known.stated.items() if name != "step"}
        own = {name: known.value(*_setting(path)) for name, path in kept}
        return Plan(
            tuple(self._moves),
            self._added,
            labels=labels,
            aliases=self._aliases(variables) if self.form == KERAS else {},
            assumed=tuple(self._assumed(variables, without if started and family.zeros else 0)),
            missing=tuple(dict.fromkeys((*lost, *unscaled))),
            consumed=(*(path for _, path in kept), *idle),
            notes=tuple(self._notes(kept, unscaled=bool(unscaled))),
            settings={self.name: {**stated, **own}},
        )

    def _variables(self) -> dict[str, tuple[Path, str]]:
        """Return the settings that are variables, each with its path and dtype."""
        rates = {LEGACY: self.family.legacy_variables, KERAS: () if self.scheduled else ("learning_rate",)}
        names = ("step", *rates.get(self.form, ()))
        edges = _PLACES.get(self.form, {})
        return {
            name: ((*self.top, attr(edges.get(name, name))), "int64" if name == "step" else "float32")
            for name in names
        }

    def _moment(self, slot: str, target: Path) -> Path:
        """Return the path of a variable's moment, which has no edge in Keras 2."""
        spec = self.family.keras_slots[slot]
        if self.form == LEGACY:
            from ckpttool.formats.tf_object_graph import slot_path  # recognition loads this module too

            return slot_path(self.top, spec.keras, target)
        return (*self.top, attr(slot if self.form == SONNET else spec.edge), index(self.numbers[target]))

    def _label(self, slot: str, target: Path) -> Label:
        """Return the moment's label with the library's name for it."""
        spec, name = self.family.keras_slots[slot], display(target[1:])
        names = {LEGACY: f"{name}/{self.variable}/{spec.keras}", SONNET: f"adam/{slot}/{name}"}
        keras = f"{self.variable}/{'_'.join(name.split('/'))}_{spec.ending}"
        return Label("slot", names.get(self.form, keras), target, spec.keras)

    def _aliases(self, variables: Mapping[str, tuple[Path, str]]) -> dict[Path, tuple[Path, ...]]:
        """Return Keras's lists of the same variables, as further paths of each."""
        slots = self.slots
        order = [path for path, _ in variables.values()]
        for kinds in self.family.keras_rounds:
            own = [slot for slot in kinds if slot in slots]
            order += [self._moment(slot, target) for target in self.numbers for slot in own]
        lists = (("_variables", enumerate(order)), ("_trainable_variables", enumerate(self.numbers)))
        return {path: ((*self.top, attr(name), index(n)),) for name, own in lists for n, path in own}

    @property
    def _first(self) -> Path | None:
        return self.weights[0].source if self.weights else None

    def _zeros(self, weight: Move) -> Leaf:
        leaf = weight.rule.leaf(self.agent[weight.source])
        if not isinstance(leaf, Leaf):
            raise MappingError("a weight is not a tensor", path=display(weight.target))
        return make_zero_tensor(leaf)

    def _kept(self, variables: Mapping[str, object]) -> Iterator[tuple[str, Path]]:
        """Yield the settings that are arguments of Keras's class or layers, and not variables.

        The learning rate is both: the variable holds it rounded to float32. Of several groups, Keras has
        the settings of the first. Settings that change the updates and have no counterpart in Keras are
        excluded, and stay unmapped.
        """
        arguments = {*self.family.arguments, *variables, *HOW, *PLACES, "learning_rate", _DECOUPLED}
        arguments |= {_DECAY} if self._can_decay else set()
        for name, path in self.known.flat():
            setting, weight = _setting(path)
            harmless = setting in _HARMLESS and self.known.value(setting, weight) == _HARMLESS[setting]
            if setting in arguments or harmless or is_state(setting):
                yield name, path

    @property
    def _can_decay(self) -> bool:
        """Whether Keras can apply the decay: decoupled at one rate, or as L2 in the loss.

        Older versions of torch's Adam do not record which of the two their decay is.
        """
        if self.family is not ADAM:
            return True
        if self.known.value(_DECOUPLED) is not True:
            return self.known.has(_DECOUPLED)
        return len(self.rates) <= 1

    def _assumed(self, variables: Iterable[str], without: int) -> Iterator[str]:
        for name in variables:
            if name in self.known.defaults and not self.known.has(name, self._first):
                yield self.known.assumed(name)
        if self.family is SGD and not self.known.has("step"):
            yield f"{self.name} iterations = 0 (the source's SGD does not count its updates)"
        if without:
            yield f"{self.name}: zero moments for {without} tensors that it never updated"

    def _notes(self, kept: Sequence[tuple[str, Path]], *, unscaled: bool) -> Iterator[str]:
        """Yield what is missing, and what a program must configure so that training resumes unchanged."""
        known, name = self.known, self.name
        if known.slots and self.family.uses_count and not known.has("step"):
            yield _NO_COUNT.format(name)
        if unscaled:
            yield f"{name}: Keras's momentum includes the learning rate, which is " + (
                f"0 in the checkpoint; {WITHOUT}"
                if known.has("learning_rate", self._first)
                else f"missing from the checkpoint; pass --optimizer {name}/learning_rate=0.001"
            )
        yield from self._settings_notes(kept)
        if BUFFER in known.slots and known.number("learning_rate") and not known.idle():
            yield f"{name}: momentum is multiplied by the learning rate, with rounding"
        if self.scheduled:
            yield (
                f"{name} has no learning rate: build it with its schedule, or pass --optimizer "
                f"{name}/learning_rate=... for a constant one"
            )

    def _settings_notes(self, kept: Sequence[tuple[str, Path]]) -> Iterator[str]:
        known, name, cls = self.known, self.name, self.family.name
        if self.constructor is not None:
            yield f"{name}: restore into {self.constructor}"
        paths, known_settings = {path for _, path in kept}, {*self.family.torch_settings.values()}
        for setting in dict.fromkeys(str(path[1].value) for _, path in known.flat() if path not in paths):
            if setting in known_settings:
                yield f"{name}: Keras's {cls} does not support {setting}; {WITHOUT}"
        if self.plain:
            yield f"{name}: exclude from weight decay: {', '.join(map(display, self.plain))}"
        # The penalties of the loss: torch adds decay * w to a gradient, l2(c) adds 2 * c * w.
        for rate in self.rates if self._can_decay and not self.decoupled else ():
            pairs = zip(self.weights, self.decays, strict=True)
            mine = ", ".join(display(weight.target) for weight, decay in pairs if decay == rate)
            yield f"{name}: build with l2({rate / 2!r}) as the regularizer of {mine}"
        for setting in self.family.settings:
            values = list(dict.fromkeys(repr(known.value(setting, weight.source)) for weight in self.weights))
            if len(values) > 1:
                yield (
                    f"{name}: {setting} differs between PyTorch's parameter groups "
                    f"({' and '.join(values)}), but Keras's optimizer has one value for all: {values[0]} "
                    "is used, so updates differ; the sidecar keeps all values"
                )


_DICT, _LIST, _TUPLE = Container("dict"), Container("list"), Container("tuple")
# Defaults that need no note: they do not affect updates, or the state determines them.
_SILENT = frozenset((*HOW, "maximize", _DECOUPLED, "dampening", "centered", "lr_decay"))
# One torch parameter: the moves of the agent's weights in it, two if a layer is split in two. The first
# identifies its settings.
_Parameter = Sequence[Move]


class TorchOptimizerWriter(_OptimizerWriter):
    """One canonical optimizer as torch's state_dict.

    Source: torch/optim/optimizer.py, state_dict() and load_state_dict(): a group is a dict of settings and
    the parameters that they apply to; parameters are numbered through all groups; an optimizer loads a
    state_dict with the same number and sizes of groups as its own.
    """

    def __init__(self, known: CanonicalOptimizer, weights: Sequence[Move]) -> None:
        """Store a canonical optimizer, which trains the `weights`."""
        super().__init__(known, weights)
        places: dict[Path, list[Move]] = {}
        for move in weights:
            places.setdefault(move.target, []).append(move)
        self.groups = self._make_groups(list(places.values()))
        self.parameters = [parameter for group in self.groups for parameter in group]
        self.moments = [list(self._slots(parameter)) for parameter in self.parameters]
        # torch has no state before the first update, and none for parameters without a gradient.
        self.started = any(self.moments)
        self._step = schema.canonical_setting_path(self.name, "step")
        self._counted = self._step in self.agent
        self._uncounted = self.family.counts and not self.family.uses_count and not self._counted
        # Whether the groups list parameter names: several do, unless the source's groups had none.
        named = all(self.known.has(schema.NAMES, parameter[0].source) for parameter in self.parameters)
        grouped = any(self.known.has(schema.GROUP, parameter[0].source) for parameter in self.parameters)
        self._named = named or (len(self.groups) > 1 and not grouped)

    def _make_groups(self, parameters: Sequence[_Parameter]) -> list[list[_Parameter]]:
        """Return the groups: as in the source if known, else one per set of settings."""
        known = self.known
        names = [name for name in known.settings if name not in (*PLACES, "step") and not is_state(name)]
        marks = [known.value(schema.GROUP, parameter[0].source) for parameter in parameters]
        values = [tuple(repr(known.value(name, param[0].source)) for name in names) for param in parameters]
        numbered = all(isinstance(mark, int) for mark in marks)
        fits = numbered and len(set(zip(marks, values, strict=True))) == len(set(marks))
        by_settings: dict[object, list[_Parameter]] = {}
        for parameter, mark, own in zip(parameters, marks, values, strict=True):
            by_settings.setdefault(mark if fits else own, []).append(parameter)
        order = sorted(by_settings, key=lambda mark: int(str(mark))) if fits else list(by_settings)
        groups = [by_settings[mark] for mark in order]
        for group in groups:
            group.sort(key=lambda parameter: known.number(schema.NUMBER, parameter[0].source) or 0.0)
        return groups

    def plan(self, path: Path | None = None) -> Plan:
        """Return the whole state_dict as a plan, at `path` if that differs from the optimizer's name."""
        top = (key(self.name),) if path is None else path
        state, groups = (*top, key("state")), (*top, key("param_groups"))
        containers = {top: _DICT, state: _DICT, groups: _LIST}
        for number, parameter in enumerate(self.parameters):
            at = (*state, key(number))
            before = len(self._moves) + len(self._added)
            self._write_state(parameter, self.moments[number], at)
            if len(self._moves) + len(self._added) > before:
                containers[at] = _DICT
        count = 0
        for number, group in enumerate(self.groups):
            at = (*groups, index(number))
            containers |= {at: _DICT, (*at, key("params")): _LIST}
            if self.family.uses_count:
                containers[*at, key("betas")] = _TUPLE
            if self._named:
                containers[*at, key("param_names")] = _LIST
            self._write_settings(group[0][0].source, at)
            for position, member in enumerate(group):
                self._added[*at, key("params"), index(position)] = ValueLeaf(count)
                count += 1
                if self._named:
                    weight, target = member[0].source, member[0].target
                    source = self.known.source(schema.NAMES, weight)
                    known = None if source else self.known.value(schema.NAMES, weight)
                    name = ValueLeaf(known or ".".join(str(step.value) for step in target[1:]))
                    self._put((*at, key("param_names"), index(position)), source, KEEP, name)
        # SGD's update count, which torch cannot store and the sidecar does.
        stated = {self.name: {"step": self.known.value("step")}} if self._counted else {}
        return Plan(
            tuple(self._moves),
            self._added,
            containers,
            tuple(dict.fromkeys(self._assumed())),
            tuple(dict.fromkeys(self._missing())),
            tuple(self._consumed()),
            tuple(self._notes()),
            settings=stated if self.family is SGD else {},
        )

    def _write_settings(self, weight: Path, at: Path) -> None:
        known = self.known
        for setting, stored in self._list_settings(weight):
            name, _, position = stored.partition("/")
            target = (*at, key(name), *((index(int(position)),) if position else ()))
            rule = ToValue(exact=known.exact(setting, weight))
            source = known.source(setting, weight)
            self._put(target, source, rule, ValueLeaf(None if source else known.value(setting, weight)))

    def _list_settings(self, weight: Path) -> list[tuple[str, str]]:
        """Return a group's settings by canonical and torch's names: torch's own, then other known ones."""
        known, listed = self.known, list_torch_settings()
        own = {canonical: stored for stored, canonical in self.family.torch_settings.items()}
        others = [
            name
            for name in known.settings
            if name not in (*own, *PLACES, "step")
            and not is_state(name)
            and (known.source(name, weight) is not None or name not in listed)
        ]
        return [*own.items(), *((other, other) for other in others)]

    def _write_state(
        self, parameter: _Parameter, moments: Sequence[tuple[str, Move, Path]], at: Path
    ) -> None:
        if moments and self.family.counts and (self._counted or self._uncounted):
            source = self._step if self._counted else None
            stored = source is not None and isinstance(self.agent[source], Leaf)
            zero = ToTensor("float32").leaf(ValueLeaf(0, "counter"))
            self._put((*at, key("step")), source, Cast("float32") if stored else ToTensor("float32"), zero)
        for torch_name, weight, source in moments:
            if not self._lacks_rate(source, weight):
                rule = compose_rules(weight.rule, self._rescaled(source, weight, BUFFER)[0])
                self._moves.append(Move(source, (*at, key(torch_name)), rule))
        # An old SGD without momentum stores None.
        for slot in self.family.torch_slots:
            source = schema.canonical_slot_path(self.name, slot, parameter[0].source)
            if source in self.agent:
                self._moves.append(Move(source, (*at, key(slot)), KEEP))
            elif self.known.has(slot, parameter[0].source):
                self._added[*at, key(slot)] = ValueLeaf(None)

    def _slots(self, parameter: _Parameter) -> Iterator[tuple[str, Move, Path]]:
        """Yield a parameter's moments: torch's name, the weight's move, and where the agent stores it."""
        for stored, slot in self.family.torch_slots.items():
            for weight in parameter:
                source = self._stored(slot, weight)
                if source is not None:
                    yield stored, weight, source

    def _lacks_rate(self, source: Path, weight: Move) -> bool:
        """Return whether the learning rate in gradient sums is unknown, or changes with every update."""
        if self._rescaled(source, weight, BUFFER) == (KEEP, True):
            return False
        return not self._rescaled(source, weight, BUFFER)[1] or bool(self.known.number("decay"))

    @property
    def _lacks_count(self) -> bool:
        return self.started and self.family.uses_count and not self._counted

    @property
    def _decays_beside(self) -> list[float]:
        """The decoupled decay rates that PyTorch's class does not support: only Adam's does."""
        rates = set()
        for weight in (parameter[0].source for parameter in self.parameters if self.family is not ADAM):
            rate = self.known.number(_DECAY, weight)
            # Without momentum both subtract rate * decay * weight.
            plain = self.family is SGD and self.known.idle(weight)
            if rate and self.known.value(_DECOUPLED, weight) is True and not plain:
                rates.add(rate)
        return sorted(rates)

    def _assumed(self) -> Iterator[str]:
        """Yield a sentence for every default that training depends on."""
        known = self.known
        for weight in (group[0][0].source for group in self.groups):
            for setting, _ in self._list_settings(weight):
                silent = setting in _SILENT or known.certain.get(setting)
                if setting in known.defaults and not silent and not known.has(setting, weight):
                    yield known.assumed(setting)
        without = sum(not moment for moment in self.moments)
        if self.started and without:
            yield f"{self.name} never updated {without} of {len(self.parameters)} parameters"

    def _missing(self) -> Iterator[str]:
        """Yield the moments that other weights of the network have and one lacks, and unknown scales."""
        family, known = self.family, self.known
        required = dict.fromkeys((*family.always, *(s for s in family.slots if s in known.slots)))
        for number, parameter in enumerate(self.parameters):
            for weight in parameter if self.moments[number] or not family.zeros else ():
                for slot in required:
                    source = self._stored(slot, weight)
                    if source is None or self._lacks_rate(source, weight):
                        yield f"{self.name}/state/{number}/{family.torch_slot(slot)}"
        if self._lacks_count:
            yield f"{self.name}/state/0/step"
        if known.momentum_unknown:
            yield f"{self.name}/param_groups/0/momentum"
        if self._decays_beside:
            yield f"{self.name}/param_groups/0/weight_decay"

    def _consumed(self) -> Iterator[Path]:
        """Yield what need not be written: without state torch has no count, so a count of 0 is dropped.

        SGD never has a count: the sidecar stores it. Settings stored once per group need not repeat per
        weight.
        """
        flat = [path for _, path in self.known.flat()]
        names = [path for path in flat if path[1].value == schema.NAMES]
        yield from (p for p in flat if len(p) > 2 and p not in names and not is_state(str(p[1].value)))
        yield from names if not self._named else ()
        unused = not self.family.counts or (not self.started and self.known.value("step") == 0)
        if self._counted and unused:
            yield self._step

    def _notes(self) -> Iterator[str]:
        """Yield notes for people: groups, an update count that is not converted, computed numbers."""
        name, cls, decay = self.name, self.family.name, self.known.number("decay")
        if self._lacks_count:
            yield _NO_COUNT.format(name)
        if len(self.groups) > 1:
            sizes = " and ".join(str(len(group)) for group in self.groups)
            listed = ": param_names lists them" if self._named else ""
            yield f"{name} has {len(self.groups)} parameter groups, of {sizes} parameters{listed}"
        if self.known.momentum_unknown:
            yield f"{name}: momentum is missing; pass --optimizer {name}/momentum=0.9"
        for rate in self._decays_beside:
            yield (
                f"{name}: Keras's {cls} applies weight decay separately from the gradient "
                f"(weight_decay={rate}), PyTorch's adds it to the gradient; {WITHOUT}"
            )
        if decay:
            yield (
                f"{name}: the learning rate is divided by 1 + {decay} * updates at each update (decay); "
                "in PyTorch use torch.optim.lr_scheduler.LambdaLR"
            )
        if self.started and self._uncounted:
            yield f"{name}: its update count is not stored; {cls} does not use it"
        scaled = [(source, weight) for moment in self.moments for _, weight, source in moment]
        if any(self._lacks_rate(*moment) for moment in scaled):
            yield f"{name}: its velocity includes the learning rate, which " + (
                f"changes with every update; {WITHOUT}"
                if decay
                else f"is unknown; pass --optimizer {name}/learning_rate=..."
            )
        elif any(self._rescaled(*moment, BUFFER)[0] != KEEP for moment in scaled):
            yield f"{name}: momentum is divided by the learning rate, with rounding"


def list_epsilon_notes(
    agent: Tree, source: str, target: str, names: Iterable[str] = schema.OPTIMIZERS
) -> tuple[str, ...]:
    """Return a note for each kind of optimizer whose epsilon means different things in the two frameworks.

    The state and the settings are the same. Source of an exception: tf_keras/src/optimizers/legacy/rmsprop.py
    adds epsilon as torch does unless there is momentum.
    """
    named: dict[OptimizerFamily, list[str]] = {}
    for name in names if source != target else ():
        if any(path[0] == attr(name) for path in agent):
            named.setdefault(CanonicalOptimizer(name, agent, {}, {}).family, []).append(name)
    return tuple(
        f"{' and '.join(mine)}: epsilon keeps its value, but {family.epsilon}; updates differ where "
        "gradients are about as small as epsilon"
        for family, mine in named.items()
        if family.epsilon
    )
