"""Conversion plans and records of their effects."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ckpttool.conversion import targets
from ckpttool.conversion.options import ConversionRequest, OptimizerOptions
from ckpttool.conversion.preparation import PreparedTree, prepare_tree
from ckpttool.conversion.reverse import ReverseConversion
from ckpttool.conversion.targets import TARGETS, TargetKind
from ckpttool.core import dtypes, plugins, sidecar
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError, MappingError, UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.sidecar import LedgerEntries, OmittedTensor, Sidecar
from ckpttool.core.text import describe_record, format_count, render_record
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, attr, display, key
from ckpttool.evaluation import restore
from ckpttool.evaluation.restore import require_layers, with_names, with_records
from ckpttool.formats.probe import format_framework
from ckpttool.libraries import recognize, schema
from ckpttool.libraries.recognize import KERAS_FORMATS
from ckpttool.libraries.schema import NO_LAYOUT, RecognizedAgent
from ckpttool.mapping.rules import (
    KEEP,
    Label,
    MappingEntry,
    MappingReport,
    Move,
    Plan,
    Settings,
    apply_plan,
    compose_plans,
)

if TYPE_CHECKING:
    from ckpttool.formats.probe import WritingFormat
    from ckpttool.mapping.solver import Ambiguity, LayerMatch
    from ckpttool.mapping.user_rules import RuleFile
    from ckpttool.verification.output_comparison import Parity
    from ckpttool.verification.proof import ModelProof


# A file of arrays only: an unchanged tree may have entries that it cannot store (formats/keras_h5.py).
_WEIGHTS_FILE = "keras_h5"
_GROUPS = key("param_groups")


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The plan from a source tree to a target tree, and its report.

    `ready` is the converted part, as it was prepared. `settings` are the optimizer settings for
    the target's sidecar, None to keep the source's; `objects` the objects that names hide. `moves`
    map entries, `whole` is whether all of a checkpoint was mapped under its own names. `before` is
    the digest of what a conversion was reversed to, `kept` the names of values stored only in the
    sidecar.
    """

    ready: PreparedTree
    tree: Tree
    report: MappingReport
    binding: RecognizedAgent | None = None
    settings: Settings | None = None
    objects: Mapping[str, Any] | None = None
    moves: tuple[Move, ...] = ()
    whole: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)
    before: str | None = None
    kept: tuple[str, ...] = ()

    def kept_tensors(self) -> Tree:
        """Return the tensors stored only with the sidecar, by name, for the file beside the target."""
        paths = {name: path for path, name in self.ready.names.items()}
        leaves: dict[Path, Leaf | ValueLeaf] = {}
        for name in self.kept:
            leaf = self.ready.tree.get(paths[name])
            if isinstance(leaf, Leaf) and dtypes.BY_NAME[leaf.dtype].torch is not None:
                leaves[key(name),] = Leaf(leaf.dtype, leaf.shape, leaf.source, name)
        return Tree(leaves, {}, {(): Container("dict")})


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """Result of a conversion or export; `digest` is the target's (None for a dry run or a refusal).

    `written` is whether the target exists now, `parity` compares the written networks, `load` are the
    Python lines that load the target. Where a user's model was filled, `matched` lists by layer its
    source, `ambiguous` layers without evidence, `left_out` the source's tensors that fill nothing,
    `loaded` whether the model loaded the target (else None), and `proof` whether it computes what the
    source computes. `playable` is whether the target is to be played, as an exported policy is; `code`
    is that of its networks, if requested.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    source: str
    target: str
    report: MappingReport
    digest: str | None = None
    written: bool = False
    parity: tuple[Parity, ...] = ()
    load: tuple[str, ...] = ()
    ledger: LedgerEntries = ()
    matched: tuple[LayerMatch, ...] = ()
    ambiguous: tuple[Ambiguity, ...] = ()
    loaded: bool | None = None
    left_out: tuple[OmittedTensor, ...] = ()
    proof: ModelProof | None = None
    playable: bool = False
    code: str | None = None

    @property
    def open_entries(self) -> LedgerEntries:
        """The facts without which the target certainly differs from the source."""
        return tuple(
            entry for entry in self.ledger if entry.open and (self.playable or entry.concerns == "conversion")
        )

    @property
    def within(self) -> bool:
        """Return whether all comparisons are within their bounds."""
        return all(network.within for network in self.parity) and (self.proof is None or self.proof.within)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        document: dict[str, Any] = {
            "source": self.source,
            "target": self.target,
            "mapped": [entry.document() for entry in self.report.mapped],
            "unused": list(self.report.unused),
            "missing": list(self.report.missing),
            "assumed": list(self.report.assumed),
            "ledger": sidecar.entries_to_json(self.ledger),
            "notes": list(self.report.notes),
            "parity": [network.document() for network in self.parity],
            "digest": self.digest,
            "written": self.written,
            "load": list(self.load),
        }
        if self.code is not None:
            document["code"] = self.code
        if self.loaded is not None:
            document["matched"] = [match.document() for match in self.matched]
            document["ambiguous"] = [entry.document() for entry in self.ambiguous]
            document["loaded"] = self.loaded
            document["left_out"] = [entry.document() for entry in self.left_out]
            document["verification"] = None if self.proof is None else self.proof.document()
        return document


def plan_conversion(
    checkpoint: Checkpoint,
    request: ConversionRequest,
    known: Sidecar | None,
    recognised: RecognizedAgent | None = None,
) -> ConversionPlan:
    """Return the plan from the checkpoint to the request; `known` is its own sidecar.

    `recognised` is the agent in it, if already known.

    Raise UsageError for a missing part, a layout that does not fit or cannot be written and names
    that cannot be restored, MappingError when nothing can be mapped.
    """
    ready, layout = _prepare(checkpoint, request, known), request.options.layout
    tree = ready.tree
    binding, read = recognize_source_agent(checkpoint, tree, layout, request.options.part, recognised)
    planner = _Planner(checkpoint, tree, request, binding, known)
    back = plan_reverse(checkpoint, request, known, tree)
    if back.note is not None:
        ready = ready._replace(notes=(*ready.notes, back.note))
    if back.tree is not None and known is not None:
        return _restored(ready, back.tree, back.moves, planner, known)
    if any(request.stated) or _has_modules(tree) or (known is not None and known.optimizers):
        from ckpttool.conversion.optimizer_options import add_stated_settings, penalty_notes

        planner = replace(planner, known=add_stated_settings(request.stated, known, binding, tree))
        ready = ready._replace(notes=(*ready.notes, *penalty_notes(planner.known)))
    plan = _chosen(ready, planner, read)
    # A library's own file has its own optimizers, and its layout decides about them.
    if plan.moves and not (request.kind.agent or any(request.stated) or request.rules is not None):
        return _without_unfit_optimizers(ready, plan, planner, read)
    return plan


def _has_modules(tree: Tree) -> bool:
    """Return whether the tree has modules, whose settings may contain penalties of weights."""
    return any(container.kind == "module" for container in tree.containers.values())


def _chosen(ready: PreparedTree, planner: _Planner, read: Sequence[str]) -> ConversionPlan:
    """Return the plan that the planner chooses; `read` are the notes on files beside the checkpoint."""
    request, checkpoint, choice = planner.request, planner.checkpoint, planner.choose()
    if choice.plan is not None and choice.by_layout:
        choice = choice._replace(plan=replace(choice.plan, notes=(*choice.plan.notes, *read)))
    plan, objects = _by_name(planner, choice.plan)
    plan = plan if plan is not None else _state_dicts(ready.tree, request.kind)
    conversion = _copied(ready, planner) if plan is None else _mapped(ready, plan, choice, planner)
    return replace(
        conversion,
        binding=choice.binding if request.rules is None else None,
        objects=objects,
        whole=request.whole and (plan is not None or request.kind.format != checkpoint.format),
        origins=_statement_origins(planner.known),
    )


def _without_unfit_optimizers(
    ready: PreparedTree, conversion: ConversionPlan, planner: _Planner, read: Sequence[str]
) -> ConversionPlan:
    """Return the plan without optimizers of which a part has no place in the target.

    A framework may load such an optimizer and fail at its first step. One that only lacks some slots stays.
    """
    if not (conversion.report.unused or conversion.report.missing):
        return conversion
    from ckpttool.libraries.optimizer_entries import OPTIMIZER, list_optimizers

    unused, moved = {*conversion.report.unused}, {move.source for move in conversion.moves}
    unfit: dict[Path, list[Path]] = {}
    gone: set[Path] = set()
    for top, own in list_optimizers(ready.tree).items():
        lost = [path for path in own if ready.names[path] in unused]
        slots = any(path in moved and _is_slot(ready.tree[path]) for path in own)
        whole = slots and all(_is_slot(ready.tree[path]) for path in lost)
        title = display(top) or OPTIMIZER
        lacks = any(name.startswith(f"{title}/") for name in conversion.report.missing)
        if own and (lacks or (lost and not whole)):
            unfit[top] = lost
            gone.update(own)
    if not unfit:
        return conversion
    from ckpttool.conversion import averages

    tree = averages.select_entries(ready.tree, {p: leaf for p, leaf in ready.tree.items() if p not in gone})
    options = planner.request.options
    try:
        binding, _ = recognize_source_agent(planner.checkpoint, tree, options.layout, options.part)
        left = _chosen(ready._replace(tree=tree), replace(planner, tree=tree, binding=binding), read)
    except CkpttoolError:
        return conversion
    if not {*left.report.missing} <= {*conversion.report.missing}:
        return conversion
    notes = [
        f"{display(top) or OPTIMIZER} is left out: {_why_unfit(top, lost, ready, conversion)}"
        for top, lost in unfit.items()
    ]
    # The target alone does not restore the source.
    return replace(left, whole=False, report=replace(left.report, notes=(*notes, *left.report.notes)))


def _is_slot(leaf: Leaf | ValueLeaf) -> bool:
    return isinstance(leaf, Leaf) and leaf.role == "slot"


def _why_unfit(top: Path, lost: Sequence[Path], ready: PreparedTree, conversion: ConversionPlan) -> str:
    """Return why an optimizer has no place in the target: the plan's own sentence, or its entries."""
    from ckpttool.libraries.optimizer_entries import OPTIMIZER, WITHOUT

    title = display(top) or OPTIMIZER
    for note in conversion.report.notes:
        if note.startswith((f"{title}: ", f"{title} ")) and WITHOUT in note:
            why = note.removeprefix(title).replace(WITHOUT, "").rstrip("; ")
            return why[2:] if why.startswith(": ") else f"it{why}"
    if not lost:
        lacks = [name for name in conversion.report.missing if name.startswith(f"{title}/")]
        return f"the checkpoint lacks {abbreviate_list(lacks, 3)}"
    if not any(move.source[: len(top)] == top for move in conversion.moves) and top:
        return "the target has no place for it"
    names = abbreviate_list([ready.names[path] for path in lost], 3)
    return f"the target has no place for {names}"


