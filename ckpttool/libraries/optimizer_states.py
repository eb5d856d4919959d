"""Read the optimizer state of a checkpoint by its own tree, and write it for another framework.

An optimizer is matched to the parameters that it trains by the object graph, by names, or by PyTorch's own
rule (the order of param_groups is the order of the parameters, confirmed by the shapes of all slots). Its
canonical form is between both sides (libraries/optimizers_read.py, optimizers_write.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UsageError, abbreviate_list, suggest_choice
from ckpttool.core.optimizers import (
    ADAM,
    ADAMW,
    FAMILIES,
    MORE_SLOTS,
    VELOCITY,
    list_keras_kinds,
    list_slots,
    list_torch_settings,
)
from ckpttool.core.tree import (
    Alias,
    Container,
    Leaf,
    Path,
    PathStep,
    Tree,
    ValueLeaf,
    attr,
    display,
    index,
    key,
)
from ckpttool.libraries import optimizers_read, schema
from ckpttool.libraries.optimizer_entries import (
    ITERATIONS,
    OPTIMIZER,
    POWERS,
    WITHOUT,
    has_rate,
    list_keras_optimizers,
    list_torch_optimizers,
    path_texts,
)
from ckpttool.libraries.optimizers_read import (
    BoundOptimizer,
    CanonicalOptimizer,
    OptimizerMoves,
    Setting,
    StoredOptimizer,
    bind_torch_optimizers,
)
from ckpttool.mapping.layer_kinds import Name
from ckpttool.mapping.rules import (
    KEEP,
    Move,
    MoveList,
    Plan,
    Rule,
    Settings,
    SumTerm,
    apply_plan,
    canonical_tree,
    chain_rules,
    compose_plans,
    rule_steps,
)

if TYPE_CHECKING:
    from ckpttool.mapping.fill_model import Skeleton
    from ckpttool.mapping.solver import FillResult

_NETWORKS = attr("networks")  # component of all weights in the canonical tree of an optimizer
# The numbered variables of an object in a Keras file (formats/keras_h5.py).
_VARS = deferred.compile(r"/vars/\d+\Z")
# Settings in the configuration of a Keras optimizer.
_CONFIGURED = {"weight_decay", *(name for family in FAMILIES for name in family.settings)}
_SPARSE = (
    "for embeddings, Keras updates only the rows that a batch reads, PyTorch all rows (unless "
    "Embedding is sparse)"
)
# Edges between a Keras model and its layers: their targets belong to the model itself
# (keras/src/models/{sequential,functional}.py; tf_keras: layer_with_weights-0, layer-1).
_INNER = deferred.compile(r"_functional|_layers|_operations|layers|layer_with_weights-\d+|layer-\d+")
_AVERAGE = "average"  # slot kind (formats/tf_common.py)
_SECOND_BIAS = deferred.compile(r"bias_hh_(l\d+(?:_reverse)?)")


# A weight of the source, its name in the target, and the rule that moves it.
Row = tuple[Path, Name, Rule]


def name_canonical_paths(names: Mapping[Path, Name]) -> dict[Path, Path]:
    """Return the canonical path of each weight, by its TensorFlow name."""
    targets: set[Path] = set()
    canonical = {}
    for source, name in names.items():
        path = (_NETWORKS, *map(attr, name))
        number = 0
        while path in targets:
            number += 1
            path = (_NETWORKS, *map(attr, name), index(number))
        targets.add(path)
        canonical[source] = path
    return canonical


class OptimizerSettings(NamedTuple):
    """Optimizer settings from the sidecar, and which of them a user gave."""

    settings: Settings
    stated: Sequence[tuple[str, str]] = ()

    def of(self, *names: str) -> Mapping[str, Setting]:
        """Return the settings of the optimizer with these names; a single one may have another name."""
        matching = [self.settings[name] for name in names if self.settings.get(name)]
        if matching:
            return matching[0]
        stated_names = {name for name, _ in self.stated}
        own = [
            settings
            for name, settings in self.settings.items()
            if settings and name not in stated_names and name not in schema.ALL_OPTIMIZED
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


class _OptimizerStates:
    """The optimizers of a tree: the canonical paths of their weights, and those written by name."""

    framework = "torch"

    def __init__(self, tree: Tree, settings: OptimizerSettings) -> None:
        self.tree, self.settings = tree, settings
        self.canonical: Mapping[Path, Path] = {}
        self.written: dict[str, WrittenOptimizer] = {}

    def _plan(
        self,
        state: BoundOptimizer,
        facts: Mapping[str, Setting],
        weights: Sequence[Move],
        top: Path,
        more: Iterable[Move] = (),
        variable: str | None = None,
        *,
        scheduled: bool = False,
    ) -> Plan:
        """Return the plan of one optimizer at `top`: Keras's with its variables' first name, or torch's."""
        from ckpttool.libraries import optimizers_write

        trained = [Move(path, self.canonical[path], KEEP) for path in state.weights]
        moves = (*trained, *state.moves.moves, *more)
        agent = self._named(canonical_tree(self.tree, MoveList(moves)), state)
        self.settings.require_free(state.name, agent)
        known = CanonicalOptimizer(state.name, agent, facts, state.moves.defaults)
        if variable is not None:
            objects = optimizers_write.KerasOptimizerWriter(
                known, variable, weights, top, scheduled=scheduled
            )
            names = sorted({objects.family.keras_slots[slot].setting for slot in objects.slots} - {""})
            arguments = {name: 0.5 if name == "momentum" else True for name in names}
            cls = "AdamW" if objects.decoupled else objects.family.name
            plain, groups = list(dict.fromkeys(objects.plain)), [list(objects.numbers)]
            self.written[state.name] = WrittenOptimizer(cls, arguments, groups, objects.constructor, plain)
            plan = objects.plan()
            plan = replace(plan, settings={display(top): plan.settings.get(state.name, {})})
        else:
            writer = optimizers_write.TorchOptimizerWriter(known, weights)
            decoupled = writer.family is ADAM and known.value("decoupled_weight_decay") is True
            groups = [[parameter[0].target for parameter in group] for group in writer.groups]
            self.written[state.name] = WrittenOptimizer(
                "AdamW" if decoupled else writer.family.name, {}, groups
            )
            plan = writer.plan(top)
        target = "torch" if variable is None else "tensorflow"
        notes = optimizers_write.list_epsilon_notes(agent, self.framework, target, (state.name,))
        plan = replace(plan, kept=tuple(self._unread(agent, plan)), notes=(*plan.notes, *notes))
        composed = compose_plans(Plan(moves, consumed=tuple(state.moves.consumed)), plan)
        assumed = (state.moves.assumed,) if state.moves.assumed else ()
        return replace(composed, assumed=(*assumed, *composed.assumed))

    def _named(self, agent: Tree, state: BoundOptimizer) -> Tree:  # noqa: ARG002 - for Keras
        return agent

    def _trained_moves(
        self, state: BoundOptimizer, rows: Iterable[Row], paths: Mapping[Name, Path]
    ) -> list[Move]:
        """Return the moves of an optimizer's weights in their order in the target."""
        trained = frozenset(state.weights)
        return [
            Move(self.canonical[source], paths[name], rule)
            for source, name, rule in rows
            if source in trained
        ]

    def _unread(self, agent: Tree, plan: Plan) -> Iterator[Path]:
        """Yield the settings of torch's groups that none of its optimizers reads, e.g. a scheduler's."""
        read = {*list_torch_settings(), *list_slots(), "step"}
        used = {move.source for move in plan.moves} | set(plan.consumed)
        for path in agent if self.framework == "torch" else ():
            own = len(path) > 1 and path[0] != _NETWORKS and path not in used
            if own and str(path[1].value) not in read:
                yield path


