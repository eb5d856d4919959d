"""Plan the conversion of a checkpoint without a recognised layout: networks, optimizers and values.

Networks are converted by the kinds of their layers (mapping/conversion_by_kinds.py). An optimizer is matched
to the parameters that it trains by the object graph, by names, or by PyTorch's own rule (the order
of param_groups is the order of the parameters, confirmed by the shapes of all slots), and becomes
the target's optimizer. Counters become variables or numbers. Other values are kept if the target
can store them; the rest goes to the sidecar.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.conversion.parts import is_keras_export, largest_matrices, without_copies
from ckpttool.core import deferred, dtypes
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import abbreviate_list
from ckpttool.core.source import Shape
from ckpttool.core.tree import Alias, Container, Leaf, Path, Tree, ValueLeaf, display, key
from ckpttool.evaluation.other_content import no_layers_error
from ckpttool.libraries.optimizer_entries import OPTIMIZER, path_texts
from ckpttool.libraries.optimizer_states import (
    KerasStates,
    OptimizerSettings,
    Row,
    TorchStates,
    trained_order,
)
from ckpttool.libraries.optimizers_read import BoundOptimizer
from ckpttool.mapping import pickled_modules, weight_norm, wrappers
from ckpttool.mapping.keras_names import SEQUENTIAL_EDGES, object_graph_paths, sequential_names
from ckpttool.mapping.layer_kinds import LayerOption, Name
from ckpttool.mapping.layers import ModuleInfo, numbered_kinds, propose_options
from ckpttool.mapping.rules import (
    KEEP,
    Label,
    Move,
    Plan,
    Rule,
    Settings,
    ToTensor,
    ToValue,
    relocate_sources,
)

if TYPE_CHECKING:
    from ckpttool.mapping.conversion_by_kinds import TreeConversion


_DICT, _ORDERED = Container("dict"), Container("OrderedDict")
_MODEL = "model"
_SAVES = "save_counter"
_COUNTS = 1 << 63
_MOST_OPTIONS = 24
_EDGES = frozenset(("_functional", "_layers", "_operations"))
_LISTED = frozenset(("Sequential", "Functional", "Model"))
# Variable names that identify the class of their layer (formats/keras_h5.py).
_BY_CLASS = frozenset(("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance", "embeddings"))
_NUMBERED = deferred.compile(r"layer_with_weights-(\d+)")


def to_tensorflow(
    tree: Tree,
    options: Sequence[LayerOption],
    settings: Settings,
    stated: Sequence[tuple[str, str]] = (),
    *,
    file: bool,
    strip: bool = True,
    graph: bool = False,
) -> Plan:
    """Plan the conversion of a PyTorch tree to TensorFlow objects, or to a Keras weights file.

    Whole modules are read as their state_dicts. Raise UsageError for a setting that contradicts the
    checkpoint or names a missing optimizer.

    Args:
        tree: the source.
        options: the user's statements about layers.
        settings: optimizer settings from the sidecar.
        stated: those of them (optimizer, setting) that a user gave.
        file: write for a Keras weights file.
        strip: remove prefixes of wrappers from names.
        graph: name numbered layers as a Keras Sequential in an object graph does.
    """
    plain, sources, notes = _as_state_dicts(tree, strip=strip)
    described = describe_sources(tree, sources)
    stored = OptimizerSettings(settings, stated)
    plan = _TensorFlowPlanner(plain, options, stored, described, file=file, graph=graph).plan()
    source_paths = set(sources.values())
    left = tuple(path for path in tree if path not in source_paths)
    plan = relocate_sources(plan, sources)
    norms = tuple(weight_norm.describe_weight_norm(plain))
    return replace(plan, notes=(*notes, *plan.notes, *norms), kept=(*plan.kept, *left))


def to_torch(
    tree: Tree, options: Sequence[LayerOption], settings: Settings, stated: Sequence[tuple[str, str]] = ()
) -> Plan:
    """Return the plan of a TensorFlow tree for a PyTorch file.

    Networks without other entries become one flat state_dict. With optimizers or other values, each
    network is a separate state_dict under its attribute name (`model` if the model is the root).
    """
    return _TorchPlanner(tree, options, OptimizerSettings(settings, stated)).plan()


def to_objects(
    tree: Tree,
    settings: Settings,
    stated: Sequence[tuple[str, str]] = (),
    *,
    file: bool,
    name: str | None = None,
    in_order: bool = False,
) -> Plan | None:
    """Plan a TensorFlow tree with its optimizers converted to Keras 3; return None if one cannot be.

    Weights stay unchanged.

    Args:
        tree: the source.
        settings: optimizer settings from the sidecar.
        stated: those of them (optimizer, setting) that a user gave.
        file: write a single network as the root of a Keras weights file, its optimizer as that of the model.
        name: the layout's name for an optimizer without a name in the tree.
        in_order: the layers are in model order, and the file names them by class and number.
    """
    bare = without_copies(tree)
    plan = _ObjectsPlanner(bare, (), OptimizerSettings(settings, stated))
    plan.unnamed, plan.in_order = name or OPTIMIZER, in_order
    plan.exported = is_keras_export(tree)
    tree_plan = plan.objects(file=file)
    copies = tuple(path for path in tree if path not in bare)
    return replace(tree_plan, consumed=(*tree_plan.consumed, *copies)) if tree_plan is not None else None


def _as_state_dicts(tree: Tree, *, strip: bool) -> tuple[Tree, dict[Path, Path], tuple[str, ...]]:
    """Return the tree with whole modules as state_dicts and plain names, and the source of each path."""
    tree, sources = read_state_dicts(tree)
    notes: list[str] = []
    bare = wrappers.strip_prefixes(tree) if strip else None
    if bare is not None:
        places = {old: new for new, old in bare.moves.items()}
        tree = Tree(
            {path: _remap_owner(leaf, places) for path, leaf in bare.tree.items()},
            bare.tree.aliases,
            bare.tree.containers,
        )
        sources = {new: sources[old] for new, old in bare.moves.items()}
        words = {
            segment
            for decoration in bare.decorations
            for one in decoration.wrapped
            for segment in one.segments
        }
        prefixes = ", ".join(f"{word}. ({wrappers.wrapper_title(word)})" for word in sorted(words))
        notes.append(f"wrapper prefixes removed from names: {prefixes}")
    return tree, sources, tuple(notes)


def read_state_dicts(tree: Tree) -> tuple[Tree, dict[Path, Path]]:
    """Return the tree with whole modules as their state_dicts, and the source of each path."""
    state_dicts = pickled_modules.plan_state_dicts(tree)
    if state_dicts is None:
        return tree, {path: path for path in tree}
    sources = {move.target: move.source for move in state_dicts.moves}
    places = {old: new for new, old in sources.items()}
    leaves = {new: _remap_owner(tree[old], places) for new, old in sources.items()}
    aliases = {path: tuple(map(Alias, others)) for path, others in state_dicts.aliases.items()}
    return Tree(leaves, aliases, state_dicts.containers), sources


def describe_sources(tree: Tree, sources: Mapping[Path, Path]) -> dict[Path, ModuleInfo]:
    """Return the file's description of the whole module that each tensor comes from."""
    about = pickled_modules.describe_modules(tree)
    return {path: about[source] for path, source in sources.items() if source in about}