def _prepare(checkpoint: Checkpoint, request: ConversionRequest, known: Sidecar | None) -> PreparedTree:
    """Return the part to convert, under the names used for mapping."""
    part, weights = request.options.part, request.options.weights
    tree = checkpoint.tree
    chosen: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    if part is not None or request.no_optimizers:
        from ckpttool.conversion import parts
    if part is not None:
        tree, lost = parts.select_part(tree, part)
    if weights is not None:
        from ckpttool.conversion import averages

        tree, chosen = averages.choose_weights(tree, weights)
    if request.no_optimizers:
        tree, without = parts.without_optimizers(tree)
        chosen = (*chosen, *without)
    ready = prepare_tree(checkpoint.tree, tree, part, request.options.preparation, known)
    return ready._replace(lost=(*lost, *ready.lost), notes=(*ready.notes, *chosen))


def _restored(
    ready: PreparedTree, source: Tree, moves: tuple[Move, ...], planner: _Planner, known: Sidecar
) -> ConversionPlan:
    """Return the reverse plan to the source recorded in the sidecar."""
    settings, notes = _unplaced_statements(planner, known)
    return ConversionPlan(
        ready._replace(stripped=None),
        source,
        MappingReport(report_moves(ready, source, moves), notes=(*ready.notes, *notes)),
        planner.binding,
        settings,
        moves=moves,
        whole=True,
        origins=_statement_origins(known),
        before=(known.source or {}).get("sha256"),
    )


