"""What fills a model: a checkpoint, a part of it, or its agent by canonical names; and the report of that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool import plugins
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import MappingError, UsageError, some
from ckpttool.formats import onnx
from ckpttool.layouts import onnx_layers, variables
from ckpttool.layouts.canonical import RUN, Binding
from ckpttool.layouts.recognise import recognised
from ckpttool.layouts.recorded_orders import with_orders
from ckpttool.leaf import Leaf, Path, ValueLeaf, display
from ckpttool.mapping import inert, orientation
from ckpttool.mapping.filling import fill, fill_by_rules
from ckpttool.mapping.fitting import STATES
from ckpttool.mapping.layers import Choice, layers
from ckpttool.mapping.matches import Filling
from ckpttool.mapping.modules import About
from ckpttool.mapping.report import Moves, Report
from ckpttool.mapping.rule_file import RuleFile
from ckpttool.mapping.skeleton import Skeleton
from ckpttool.ops import part as parts
from ckpttool.ops import side_files
from ckpttool.ops.general_way import without_copies
from ckpttool.ops.plain_names import AS_IT_IS, Prepared, Wanted, prepared
from ckpttool.ops.restore import canonical_tree
from ckpttool.ops.route import mapped
from ckpttool.sidecar import Sidecar
from ckpttool.source import Shape
from ckpttool.tree import Alias, Tree

# Formats whose tensors stand in alphabetical order, whatever the program did.
_SORTED = frozenset(("npz", "safetensors", "sharded", "tensorflow_v1"))
_OF_GRAPHS = frozenset(("tensorflow_v1", "tensor_bundle"))
# The canonical agent has dense kernels [in, out] and names that mappings know as TensorFlow's.
_CANONICAL = "tensorflow"
_SHOWN = 3
# Shapes of a model's inputs, as formats/keras_tree/flow.py writes them.
_INPUTS = re.compile(r"\d{1,7}(,\d{1,7}){0,4}(;\d{1,7}(,\d{1,7}){0,4}){0,7}", re.ASCII)
_BY = {
    "order": "in order",
    "numbers": "by numbers",
    "calls": "by calls",
    "words": "by words",
    "only fit": "as the only fit",
}
_COUNTED = {**_BY, "given": "as given"}


class ModelSource(NamedTuple):
    """The tree that fills a model, in whose framework's spelling it is, and whether its order tells much.

    `described` is what the file records of the whole modules that its tensors come from, `listed` says that
    counts in names follow the calls of a graph.
    """

    ready: Prepared
    framework: str
    in_order: bool
    described: Mapping[Path, About] = MappingProxyType({})
    listed: bool = False

    @property
    def tree(self) -> Tree:
        """The tree itself."""
        return self.ready.tree

    def fill(
        self,
        skeleton: Skeleton,
        choices: Sequence[Choice] = (),
        given: Sequence[tuple[str, str]] = (),
        *,
        strict: bool = True,
        accept_order: bool = False,
        cast: bool = False,
        rules: RuleFile | None = None,
    ) -> Filling:
        """Return how it fills the skeleton; see fill and fill_by_rules of mapping.filling."""
        how: dict[str, Any] = {
            "in_order": self.in_order,
            "listed": self.listed,
            "described": self.described,
            "choices": choices,
            "given": given,
            "strict": strict,
            "accept_order": accept_order,
            "cast": cast,
        }
        if rules is None:
            return fill(self.tree, self.framework, skeleton, **how)
        return fill_by_rules(self.tree, self.framework, skeleton, rules, **how)

    def guessed(self) -> tuple[Shape, ...]:
        """Return the shapes of inputs as a configuration tells them, or a dense first layer."""
        for container in self.tree.containers.values():
            said = container.state.get("model_inputs") if isinstance(container.state, dict) else None
            if isinstance(said, str) and _INPUTS.fullmatch(said):
                return tuple(tuple(map(int, shape.split(","))) for shape in said.split(";"))
        found = layers(self.tree, self.framework)
        if not found or [kind.name for kind in found[0].kinds] != ["dense"]:
            return ()
        kind = found[0].kinds[0]
        group = found[0].group(self.tree)
        row = next(row for row in kind.read(group).rows if row.canonical == "kernel")
        shape = getattr(row.rule.leaf(group[row.stored]), "shape", ())
        return ((shape[0],),) if shape else ()


def model_source(
    checkpoint: Checkpoint,
    part: str | None,
    wanted: Wanted = AS_IT_IS,
    known: Sidecar | None = None,
    source: str | None = None,
    shapes: Sequence[Shape] = (),
) -> ModelSource:
    """Return the checkpoint, or what lies below the path `part`, by its own names.

    `source` states whose orientation its arrays have ("torch" or "tf"), `shapes` are those of the inputs of
    the model that is filled. Raise UsageError where nothing lies
    below it, or names cannot be restored, MappingError where the orientation is not clear.
    """
    if checkpoint.format == onnx.NAME:
        checkpoint = onnx_layers.as_state_dict(checkpoint)
    else:
        checkpoint = replace(checkpoint, tree=with_orders(checkpoint.tree, checkpoint, shapes))
    tree, lost = (checkpoint.tree, ()) if part is None else parts.below(checkpoint.tree, part)
    side_files.require_shards(tree)
    ready, described = _as_saved(prepared(checkpoint.tree, tree, part, wanted, known))
    ready = ready._replace(lost=(*lost, *ready.lost))
    framework = _framework(checkpoint, ready.tree, source)
    try:
        rows = orientation.with_layers(ready.tree, framework, stated=source is not None)
    except MappingError as error:
        raise error.located(file=checkpoint.path) from None
    if not rows.assumed:
        in_order = _in_order(checkpoint, ready.tree, framework)
        # A graph counts layers of a scope as they are called.
        by_graph = checkpoint.format in _OF_GRAPHS and variables.by_name(ready.tree)
        return ModelSource(ready, framework, in_order, described, by_graph)
    names = {place: ready.names[path] for place, path in rows.sources.items()}
    rules = {place: ready.rules[path] for place, path in rows.sources.items() if path in ready.rules}
    ready = ready._replace(tree=rows.tree, names=names, rules=rules, notes=(*ready.notes, *rows.assumed))
    return ModelSource(ready, framework, in_order=True)


def _as_saved(ready: Prepared) -> tuple[Prepared, Mapping[Path, About]]:
    """Return the tree with whole modules as their state_dicts, and without the copies of Keras's export.

    The second result is what the file records of the whole modules that held the tensors.
    """
    described: Mapping[Path, About] = {}
    found = inert.to_state_dicts(ready.tree)
    if found is not None:
        sources = {move.target: move.source for move in found.moves}
        places = {old: new for new, old in sources.items()}
        leaves = {new: _owned(ready.tree[old], places) for new, old in sources.items()}
        aliases = {path: tuple(map(Alias, others)) for path, others in found.aliases.items()}
        rules = {new: ready.rules[old] for new, old in sources.items() if old in ready.rules}
        names = {new: ready.names[old] for new, old in sources.items()}
        about = inert.described(ready.tree)
        described = {new: about[old] for new, old in sources.items() if old in about}
        ready = ready._replace(tree=Tree(leaves, aliases, found.containers), names=names, rules=rules)
    return ready._replace(tree=without_copies(ready.tree)), described


def _owned(leaf: Leaf | ValueLeaf, places: Mapping[Path, Path]) -> Leaf | ValueLeaf:
    return replace(leaf, of=places.get(leaf.of)) if isinstance(leaf, Leaf) and leaf.of is not None else leaf


def agent_source(checkpoint: Checkpoint, part: str | None, layout: str | None) -> ModelSource:
    """Return the networks of the agent that a layout reads, or one of them, by their canonical names.

    Raise UsageError where no layout knows the agent, or it has no such network.
    """
    binding = recognised(checkpoint, layout)
    if binding is None:
        raise UsageError("no layout recognises an agent in this checkpoint", file=checkpoint.path)
    moves = tuple(move for move in binding.moves.moves if move.target[0].value in RUN)
    tree = canonical_tree(checkpoint.tree, Moves(moves))
    names = {display(move.target): checkpoint.tree.names[move.source] for move in moves}
    if part is not None:
        tree = _network(tree, part, binding, checkpoint)
    start = "" if part is None else f"{part.strip('/')}/"
    own = {path: names[f"{start}{display(path)}"] for path in tree}
    note = f"read as an agent of layout {binding.layout}"
    return ModelSource(Prepared(tree, own, {}, notes=(note,)), _CANONICAL, in_order=True)


def _network(tree: Tree, part: str, binding: Binding, checkpoint: Checkpoint) -> Tree:
    try:
        return parts.below(tree, part)[0]
    except UsageError as error:
        known = ", ".join(each.title for each in binding.parts)
        hint = f"the agent's networks are {known}"
        raise UsageError(error.message, file=checkpoint.path, path=part, hint=hint) from None


def written(ready: Prepared, filling: Filling) -> frozenset[str]:
    """Return the names, in the checkpoint, of what fills the model."""
    return frozenset(ready.names[move.source] for move in filling.moves)


def report(ready: Prepared, skeleton: Skeleton, filling: Filling) -> Report:
    """Return what became of every entry of the source and of every place in the model."""
    counted = [f"{n} {_COUNTED.get(by, f'by {by}')}" for by, n in _counts(filling).items()]
    many = "layer" if len(filling.matched) == 1 else "layers"
    notes = [f"{len(filling.matched)} {many} matched: {', '.join(counted)}"] if counted else []
    for by, word in _BY.items():
        found = [f"{m.source} is {m.target}" for m in filling.matched if m.by == by]
        notes += [f"{word}: {some(found, _SHOWN)}"] if found else []
    others = [ready.names[p] for p, leaf in ready.tree.tensors() if leaf.role not in (*STATES, "counter")]
    if others:
        notes.append(f"no part of a model, left behind: {some(others, _SHOWN)}")
    names = skeleton.tree.names
    lines = mapped(ready, filling.tree, filling.moves)
    return Report(
        tuple(
            replace(line, by=filling.evidence.get(move.target))
            for line, move in zip(lines, filling.moves, strict=True)
        ),
        (*(ready.names[path] for path in filling.unused), *ready.lost),
        tuple(names[path] for path in filling.unfilled),
        filling.assumed,
        (*ready.notes, *notes, *(a.sentence for a in filling.ambiguous), *filling.notes),
    )


def _counts(filling: Filling) -> dict[str, int]:
    found: dict[str, int] = {}
    for match in filling.matched:
        found[match.by] = found.get(match.by, 0) + 1
    return found


def _framework(checkpoint: Checkpoint, tree: Tree, source: str | None) -> str:
    """Return whose spelling the source has; without evidence, in whose more of its arrays are layers."""
    native = str(plugins.find("formats", checkpoint.format).load().FRAMEWORK)
    said = orientation.of_checkpoint(checkpoint, tree, native, source)
    if said in ("torch", "tensorflow"):
        return said
    counts = {
        name: sum(len(layer.tensors) for layer in layers(tree, name)) for name in ("torch", "tensorflow")
    }
    return max(counts, key=lambda name: counts[name])


def _in_order(checkpoint: Checkpoint, tree: Tree, framework: str) -> bool:
    """Say whether the tree lists layers as the program made them, not by their names."""
    if checkpoint.format in _SORTED or (framework == "tensorflow" and variables.by_name(tree)):
        return False
    # keras/src/saving/saving_lib.py, _walk_saveable: attributes in alphabetical order.
    return checkpoint.format != "keras_h5" or all("/vars/" not in leaf.key for _, leaf in tree.tensors())
