"""Which way a checkpoint takes: copied as it is, by its layout, by the kinds of its layers, or by rules."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from ckpttool import plugins, sidecar
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, MappingError, UnsupportedError, UsageError, some
from ckpttool.formats import onnx
from ckpttool.formats.probe import Format
from ckpttool.layouts import canonical, objects, onnx_layers, variables
from ckpttool.layouts.canonical import NO_LAYOUT, Binding
from ckpttool.layouts.recorded_orders import with_orders
from ckpttool.leaf import Path, display
from ckpttool.mapping import by_rules, generic, orientation
from ckpttool.mapping.layers import Choice
from ckpttool.mapping.plan import Label, Plan, Settings, after, build, edges, resourced
from ckpttool.mapping.report import Move
from ckpttool.mapping.rule_file import RuleFile
from ckpttool.mapping.rules import KEEP
from ckpttool.ops import agent_way, general_way, optimizer_facts, side_files
from ckpttool.ops.agent_way import framework_of
from ckpttool.ops.request import Request
from ckpttool.ops.restore import require_layers, with_names
from ckpttool.ops.targets import TargetKind
from ckpttool.ops.way_back import CONTAINERS
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

TENSORFLOW, NUMPY = "tensorflow", "numpy"
_WEIGHTS_FILE = "keras_h5"
_KERAS_FILES = frozenset(("keras_h5", "keras_zip"))
# Those that pickle NumPy arrays, whichever framework trained them, among much else.
PICKLES = frozenset(("rllib",))
# The layouts of a library's own container, whose settings mean nothing elsewhere.
ENCLOSED = frozenset(("stable_baselines3", "rllib", "rllib_policy", "d3rlpy"))


class Way(NamedTuple):
    """The plan, None if everything stays as it is, and the agent if it goes by its layout.

    `general` says that the plan is of networks, optimizers and values, whatever layout the tree has.
    """

    plan: Plan | None
    agent: Binding | None = None
    general: bool = False


def way(
    checkpoint: Checkpoint, tree: Tree, request: Request, binding: Binding | None, known: Sidecar | None
) -> Way:
    """Return the way of a tree, recognised as `binding` or as nothing, to what is wanted.

    Raise UsageError for what the target or the way does not take.
    """
    kind, given = request.kind, request.given
    if checkpoint.format == onnx.NAME and request.rules is None:
        return _of_graph(checkpoint, tree, request, known)
    if request.rules is not None:
        return Way(_by_rules(checkpoint, tree, kind, request.rules, given))
    if kind.agent and binding is None:
        raise UsageError(
            f"only an agent can be written as {kind.layout}, and no layout recognises one here",
            file=checkpoint.path,
        )
    if request.fold_normalizer and (binding is None or binding.layout == NO_LAYOUT):
        raise UsageError("--fold-normalizer is for agents that a layout recognises", file=checkpoint.path)
    kept = (
        not request.fold_normalizer
        and request.layout in (None, NO_LAYOUT)
        and not kind.agent
        and _is_kept(checkpoint, request, tree, binding)
    )
    if given and (kept or binding is not None):
        why = "stays as it is" if kept or binding is None else f"goes by its layout, {binding.layout}"
        raise UsageError(
            f"--kind and --flatten say how layers are mapped, and this {why}", file=checkpoint.path
        )
    if kept:
        stated = request.source is not None
        nested = _nested(checkpoint, tree, kind, stated=stated) if binding is None else None
        if nested is not None:
            inner = build(tree, nested)
            return Way(after(nested, _rewritten(inner, kind, None) or _as_it_is(inner)))
        plan = _rewritten(tree, kind, known if request.part is None else None)
        # An optimizer of TensorFlow 1 has no place in Keras's file as it is, whatever layout knows it.
        older = kind.format == _WEIGHTS_FILE and general_way.has_older_optimizer(tree)
        objects = (binding is None or older) and _is_rebuilt(checkpoint.format, kind, tree)
        made = _rebuilt(checkpoint.format, tree, request, known, binding) if objects else None
        if made is None or (_problems(tree, made) and not older):
            return Way(plan)
        return Way(made, general=True)
    if binding is not None:
        require_layers(binding, known, sidecar.beside(checkpoint.path))
        agent = with_names(agent_way.without_added(binding, tree, known), tree, known)
        return _by_layout(checkpoint, tree, request, agent, known)
    return Way(_general(checkpoint, tree, request, optimizer_facts.settings(known)), general=True)


def _of_graph(checkpoint: Checkpoint, tree: Tree, request: Request, known: Sidecar | None) -> Way:
    """Return the way of an ONNX model: its layers as a state_dict, and from there as any state_dict goes."""
    if request.part is not None or tree.leaves.keys() != checkpoint.tree.leaves.keys():
        raise UsageError(
            "of an ONNX model all layers are converted", file=checkpoint.path, hint="leave out --part"
        )
    if request.kind.agent:
        raise UsageError(
            f"only an agent can be written as {request.kind.layout}, and an ONNX model is a network alone",
            file=checkpoint.path,
            hint="--to torch, tf, keras, safetensors or npz writes its layers",
        )
    try:
        first, choices = onnx_layers.to_state_dict(checkpoint)
    except CkpttoolError as error:
        raise error.located(file=error.file or checkpoint.path) from error.__cause__
    if _framework(request.kind.format) != TENSORFLOW:
        if request.given:
            raise UsageError("--kind and --flatten say how layers are mapped, and these stay as they are")
        return Way(first, general=True)
    inner = request._replace(given=(*request.given, *choices))
    layers = with_orders(build(tree, first), checkpoint, sources=onnx_layers.sources(first), unknown=False)
    second = _general(checkpoint, layers, inner, optimizer_facts.settings(known))
    return Way(after(first, second), general=True)


def _by_layout(
    checkpoint: Checkpoint, tree: Tree, request: Request, agent: Binding, known: Sidecar | None
) -> Way:
    """Return the way of an agent: by its layout, or by its parts if those keep an optimizer that it loses.

    One network alone is the root of a file of Keras, as it is of a program's `model.load_weights`.
    """
    told = optimizer_facts.settings(known)
    keras = request.kind.format == _WEIGHTS_FILE and not request.fold_normalizer
    if request.layout is None and keras and _is_alone(tree, agent):
        with contextlib.suppress(MappingError, UnsupportedError, UsageError):
            general = _general(checkpoint, tree, request, told)
            if not _problems(tree, general):
                return Way(general, general=True)
    failed: CkpttoolError | None = None
    plan: Plan | None = None
    try:
        fold = request.fold_normalizer
        plan = agent_way.plan(tree, agent, request.kind, told, known, fold=fold)
    except (MappingError, UnsupportedError) as error:
        failed = error
    left = _problems(tree, plan, agent.consumed) if plan is not None else list(tree)
    unplaced = frozenset(left)
    open_ = [leaf for path, leaf in tree.tensors() if path in unplaced]
    slots = any(leaf.role == "slot" for leaf in open_)
    layers = any(leaf.role in ("parameter", "buffer") and len(leaf.shape) > 1 for leaf in open_)
    able = request.layout is None and not request.kind.agent and not request.fold_normalizer
    if (slots or layers) and able:
        with contextlib.suppress(MappingError, UnsupportedError, UsageError):
            general = _general(checkpoint, tree, request, told)
            problems = _problems(tree, general)
            if not problems or (slots and len(problems) < len(left)):
                what = "the optimizer's state" if slots else "other networks"
                said = f"converted by its parts: layout {agent.layout} has no place for {what}"
                return Way(replace(general, notes=(said, *general.notes)), general=True)
    if failed is not None:
        raise failed
    return Way(plan, agent)


def _is_alone(tree: Tree, agent: Binding) -> bool:
    """Whether the tree is one network of an agent, in a dict of its own, and nothing else."""
    tensors = [path for path, _ in tree.tensors()]
    return len({part.component for part in agent.parts}) == 1 and len({path[:-1] for path in tensors}) == 1


def _problems(tree: Tree, plan: Plan, consumed: Collection[Path] = ()) -> list[Path | str]:
    """Return what a plan leaves open: entries of the source by path, of the target by name."""
    used = {move.source for move in plan.moves} | {*plan.consumed, *plan.kept, *consumed}
    return [*plan.missing, *plan.partly, *(path for path in tree if path not in used)]


def _general(checkpoint: Checkpoint, tree: Tree, request: Request, told: Settings) -> Plan:
    """Return the plan of a checkpoint without a layout; raise MappingError where no layer is known."""
    kind, given, stated = request.kind, request.given, request.stated.settings()
    ours = _framework(kind.format)
    theirs, stated_axes = "torch" if ours == TENSORFLOW else TENSORFLOW, request.source is not None
    if checkpoint.format != onnx.NAME:
        tree = with_orders(tree, checkpoint, unknown=False)
    try:
        tree, sources, assumed = orientation.with_layers(tree, theirs, stated=stated_axes)
        if ours == TENSORFLOW:
            file = kind.format == _WEIGHTS_FILE
            plan = general_way.to_tensorflow(tree, given, told, stated, file=file)
        else:
            plan = general_way.to_torch(tree, given, told, stated)
        return replace(resourced(plan, sources), assumed=(*assumed, *plan.assumed)) if assumed else plan
    except CkpttoolError as error:
        raise error.located(file=checkpoint.path) from error.__cause__


def _is_kept(checkpoint: Checkpoint, request: Request, tree: Tree, binding: Binding | None) -> bool:
    """Say whether all that a checkpoint holds goes into another format as it is, under the same paths."""
    source, target = checkpoint.format, request.kind.format
    native, ours = _framework(source), _framework(target)
    if source == target or ours == NUMPY:
        return True
    if {source, target} <= CONTAINERS and (
        source not in orientation.NEUTRAL or target in orientation.NEUTRAL
    ):
        return True
    if binding is None:
        theirs = orientation.of_checkpoint(checkpoint, tree, native, request.source, ours)
        return theirs in (ours, NUMPY)
    if source in orientation.NEUTRAL & CONTAINERS:
        return framework_of(binding) == ours
    theirs = native
    if theirs != NUMPY:
        # What a program kept for itself is an agent for others only if a layout knows it; variables by name
        # and objects are TensorFlow's own.
        return theirs == ours == TENSORFLOW and source not in PICKLES
    # Arrays that belong to no framework have the paths that they have; their names tell who named them.
    return binding.layout not in ENCLOSED and framework_of(binding) == ours


def axes_note(checkpoint: Checkpoint, tree: Tree, request: Request) -> str | None:
    """Return a note on arrays that keep their axes because nothing tells whose framework they are of."""
    ours = _framework(request.kind.format)
    if checkpoint.format not in orientation.NEUTRAL or ours == NUMPY or request.source is not None:
        return None
    matrices = [path for path, leaf in tree.tensors() if len(leaf.shape) > 1 and "float" in leaf.dtype]
    native = _framework(checkpoint.format)
    if not matrices or orientation.of_checkpoint(checkpoint, tree, native, None, ours) != NUMPY:
        return None
    names = some([display(path) for path in matrices], 3)
    return (
        f"no name tells a layer: axes stay as they are in the file ({names}), "
        "and nn.Linear takes [out, in], Dense [in, out]"
    )


def _framework(name: str) -> str:
    return cast(Format, plugins.find("formats", name).load()).FRAMEWORK


def _rewritten(tree: Tree, kind: TargetKind, known: Sidecar | None) -> Plan | None:
    """Return the way to objects of what has none, None if the tree is that already or needs names."""
    if not kind.options.get("graph") or variables.is_graph(tree):
        return None
    plan = objects.again(tree, known.objects) if known is not None and known.objects is not None else None
    return plan or variables.to_graph(tree)


def _nested(checkpoint: Checkpoint, tree: Tree, kind: TargetKind, *, stated: bool) -> Plan | None:
    """Return the way of arrays by whole names (`l1.kernel`) to objects, None where that has no meaning.

    Nothing has an attribute with a dot in its name, and arrays in a row are layers in this order.
    """
    objects = kind.format == _WEIGHTS_FILE or kind.options.get("graph")
    neutral = checkpoint.format in orientation.NEUTRAL or _is_handmade(checkpoint)
    if not objects or not neutral or any(len(path) != 1 for path in tree):
        return None
    rows = orientation.with_layers(tree, TENSORFLOW, stated=stated)
    tree = rows.tree
    names = {path: tuple(re.split(r"[./]", str(path[0].value).removesuffix(":0"))) for path in tree}
    below = {name[:depth] for name in names.values() for depth in range(len(name))}
    clear = len(set(names.values())) == len(names) and below.isdisjoint(names.values())
    if not clear or all(len(name) == 1 for name in names.values()) or not all(map(all, names.values())):
        return None
    own = {path: _as_kernel(name, frozenset(names.values())) for path, name in names.items()}
    found = edges(own.values())
    labels = {found[own[path]]: Label(leaf.role, "/".join(own[path])) for path, leaf in tree.tensors()}
    moves = tuple(Move(rows.sources[path], found[name], KEEP) for path, name in own.items())
    return Plan(moves, labels=labels, assumed=rows.assumed)


def _is_handmade(checkpoint: Checkpoint) -> bool:
    """Say whether the file is HDF5 that no Keras wrote."""
    return checkpoint.format == _WEIGHTS_FILE and checkpoint.writer is None


def _as_kernel(name: tuple[str, ...], others: frozenset[tuple[str, ...]]) -> tuple[str, ...]:
    """Return a dense layer's name of its matrix for the ones that a program's own class gave it."""
    own = name[-1] == "weight" and {(*name[:-1], "bias")} <= others
    return (*name[:-1], "kernel") if own else name


def _as_it_is(tree: Tree) -> Plan:
    return Plan(tuple(Move(path, path, KEEP) for path in tree))


def _is_rebuilt(source: str, kind: TargetKind, tree: Tree) -> bool:
    """Say whether the target keeps objects in TensorFlow's other way: in Keras's files, or in a graph."""
    if kind.format == _WEIGHTS_FILE:
        held = tree.containers.get(())
        groups = held is not None and isinstance(held.state, dict) and "group" in held.state
        return not groups and _framework(source) == TENSORFLOW
    return bool(kind.options.get("graph")) and (source in _KERAS_FILES or general_way.is_exported(tree))


def _rebuilt(
    source: str, tree: Tree, request: Request, known: Sidecar | None, binding: Binding | None
) -> Plan | None:
    told, stated = optimizer_facts.settings(known), request.stated.settings()
    file = request.kind.format == _WEIGHTS_FILE
    moved = {str(move.target[0].value) for move in binding.moves.moves} if binding is not None else set()
    own = [name for name in canonical.OPTIMIZERS if name in moved]
    name = own[0] if len(own) == 1 else None
    # An .h5 of Keras 1 or 2 lists the layers of a model: those of Keras 3 never come here.
    in_order = source == _WEIGHTS_FILE
    return general_way.to_objects(tree, told, stated, file=file, name=name, in_order=in_order)


def _by_rules(
    checkpoint: Checkpoint, tree: Tree, kind: TargetKind, rules: RuleFile, given: Sequence[Choice]
) -> Plan:
    """Return what the user's rules say, and of what they do not name what the file says of the rest."""
    if kind.agent:
        raise UsageError(f"rules say names, and those of {kind.layout} are its library's", file=rules.path)
    found = by_rules.applied(rules, tree)
    ours = _framework(kind.format)
    plan = by_rules.plan(rules, found, objects=ours == TENSORFLOW)
    rest = Tree({path: tree[path] for path in found.rest}, {}, tree.containers)
    if rules.rest == "keep":
        kept = tuple(Move(path, path, KEEP) for path in rest)
        return replace(plan, moves=(*plan.moves, *kept))
    if rules.rest == "kinds" and found.rest:
        more = _by_kind(checkpoint, rest, ours, given)
        return replace(
            more,
            moves=(*plan.moves, *more.moves),
            added={**plan.added, **more.added},
            labels={**plan.labels, **more.labels},
            consumed=(*plan.consumed, *more.consumed),
            notes=(*plan.notes, *more.notes),
        )
    return plan


def _by_kind(checkpoint: Checkpoint, tree: Tree, ours: str, given: Sequence[Choice]) -> Plan:
    plan = generic.to_tensorflow(tree, given) if ours == TENSORFLOW else generic.to_torch(tree, given)
    if not plan.moves and not plan.notes:
        theirs = "torch" if ours == TENSORFLOW else TENSORFLOW
        raise side_files.no_layers(tree, theirs).located(file=checkpoint.path)
    return plan