def _remap_owner(leaf: Leaf | ValueLeaf, places: Mapping[Path, Path]) -> Leaf | ValueLeaf:
    return replace(leaf, of=places.get(leaf.of)) if isinstance(leaf, Leaf) and leaf.of is not None else leaf


class ConversionUnit(NamedTuple):
    """One layer, or one tensor outside layers, under its names in the target."""

    moves: tuple[Row, ...]
    added: Mapping[Name, Leaf]


class _TreeNetworks:
    """The networks of a tree: layers under their target names, and tensors outside layers.

    `inside` returns whether a tensor belongs to a network; `state` are the leaves of optimizers.
    """

    def __init__(
        self, tree: Tree, placed: TreeConversion, state: frozenset[Path], inside: Callable[[Path], bool]
    ) -> None:
        self.tree, self.placed, self.state = tree, placed, state
        self.of_layers = {move[0] for _, done, _ in placed.done for move in done.moves}
        self.left = frozenset(placed.left)
        self.outside = [
            path
            for path in tree
            if path not in self.of_layers and path not in self.left and path not in state
        ]
        lone = {path: None for path in self.outside if inside(path) and self._is_lone(path)}
        # Tensors that are neither moved nor plain values of a network cannot be mapped and are reported.
        self.unmapped = frozenset(
            path
            for path in self.outside
            if path in placed.refused or (path not in lone and self._is_weight(path, inside=inside(path)))
        )
        self.units = self._ordered(tuple(lone))
        self.values = [path for path in self.outside if not inside(path)]

    def moved(self) -> Iterator[Row]:
        """Yield all moves in the order of the target's parameters."""
        return (move for unit in self.units for move in unit.moves)

    def name_sequentials(self) -> None:
        """Give numbered layers the names that a Keras Sequential of theirs has in an object graph."""
        shapes: dict[Name, Shape] = {}
        for unit in self.units:
            leaves = {
                **{name: rule.leaf(self.tree[source]) for source, name, rule in unit.moves},
                **unit.added,
            }
            shapes |= {name: leaf.shape if isinstance(leaf, Leaf) else () for name, leaf in leaves.items()}
        names = sequential_names(shapes)
        self.units = [
            ConversionUnit(
                tuple((source, names[name], rule) for source, name, rule in unit.moves),
                {names[name]: leaf for name, leaf in unit.added.items()},
            )
            for unit in self.units
        ]

    def _is_weight(self, path: Path, *, inside: bool) -> bool:
        """Return whether a tensor without a rule belongs, or may belong, to a network."""
        leaf = self.tree[path]
        weight = isinstance(leaf, Leaf) and leaf.role in ("parameter", "buffer", "slot")
        return weight and (inside or not self._is_plain(path))

    def _is_plain(self, path: Path) -> bool:
        """Return whether a tensor has no axes that the frameworks could order differently."""
        leaf = self.tree[path]
        if not isinstance(leaf, Leaf):
            return False
        vector = leaf.size in (0, max(leaf.shape, default=1))
        return vector or "int" in leaf.dtype or leaf.dtype in ("bool", "string")

    def _is_lone(self, path: Path) -> bool:
        """Return whether a network tensor lies outside layers and has the same form in every framework."""
        leaf = self.tree[path]
        mine = isinstance(leaf, Leaf) and leaf.role in ("parameter", "buffer") and leaf.dtype != "string"
        return mine and self._is_plain(path) and path not in self.placed.refused

    def reasons(self, framework: str) -> Iterator[str]:
        """Yield sentences on unmapped tensors outside layers, with options that were tested on them."""
        lost = [path for path in self.outside if path in self.unmapped and path not in self.placed.refused]
        if not lost:
            return
        if framework == "tensorflow":
            for title, able in numbered_kinds(self.tree, set(lost)).items():
                ways = " or ".join(f"--kind '{title}={kind}'" for kind in able)
                yield (
                    f"{title}: the file numbers its variables and does not record the layer class; use {ways}"
                )
                lost = [path for path in lost if not self.tree.names[path].startswith(f"{title}/vars/")]
        options = propose_options(self.tree, framework, lost) if lost else ()
        if options:
            yield (
                f"tensors outside any layer: use {' '.join(options[:_MOST_OPTIONS])} to treat them as layers"
            )
        elif lost:
            left = abbreviate_list([self.tree.names[path] for path in lost], 3)
            advice = "state its axes with --map FILE, or use --to npz to copy all tensors unchanged"
            if not largest_matrices(self.tree) <= {*lost}:
                advice = "use --allow-missing to leave it out"
            yield f"{left}: not part of a known layer, so the order of axes is unknown; {advice}"

    def with_kept(self, whole: Plan, more: Iterable[Path] = ()) -> Plan:
        """Return the plan with the values that only the sidecar keeps, and `more` of them."""
        used = {move.source for move in whole.moves} | {*whole.consumed, *whole.kept} | self.unmapped
        kept = (path for path in (*self.outside, *more) if path not in used)
        return replace(whole, kept=(*whole.kept, *kept))

    def require(self, framework: str) -> None:
        """Raise MappingError if no layer of the framework is known, unless there is replay data to keep."""
        if self.placed.done or self.placed.notes:
            return
        if any(leaf.role == "replay" for _, leaf in self.tree.tensors()):
            return
        raise no_layers_error(self.tree, framework)

    def _ordered(self, lone: Sequence[Path]) -> list[ConversionUnit]:
        """Return the units in file order; a module's own tensors come before its submodules."""
        units = [
            ConversionUnit(
                tuple((source, names[stored], rule) for source, stored, rule in done.moves),
                {names[stored]: leaf for stored, leaf in done.added.items()},
            )
            for _, done, names in self.placed.done
        ]
        for path in reversed(lone):
            name = _plain_name(tuple(self.tree.names[path].split("/")))
            at = next((n for n, unit in enumerate(units) if _is_below(unit, name[:-1])), len(units))
            units.insert(at, ConversionUnit(((path, name, KEEP),), {}))
        return units