def _by_name(planner: _Planner, plan: Plan | None) -> tuple[Plan | None, Mapping[str, Any] | None]:
    """Return the plan to TensorFlow 1 names where the target has them, and what these names hide."""
    if not planner.request.by_name:
        return plan, None
    from ckpttool.libraries import tf_names  # for targets of TensorFlow only

    tree = planner.tree if plan is None else apply_plan(planner.tree, plan)
    if tf_names.has_named_variables(tree):
        return plan, None
    settings = planner.settings if plan is None else {**planner.settings, **plan.settings}
    to_names = tf_names.plan_variable_names(tree, settings)
    return to_names if plan is None else compose_plans(plan, to_names), tf_names.record_objects(
        tree, to_names
    )


def _state_dicts(tree: Tree, kind: TargetKind) -> Plan | None:
    """Return the plan of whole modules to the dicts that PyTorch loads, None where there are none."""
    if kind.format not in ("pytorch", "pytorch_dcp"):
        return None
    from ckpttool.mapping.pickled_modules import plan_state_dicts

    plan = plan_state_dicts(tree)
    if plan is None:
        return None
    # Numbers in TorchScript's code (an epsilon) are in no state_dict: no module could load it.
    moves = tuple(move for move in plan.moves if not _is_number_of_code(move.source, tree[move.source]))
    if not any(isinstance(tree[move.source], Leaf) for move in moves):
        return plan
    moved = {move.source for move in moves}
    kept = (
        path
        for path, leaf in tree.items()
        if path not in moved and (isinstance(leaf, ValueLeaf) or _is_number_of_code(path, leaf))
    )
    return replace(plan, moves=moves, kept=tuple(kept))


def _is_number_of_code(path: Path, leaf: Leaf | ValueLeaf) -> bool:
    return path[0] == attr("CONSTANTS") and isinstance(leaf, Leaf) and not leaf.shape


def _copied(ready: PreparedTree, planner: _Planner) -> ConversionPlan:
    """Return the plan that copies entries unchanged."""
    tree, kind, checkpoint = ready.tree, planner.kind, planner.checkpoint
    target = _arrays(tree) if kind.format == _WEIGHTS_FILE else tree
    moves = tuple(Move(path, path, KEEP) for path in target)
    lost = tuple(ready.names[path] for path in tree if path not in target)
    axes = axes_note(checkpoint, tree, planner.request) if kind.format != checkpoint.format else None
    report = MappingReport(
        report_moves(ready, target, moves),
        (*lost, *ready.lost),
        notes=(*ready.notes, *filter(None, (axes,))),
    )
    settings = _stated_settings(planner.request.stated, planner.known)
    return ConversionPlan(ready, target, report, settings=settings, moves=moves)


def _mapped(ready: PreparedTree, plan: Plan, choice: _Choice, planner: _Planner) -> ConversionPlan:
    """Return a plan of moves with the resulting tree and report."""
    agent = choice.binding if choice.by_layout else None
    target, kept = apply_plan(ready.tree, plan), _kept_values(ready.tree, plan, agent)
    stated = _stated_settings(planner.request.stated, planner.known)
    return ConversionPlan(
        ready,
        target,
        _report(ready, target, plan, agent, kept),
        settings=plan.settings if agent is not None or plan.settings else stated,
        moves=plan.moves,
        kept=tuple(ready.names[path] for path in kept),
    )


def _arrays(tree: Tree) -> Tree:
    """Return the tree without entries that are no arrays: plain values, and strings."""
    return tree.with_leaves({path: leaf for path, leaf in tree.tensors() if leaf.dtype != "string"})


def _unplaced_statements(planner: _Planner, known: Sidecar) -> tuple[Settings | None, tuple[str, ...]]:
    """Return the optimizer settings once stated that the reversed source cannot store, with notes."""
    if not _statement_origins(known) or planner.binding is None:
        return None, ()
    plan = planner.choose().plan
    return (None, ()) if plan is None else (plan.settings, plan.notes)


