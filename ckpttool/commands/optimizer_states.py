"""Read the optimizer state of a checkpoint by its own tree, and write it for another framework.

An optimizer is matched to the parameters that it trains by the object graph, by names, or by PyTorch's own
rule (the order of param_groups is the order of the parameters, confirmed by the shapes of all slots). Its
canonical form is between both sides (libraries/optimizers_read.py, optimizers_write.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.commands import options
from ckpttool.commands.restore import canonical_tree, read_any_sidecar
from ckpttool.core.errors import UnsupportedError, UsageError, abbreviate_list, suggest_choice
from ckpttool.core.tree import Leaf, Path, Tree, attr, display, index
from ckpttool.formats.detect import open_checkpoint
from ckpttool.formats.tf_object_graph import slot_optimizer
from ckpttool.libraries import optimizers_read, optimizers_write, schema
from ckpttool.libraries.optimizers_read import (
    ADAM,
    ADAMW,
    FAMILIES,
    MORE_SLOTS,
    OTHERS,
    POWERS,
    VELOCITY,
    WITHOUT,
    CanonicalOptimizer,
    make_unconverted_note,
)
from ckpttool.libraries.optimizers_write import BoundOptimizer, bind_torch_optimizers, list_torch_optimizers
from ckpttool.libraries.recognize import OptimizerMoves, StoredOptimizer
from ckpttool.mapping.layers import Name
from ckpttool.mapping.rules import (
    KEEP,
    Move,
    MoveList,
    Plan,
    Rule,
    Settings,
    SumTerm,
    chain_rules,
    compose_plans,
    rule_steps,
)
from ckpttool.networks.model_training import choose_optimizer

_NETWORKS = attr("networks")  # component of all weights in the canonical tree of an optimizer
OPTIMIZER = "optimizer"
_KNOWN_SLOTS = frozenset(slot.kind for family in FAMILIES for slot in family.keras_slots.values())
_ITERATIONS = frozenset(("_iterations", "iterations", "iter", "step"))
# The numbered variables of an object in a Keras file (formats/keras_h5.py).
_VARS = re.compile(r"/vars/\d+\Z")
_RATES = frozenset(("_learning_rate", "learning_rate"))
# Settings in the configuration of a Keras optimizer, under their names here.
_CONFIGURED = frozenset(("learning_rate", "beta_1", "beta_2", "epsilon", "amsgrad", "rho", "momentum")) | {
    "initial_accumulator_value",
    "centered",
    "nesterov",
    "weight_decay",
}
_SPARSE = (
    "for embeddings, Keras updates only the rows that a batch reads, PyTorch all rows (unless "
    "Embedding is sparse)"
)
# Edges between a Keras model and its layers: their targets belong to the model itself
# (keras/src/models/{sequential,functional}.py; tf_keras: layer_with_weights-0, layer-1).
_INNER = re.compile(r"_functional|_layers|_operations|layers|layer_with_weights-\d+|layer-\d+")
_AVERAGE = "average"  # slot kind (formats/tf_common.py)
_SECOND_BIAS = re.compile(r"bias_hh_(l\d+(?:_reverse)?)")


class ConversionUnit(NamedTuple):
    """One layer, or one tensor outside layers, under its names in the target."""

    moves: tuple[tuple[Path, Name, Rule], ...]
    added: Mapping[Name, Leaf]


def build_state_plan(
    tree: Tree,
    state: BoundOptimizer,
    canonical_paths: Mapping[Path, Path],
    write: Callable[[Tree], Plan],
    more: Iterable[Move] = (),
) -> Plan:
    """Return the plan of one optimizer, which `write` builds from its canonical tree."""
    weights = [Move(path, canonical_paths[path], KEEP) for path in state.weights]
    moves = (*weights, *state.moves.moves, *more)
    agent = canonical_tree(tree, MoveList(moves))
    first = Plan(moves, consumed=tuple(state.moves.consumed))
    made = compose_plans(first, write(agent))
    assumed = (state.moves.assumed,) if state.moves.assumed else ()
    return replace(made, assumed=(*assumed, *made.assumed))


def name_canonical_paths(names: Mapping[Path, Name]) -> dict[Path, Path]:
    """Return the canonical path of each weight, by its TensorFlow name."""
    taken: set[Path] = set()
    found = {}
    for source, name in names.items():
        path = (_NETWORKS, *map(attr, name))
        number = 0
        while path in taken:
            number += 1
            path = (_NETWORKS, *map(attr, name), index(number))
        taken.add(path)
        found[source] = path
    return found


class OptimizerSettings(NamedTuple):
    """Optimizer settings from the sidecar, and which of them a user gave."""

    settings: Settings
    stated: Sequence[tuple[str, str]] = ()

    def of(self, *names: str) -> Mapping[str, float | bool | str | None]:
        """Return the settings of the optimizer with these names; a single one may have another name."""
        found = [self.settings[name] for name in names if self.settings.get(name)]
        if found:
            return found[0]
        given = {name for name, _ in self.stated}
        own = [
            settings
            for name, settings in self.settings.items()
            if settings and name not in given and name not in schema.ALL_OPTIMIZED
        ]
        return own[0] if len(own) == 1 else {}

    def require(self, names: Collection[str]) -> None:
        """Raise UsageError for a given setting of an optimizer that does not exist."""
        for name, setting in self.stated:
            if name not in names:
                raise UsageError(
                    f"--optimizer {name}/{setting}: the checkpoint has no optimizer with that name",
                    hint=suggest_choice(name, sorted(names)) if names else "leave the option out",
                )

    def require_free(self, name: str, agent: Tree) -> None:
        """Raise UsageError for a given setting that the checkpoint itself contains."""
        for other, setting in self.stated:
            if other == name and schema.canonical_setting_path(name, setting) in agent:
                raise UsageError(
                    f"--optimizer {name}/{setting}: the checkpoint already contains this setting"
                )


class WrittenOptimizer(NamedTuple):
    """One optimizer of the target: its framework's class, arguments that decide which slots it has, weights.

    `groups` are the weights' paths in the target, in the optimizer's order; Keras has one group.
    `constructor` is the Python expression with all settings that creates it, if defaults do not suffice;
    `plain` are the weights exempt from Keras's weight decay.
    """

    cls: str
    arguments: Mapping[str, float | bool]
    groups: Sequence[Sequence[Path]]
    constructor: str | None = None
    plain: Sequence[Path] = ()


def _describe_torch(writer: optimizers_write.TorchOptimizerWriter) -> WrittenOptimizer:
    decoupled = writer.family is ADAM and writer.known.value("decoupled_weight_decay") is True
    groups = [[parameter.target for parameter in group] for group in writer.groups]
    return WrittenOptimizer("AdamW" if decoupled else writer.family.name, {}, groups)


def _describe_keras(writer: optimizers_write.KerasOptimizerWriter) -> WrittenOptimizer:
    has = set(writer.slots)
    wanted: dict[str, float | bool] = {"amsgrad": "vhat" in has, "centered": "mg" in has}
    arguments = {name: value for name, value in wanted.items() if value}
    if VELOCITY in has:
        arguments["momentum"] = 0.5
    cls = "AdamW" if writer.arguments.decoupled else writer.family.name
    plain = dict.fromkeys(weight.target for weight in writer.arguments.plain)
    return WrittenOptimizer(cls, arguments, [list(writer.numbers)], writer.arguments.constructor, list(plain))


# PyTorch's state_dicts.


class TorchStates:
    """The optimizers of a PyTorch tree."""

    def __init__(self, tree: Tree, settings: OptimizerSettings) -> None:
        self.tree, self.settings = tree, settings
        self.tops = list_torch_optimizers(tree)
        self.canonical: Mapping[Path, Path] = {}
        self.written: dict[str, WrittenOptimizer] = {}

    def bind_states(
        self, rows: Sequence[tuple[Path, Name, Rule]]
    ) -> tuple[list[BoundOptimizer], list[str], list[str]]:
        """Return the optimizers with the parameters that they train, notes, and assumptions.

        `rows` are the weights with their names in the target and their rules.
        """
        found: dict[str, dict[Path, None]] = {}
        names: dict[Path, Name] = {}
        for source, name, _ in rows:
            leaf = self.tree[source]
            names.setdefault(source, name)
            if isinstance(leaf, Leaf) and leaf.role == "parameter" and "float" in leaf.dtype:
                found.setdefault(display(source[:-1]), {})[source] = None
        order = {path: number for number, path in enumerate(self.tree)}
        networks = {name: tuple(sorted(own, key=order.__getitem__)) for name, own in found.items()}
        self.canonical = name_canonical_paths(names)
        return bind_torch_optimizers(self.tree, self.tops, networks, self.canonical)

    def write_keras(
        self,
        state: BoundOptimizer,
        number: int,
        rows: Sequence[tuple[Path, Name, Rule]],
        paths: Mapping[Name, Path],
        top: Path,
    ) -> Plan:
        """Return the plan of the optimizer as Keras's object at `top`, for variables in the rows' order.

        `number` distinguishes several optimizers in the names of their variables.
        """
        weights, twice = self._weights(state, rows, paths)
        title = display(top)
        equal = frozenset(self._repeated(state, {source: first for source, (_, first) in twice.items()}))
        state = state._replace(moves=_drop_repeated_slots(state.moves, equal))
        facts = self.settings.of(state.name, title)
        variable = f"adam_{number}" if number else "adam"

        def write(agent: Tree) -> Plan:
            self.settings.require_free(state.name, agent)
            writer = optimizers_write.KerasOptimizerWriter(
                CanonicalOptimizer(state.name, agent, facts, state.moves.defaults), variable, weights, top
            )
            self.written[state.name] = _describe_keras(writer)
            made = writer.plan()
            extra = tuple(self._unread(agent, made, state.name))
            epsilon_notes = optimizers_write.list_epsilon_notes(agent, "torch", "tensorflow", (state.name,))
            own = {title: made.settings.get(state.name, {})}
            return replace(made, kept=extra, notes=(*made.notes, *epsilon_notes), settings=own)

        plan = build_state_plan(self.tree, state, self.canonical, write)
        biases = {source: target for source, (target, _) in twice.items()}
        notes = (*self._bias_notes(title, state, biases, equal), *self._state_notes(title, state, rows))
        return replace(plan, notes=(*plan.notes, *notes))

    def write_torch(self, state: BoundOptimizer, weights: Sequence[Move], place: Path) -> Plan:
        """Return the plan of the optimizer's PyTorch state_dict at `place`, for parameters in that order."""
        facts = self.settings.of(state.name, display(place))

        def write(agent: Tree) -> Plan:
            self.settings.require_free(state.name, agent)
            writer = optimizers_write.TorchOptimizerWriter(
                state.name, weights, agent, facts, state.moves.defaults
            )
            self.written[state.name] = _describe_torch(writer)
            made = writer.plan(place)
            return replace(made, kept=tuple(self._unread(agent, made, state.name)))

        return build_state_plan(self.tree, state, self.canonical, write)

    def _weights(
        self, state: BoundOptimizer, rows: Sequence[tuple[Path, Name, Rule]], paths: Mapping[Name, Path]
    ) -> tuple[list[Move], dict[Path, tuple[Path, Path]]]:
        """Return the moves of trained weights, and each second bias with its target and its first bias."""
        trained = self._trained(state)
        weights: list[Move] = []
        rules: dict[Path, list[Rule]] = {}
        firsts: dict[Path, Path] = {}
        twice: dict[Path, tuple[Path, Path]] = {}
        for source, name, rule in rows:
            if source not in trained:
                continue
            parts = [step for step in rule_steps(rule) if not isinstance(step, SumTerm)]
            alone, known, target = chain_rules(*parts), rules.setdefault(source, []), paths[name]
            if alone in known:
                continue  # a layer with several names is one layer in Keras, with one set of moments
            if len(parts) < len(rule_steps(rule)) and target in firsts:
                twice[source] = target, firsts[target]
                continue
            known.append(alone)
            firsts.setdefault(target, source)
            weights.append(Move(self.canonical[source], target, alone))
        return weights, twice

    def _bias_notes(
        self, title: str, state: BoundOptimizer, twice: Mapping[Path, Path], equal: Collection[Path]
    ) -> Iterator[str]:
        """Yield notes on bias pairs that are merged; `twice` maps the second biases to their targets."""
        owners = state.moves.of or {}
        left = {path for path in equal if path in owners}
        open_ = {source for slot, source in owners.items() if source in twice and slot not in left}
        biases = [display(target) for source, target in twice.items() if source not in open_]
        apart = [display(twice[source]) for source in open_]
        if biases:
            yield (
                f"{title}: PyTorch trains two biases with equal moments, Keras trains their sum "
                f"({abbreviate_list(biases, 2)}) with these moments; in further training it moves half as "
                "fast"
            )
        if apart:
            yield (
                f"{title}: PyTorch trains two biases with separate moments, Keras trains their sum "
                f"({abbreviate_list(apart, 2)}); use --part {self._network(state)} to convert only the "
                "network, or --allow-missing to use the moments of bias_ih"
            )

    def _state_notes(
        self, title: str, state: BoundOptimizer, rows: Sequence[tuple[Path, Name, Rule]]
    ) -> Iterator[str]:
        """Yield notes on weights without state, and on embeddings."""
        trained = self._trained(state)
        frozen = [self.tree.names[path] for path in state.weights if path not in trained]
        if frozen:
            yield (
                f"{title} has no state for {abbreviate_list(frozen, 3)}; create the Keras optimizer "
                "without the variables that these become"
            )
        if any(name[-1] == "embeddings" for source, name, _ in rows if source in trained):
            yield f"{title}: {_SPARSE}"

    def _repeated(self, state: BoundOptimizer, twins: Mapping[Path, Path]) -> Iterator[Path]:
        """Yield the slots of second biases that equal those of the first biases.

        Two biases that are added have the same gradient, and therefore the same moments, unless the
        optimizer adds a term that differs, e.g. weight decay.
        """
        slots = {(owner, path[-1]): path for path, owner in (state.moves.of or {}).items()}
        for source, first in twins.items():
            pairs = [
                (path, slots.get((first, step))) for (owner, step), path in slots.items() if owner == source
            ]
            if all(other is not None and _is_equal(self.tree, path, other) for path, other in pairs):
                yield from (path for path, _ in pairs)

    def _network(self, state: BoundOptimizer) -> str:
        return display(state.weights[0][:-1]) or "the network"

    @staticmethod
    def _trained(state: BoundOptimizer) -> frozenset[Path]:
        """Return the parameters with state; before the first update there is none, so return all."""
        started = frozenset((state.moves.of or {}).values())
        return started or frozenset(state.weights)

    @staticmethod
    def _unread(agent: Tree, made: Plan, name: str) -> Iterator[Path]:
        """Yield the param_groups settings that no PyTorch optimizer reads, e.g. those of a scheduler."""
        known = {ours for family in FAMILIES for ours in family.torch_settings.values()}
        used = {move.source for move in made.moves} | set(made.consumed)
        for path in agent:
            if path[0] == attr(name) and path not in used and len(path) > 1:
                setting = str(path[1].value)
                if setting not in known and setting not in schema.SLOTS and setting != "step":
                    yield path