def _is_below(unit: ConversionUnit, module: Name) -> bool:
    names = (*(name for _, name, _ in unit.moves), *unit.added)
    return any(name[: len(module)] == module for name in names)


class _TensorFlowPlanner(TorchStates):
    """Plans one PyTorch tree for TensorFlow or Keras."""

    def __init__(
        self,
        tree: Tree,
        options: Sequence[LayerOption],
        settings: OptimizerSettings,
        described: Mapping[Path, ModuleInfo],
        *,
        file: bool,
        graph: bool,
    ) -> None:
        from ckpttool.mapping import conversion_by_kinds

        super().__init__(tree, settings)
        self.file = file
        state = frozenset(path for own in self.tops.values() for path in own)
        placed = conversion_by_kinds.convert_to_tensorflow(tree, options, described)
        dicts = {move[0][:-1] for _, done, _ in placed.done for move in done.moves}
        self.networks = _TreeNetworks(tree, placed, state, lambda path: path[:-1] in dicts)
        if graph:
            self.networks.name_sequentials()
        self.dicts = dicts
        # A weights file belongs to one model: its single network is the root, its single optimizer
        # `optimizer`.
        root = next(iter(dicts)) if file and len(dicts) == 1 else ()
        above = tuple(display(root).split("/")) if root else ()
        # A tensor shared by two networks is listed under one of them.
        below = all(name[: len(above)] == above for _, name, _ in self.networks.moved())
        self.cut = len(above) if below else 0

    def plan(self) -> Plan:
        """Return the full plan."""
        from ckpttool.libraries.write import merge_plans
        from ckpttool.mapping import conversion_by_kinds

        self.networks.require("torch")
        rows = [(source, name[self.cut :], rule) for source, name, rule in self.networks.moved()]
        added = {name[self.cut :]: leaf for unit in self.networks.units for name, leaf in unit.added.items()}
        values = {} if self.file else dict(self._values())
        tops = {top: self._top(top) for top in self.tops}
        marks = {top: (*name, "_iterations") for top, name in tops.items()}
        paths = object_graph_paths(
            dict.fromkeys((*(n for _, n, _ in rows), *added, *marks.values(), *values.values()))
        )
        moves = [Move(source, paths[name], rule) for source, name, rule in rows]
        labels = {paths[name]: self._label(source, name) for source, name, _ in rows}
        labels |= {paths[name]: conversion_by_kinds.variable_label(name) for name in added}
        for source, name in values.items():
            leaf = self.tree[source]
            counted = isinstance(leaf, ValueLeaf)
            labels[paths[name]] = Label("counter" if counted else "other", "/".join(name))
            moves.append(Move(source, paths[name], ToTensor("int64") if counted else KEEP))
        states, notes, assumed = self.bind_states(rows)
        rows = self._in_order(rows, states)
        if self.file and len(self.dicts) > 1:
            parts = abbreviate_list(
                [f"--part {shlex.quote(display(path))}" for path in sorted(self.dicts, key=display)], 4
            )
            notes.append(f"the file contains several networks; use {parts} to convert only one")
        self.settings.require({state.name for state in states})
        plans = [
            self.write_keras(state, rows, paths, paths[marks[state.top]][:-1], number)
            for number, state in enumerate(states)
        ]
        placed = self.networks.placed
        whole = merge_plans(
            Plan(
                tuple(moves),
                {paths[name]: leaf for name, leaf in added.items()},
                assumed=(*placed.assumed, *assumed),
                consumed=placed.left,
                notes=(*placed.notes, *self.networks.reasons("torch"), *notes),
                labels=labels,
            ),
            *plans,
        )
        return self.networks.with_kept(whole)

    def _label(self, source: Path, name: Name) -> Label:
        from ckpttool.mapping import conversion_by_kinds

        leaf = self.tree[source]
        kind = conversion_by_kinds.variable_label(name)
        buffer = isinstance(leaf, Leaf) and leaf.role == "buffer"
        return kind._replace(role="buffer") if buffer else kind

    def _top(self, top: Path) -> Name:
        if self.file and len(self.tops) == 1:
            return (OPTIMIZER,)
        return tuple(display(top).split("/")) if top else (OPTIMIZER,)

    def _values(self) -> Iterator[tuple[Path, Name]]:
        """Yield the values that become variables: integers at the top level, and tensors."""
        tops = {self.tree.names[path].split("/")[0] for path in self.networks.of_layers}
        for path in self.networks.values:
            leaf = self.tree[path]
            name = tuple(self.tree.names[path].split("/"))
            if isinstance(leaf, ValueLeaf):
                counts = type(leaf.value) is int and -_COUNTS <= leaf.value < _COUNTS
                if counts and len(path) == 1 and name[0] not in tops:
                    yield path, name
            elif name == (_SAVES,) and (leaf.dtype, leaf.shape) != ("int64", ()):
                continue  # tf.train.Checkpoint restores its own count from it, an int64
            elif path not in self.networks.unmapped and dtypes.BY_NAME[leaf.dtype].tensorflow is not None:
                yield path, name

    def _in_order(self, rows: list[Row], states: Sequence[BoundOptimizer]) -> list[Row]:
        """Return the rows with their layers in the order in which optimizers train them, if that differs.

        A file with tensors sorted by name has another order than the model.
        """
        ranks = {path: n for n, path in enumerate(path for state in states for path in state.weights)}
        units = {move[0]: n for n, unit in enumerate(self.networks.units) for move in unit.moves}
        first: dict[int, int] = {}
        for source, _, _ in rows:
            if source in ranks:
                first[units[source]] = min(ranks[source], first.get(units[source], len(ranks)))
        if list(first.values()) == sorted(first.values()):
            return rows
        return sorted(rows, key=lambda row: first.get(units[row[0]], -1))