class TorchStates(_OptimizerStates):
    """The optimizers of a PyTorch tree."""

    def __init__(self, tree: Tree, settings: OptimizerSettings) -> None:
        super().__init__(tree, settings)
        self.tops = list_torch_optimizers(tree)

    def bind_states(self, rows: Sequence[Row]) -> tuple[list[BoundOptimizer], list[str], list[str]]:
        """Return the optimizers with the parameters that they train, notes, and assumptions.

        `rows` are the weights with their names in the target and their rules.
        """
        trained: dict[str, dict[Path, None]] = {}
        names: dict[Path, Name] = {}
        for source, name, _ in rows:
            leaf = self.tree[source]
            names.setdefault(source, name)
            if isinstance(leaf, Leaf) and leaf.role == "parameter" and "float" in leaf.dtype:
                trained.setdefault(display(source[:-1]), {})[source] = None
        order = {path: number for number, path in enumerate(self.tree)}
        networks = {name: tuple(sorted(own, key=order.__getitem__)) for name, own in trained.items()}
        self.canonical = name_canonical_paths(names)
        return bind_torch_optimizers(self.tree, self.tops, networks, self.canonical)

    def write_keras(
        self,
        state: BoundOptimizer,
        rows: Sequence[Row],
        paths: Mapping[Name, Path],
        top: Path,
        number: int = 0,
    ) -> Plan:
        """Return the plan of the optimizer as Keras's object, for variables in the rows' order.

        Args:
            state: the source's optimizer.
            rows: the trained variables in the target's order.
            paths: the source's path of each weight by its name.
            top: the path of the object.
            number: distinguishes several optimizers in the names of their variables.
        """
        weights, twice = self._weights(state, rows, paths)
        title = display(top)
        equal = frozenset(self._repeated(state, {source: first for source, (_, first) in twice.items()}))
        kept = tuple(move for move in state.moves.moves if move.source not in equal)
        moves = replace(state.moves, moves=kept, consumed=state.moves.consumed | equal)
        state = state._replace(moves=moves)
        facts, variable = self.settings.of(state.name, title), f"adam_{number}" if number else "adam"
        plan = self._plan(state, facts, weights, top, variable=variable)
        biases = {source: target for source, (target, _) in twice.items()}
        notes = (*self._bias_notes(title, state, biases, equal), *self._state_notes(title, state, rows))
        return replace(plan, notes=(*plan.notes, *notes))

    def write_torch(
        self,
        state: BoundOptimizer,
        rows: Iterable[Row],
        paths: Mapping[Name, Path],
        top: Path,
        added: Collection[Name] = (),
    ) -> Plan:
        """Return the plan of the optimizer's PyTorch state_dict, for parameters in the rows' order.

        Args:
            state: the source's optimizer.
            rows: the trained parameters in the target's order.
            paths: the source's path of each weight by its name.
            top: the path of the state_dict.
            added: not used: second biases have separate state.
        """
        del added  # second biases have separate state
        weights = self._trained_moves(state, rows, paths)
        return self._plan(state, self.settings.of(state.name, display(top)), weights, top)

    def _weights(
        self, state: BoundOptimizer, rows: Sequence[Row], paths: Mapping[Name, Path]
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
        network = display(state.weights[0][:-1]) or "the network"
        if biases:
            yield (
                f"{title}: PyTorch trains two biases with equal moments, Keras trains their sum "
                f"({abbreviate_list(biases, 2)}) with these moments; in further training it moves half as "
                "fast"
            )
        if apart:
            yield (
                f"{title}: PyTorch trains two biases with separate moments, Keras trains their sum "
                f"({abbreviate_list(apart, 2)}); use --part {network} to convert only the "
                "network, or --allow-missing to use the moments of bias_ih"
            )

    def _state_notes(self, title: str, state: BoundOptimizer, rows: Sequence[Row]) -> Iterator[str]:
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
            if all(other is not None and schema.are_equal(self.tree, path, other) for path, other in pairs):
                yield from (path for path, _ in pairs)

    @staticmethod
    def _trained(state: BoundOptimizer) -> frozenset[Path]:
        """Return the parameters with state; before the first update there is none, so return all."""
        started = frozenset((state.moves.of or {}).values())
        return started or frozenset(state.weights)


class KerasStates(_OptimizerStates):
    """The optimizers of a TensorFlow tree; with `root`, the tree itself is the model."""

    framework = "tensorflow"
    unnamed = OPTIMIZER
    root = False

    def __init__(self, tree: Tree, settings: OptimizerSettings) -> None:
        super().__init__(tree, settings)
        self.stored = list_keras_optimizers(tree)
        tops = self.stored
        # A wrapping optimizer (LossScaleOptimizer) has no moments: PyTorch gets the inner one.
        self.around = frozenset(
            top for top in tops if any(top != other and other[:-1] == top for other in tops) and top
        )
        # Weight averages (use_ema, ExponentialMovingAverage), which no PyTorch optimizer has.
        self.averages = frozenset(path for path, leaf in tree.tensors() if leaf.slot == _AVERAGE)
        self.tops = {
            top: trained
            for top, own in tops.items()
            if top not in self.around and (trained := [path for path in own if path not in self.averages])
        }
        # Entries of optimizers without slots: counters and settings, which belong to no parameter.
        self.idle: set[Path] = {path for top in self.around for path in tops[top]} | self.averages

    def is_root(self, sources: Sequence[Path]) -> bool:
        """Return whether the root itself is a model, not a tf.train.Checkpoint with attributes."""
        root = self.tree.containers.get(())
        if root is not None and root.kind == "module":
            return True
        return any(len(path) < 3 or _INNER.fullmatch(str(path[0].value)) for path in sources)

    def bind_states(self, rows: Sequence[Row]) -> tuple[list[BoundOptimizer], list[str], list[str]]:
        """Return the optimizers with the parameters that they train, notes, and assumptions.

        `rows` are the weights.
        """
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
            entries = tuple((path, self.canonical[path], KEEP) for path in weights)
            stored = StoredOptimizer(title, self._prefix(top), self.tree, entries)
            bound = optimizers_read.from_keras(stored)
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
        return states, notes, []

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
        node = self.tree.containers.get(top)
        return node.name.lower() if node is not None and node.kind == "module" and node.name else None

    def _named(self, agent: Tree, state: BoundOptimizer) -> Tree:
        """Return the tree with the update counter renamed to the file's name for the optimizer class."""
        path = schema.canonical_setting_path(state.name, "step")
        leaf, cls = agent.get(path), self._class(state.top)
        if cls is None or not isinstance(leaf, Leaf) or leaf.name:
            return agent
        return Tree({**agent, path: replace(leaf, name=f"{cls}/iteration")}, agent.aliases, agent.containers)

    def _configuration(self, top: Path) -> Mapping[str, Any]:
        """Return the optimizer's configuration in the file, {} if there is none."""
        container = self.tree.containers.get(top)
        return container.state if container is not None and isinstance(container.state, dict) else {}

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

    def _first_rate(self, state: BoundOptimizer) -> dict[str, Setting]:
        """Return the initial learning rate of a schedule in the optimizer's configuration.

        A velocity includes the present rate, which is another one and in no file.
        """
        first = self._configuration(state.top).get("learning_rate_initial")
        moved = any(len(m.target) > 2 and m.target[1] == attr(VELOCITY) for m in state.moves.moves)
        return {"learning_rate": first} if isinstance(first, float) and not moved else {}

    def _scheduled(self, top: Path, title: str) -> Iterator[str]:
        """Yield a note if a schedule of the program computes the learning rate."""
        state = self._configuration(top)
        counted = any((*top, attr(name)) in self.tree for name in ITERATIONS)
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

    def _configured(self, top: Path) -> dict[str, Setting]:
        """Return the settings in the optimizer's configuration in the file."""
        state = self._configuration(top)
        settings: dict[str, Setting] = {
            name: value
            for name, value in state.items()
            if name in _CONFIGURED and isinstance(value, bool | int | float)
        }
        if state.get("decay"):  # of the learning rate, in old versions
            settings["decay"] = state["decay"]
        if settings.get("weight_decay") is not None or self._class(top) == ADAMW:
            settings["decoupled_weight_decay"] = True
        return settings

    def write_torch(
        self,
        state: BoundOptimizer,
        rows: Iterable[Row],
        paths: Mapping[Name, Path],
        top: Path,
        added: Collection[Name] = (),
    ) -> Plan:
        """Return the plan of the optimizer's PyTorch state_dict, for parameters in the rows' order.

        Args:
            state: the source's optimizer.
            rows: the trained parameters in the target's order.
            paths: the source's path of each weight by its name.
            top: the path of the state_dict.
            added: names of tensors that the source does not have, e.g. second recurrent biases.
        """
        weights, more, doubled = self._weights(state, rows, paths, added)
        facts = {**self._first_rate(state), **self._configured(state.top), **self.settings.of(state.name)}
        plan = self._plan(state, facts, weights, top, more)
        sums = (
            f"{state.name}: PyTorch trains {abbreviate_list(doubled, 2)} in addition to bias_ih, Keras "
            "trains the sum of the two biases; both get its moments, and in further training the sum "
            "moves twice as fast"
        )
        rows_read = any(str(path[-1].value).lstrip("_") == "embeddings" for path in state.weights)
        notes = (*((sums,) if doubled else ()), *((f"{state.name}: {_SPARSE}",) if rows_read else ()))
        return replace(plan, notes=(*plan.notes, *notes))

    def write_keras(
        self,
        state: BoundOptimizer,
        rows: Iterable[Row],
        paths: Mapping[Name, Path],
        top: Path,
        number: int = 0,
    ) -> Plan:
        """Return the plan of the optimizer as Keras's object, for variables in the rows' order.

        Args:
            state: the source's optimizer.
            rows: the trained variables in the target's order.
            paths: the source's path of each weight by its name.
            top: the path of the object.
            number: not used: variables keep their names.
        """
        del number  # variables keep their names
        facts = {**self._configured(state.top), **self.settings.of(state.name)}
        # Keras stores a constant learning rate as a variable, but not the rate of a schedule.
        counted = any((*state.top, attr(name)) in self.tree for name in ITERATIONS)
        scheduled = counted and "learning_rate" not in facts and not has_rate(self.tree, state.top)
        weights = self._trained_moves(state, rows, paths)
        return self._plan(state, facts, weights, top, variable="adam", scheduled=scheduled)

    def _weights(
        self,
        state: BoundOptimizer,
        rows: Iterable[Row],
        paths: Mapping[Name, Path],
        added: Collection[Name],
    ) -> tuple[list[Move], list[Move], list[str]]:
        """Return the moves of an optimizer's weights, the moves of second biases, and their names."""
        owners = state.moves.of or {}
        second = {name for name in added if _SECOND_BIAS.fullmatch(name[-1])}
        names = {path: name for name, path in paths.items()}
        weights: list[Move] = []
        more: list[Move] = []
        doubled: list[str] = []
        for move in self._trained_moves(state, rows, paths):
            weights.append(move)
            name = names[move.target]
            twin = (*name[:-1], name[-1].replace("bias_ih_", "bias_hh_"))
            if name[-1].startswith("bias_ih_") and twin in second:
                own = (*move.source, attr("second"))
                sources = [path for path in state.weights if self.canonical[path] == move.source]
                more += [Move(path, own, KEEP) for path in sources]
                more += [
                    replace(move, target=(*move.target, attr("second")))
                    for move in state.moves.moves
                    if owners.get(move.source) in sources
                ]
                weights.append(Move(own, paths[twin], move.rule))
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


def _unknown_slots_note(title: str, slots: Sequence[Leaf], bound: OptimizerMoves) -> str:
    """Return a note on slots that no known optimizer has, "" if there are none."""
    kinds = {str(leaf.slot) for leaf in slots}
    if kinds <= list_keras_kinds() and (bound.of or not slots):
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


_MODEL = "model"
_VARIABLES = attr("_variables")
_DICT = Container("dict")
_MASK = (
    "no file of Keras lists the variables exempt from weight decay (exclude_from_weight_decay); exempt them "
    "in your program as well"
)


class ConvertedOptimizers(NamedTuple):
    """Optimizers beside a filled model: the whole target tree, the plan of the added part, and what is left.

    `prefix` is the path of the model in the tree, `written` are the optimizers by name, `order` the positions
    of weights in the model's list `weights`, `left` the slots and settings that are not converted, and
    `reasons` the sentences why. `parameters` is the number of the model's parameters.
    """

    tree: Tree
    plan: Plan = Plan(())
    prefix: Path = ()
    written: Mapping[str, WrittenOptimizer] = {}
    order: Mapping[Path, int] = {}
    left: tuple[Path, ...] = ()
    reasons: tuple[str, ...] = ()
    weights: str = "model.weights"
    parameters: int = 0

    @property
    def names(self) -> frozenset[str]:
        """The names of the optimizers in the target."""
        return frozenset(self.written)

    @property
    def documents(self) -> list[dict[str, Any]]:
        """How a program creates the optimizers; weights are numbers in the model, or keys of a state_dict."""
        return [
            {
                "name": name,
                "class": optimizer.cls,
                "arguments": dict(optimizer.arguments),
                "groups": [[self._weight(path) for path in group] for group in optimizer.groups],
            }
            for name, optimizer in self.written.items()
        ]

    def loading_code(self, lines: Sequence[str], form: str) -> tuple[str, ...]:
        """Return the lines that load the model, with those that create and load its optimizers."""
        if form == "torch" or not self.written:
            return tuple(lines)
        lines_before = []
        for name, optimizer in self.written.items():
            constructor = optimizer.constructor if len(self.written) == 1 else None
            lines_before.append(f"{name} = {constructor or f'keras.optimizers.{optimizer.cls}(...)'}")
            numbers = [self.order[path] for path in optimizer.groups[0]]
            if optimizer.plain:
                plain = ", ".join(f"{self.weights}[{self.order[path]}]" for path in optimizer.plain)
                lines_before.append(f"{name}.exclude_from_weight_decay([{plain}])")
            # An optimizer of other variables than the file's loads nothing, with a warning only.
            chosen = f"[{self.weights}[n] for n in {tuple(numbers)}]"
            whole = len(numbers) == self.parameters
            lines_before.append(f"{name}.build({'model.trainable_variables' if whole else chosen})")
        if form == "keras":
            return (*lines_before, f"model.compile({next(iter(self.written))})", *lines)
        both = f"tf.train.Checkpoint(model, {', '.join(f'{name}={name}' for name in self.written)})"
        return (*lines_before, *(line.replace("tf.train.Checkpoint(model)", both) for line in lines))

    def _weight(self, path: Path) -> int | str:
        own = path[len(self.prefix) :]
        return str(own[-1].value) if self.prefix else self.order[own]


def convert_optimizers(
    source: Tree, filling: FillResult, skeleton: Skeleton, form: str, settings: OptimizerSettings
) -> ConvertedOptimizers:
    """Return the filled model's tree with the source's optimizers in the target's form.

    The factory creates the model and thereby the order of its parameters. The state of each optimizer is
    moved with the layer pairs and rules of the weights that it trains, into the form that the target's
    framework loads.

    Args:
        source: the tree that fills the model, with its optimizers.
        filling: the moves of its weights.
        skeleton: the model, with the order of its parameters.
        form: the target's form ("torch", "tf" or "keras").
        settings: settings that the checkpoint lacks.
    """
    from ckpttool.libraries.write import merge_plans

    planner = _OptimizerPlanner(source, filling, skeleton, form, settings)
    plans, reasons = planner.plans()
    tops = list_torch_optimizers(source)
    own = {path for paths in tops.values() for path in paths}
    slots = [p for p, leaf in source.tensors() if leaf.role == "slot" or (p in own and leaf.shape != ())]
    if not plans:
        return ConvertedOptimizers(filling.tree, left=tuple(slots), reasons=tuple(reasons))
    plan = merge_plans(Plan(()), *plans)
    used = {move.source for move in plan.moves} | {*plan.consumed, *plan.kept, *plan.partly}
    listed = (
        path
        for top, paths in tops.items()
        for path in paths
        if path[len(top)] == key("param_groups") and isinstance(source[path], ValueLeaf)
    )
    left = tuple(path for path in (*slots, *listed) if path not in used)
    converted = apply_plan(source, replace(plan, aliases={}))
    tree = _beside_model(filling.tree, converted, plan, planner.prefix)
    return ConvertedOptimizers(
        tree,
        replace(plan, notes=(*reasons, *plan.notes)),
        planner.prefix,
        planner.written,
        skeleton.order,
        left,
        tuple(reasons),
        skeleton.weights,
        sum(path in skeleton.order and leaf.role == "parameter" for path, leaf in skeleton.tree.tensors()),
    )


class _OptimizerPlanner:
    """Plans the optimizers of one source for one form of one model."""

    def __init__(
        self, source: Tree, filling: FillResult, skeleton: Skeleton, form: str, settings: OptimizerSettings
    ) -> None:
        self.source, self.skeleton, self.form, self.settings = source, skeleton, form, settings
        # A PyTorch file lists the state_dicts of the model and its optimizers; objects and weights files have
        # the optimizer beside the model's own attributes.
        self.prefix: Path = (key(_MODEL),) if form == "torch" else ()
        ranks = skeleton.order
        moves = sorted(filling.moves, key=lambda move: ranks.get(move.target, len(ranks)))
        self.written: dict[str, WrittenOptimizer] = {}
        self.paths: dict[Name, Path] = {self._name(path): (*self.prefix, *path) for path in skeleton.tree}
        self.rows = [(move.source, self._name(move.target), move.rule) for move in moves]

    def plans(self) -> tuple[list[Plan], list[str]]:
        """Return the plan of each optimizer, and sentences on those that cannot be converted."""
        if list_torch_optimizers(self.source):
            torch = TorchStates(self.source, self.settings)
            return self._write(torch, [*self.rows, *self._unfilled()])
        if list_keras_optimizers(self.source):
            keras = KerasStates(self.source, self.settings)
            keras.root = keras.is_root([source for source, _, _ in self.rows])
            order = trained_order(self.source)
            places = {path: number for number, path in enumerate(self.source)}
            return self._write(
                keras, sorted(self.rows, key=lambda row: (order.get(row[0], -1), places[row[0]]))
            )
        self.settings.require(())
        return [], []

    def _write(self, states: TorchStates | KerasStates, rows: Sequence[Row]) -> tuple[list[Plan], list[str]]:
        """Return the plans of the optimizers that train the rows; assumptions are the first one's."""
        bound, notes, assumed = states.bind_states(rows)
        self.settings.require({state.name for state in bound})
        filled = {name for _, name, _ in self.rows}
        added = [name for path, _ in self.skeleton.tree.tensors() if (name := self._name(path)) not in filled]
        plans: list[Plan] = []
        for number, (state, top) in enumerate(self._places(bound, notes)):
            if self.form == "torch":
                plan = states.write_torch(state, self.rows, self.paths, top, added)
            else:
                plan = states.write_keras(state, self.rows, self.paths, top, number)
            plan = _in_weights_file(plan, top) if self.form == "keras" else plan
            plans.append(replace(plan, assumed=(*(() if plans else assumed), *plan.assumed)))
            self.written[display(top)] = states.written[state.name]
            if states.framework == "tensorflow" and states.written[state.name].cls == "AdamW":
                notes.append(f"{state.name}: {_MASK}")
        return plans, notes

    def _name(self, path: Path) -> Name:
        return tuple(str(path[-1].value).split(".")) if self.form == "torch" else path_texts(path)

    def _unfilled(self) -> Iterator[Row]:
        """Yield the parameters beside those that fill the model: an optimizer may train them as well."""
        moved = {source for source, _, _ in self.rows}
        dicts = {source[:-1] for source in moved}
        for path, leaf in self.source.tensors():
            if path[:-1] in dicts and path not in moved and leaf.role == "parameter":
                yield path, ("", *path_texts(path)), KEEP

    def _places(
        self, states: Sequence[BoundOptimizer], notes: list[str]
    ) -> Iterator[tuple[BoundOptimizer, Path]]:
        """Yield the optimizers that train a weight of the model, each with its path in the target."""
        filled = {source for source, _, _ in self.rows}
        mine = [state for state in states if filled & set(state.weights)]
        if self.form == "keras" and len(mine) > 1:
            notes.append(f"a .weights.h5 file stores one optimizer, not {len(mine)}: use --to tf")
            return
        step = key if self.form == "torch" else attr
        for state in mine:
            title = OPTIMIZER if len(mine) == 1 else "_".join(path_texts(state.top)) or state.name
            yield state, (step(title),)


def _in_weights_file(plan: Plan, top: Path) -> Plan:
    """Return the plan with the places of Keras's weights file: numbered variables in one group.

    Source: keras/src/optimizers/base_optimizer.py, save_own_variables.
    """
    group = display(top)
    labels = dict(plan.labels)
    for path, others in plan.aliases.items():
        numbers = [other[-1].value for other in others if other[:-1] == (*top, _VARIABLES)]
        if numbers and path in labels:
            labels[path] = labels[path]._replace(key=f"{group}/vars/{numbers[0]}")
    first = next((label.name for label in labels.values() if label.role == "counter" and label.name), "adam")
    name = first.partition("/")[0]
    return replace(
        plan,
        labels=labels,
        aliases={},
        containers={**plan.containers, top: Container("module", name, {"group": group, "layer": name})},
    )


def _beside_model(model: Tree, tree: Tree, plan: Plan, prefix: Path) -> Tree:
    """Return one tree of the model and its optimizers; state that the model already has is replaced."""
    tops = {path[:1] for path in tree}
    old = {path for path in model if not prefix and path[:1] in tops}
    whole = model.under(prefix)
    leaves = {path: leaf for path, leaf in whole.items() if path not in old} | dict(tree.leaves)
    aliases = {path: others for path, others in whole.aliases.items() if path in leaves}
    for path, others in plan.aliases.items():
        mine = tuple(alias for alias in aliases.get(path, ()) if alias.path[:1] not in tops)
        aliases[path] = (*mine, *(Alias(other, display(other)) for other in others))
    containers = {**whole.containers, **plan.containers}
    if prefix:
        containers = {(): _DICT, prefix: Container("OrderedDict"), **containers}
    return Tree(leaves, aliases, containers)


def stage_keras_optimizer(
    optimizer: Any, tensors: Mapping[Path, Any], optimizers: ConvertedOptimizers
) -> Iterator[tuple[str, Any, Leaf]]:
    """Yield the optimizer's variables with their next values; `tensors` are the model's variables by path.

    Raise UsageError for an optimizer of another class, or one without a variable that the state needs.
    """
    name, written = _only_optimizer(optimizer, optimizers)
    own = [id(_variable(variable)) for variable in getattr(optimizer, "_trainable_variables", ())]
    order = [id(_variable(tensors[path])) for path in written.groups[0]]
    if not own or not set(order) <= set(own):
        raise UsageError(
            "the optimizer has no variables for these weights",
            hint="call optimizer.build(model.trainable_variables) before",
        )
    for path, leaf in optimizers.tree.tensors():
        if path[0] != attr(name):
            continue
        variable: Any = getattr(optimizer, str(path[1].value), None)
        if variable is not None and len(path) > 2:
            at = own.index(order[_number(path[2])])
            variable = variable[at] if at < len(variable) else None
        if variable is None:
            raise UsageError(
                "the optimizer has no such state; create it with the settings of the checkpoint",
                path=display(path),
                hint=written.constructor and f"restore into {written.constructor}",
            )
        yield display(path), variable, leaf


def _variable(variable: Any) -> Any:
    """Return TensorFlow's variable inside one of Keras 3."""
    return getattr(variable, "value", variable) if hasattr(variable, "_value") else variable


def build_torch_state(
    optimizer: Any, names: Mapping[int, str], tensor: Callable[[Leaf], Any], optimizers: ConvertedOptimizers
) -> dict[str, Any]:
    """Return the state_dict for a PyTorch optimizer, with its own groups of parameters.

    Args:
        optimizer: the optimizer of the filled model.
        names: the names of the model's parameters by id.
        tensor: creates a tensor with a value.
        optimizers: the optimizers of the checkpoint, converted for the model.
    """
    top, written = _only_optimizer(optimizer, optimizers)
    numbers: dict[str, tuple[int, int]] = {}
    for group, paths in enumerate(written.groups):
        for path in paths:
            numbers[str(path[-1].value)] = (len(numbers), group)
    state_dict: dict[str, Any] = _nested(optimizers.tree, key(top), tensor)
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    missing = set(numbers)
    for own in optimizer.param_groups:
        first = sum(len(group["params"]) for group in groups)
        called = [names.get(id(parameter), "") for parameter in own["params"]]
        missing -= set(called)
        mine = [state_dict["param_groups"][numbers[name][1]] for name in called if name in numbers]
        settings = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in mine]
        if any(setting != settings[0] for setting in settings):
            raise UsageError(
                f"parameter group {len(groups)} of the optimizer has parameters with different settings",
                hint="create the optimizer with the parameter groups of the checkpoint",
            )
        for position, name in enumerate(called):
            slots = state_dict["state"].get(numbers[name][0]) if name in numbers else None
            if slots is not None:
                state[first + position] = slots
        kept = {k: v for k, v in own.items() if k != "params"}
        params = list(range(first, first + len(called)))
        groups.append({**kept, **(settings[0] if settings else {}), "params": params})
    if missing:
        raise UsageError(
            f"the optimizer does not train {len(missing)} parameters that have state in the checkpoint",
            path=min(missing),
        )
    return {"state": state, "param_groups": groups}