def _report(
    ready: PreparedTree, target: Tree, plan: Plan, agent: RecognizedAgent | None, kept: Sequence[Path]
) -> MappingReport:
    used = _used_paths(plan, agent) - set(plan.partly) | set(kept)
    unused = (*(ready.names[path] for path in ready.tree if path not in used), *ready.lost)
    notes = (*ready.notes, *plan.notes)
    if kept:
        names = [ready.names[path] for path in kept]
        notes = (
            *notes,
            f"kept in the sidecar: {format_count(len(names), 'value')} ({abbreviate_list(names, 3)})",
        )
    report = MappingReport(report_moves(ready, target, plan.moves), unused, plan.missing, plan.assumed, notes)
    if not unused or plan.missing:
        return report
    from ckpttool.libraries.optimizer_entries import list_optimizers

    optimizers = list_optimizers(ready.tree).values()
    state = {ready.names[path] for own in optimizers for path in own}
    return replace(report, remedy="--optimizer none") if state.issuperset(unused) else report


def _used_paths(plan: Plan, agent: RecognizedAgent | None) -> set[Path]:
    used = {move.source for move in plan.moves} | set(plan.consumed)
    return used if agent is None else used | agent.consumed


def _kept_values(tree: Tree, plan: Plan, agent: RecognizedAgent | None) -> tuple[Path, ...]:
    """Return what the sidecar stores: values that belong to no network and no optimizer."""
    if agent is None:
        return plan.kept
    from ckpttool.libraries.optimizer_entries import is_scheduled

    used = _used_paths(plan, agent)
    values = (path for path, _ in tree.plain() if _GROUPS not in path or is_scheduled(path))
    beside = _tensors_beside_networks(tree, agent)
    return (*plan.kept, *(path for path in (*values, *beside) if path not in used))


def _tensors_beside_networks(tree: Tree, agent: RecognizedAgent) -> list[Path]:
    """Return the tensors that only training needs, which the layout lets the sidecar keep."""
    places = getattr(plugins.find("layouts", agent.layout).load(), "KEPT", ())
    below = tuple(f"{prefix}/" for prefix in places)
    return [path for path, _ in tree.tensors() if tree.names[path].startswith(below)] if below else []


def _stated_settings(stated: OptimizerOptions, known: Sidecar | None) -> Settings | None:
    """Return the settings with the stated ones, None if none were stated."""
    return known.optimizers if any(stated) and known is not None else None


def _statement_origins(known: Sidecar | None) -> Mapping[str, str]:
    """Return the provenance of stated optimizer settings, for the receipt."""
    recorded = known.provenance if known is not None else {}
    return {name: recorded[name] for name in ("l2", "optimizer") if name in recorded}


def report_moves(ready: PreparedTree, target: Tree, moves: tuple[Move, ...]) -> tuple[MappingEntry, ...]:
    """Return the report's line for each move."""
    lines = []
    for move in moves:
        before, there = ready.tree[move.source], target.get(move.target)
        shape_in = before.shape if isinstance(before, Leaf) else ()
        shape_out = there.shape if isinstance(there, Leaf) else ()
        names = [ready.rules.get(move.source), move.rule.name if move.rule != KEEP else None]
        done = ", ".join(name for name in names if name) or KEEP.name
        rule = done if there is not None else f"{done}, shared"
        lines.append(MappingEntry(ready.names[move.source], display(move.target), rule, shape_in, shape_out))
    return tuple(lines)


TENSORFLOW, NUMPY = "tensorflow", "numpy"
# Formats of libraries' own files: NumPy arrays, among settings that have no meaning elsewhere.
OWN_FILES = frozenset(("rllib", "stable_baselines2"))
# Layouts of a library's own container, whose settings have no meaning elsewhere.
ENCLOSED = frozenset(("stable_baselines3", "rllib", "rllib_policy", "d3rlpy"))


class _Choice(NamedTuple):
    """A conversion's plan (None: everything stays as it is) and the agent in the target.

    `by_layout` is whether the agent's layout made the plan.
    """

    plan: Plan | None
    binding: RecognizedAgent | None = None
    by_layout: bool = False