# Keras's and TensorFlow's objects.


class KerasStates:
    """The optimizers of a TensorFlow tree; with `root`, the tree itself is the model."""

    unnamed = OPTIMIZER
    root = False

    def __init__(self, tree: Tree, settings: OptimizerSettings) -> None:
        self.tree, self.settings = tree, settings
        self.canonical: Mapping[Path, Path] = {}
        self.written: dict[str, WrittenOptimizer] = {}
        self.stored = list_keras_optimizers(tree)
        tops = self.stored
        # A wrapping optimizer (LossScaleOptimizer) has no moments: PyTorch gets the inner one.
        self.around = frozenset(
            top for top in tops if any(top != other and other[:-1] == top for other in tops) and top
        )
        # Weight averages (use_ema, ExponentialMovingAverage), which no PyTorch optimizer has.
        self.averages = frozenset(path for path, leaf in tree.tensors() if leaf.slot == _AVERAGE)
        self.tops = {
            top: found
            for top, own in tops.items()
            if top not in self.around and (found := [path for path in own if path not in self.averages])
        }
        # Entries of optimizers without slots: counters and settings, which belong to no parameter.
        self.idle: set[Path] = {path for top in self.around for path in tops[top]} | self.averages

    def is_root(self, sources: Sequence[Path]) -> bool:
        """Return whether the root itself is a model, not a tf.train.Checkpoint with attributes."""
        held = self.tree.containers.get(())
        if held is not None and held.kind == "module":
            return True
        return any(len(path) < 3 or _INNER.fullmatch(str(path[0].value)) for path in sources)

    def bind_states(self, rows: Sequence[tuple[Path, Name, Rule]]) -> tuple[list[BoundOptimizer], list[str]]:
        """Return the optimizers with the parameters that they train, and notes; `rows` are the weights."""
        trained: dict[Path, None] = {}
        for source, _, _ in rows:
            leaf = self.tree[source]
            if isinstance(leaf, Leaf) and leaf.role == "parameter":
                trained[source] = None
        self.canonical = name_canonical_paths({p: tuple(self.tree.names[p].split("/")) for p in trained})
        states: list[BoundOptimizer] = []
        notes = list(self._beside())
        for top, own in self.tops.items():
            title = display(top) or self.unnamed
            notes += (*self._clipped(top, title), *self._scheduled(top, title))
            slots = [
                leaf for path in own if isinstance(leaf := self.tree[path], Leaf) and leaf.role == "slot"
            ]
            owners = {leaf.of for leaf in slots if leaf.of is not None}
            weights = tuple(path for path in trained if not owners or path in owners)
            if not slots and len({path[:1] for path in weights}) > 1 and not self.root:
                beside = (
                    [path for path in weights if path[: len(top) - 1] == top[:-1]] if len(top) > 1 else []
                )
                weights = tuple(beside)
            cls = self._class(top)
            if cls in OTHERS:
                notes.append(make_unconverted_note(title, str(cls)))
                continue
            prefix = self._prefix(top)
            entries = tuple((path, self.canonical[path], KEEP) for path in weights)
            bound = optimizers_read.from_keras(StoredOptimizer(title, prefix, self.tree, entries))
            note = bound.note or _unknown_slots_note(title, slots, bound)
            if note:
                notes.append(note)
                continue
            if not slots:
                self.idle.update(own)
            if weights:
                states.append(BoundOptimizer(title, top, bound, weights))
                others = [p for p in trained if p not in weights and p[:1] in {w[:1] for w in weights}]
                if slots and others:
                    notes.append(
                        f"{title} trains {len(weights)} of {len(weights) + len(others)} parameters; "
                        "create the PyTorch optimizer without "
                        f"{abbreviate_list([self.tree.names[p] for p in others], 3)}"
                    )
        return states, notes

    def _beside(self) -> Iterator[str]:
        """Yield notes on optimizer wrappers and weight averages."""
        for top in sorted(self.around, key=display):
            yield f"{display(top)} wraps the converted optimizer; PyTorch scales the loss elsewhere"
        if self.averages:
            yield (
                f"{len(self.averages)} weight averages are kept beside the target, which has no "
                "place for them"
            )

    def _prefix(self, top: Path) -> Name:
        if top:
            return tuple(display(top).split("/"))
        scopes = {path[:-1] for path in self.tops[top] if str(path[-1].value) in POWERS}
        return tuple(display(next(iter(scopes))).split("/")) if len(scopes) == 1 and () not in scopes else ()

    def _class(self, top: Path) -> str | None:
        held = self.tree.containers.get(top)
        return held.name.lower() if held is not None and held.kind == "module" and held.name else None

    def _named(self, agent: Tree, state: BoundOptimizer) -> Tree:
        """Return the tree with the update counter renamed to the file's name for the optimizer class."""
        path = schema.canonical_setting_path(state.name, "step")
        leaf, cls = agent.get(path), self._class(state.top)
        if cls is None or not isinstance(leaf, Leaf) or leaf.name:
            return agent
        return Tree({**agent, path: replace(leaf, name=f"{cls}/iteration")}, agent.aliases, agent.containers)

    def _configuration(self, top: Path) -> Mapping[str, Any]:
        """Return the optimizer's configuration in the file, {} if there is none."""
        held = self.tree.containers.get(top)
        return held.state if held is not None and isinstance(held.state, dict) else {}

    def _clipped(self, top: Path, title: str) -> Iterator[str]:
        """Yield a note for each setting that changes updates and that PyTorch handles outside optimizers."""
        state = self._configuration(top)
        if state.get("loss_scale_factor") is not None:
            yield (
                f"{title} has loss_scale_factor = {state['loss_scale_factor']}: Keras multiplies the loss "
                "and divides the gradients by it, PyTorch optimizers do neither; train without it"
            )
        for name in ("clipnorm", "global_clipnorm", "clipvalue"):
            if state.get(name) is not None:
                yield (
                    f"{title} has {name} = {state[name]}; PyTorch optimizers do not clip gradients, so "
                    "the program must do so before each step"
                )

    def _first_rate(self, state: BoundOptimizer) -> dict[str, float | bool | str | None]:
        """Return the initial learning rate of a schedule in the optimizer's configuration.

        A velocity includes the present rate, which is another one and in no file.
        """
        first = self._configuration(state.top).get("learning_rate_initial")
        moved = any(len(m.target) > 2 and m.target[1] == attr(VELOCITY) for m in state.moves.moves)
        return {"learning_rate": first} if isinstance(first, float) and not moved else {}

    def _scheduled(self, top: Path, title: str) -> Iterator[str]:
        """Yield a note if a schedule of the program computes the learning rate."""
        state = self._configuration(top)
        counted = any((*top, attr(name)) in self.tree for name in _ITERATIONS)
        if top and counted and not state and not has_rate(self.tree, top):
            yield (
                f"{title} has no learning rate: a schedule of the program computes it; create the matching "
                "PyTorch scheduler"
            )
        if isinstance(state.get("learning_rate"), str):
            yield (
                f"{title}: the schedule {state['learning_rate']} computes the learning rate; create the "
                "matching PyTorch scheduler (the file contains only the first rate)"
            )

    def _configured(self, top: Path) -> dict[str, float | bool | str | None]:
        """Return the settings in the optimizer's configuration in the file."""
        state = self._configuration(top)
        found: dict[str, float | bool | str | None] = {
            name: value
            for name, value in state.items()
            if name in _CONFIGURED and isinstance(value, bool | int | float)
        }
        if state.get("decay"):  # of the learning rate, in old versions
            found["decay"] = state["decay"]
        if found.get("weight_decay") is not None or self._class(top) == ADAMW:
            found["decoupled_weight_decay"] = True
        return found

    def write_torch(
        self,
        state: BoundOptimizer,
        units: Iterable[ConversionUnit],
        paths: Mapping[Name, Path],
        place: Path,
    ) -> Plan:
        """Return the plan of the optimizer's PyTorch state_dict at `place`, for parameters in their order."""
        weights, more, doubled = self._weights(state, units, paths)
        facts = {**self._first_rate(state), **self._configured(state.top), **self.settings.of(state.name)}

        def write(agent: Tree) -> Plan:
            self.settings.require_free(state.name, agent)
            agent = self._named(agent, state)
            writer = optimizers_write.TorchOptimizerWriter(
                state.name, weights, agent, facts, state.moves.defaults
            )
            self.written[state.name] = _describe_torch(writer)
            made = writer.plan(place)
            epsilon_notes = optimizers_write.list_epsilon_notes(agent, "tensorflow", "torch", (state.name,))
            return replace(made, notes=(*made.notes, *epsilon_notes))

        plan = build_state_plan(self.tree, state, self.canonical, write, more)
        sums = (
            f"{state.name}: PyTorch trains {abbreviate_list(doubled, 2)} in addition to bias_ih, Keras "
            "trains the sum of the two biases; both get its moments, and in further training the sum "
            "moves twice as fast"
        )
        rows_read = any(str(path[-1].value).lstrip("_") == "embeddings" for path in state.weights)
        notes = (*((sums,) if doubled else ()), *((f"{state.name}: {_SPARSE}",) if rows_read else ()))
        return replace(plan, notes=(*plan.notes, *notes))

    def write_keras(self, state: BoundOptimizer, weights: Sequence[Move], top: Path) -> Plan:
        """Return the plan of the optimizer as Keras's object at `top`, for variables in that order."""
        facts = {**self._configured(state.top), **self.settings.of(state.name)}
        # Keras stores a constant learning rate as a variable, but not the rate of a schedule.
        counted = any((*state.top, attr(name)) in self.tree for name in _ITERATIONS)
        scheduled = counted and "learning_rate" not in facts and not has_rate(self.tree, state.top)

        def write(agent: Tree) -> Plan:
            self.settings.require_free(state.name, agent)
            agent = self._named(agent, state)
            writer = optimizers_write.KerasOptimizerWriter(
                CanonicalOptimizer(state.name, agent, facts, state.moves.defaults),
                "adam",
                weights,
                top,
                scheduled=scheduled,
            )
            self.written[state.name] = _describe_keras(writer)
            made = writer.plan()
            return replace(made, settings={display(top): made.settings.get(state.name, {})})

        return build_state_plan(self.tree, state, self.canonical, write)

    def _weights(
        self, state: BoundOptimizer, units: Iterable[ConversionUnit], paths: Mapping[Name, Path]
    ) -> tuple[list[Move], list[Move], list[str]]:
        """Return the moves of an optimizer's weights, the moves of second biases, and their names."""
        trained, owners = frozenset(state.weights), state.moves.of or {}
        weights: list[Move] = []
        more: list[Move] = []
        doubled: list[str] = []
        for unit in units:
            second = {name: leaf for name, leaf in unit.added.items() if _SECOND_BIAS.fullmatch(name[-1])}
            for source, name, rule in unit.moves:
                if source not in trained:
                    continue
                weights.append(Move(self.canonical[source], paths[name], rule))
                twin = (*name[:-1], name[-1].replace("bias_ih_", "bias_hh_"))
                if name[-1].startswith("bias_ih_") and twin in second:
                    own = (*self.canonical[source], attr("second"))
                    more.append(Move(source, own, KEEP))
                    more += [
                        replace(move, target=(*move.target, attr("second")))
                        for move in state.moves.moves
                        if owners.get(move.source) == source
                    ]
                    weights.append(Move(own, paths[twin], rule))
                    doubled.append(".".join(twin))
        return weights, more, doubled