def _nested(tree: Tree, top: PathStep, tensor: Callable[[Leaf], Any]) -> dict[str, Any]:
    """Return the state_dict under a key as nested dicts, with settings as plain values."""
    state_dict: dict[str, Any] = {"state": {}, "param_groups": {}}
    for path, leaf in tree.items():
        if path[0] != top or len(path) < 4:
            continue
        number, name = _number(path[2]), str(path[3].value)
        own = state_dict[str(path[1].value)].setdefault(number, {})
        value = tensor(leaf) if isinstance(leaf, Leaf) else leaf.value
        own[name] = (*own.get(name, ()), value) if len(path) > 4 else value
    return state_dict


def _number(step: PathStep) -> int:
    assert isinstance(step.value, int)  # noqa: S101 - the writers number weights, groups and parameters
    return step.value


def _only_optimizer(optimizer: Any, converted: ConvertedOptimizers) -> tuple[str, WrittenOptimizer]:
    """Return the only converted optimizer; raise UsageError unless it is of the given object's class."""
    if len(converted.written) != 1:
        raise UsageError(
            "the checkpoint has no optimizer for this model"
            if not converted.written
            else f"the checkpoint has {len(converted.written)} optimizers for this model",
            found=next(iter(converted.reasons), None),
        )
    ((name, written),) = converted.written.items()
    if type(optimizer).__name__ != written.cls:
        raise UsageError(
            "the optimizer is of another class than that of the checkpoint",
            expected=written.cls,
            found=type(optimizer).__name__,
        )
    return name, written


KERAS_ARGUMENTS = {family.name: (*family.arguments, "weight_decay") for family in FAMILIES}