@dataclass(frozen=True, slots=True)
class _Planner:
    """Inputs of conversion planning: the prepared tree, its agent, and its sidecar."""

    checkpoint: Checkpoint
    tree: Tree
    request: ConversionRequest
    binding: RecognizedAgent | None
    known: Sidecar | None

    @property
    def kind(self) -> TargetKind:
        """The target's kind."""
        return self.request.kind

    @property
    def framework(self) -> str:
        """The framework whose names the target uses."""
        return format_framework(self.kind.format)

    @property
    def folds(self) -> bool:
        """Whether observation statistics are folded into the first layers."""
        return self.request.options.fold_normalizer

    @property
    def settings(self) -> Settings:
        """The sidecar's optimizer settings."""
        from ckpttool.libraries.optimizer_settings import sidecar_settings

        return sidecar_settings(self.known)

    def choose(self) -> _Choice:
        """Return the plan: by rules, a copy, by the agent's layout, or by the kinds of its layers.

        Raise UsageError for options that the target or the plan does not support.
        """
        request, binding, file = self.request, self.binding, self.checkpoint.path
        if request.rules is not None:
            return _Choice(self._by_rules(request.rules))
        if self.checkpoint.format == targets.ONNX:
            return _Choice(self._from_onnx())
        if self.kind.agent and binding is None:
            raise UsageError(
                f"only an agent can be written as {self.kind.layout}, but no layout recognises an agent here",
                file=file,
                hint="use --to torch or --to tf, which write the layers of any model",
            )
        if self.folds and (binding is None or binding.layout == NO_LAYOUT):
            raise UsageError("--fold-normalizer needs an agent that a layout recognises", file=file)
        kept = self._is_kept()
        if request.layer_options and kept:
            raise self._no_layers_to_map("is copied unchanged")
        if kept:
            return self._copy()
        if binding is None:
            return _Choice(self._by_parts())
        return self._by_stated_layers(binding) if request.layer_options else self._by_layout(binding)

    def _by_stated_layers(self, binding: RecognizedAgent) -> _Choice:
        """Return the plan part by part, with the user's layers, of an agent that its layout does not map.

        Raise UsageError if the layout decides how all layers are mapped.
        """
        own = replace(self, request=self.request._replace(layer_options=()))
        complete = self.request.options.layout is not None or self.kind.agent or self.folds
        if not complete:
            with contextlib.suppress(MappingError, UnsupportedError):
                plan = own._by_layout(binding).plan
                complete = plan is None or not _open_problems(self.tree, plan, binding.consumed)
        if complete:
            raise self._no_layers_to_map(f"is mapped by its layout, {binding.layout}")
        plan = self._by_parts()
        sentence = f"converted part by part: layout {binding.layout} does not map these layers"
        return _Choice(replace(plan, notes=(sentence, *plan.notes)))

    def _no_layers_to_map(self, why: str) -> UsageError:
        return UsageError(
            f"--kind and --flatten set how layers are mapped, but this checkpoint {why}",
            file=self.checkpoint.path,
            hint="leave out --kind and --flatten",
        )

    def _is_kept(self) -> bool:
        """Return whether all is copied into another format unchanged, under the same paths."""
        by_layers = self.request.options.layout in (None, NO_LAYOUT)
        if self.folds or self.kind.agent or not by_layers:
            return False
        return _is_kept(self.checkpoint, self.request, self.tree, self.binding)

    def _copy(self) -> _Choice:
        """Return the plan of a tree that keeps its values: with target objects, if any are needed."""
        tree, kind, binding = self.tree, self.kind, self.binding
        stated = self.request.options.from_ is not None
        nested = _plan_nested(self.checkpoint, tree, kind, stated=stated) if binding is None else None
        if nested is not None:
            inner = apply_plan(tree, nested)
            copy = Plan(tuple(Move(path, path, KEEP) for path in inner))
            return _Choice(compose_plans(nested, _plan_rewrite(inner, kind, None) or copy))
        plan = _plan_rewrite(tree, kind, self.known if self.request.options.part is None else None)
        # A TensorFlow 1 optimizer cannot be stored in a Keras file unchanged, whatever layout recognises it.
        older = False
        if kind.format == _WEIGHTS_FILE:
            from ckpttool.conversion.parts import has_older_optimizer

            older = has_older_optimizer(tree)
        objects = (binding is None or older) and _is_rebuilt(self.checkpoint.format, kind, tree)
        rebuilt = self._object_rebuild() if objects else None
        if rebuilt is None or (_open_problems(tree, rebuilt) and not older):
            return _Choice(plan, binding)
        return _Choice(rebuilt)

    def _object_rebuild(self) -> Plan | None:
        from ckpttool.conversion import general

        binding = self.binding
        moved = {str(move.target[0].value) for move in binding.moves.moves} if binding is not None else set()
        own = [name for name in schema.OPTIMIZERS if name in moved]
        return general.to_objects(
            self.tree,
            self.settings,
            self.request.stated.settings(),
            file=self.kind.format == _WEIGHTS_FILE,
            name=own[0] if len(own) == 1 else None,
            # An .h5 file of Keras 1 or 2 lists the layers of a model: Keras 3 files never reach this.
            in_order=self.checkpoint.format == _WEIGHTS_FILE,
        )

    def _from_onnx(self) -> Plan:
        """Return the plan of an ONNX model: its layers as a state_dict, then like any state_dict."""
        from ckpttool.libraries.activation_orders import with_orders

        checkpoint, tree, request, file = self.checkpoint, self.tree, self.request, self.checkpoint.path
        if request.options.part is not None or tree.leaves.keys() != checkpoint.tree.leaves.keys():
            raise UsageError(
                "all layers of an ONNX model are converted, so --part does not apply",
                file=file,
                hint="leave out --part",
            )
        if self.kind.agent:
            raise UsageError(
                f"only an agent can be written as {self.kind.layout}, but an ONNX model contains only a "
                "network",
                file=file,
                hint="use --to torch, --to tf, --to keras, --to safetensors or --to npz to write its layers",
            )
        try:
            from ckpttool.libraries import onnx_policies  # for ONNX models

            first, choices = onnx_policies.plan_state_dict(checkpoint)
        except CkpttoolError as error:
            raise error.located(file=error.file or file) from error.__cause__
        if self.framework != TENSORFLOW:
            if request.layer_options:
                raise UsageError(
                    "--kind and --flatten set how layers are mapped, but these layers are copied unchanged"
                )
            return first
        layers = with_orders(
            apply_plan(tree, first),
            checkpoint,
            sources=onnx_policies.map_weight_constants(first),
            unknown=False,
        )
        inner = replace(
            self, tree=layers, request=request._replace(layer_options=(*request.layer_options, *choices))
        )
        return compose_plans(first, inner._by_parts())

    def _by_layout(self, binding: RecognizedAgent) -> _Choice:
        """Return the plan of an agent: by its layout, or part by part if that keeps more of it.

        A network alone is the root of a Keras file, as in a program's `model.load_weights`.
        """
        # Copies and parts are planned without it.
        from ckpttool.conversion.agent_plan import plan_agent_conversion, without_save_count

        require_layers(binding, self.known, sidecar.sidecar_path(self.checkpoint.path))
        if any(move.target[-1] == attr(schema.KERNEL_DEVIATION) for move in binding.moves.moves):
            raise UnsupportedError(
                "the weights of its noisy layers are drawn at every call, in evaluation too: no other format "
                "has such layers",
                file=self.checkpoint.path,
                hint="use --to npz, which copies all tensors unchanged",
            )
        agent = with_names(without_save_count(binding, self.tree, self.known), self.tree, self.known)
        alone = self.kind.format == _WEIGHTS_FILE and _is_alone(self.tree, agent)
        if alone and not self.folds and self.request.options.layout is None:
            general = self._attempt_by_parts()
            if general is not None and not _open_problems(self.tree, general):
                return _Choice(general)
        failed: CkpttoolError | None = None
        plan: Plan | None = None
        try:
            plan = plan_agent_conversion(
                self.tree, agent, self.kind, self.settings, self.known, fold=self.folds
            )
        except (MappingError, UnsupportedError) as error:
            failed = error
        left = _open_problems(self.tree, plan, agent.consumed) if plan is not None else list(self.tree)
        beside = frozenset(_tensors_beside_networks(self.tree, agent))
        better = self._better_by_parts(agent, [path for path in left if path not in beside])
        if better is not None:
            return better
        if failed is not None:
            raise failed
        return _Choice(plan, agent, by_layout=True)

    def _better_by_parts(self, agent: RecognizedAgent, left: Sequence[Path | str]) -> _Choice | None:
        """Return the plan part by part if it keeps tensors that the layout cannot map.

        Between files of PyTorch, all parts stay as they are.
        """
        if self.request.options.layout is not None or self.kind.agent or self.folds:
            return None
        unplaced = frozenset(left)
        open_ = [leaf for path, leaf in self.tree.tensors() if path in unplaced]
        slots = any(leaf.role == "slot" for leaf in open_)
        tops = {self.tree.names[move.source].split("/")[0] for move in agent.moves.moves}
        weights = any(
            leaf.role in ("parameter", "buffer") and (len(leaf.shape) > 1 or self._is_below(path, tops))
            for path, leaf in self.tree.tensors()
            if path in unplaced
        )
        if format_framework(self.checkpoint.format) == self.framework == "torch":
            return _Choice(None) if weights else None
        general = self._attempt_by_parts() if slots or weights else None
        if general is None:
            return None
        problems = _open_problems(self.tree, general)
        fewer = slots and len(problems) < len(left)
        if (
            problems
            and not fewer
            and not _count_weights(self.tree, problems) < _count_weights(self.tree, left)
        ):
            return None
        layers = any(len(leaf.shape) > 1 for leaf in open_)
        what = (
            "other networks" if layers else "the optimizer's state" if slots else "tensors beside its layers"
        )
        sentence = f"converted part by part: layout {agent.layout} cannot store {what}"
        return _Choice(replace(general, notes=(sentence, *general.notes)))

    def _is_below(self, path: Path, tops: Collection[str]) -> bool:
        """Return whether a tensor is below one of these attributes, e.g. a scalar of a network."""
        first, *more = self.tree.names[path].split("/")
        return first in tops and bool(more)

    def _attempt_by_parts(self) -> Plan | None:
        with contextlib.suppress(MappingError, UnsupportedError, UsageError):
            return self._by_parts()
        return None

    def _by_parts(self) -> Plan:
        """Return the plan of networks, optimizers and values; raise MappingError if no layer is known."""
        from ckpttool.conversion import general
        from ckpttool.conversion.parts import without_copies
        from ckpttool.libraries.activation_orders import with_orders
        from ckpttool.mapping import orientation

        request, tree = self.request, self.tree
        statements, stated = request.layer_options, request.stated.settings()
        framework = self.framework
        other_framework, stated_axes = (
            "torch" if framework == TENSORFLOW else TENSORFLOW,
            request.options.from_ is not None,
        )
        if self.checkpoint.format != targets.ONNX:
            tree = with_orders(tree, self.checkpoint, unknown=False)
        whole, tree = tree, without_copies(tree)
        try:
            rows = orientation.group_unnamed_arrays(tree, other_framework, stated=stated_axes)
            original, tree = tree, rows.tree
            if framework == TENSORFLOW:
                file = self.kind.format == _WEIGHTS_FILE
                graph = self.kind is targets.TARGETS["tf"]
                plan = general.to_tensorflow(tree, statements, self.settings, stated, file=file, graph=graph)
            else:
                plan = general.to_torch(tree, statements, self.settings, stated)
            plan = plan if tree is original else rows.plan(plan)
            copies = tuple(path for path in whole if path not in original)
            return replace(plan, consumed=(*plan.consumed, *copies))
        except CkpttoolError as error:
            raise error.located(file=self.checkpoint.path) from error.__cause__

    def _by_rules(self, rules: RuleFile) -> Plan:
        """Return the plan of the user's rules, and for unnamed entries the one from the file's evidence."""
        from ckpttool.libraries.write import merge_plans
        from ckpttool.mapping import conversion_by_kinds, user_rules

        if self.kind.agent:
            raise UsageError(
                f"rules define names, but {self.kind.layout} uses its library's names", file=rules.path
            )
        result = user_rules.apply_rules(rules, self.tree)
        plan = user_rules.plan_from_rules(rules, result, objects=self.framework == TENSORFLOW)
        rest = Tree({path: self.tree[path] for path in result.rest}, {}, self.tree.containers)
        if rules.rest == "keep":
            kept = tuple(Move(path, path, KEEP) for path in rest)
            return replace(plan, moves=(*plan.moves, *kept))
        if rules.rest == "kinds" and result.rest:
            to_tensorflow = self.framework == TENSORFLOW
            make = (
                conversion_by_kinds.plan_to_tensorflow if to_tensorflow else conversion_by_kinds.plan_to_torch
            )
            more = make(rest, self.request.layer_options)
            if not more.moves and not more.notes:
                target_framework = "torch" if to_tensorflow else TENSORFLOW
                from ckpttool.evaluation.other_content import no_layers_error

                raise no_layers_error(rest, target_framework).located(file=self.checkpoint.path)
            return merge_plans(plan, more)
        return plan