class _TorchPlanner(KerasStates):
    """Plans one TensorFlow tree for PyTorch."""

    def __init__(self, tree: Tree, options: Sequence[LayerOption], settings: OptimizerSettings) -> None:
        from ckpttool.mapping import conversion_by_kinds

        super().__init__(tree, settings)
        state = frozenset(path for own in self.stored.values() for path in own)
        placed = conversion_by_kinds.convert_to_torch(tree, options)
        # Names have no edges between a Keras model and its layers; layer numbers stay.
        placed = placed._replace(
            done=tuple(
                (a, b, {old: _plain_name(new) for old, new in names.items()}) for a, b, names in placed.done
            )
        )
        sources = [path for _, done, _ in placed.done for path, _, _ in done.moves]
        self.root = self.is_root(sources)
        self.heads = frozenset(path[:1] for path in sources)
        self.networks = _TreeNetworks(tree, placed, state, self._inside)
        self._order_units()

    def _order_units(self) -> None:
        """Sort layers into their optimizer's training order, because PyTorch matches by order."""
        order = trained_order(self.tree)
        ranks: list[int] = []
        for unit in self.networks.units:
            own = [order[source] for source, _, _ in unit.moves if source in order]
            ranks.append(min(own) if own else ranks[-1] if ranks else -1)
        ranked = sorted(zip(ranks, range(len(ranks)), strict=True))
        self.networks.units = [self.networks.units[at] for _, at in ranked]

    def _inside(self, path: Path) -> bool:
        leaf = self.tree[path]
        if self.root:
            return isinstance(leaf, Leaf) and leaf.role in ("parameter", "buffer")
        return path[:1] in self.heads

    def plan(self) -> Plan:
        """Return the full plan."""
        from ckpttool.libraries.write import merge_plans

        self.networks.require("tensorflow")
        rows = list(self.networks.moved())
        added = {name: leaf for unit in self.networks.units for name, leaf in unit.added.items()}
        values = list(self._values())
        nested = bool(self.tops) or any(str(path[-1].value) != _SAVES for path in values)
        containers: dict[Path, Container] = {(): _DICT if nested else _ORDERED}
        names = dict.fromkeys((*(name for _, name, _ in rows), *added))
        paths = {name: self._target_path(name, nested=nested) for name in names}
        containers |= {path[:-1]: _ORDERED for path in paths.values() if len(path) > 1}
        moves = [Move(source, paths[name], rule) for source, name, rule in rows]
        moves += [
            Move(path, (key(self.tree.names[path].replace("/", ".")),), KEEP)
            for path, leaf in self.tree.tensors()
            if leaf.role == "replay" and dtypes.BY_NAME[leaf.dtype].torch is not None
        ]
        for path in values if nested else ():
            prefix = tuple(key(step.value) for step in path)
            moves.append(Move(path, prefix, self._value_rule(path)))
            containers |= {prefix[:depth]: _DICT for depth in range(1, len(prefix))}
        states, notes, _ = self.bind_states(rows)
        self.settings.require({state.name for state in states})
        plans = []
        for state in states:
            at = self._optimizer_place(state.top, containers)
            plan = self.write_torch(state, rows, paths, at, added)
            containers |= {at[:depth]: _DICT for depth in range(1, len(at)) if at[:depth] not in containers}
            containers |= plan.containers
            plans.append(plan)
        placed = self.networks.placed
        whole = merge_plans(
            Plan(
                tuple(moves),
                {paths[name]: leaf for name, leaf in added.items()},
                containers,
                placed.assumed,
                consumed=placed.left,
                notes=(*placed.notes, *self.networks.reasons("tensorflow"), *notes),
            ),
            *plans,
        )
        idle = (path for path in self.tree if path in self.idle)
        return self.networks.with_kept(replace(whole, containers=containers), idle)

    def _target_path(self, name: Name, *, nested: bool) -> Path:
        if not nested:
            return (key(".".join(name)),)
        if self.root:
            return key(_MODEL), key(".".join(name))
        return key(name[0]), key(".".join(name[1:]))

    def _values(self) -> Iterator[Path]:
        """Yield the variables outside networks and optimizers that the PyTorch file can store."""
        for path in self.networks.values:
            leaf = self.tree[path]
            if not isinstance(leaf, Leaf) or leaf.role == "replay" or path in self.networks.unmapped:
                continue
            whole = not self.root or len(path) == 1
            if whole and (dtypes.BY_NAME[leaf.dtype].torch is not None or self._is_text(leaf)):
                yield path

    @staticmethod
    def _is_text(leaf: Leaf) -> bool:
        return leaf.dtype == "string" and leaf.size == 1

    def _value_rule(self, path: Path) -> Rule:
        leaf = self.tree[path]
        assert isinstance(leaf, Leaf)  # noqa: S101  # `_values` yields tensors
        number = leaf.role == "counter" and leaf.size == 1
        return ToValue() if number or self._is_text(leaf) else KEEP

    def _optimizer_place(self, top: Path, containers: Mapping[Path, Container]) -> Path:
        """Return the path of an optimizer: its own name, unless that is inside a network's state_dict."""
        top = top[:-1] if top[:-1] in self.around else top
        path = tuple(key(str(step.value)) for step in top) or (key(OPTIMIZER),)
        if len(path) > 1 and (self.root or top[:1] in self.heads):
            alone = len(self.tops) == 1 and (key(OPTIMIZER),) not in containers
            path = (key(OPTIMIZER if alone else "_".join(str(step.value) for step in top)),)
        return path