def trained_order(tree: Tree) -> dict[Path, int]:
    """Return the positions of parameters in the order of numbered optimizer slots.

    A Keras file lists layers by attribute and class, but its optimizer slots in model order.
    """
    owners = (
        leaf.of
        for path, leaf in tree.tensors()
        if leaf.role == "slot"
        and leaf.of is not None
        and (isinstance(path[-1].value, int) or _VARS.search(leaf.key))
    )
    return {path: at for at, path in enumerate(dict.fromkeys(owners))}


def _is_equal(tree: Tree, one: Path, other: Path) -> bool:
    leaves = tree[one], tree[other]
    first, second = (leaf if isinstance(leaf, Leaf) else None for leaf in leaves)
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return first.read() == second.read()


def _drop_repeated_slots(moves: OptimizerMoves, slots: Collection[Path]) -> OptimizerMoves:
    """Return the moves without slots that only repeat others."""
    kept = tuple(move for move in moves.moves if move.source not in slots)
    return replace(moves, moves=kept, consumed=moves.consumed | frozenset(slots))


def _unknown_slots_note(title: str, slots: Sequence[Leaf], bound: OptimizerMoves) -> str:
    """Return a note on slots that no known optimizer has, "" if there are none."""
    kinds = {str(leaf.slot) for leaf in slots}
    if kinds <= _KNOWN_SLOTS and (bound.of or not slots):
        return ""
    if kinds == {"None"}:
        return (
            f"{title}: the file numbers its variables and does not show which weights they belong to; save "
            f"the model as .keras or with tf.train.Checkpoint, or {WITHOUT}"
        )
    more = [MORE_SLOTS[kind] for kind in sorted(kinds) if kind in MORE_SLOTS]
    if more:
        return f"{title} has {' and '.join(more)}; its state is not converted; {WITHOUT}"
    return f"{title} has slots ({abbreviate_list(sorted(kinds), 4)}) that are not converted yet; {WITHOUT}"