def _is_alone(tree: Tree, agent: RecognizedAgent) -> bool:
    """Whether the tree is only one network of an agent, in a separate dict."""
    tensors = [path for path, _ in tree.tensors()]
    return len({part.component for part in agent.parts}) == 1 and len({path[:-1] for path in tensors}) == 1


def _open_problems(tree: Tree, plan: Plan, consumed: Collection[Path] = ()) -> list[Path | str]:
    """Return what a plan leaves open: source entries by path, target entries by name."""
    used = {move.source for move in plan.moves} | {*plan.consumed, *plan.kept, *consumed}
    return [*plan.missing, *plan.partly, *(path for path in tree if path not in used)]


def _count_weights(tree: Tree, open_: Iterable[Path | str]) -> int:
    """Return how many of a plan's open entries are tensors of networks."""
    entries = (tree.get(path) for path in open_ if not isinstance(path, str))
    return sum(isinstance(leaf, Leaf) and leaf.role in ("parameter", "buffer") for leaf in entries)


def _is_kept(
    checkpoint: Checkpoint, request: ConversionRequest, tree: Tree, binding: RecognizedAgent | None
) -> bool:
    """Return whether a whole checkpoint goes into another format unchanged, under the same paths."""
    source, target = checkpoint.format, request.kind.format
    native, target_framework = format_framework(source), format_framework(target)
    if source == target or target_framework == NUMPY:
        return True
    from ckpttool.mapping import orientation

    if {source, target} <= CONTAINERS and (
        source not in orientation.NEUTRAL or target in orientation.NEUTRAL
    ):
        return True
    if binding is None:
        source_framework = orientation.checkpoint_orientation(
            checkpoint, tree, native, request.options.from_, target_framework
        )
        return source_framework in (target_framework, NUMPY)
    from ckpttool.libraries.optimizer_settings import layout_framework

    if source in orientation.NEUTRAL & CONTAINERS:
        return layout_framework(binding.layout) == target_framework
    source_framework = native
    if source_framework != NUMPY:
        # A program's own data is an agent for others only if a layout recognises it; variables by name and
        # objects are TensorFlow's own. Those of Stable-Baselines 2 have the names of its graph.
        by_name = source == "stable_baselines2" and request.kind == targets.TARGETS["tf1"]
        own = source in OWN_FILES and not by_name
        return source_framework == target_framework == TENSORFLOW and not own
    # Arrays of no framework keep their paths; their names show which program named them.
    return binding.layout not in ENCLOSED and layout_framework(binding.layout) == target_framework


