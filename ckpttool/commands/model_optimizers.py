"""Convert the optimizer state of a checkpoint that fills a user's model.

The factory creates the model and thereby the order of its parameters. The state of each optimizer is moved
with the layer pairs and rules of the weights that it trains, into the form that the target's framework loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.commands.optimizer_states import (
    OPTIMIZER,
    ConversionUnit,
    KerasStates,
    OptimizerSettings,
    TorchStates,
    WrittenOptimizer,
    list_keras_optimizers,
    path_texts,
    trained_order,
)
from ckpttool.core.errors import UsageError
from ckpttool.core.tree import Alias, Container, Leaf, Path, PathStep, Tree, ValueLeaf, attr, display, key
from ckpttool.libraries.optimizers_write import BoundOptimizer, list_torch_optimizers
from ckpttool.libraries.write import merge_plans
from ckpttool.mapping.fill_model import Skeleton
from ckpttool.mapping.layers import Name
from ckpttool.mapping.rules import KEEP, Move, Plan, Rule, apply_plan
from ckpttool.mapping.solver import FillResult

_MODEL = "model"
_VARIABLES = attr("_variables")
_DICT = Container("dict")
_MASK = (
    "no file of Keras lists the variables exempt from weight decay (exclude_from_weight_decay); exempt them "
    "in your program as well"
)
_Row = tuple[Path, Name, Rule]


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
                "class": each.cls,
                "arguments": dict(each.arguments),
                "groups": [[self._weight(path) for path in group] for group in each.groups],
            }
            for name, each in self.written.items()
        ]

    def loading_code(self, lines: Sequence[str], form: str) -> tuple[str, ...]:
        """Return the lines that load the model, with those that create and load its optimizers."""
        if form == "torch" or not self.written:
            return tuple(lines)
        made = []
        for name, each in self.written.items():
            constructor = each.constructor if len(self.written) == 1 else None
            made.append(f"{name} = {constructor or f'keras.optimizers.{each.cls}(...)'}")
            numbers = [self.order[path] for path in each.groups[0]]
            if each.plain:
                plain = ", ".join(f"{self.weights}[{self.order[path]}]" for path in each.plain)
                made.append(f"{name}.exclude_from_weight_decay([{plain}])")
            # An optimizer of other variables than the file's loads nothing, with a warning only.
            chosen = f"[{self.weights}[n] for n in {tuple(numbers)}]"
            whole = len(numbers) == self.parameters
            made.append(f"{name}.build({'model.trainable_variables' if whole else chosen})")
        if form == "keras":
            return (*made, f"model.compile({next(iter(self.written))})", *lines)
        both = f"tf.train.Checkpoint(model, {', '.join(f'{name}={name}' for name in self.written)})"
        return (*made, *(line.replace("tf.train.Checkpoint(model)", both) for line in lines))

    def _weight(self, path: Path) -> int | str:
        own = path[len(self.prefix) :]
        return str(own[-1].value) if self.prefix else self.order[own]


def convert_optimizers(
    source: Tree, filling: FillResult, skeleton: Skeleton, form: str, settings: OptimizerSettings
) -> ConvertedOptimizers:
    """Return the filled model's tree with the source's optimizers in the target's form.

    Args:
        source: the tree that fills the model, with its optimizers.
        filling: the moves of its weights.
        skeleton: the model, with the order of its parameters.
        form: the target's form ("torch", "tf" or "keras").
        settings: settings that the checkpoint lacks.

    """
    planner = _OptimizerPlanner(source, filling, skeleton, form, settings)
    plans, reasons = planner.plans()
    slots = _list_slots(source)
    if not plans:
        return ConvertedOptimizers(filling.tree, left=tuple(slots), reasons=tuple(reasons))
    plan = merge_plans(Plan(()), *plans)
    used = {move.source for move in plan.moves} | {*plan.consumed, *plan.kept, *plan.partly}
    left = tuple(path for path in (*slots, *_list_settings(source)) if path not in used)
    made = apply_plan(source, replace(plan, aliases={}))
    tree = _beside_model(filling.tree, made, plan, planner.prefix)
    return ConvertedOptimizers(
        tree,
        replace(plan, notes=(*reasons, *plan.notes)),
        planner.prefix,
        planner.written,
        skeleton.order,
        left,
        tuple(reasons),
        skeleton.weights,
        sum(
            isinstance(each := skeleton.tree[path], Leaf) and each.role == "parameter"
            for path in skeleton.order
        ),
    )


def _list_slots(tree: Tree) -> list[Path]:
    """Return the tensors of optimizers that belong to a parameter."""
    own = {path for paths in list_torch_optimizers(tree).values() for path in paths}
    return [
        path for path, leaf in tree.tensors() if leaf.role == "slot" or (path in own and leaf.shape != ())
    ]


def _list_settings(tree: Tree) -> list[Path]:
    """Return the settings of PyTorch optimizers."""
    tops = list_torch_optimizers(tree)
    return [
        path
        for top, paths in tops.items()
        for path in paths
        if path[len(top)] == key("param_groups") and isinstance(tree[path], ValueLeaf)
    ]


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
            return self._from_torch(TorchStates(self.source, self.settings))
        if list_keras_optimizers(self.source):
            return self._from_keras(KerasStates(self.source, self.settings))
        self.settings.require(())
        return [], []

    def _name(self, path: Path) -> Name:
        return tuple(str(path[-1].value).split(".")) if self.form == "torch" else path_texts(path)

    def _from_torch(self, states: TorchStates) -> tuple[list[Plan], list[str]]:
        bound, notes, assumed = states.bind_states([*self.rows, *self._unfilled()])
        self.settings.require({state.name for state in bound})
        plans = []
        for number, (state, top) in enumerate(self._places(bound, notes)):
            if self.form == "torch":
                plans.append(states.write_torch(state, self._plain_moves(state, states.canonical), top))
            else:
                plan = states.write_keras(state, number, self.rows, self.paths, top)
                plans.append(_in_weights_file(plan, top) if self.form == "keras" else plan)
            self.written[display(top)] = states.written[state.name]
        return _with_assumptions(plans, assumed), notes

    def _unfilled(self) -> Iterator[_Row]:
        """Yield the parameters beside those that fill the model: an optimizer may train them as well."""
        moved = {source for source, _, _ in self.rows}
        dicts = {source[:-1] for source in moved}
        for path, leaf in self.source.tensors():
            if path[:-1] in dicts and path not in moved and leaf.role == "parameter":
                yield path, ("", *path_texts(path)), KEEP

    def _from_keras(self, states: KerasStates) -> tuple[list[Plan], list[str]]:
        states.root = states.is_root([source for source, _, _ in self.rows])
        order = trained_order(self.source)
        places = {path: number for number, path in enumerate(self.source)}
        rows = sorted(self.rows, key=lambda row: (order.get(row[0], -1), places[row[0]]))
        bound, notes = states.bind_states(rows)
        self.settings.require({state.name for state in bound})
        plans = []
        for state, top in self._places(bound, notes):
            if self.form == "torch":
                plans.append(states.write_torch(state, [self._unit()], self.paths, top))
            else:
                plan = states.write_keras(state, self._plain_moves(state, states.canonical), top)
                plans.append(_in_weights_file(plan, top) if self.form == "keras" else plan)
            self.written[display(top)] = states.written[state.name]
            if states.written[state.name].cls == "AdamW":
                notes.append(f"{state.name}: {_MASK}")
        return plans, notes

    def _unit(self) -> ConversionUnit:
        """Return the filled model as one unit; second recurrent biases are added zeros."""
        filled = {name for _, name, _ in self.rows}
        tree = self.skeleton.tree
        added = {
            name: leaf
            for path, leaf in tree.tensors()
            if (name := self._name(path)) not in filled and name[-1].startswith("bias_hh_")
        }
        return ConversionUnit(tuple(self.rows), added)

    def _plain_moves(self, state: BoundOptimizer, canonical: Mapping[Path, Path]) -> list[Move]:
        trained = frozenset(state.weights)
        return [
            Move(canonical[source], self.paths[name], rule)
            for source, name, rule in self.rows
            if source in trained
        ]

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


def _with_assumptions(plans: list[Plan], assumed: Sequence[str]) -> list[Plan]:
    """Return the plans; assumptions about the source are the first one's."""
    if not plans or not assumed:
        return plans
    return [replace(plans[0], assumed=(*assumed, *plans[0].assumed)), *plans[1:]]


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