class _ObjectsPlanner(_TorchPlanner):
    """Plans one TensorFlow tree for TensorFlow objects or a Keras weights file.

    With `in_order`, the source lists layers in model order, under names that may not be attributes;
    with `exported`, the source is Keras's list of a model's variables.
    """

    in_order = False
    exported = False

    def objects(self, *, file: bool) -> Plan | None:
        """Return the plan, None if an optimizer's state is unknown."""
        from ckpttool.libraries.write import merge_plans

        weights = [
            (path, leaf)
            for path, leaf in self.tree.tensors()
            if leaf.role in ("parameter", "buffer") and leaf.dtype != "string"
        ]
        heads = {path[:1] for path, _ in weights}
        cut = int(file and len(heads) == 1 and all(len(path) > 2 for path, _ in weights) and not self.root)
        cut = max(cut, self._depth([path for path, _ in weights]))
        numbers = self._numbers([path for path, _ in weights], cut) if file else {}
        edges = {} if file else self._sequential_edges()
        rows = [(path, self._in_file(path, cut, {**numbers, **edges}), KEEP) for path, _ in weights]
        states, notes, _ = self.bind_states(rows)
        if self.around or len(states) < len(self.tops) or len(states) > 1 or not weights:
            return None
        self.settings.require({state.name for state in states})
        tops = {state.top: (OPTIMIZER,) if file else path_texts(state.top) for state in states}
        marks = {top: (*name, "_iterations") for top, name in tops.items()}
        values = {} if file else {path: path_texts(path) for path in self._values()}
        paths = object_graph_paths(
            dict.fromkeys((*(n for _, n, _ in rows), *marks.values(), *values.values()))
        )
        moves = [Move(source, paths[name], KEEP) for source, name, _ in rows]
        moves += [Move(source, paths[name], KEEP) for source, name in values.items()]
        labels = {
            paths[name]: Label(leaf.role, leaf.name or "/".join(name))
            for (path, name) in [*((path, name) for path, name, _ in rows), *values.items()]
            if isinstance(leaf := self.tree[path], Leaf)
        }
        plans = [self._object(state, paths, rows, paths[marks[state.top]][:-1]) for state in states]
        whole = merge_plans(Plan(tuple(moves), labels=labels, notes=tuple(notes)), *plans)
        used = {move.source for move in whole.moves} | {*whole.consumed, *whole.kept}
        kept = [path for path in self.networks.outside if path not in used]
        return replace(whole, kept=(*whole.kept, *kept))

    def _depth(self, weights: Sequence[Path]) -> int:
        """Return the number of path steps above a model's layers in the variable list of Keras's export."""
        if not self.exported:
            return 0
        return 2 if len({path[:2] for path in weights}) == 1 and all(len(p) > 3 for p in weights) else 1

    def _sequential_edges(self) -> dict[Path, Name]:
        """Return the steps from each Sequential to its layers, of which the input layer is number 0."""
        listed: dict[Path, list[Path]] = {}
        for path, container in self.tree.containers.items():
            above = self.tree.containers.get(path[:-1]) if path else None
            if above is not None and above.name == "Sequential" and container.name != "InputLayer":
                listed.setdefault(path[:-1], []).append(path)
        return {
            path: (*SEQUENTIAL_EDGES, str(number))
            for paths in listed.values()
            for number, path in enumerate(paths, 1)
        }

    def _numbers(self, paths: Sequence[Path], cut: int) -> dict[Path, Name]:
        """Give numbers to the layers of a model whose file names them by class, in model order."""
        weights = [path[cut:] for path in paths]
        root = self.tree.containers.get(())
        listed = root is not None and root.name in _LISTED
        inner = all(_NUMBERED.fullmatch(str(path[0].value)) for path in weights)
        plain = all(len(path) == 2 and str(path[-1].value).lstrip("_") in _BY_CLASS for path in weights)
        if not plain or not (listed or inner or self.in_order or self.exported):
            return {}
        tops = dict.fromkeys(path[: cut + 1] for path in paths)
        return {top: (str(number),) for number, top in enumerate(tops)}

    @staticmethod
    def _in_file(path: Path, cut: int, steps_: Mapping[Path, Name]) -> Name:
        """Return the name of a weight below its first `cut` steps, with `steps_` to a layer for its own."""
        depths = range(cut + 1, len(path) + 1)
        return tuple(
            word for depth in depths for word in steps_.get(path[:depth], (str(path[depth - 1].value),))
        )

    def _object(
        self,
        state: BoundOptimizer,
        paths: Mapping[Name, Path],
        rows: Sequence[Row],
        top: Path,
    ) -> Plan:
        order = trained_order(self.tree)
        rows = sorted(rows, key=lambda row: order.get(row[0], len(order)))
        return self.write_keras(state, rows, paths, top)


def _plain_name(name: Name) -> Name:
    steps_ = [_NUMBERED.sub(r"\1", step) for step in name]
    return tuple(step for step in steps_ if step not in _EDGES) or name