def axes_note(checkpoint: Checkpoint, tree: Tree, request: ConversionRequest) -> str | None:
    """Return a note on arrays that keep their axes because their framework is unknown."""
    framework = format_framework(request.kind.format)
    if framework == NUMPY or request.options.from_ is not None:
        return None
    from ckpttool.mapping import orientation

    if checkpoint.format not in orientation.NEUTRAL:
        return None
    matrices = [path for path, leaf in tree.tensors() if len(leaf.shape) > 1 and "float" in leaf.dtype]
    native = format_framework(checkpoint.format)
    if not matrices or orientation.checkpoint_orientation(checkpoint, tree, native, None, framework) != NUMPY:
        return None
    names = abbreviate_list([display(path) or "one array" for path in matrices], 3)
    return (
        f"no name identifies a layer, so axes stay as in the file ({names}); nn.Linear expects [out, in], "
        "Dense [in, out]"
    )


def _plan_rewrite(tree: Tree, kind: TargetKind, known: Sidecar | None) -> Plan | None:
    """Return the plan to objects for a tree without them; None if it has them or needs names."""
    if not kind.options.get("graph"):
        return None
    from ckpttool.libraries import tf_names  # for targets of TensorFlow only

    if tf_names.is_object_graph(tree):
        return None
    plan = (
        tf_names.restore_objects(tree, known.objects)
        if known is not None and known.objects is not None
        else None
    )
    return plan or tf_names.plan_variable_objects(tree)