def _beside_model(model: Tree, made: Tree, plan: Plan, prefix: Path) -> Tree:
    """Return one tree of the model and its optimizers; state that the model already has is replaced."""
    tops = {path[:1] for path in made}
    old = {path for path in model if not prefix and path[:1] in tops}
    whole = model.under(prefix)
    leaves = {path: leaf for path, leaf in whole.items() if path not in old} | dict(made.leaves)
    aliases = {path: others for path, others in whole.aliases.items() if path in leaves}
    for path, others in plan.aliases.items():
        mine = tuple(alias for alias in aliases.get(path, ()) if alias.path[:1] not in tops)
        aliases[path] = (*mine, *(Alias(other, display(other)) for other in others))
    containers = {**whole.containers, **plan.containers}
    if prefix:
        containers = {(): _DICT, prefix: Container("OrderedDict"), **containers}
    return Tree(leaves, aliases, containers)


# Optimizers in this process: the state that a conversion would write, put into an object of the user's.


def stage_keras_optimizer(
    optimizer: Any, tensors: Mapping[Path, Any], made: ConvertedOptimizers
) -> Iterator[tuple[str, Any, Leaf]]:
    """Yield the optimizer's variables with their next values; `tensors` are the model's variables by path.

    Raise UsageError for an optimizer of another class, or one without a variable that the state needs.
    """
    name, written = _only_optimizer(optimizer, made)
    own = [id(_variable(each)) for each in getattr(optimizer, "_trainable_variables", ())]
    order = [id(_variable(tensors[path])) for path in written.groups[0]]
    if not own or not set(order) <= set(own):
        raise UsageError(
            "the optimizer has no variables for these weights",
            hint="call optimizer.build(model.trainable_variables) before",
        )
    for path, leaf in made.tree.tensors():
        if path[0] != attr(name):
            continue
        held: Any = getattr(optimizer, str(path[1].value), None)
        if held is not None and len(path) > 2:
            at = own.index(order[_number(path[2])])
            held = held[at] if at < len(held) else None
        if held is None:
            raise UsageError(
                "the optimizer has no such state; create it with the settings of the checkpoint",
                path=display(path),
                hint=written.constructor and f"restore into {written.constructor}",
            )
        yield display(path), held, leaf