def list_keras_optimizers(tree: Tree) -> dict[Path, list[Path]]:
    """Return the leaves of every optimizer, by its path; the root has slots named as in TensorFlow 1."""
    tops: dict[Path, None] = {}
    named: list[Path] = []
    for path, leaf in tree.tensors():
        if leaf.role == "slot":
            if leaf.of is not None and path_texts(path[:-1])[-len(leaf.of) :] == path_texts(leaf.of):
                named.append(path)
            else:
                tops[slot_optimizer(path, leaf)] = None
        elif leaf.role == "counter" and str(path[-1].value) in _ITERATIONS and has_rate(tree, path[:-1]):
            tops[path[:-1]] = None
    found: dict[Path, list[Path]] = {top: [] for top in tops if top}
    depths = sorted({len(top) for top in found}, reverse=True)
    for path, entry in tree.items():
        for depth in depths:
            weight = isinstance(entry, Leaf) and entry.role in ("parameter", "buffer")
            if path[:depth] in found and len(path) > depth and not weight:
                found[path[:depth]].append(path)
                break
    if named:
        powers = [path for path in tree if re.sub(r"_\d+$", "", str(path[-1].value)) in POWERS]
        found[()] = [*named, *powers]
    return found


def path_texts(path: Path) -> tuple[str, ...]:
    """Return the steps of a path as text."""
    return tuple(str(step.value) for step in path)