def _plan_nested(checkpoint: Checkpoint, tree: Tree, kind: TargetKind, *, stated: bool) -> Plan | None:
    """Return the plan from arrays with full names (`l1.kernel`) to objects, None where it does not apply.

    No attribute name contains a dot, and consecutive arrays are layers in this order.
    """
    if kind.format != _WEIGHTS_FILE and not kind.options.get("graph"):
        return None
    from ckpttool.mapping import orientation

    # HDF5 that Keras did not write has the names of the program that did.
    handmade = checkpoint.format == _WEIGHTS_FILE and checkpoint.writer is None
    neutral = checkpoint.format in orientation.NEUTRAL or handmade
    if not neutral or any(len(path) != 1 for path in tree):
        return None
    rows = orientation.group_unnamed_arrays(tree, TENSORFLOW, stated=stated)
    tree = rows.tree
    names = {path: tuple(re.split(r"[./]", str(path[0].value).removesuffix(":0"))) for path in tree}
    below = {name[:depth] for name in names.values() for depth in range(len(name))}
    clear = len(set(names.values())) == len(names) and below.isdisjoint(names.values())
    if not clear or all(len(name) == 1 for name in names.values()) or not all(map(all, names.values())):
        return None
    own = {path: _name_kernels(name, frozenset(names.values())) for path, name in names.items()}
    from ckpttool.mapping.keras_names import object_graph_paths

    paths = object_graph_paths(own.values())
    labels = {paths[own[path]]: Label(leaf.role, "/".join(own[path])) for path, leaf in tree.tensors()}
    moves = tuple(Move(rows.sources[path], paths[name], KEEP) for path, name in own.items())
    return Plan(moves, labels=labels, assumed=rows.assumed)


def _name_kernels(name: tuple[str, ...], others: frozenset[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the name with `kernel` for a dense layer's matrix that a program's own class named `weight`."""
    own = name[-1] == "weight" and {(*name[:-1], "bias")} <= others
    return (*name[:-1], "kernel") if own else name


def _is_rebuilt(source: str, kind: TargetKind, tree: Tree) -> bool:
    """Return whether TensorFlow objects must be rebuilt for the target: Keras files, or a graph."""
    if kind.format == _WEIGHTS_FILE:
        root = tree.containers.get(())
        groups = root is not None and isinstance(root.state, dict) and "group" in root.state
        return not groups and format_framework(source) == TENSORFLOW
    if not kind.options.get("graph"):
        return False
    from ckpttool.conversion.parts import is_keras_export

    return source in KERAS_FORMATS or is_keras_export(tree)


def recognize_source_agent(
    checkpoint: Checkpoint,
    tree: Tree,
    layout: str | None,
    part: str | None,
    known: RecognizedAgent | None = None,
) -> tuple[RecognizedAgent | None, tuple[str, ...]]:
    """Return the agent in the tree, with facts from files beside it, and a note for each file.

    Args:
        checkpoint: what is converted.
        tree: its prepared tree, or the part that is converted.
        layout: the layout that the user states.
        part: the path of that part.
        known: the agent of the whole checkpoint, if already recognised.
    """
    if checkpoint.format == targets.ONNX:
        return recognize.recognize_checkpoint(checkpoint, layout), ()
    same = known is not None and layout is None and tree is checkpoint.tree
    binding = known if same else recognize.recognize_tree(tree, os.path.basename(checkpoint.path), layout)
    if binding is None and part is None and tree.keys() < checkpoint.tree.keys():
        # The state of an optimizer may be the evidence for the layout of the whole tree.
        whole = recognize.recognize_tree(checkpoint.tree, os.path.basename(checkpoint.path), layout)
        binding = None if whole is None else whole.without_optimizers(tree)
    if part is not None and layout is None and binding is not None:
        # One network of an agent is a separate model.
        binding = binding if len({part.component for part in binding.parts}) > 1 else None
    if binding is None:
        return None, ()
    binding, notes = restore.with_companions(binding, checkpoint)
    return with_records(binding, tree, checkpoint), notes


# Formats that store what a torch program passed to them, and nothing else.
CONTAINERS = frozenset(("pytorch", "pytorch_legacy", "pytorch_tar", "pytorch_dcp", "safetensors", "sharded"))


def plan_reverse(
    checkpoint: Checkpoint, request: ConversionRequest, known: Sidecar | None, tree: Tree
) -> ReverseConversion:
    """Return the checkpoint's original source if requested; otherwise a note why it cannot be used."""
    if not (request.whole and request.plain) or known is None or known.undo is None:
        return ReverseConversion()
    if not _is_reverse(known, request.kind):
        return ReverseConversion()
    from ckpttool.conversion.restoration import reverse_conversion

    conversion = reverse_conversion(tree, known.undo, checkpoint.path)
    if conversion.tree is None:
        return conversion
    if request.kind.agent and not _can_store(request.kind, conversion.tree):
        return ReverseConversion()
    if request.kind.state:
        from ckpttool.libraries import tf_names  # for targets of TensorFlow only

        if request.by_name != tf_names.has_named_variables(conversion.tree):
            return ReverseConversion()
    sentence = f"conversion reversed: every entry is as it was in {(known.source or {}).get('path')}"
    return conversion._replace(note=sentence)


def _can_store(kind: TargetKind, tree: Tree) -> bool:
    """Return whether a library's format can write the tree: a whole training run of RLlib is only read."""
    try:
        cast("WritingFormat", plugins.find("formats", kind.format).load()).pieces(tree)
    except UnsupportedError:
        return False
    return True


def _is_reverse(known: Sidecar, kind: TargetKind) -> bool:
    """Return whether the target is the original source of the sidecar's checkpoint, by format and layout."""
    before, layout = (known.source or {}).get("format"), (known.source or {}).get("layout")
    if before != kind.format and not {before, kind.format} <= CONTAINERS:
        return False
    # A library's own form is requested by the library's name.
    others = {target.layout for target in TARGETS.values() if target.agent}
    return layout == kind.layout or (not kind.agent and layout not in others)