def _variable(held: Any) -> Any:
    """Return TensorFlow's variable inside one of Keras 3."""
    return getattr(held, "value", held) if hasattr(held, "_value") else held


def build_torch_state(
    optimizer: Any, names: Mapping[int, str], tensor: Callable[[Leaf], Any], made: ConvertedOptimizers
) -> dict[str, Any]:
    """Return the state_dict for a PyTorch optimizer, with its own groups of parameters.

    Args:
        optimizer: the optimizer of the filled model.
        names: the names of the model's parameters by id.
        tensor: creates a tensor with a value.
        made: the optimizers of the checkpoint, converted for the model.

    """
    top, written = _only_optimizer(optimizer, made)
    numbers: dict[str, tuple[int, int]] = {}
    for group, paths in enumerate(written.groups):
        for path in paths:
            numbers[str(path[-1].value)] = (len(numbers), group)
    held: dict[str, Any] = _nested(made.tree, key(top), tensor)
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    missing = set(numbers)
    for own in optimizer.param_groups:
        first = sum(len(each["params"]) for each in groups)
        called = [names.get(id(parameter), "") for parameter in own["params"]]
        missing -= set(called)
        mine = [held["param_groups"][numbers[name][1]] for name in called if name in numbers]
        settings = [{k: v for k, v in each.items() if k not in ("params", "param_names")} for each in mine]
        if any(each != settings[0] for each in settings):
            raise UsageError(
                f"parameter group {len(groups)} of the optimizer has parameters with different settings",
                hint="create the optimizer with the parameter groups of the checkpoint",
            )
        for position, name in enumerate(called):
            found = held["state"].get(numbers[name][0]) if name in numbers else None
            if found is not None:
                state[first + position] = found
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
    found: dict[str, Any] = {"state": {}, "param_groups": {}}
    for path, leaf in tree.items():
        if path[0] != top or len(path) < 4:
            continue
        number, name = _number(path[2]), str(path[3].value)
        own = found[str(path[1].value)].setdefault(number, {})
        value = tensor(leaf) if isinstance(leaf, Leaf) else leaf.value
        own[name] = (*own.get(name, ()), value) if len(path) > 4 else value
    return found


def _number(step: PathStep) -> int:
    assert isinstance(step.value, int)  # noqa: S101 - the writers number weights, groups and parameters
    return step.value


def _only_optimizer(optimizer: Any, made: ConvertedOptimizers) -> tuple[str, WrittenOptimizer]:
    """Return the only converted optimizer; raise UsageError unless it is of the given object's class."""
    if len(made.written) != 1:
        raise UsageError(
            "the checkpoint has no optimizer for this model"
            if not made.written
            else f"the checkpoint has {len(made.written)} optimizers for this model",
            found=next(iter(made.reasons), None),
        )
    ((name, written),) = made.written.items()
    if type(optimizer).__name__ != written.cls:
        raise UsageError(
            "the optimizer is of another class than that of the checkpoint",
            expected=written.cls,
            found=type(optimizer).__name__,
        )
    return name, written