def has_rate(tree: Tree, top: Path) -> bool:
    """Return whether an optimizer has a variable for its learning rate."""
    return bool(top) and any((*top, attr(name)) in tree for name in _RATES)


# The optimizer that a checkpoint contains without its class: that of TensorFlow objects and weights files.

KERAS_ARGUMENTS = {
    "Adam": ("beta_1", "beta_2", "epsilon", "amsgrad", "weight_decay"),
    "RMSprop": ("rho", "momentum", "epsilon", "centered", "weight_decay"),
    "SGD": ("momentum", "nesterov", "weight_decay"),
    "Adagrad": ("initial_accumulator_value", "epsilon", "weight_decay"),
    "Adamax": ("beta_1", "beta_2", "epsilon", "weight_decay"),
    "Adadelta": ("rho", "epsilon", "weight_decay"),
}


class OptimizerDescription(NamedTuple):
    """How Keras creates the optimizer of a file, and what had to be assumed."""

    name: str
    cls: str
    arguments: Mapping[str, Any]
    assumed: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object for the model's process."""
        return {"name": self.name, "class": self.cls, "arguments": dict(self.arguments)}


def describe_keras_optimizer(path: str, wanted: str | None = None) -> OptimizerDescription | None:
    """Return the optimizer of a TensorFlow checkpoint or weights file, None if there is none.

    `wanted` names one of several.
    """
    checkpoint = open_checkpoint(path)
    tree = checkpoint.tree
    known = options.sidecar_settings(read_any_sidecar(checkpoint).sidecar)
    settings = OptimizerSettings(known)
    rows = [
        (source, tuple(str(step.value) for step in source), KEEP)
        for source, leaf in tree.tensors()
        if leaf.role == "parameter"
    ]
    states = KerasStates(tree, settings)
    states.root = states.is_root([source for source, _, _ in rows])
    bound, notes = states.bind_states(rows)
    titles = [display(state.top) or OPTIMIZER for state in bound]
    if wanted is not None or len(bound) > 1:
        bound = [bound[titles.index(str(choose_optimizer(path, titles, wanted)))]]
    if not bound:
        if notes:
            raise UnsupportedError(f"the optimizer cannot be restored: {notes[0]}", file=path)
        return None
    (state,) = bound
    weights = [Move(source, states.canonical[source], KEEP) for source in state.weights]
    agent = canonical_tree(tree, MoveList((*weights, *state.moves.moves)))
    title = display(state.top) or OPTIMIZER
    canonical = CanonicalOptimizer(
        state.name, agent, settings.of(state.name, title, OPTIMIZER), state.moves.defaults
    )
    found = _as_keras(canonical, title, state.top)
    guessed = (state.moves.assumed,) if state.moves.assumed else ()
    return found._replace(assumed=(*guessed, *found.assumed))


def _as_keras(known: CanonicalOptimizer, title: str, top: Path) -> OptimizerDescription:
    cls = known.family.name
    arguments: dict[str, Any] = {}
    assumed = []
    for name in KERAS_ARGUMENTS.get(cls, ()):
        value = known.exact(name) if known.exact(name) is not None else known.value(name)
        if value is None or (name == "weight_decay" and not value):
            continue
        # Keras refuses integers.
        arguments[name] = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not known.has(name) and name in known.family.keras_defaults:
            assumed.append(known.assumed(name))
    if known.family.name in ("SGD", "RMSprop") and known.momentum_unknown:
        raise UsageError(
            f"{title} has momentum, but no file records its value",
            hint=f"convert with --optimizer {title}/momentum=0.9, which records it beside the file",
        )
    del top
    return OptimizerDescription(title, cls, arguments, tuple(assumed))
