"""The converted form of a checkpoint: planned again and compared, not written.

`diff` and `verify --all` compare a source with its conversion through the current conversion rules: those of
the agent's layout, or of its layer kinds. The conversion's receipt adds the options and the settings given by
the user. Entries that it lists as dropped are accepted only if no rule converts them, so that editing a
receipt cannot hide a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from ckpttool.conversion import write
from ckpttool.conversion.optimizer_options import read_optimizer_options
from ckpttool.conversion.options import NO_OPTIMIZER_OPTIONS, FormatOptions, OptimizerOptions, parse_request
from ckpttool.conversion.plan import CONTAINERS, ConversionPlan, plan_conversion
from ckpttool.conversion.targets import TARGETS, TargetKind
from ckpttool.core import dtypes, plugins
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.digests import digest_checkpoint
from ckpttool.core.dtypes import np
from ckpttool.core.errors import suppress_refusals
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, display
from ckpttool.evaluation.agent_facts import GIVEN
from ckpttool.evaluation.restore import FACTS, Agent, VerifiedSidecar, read_any_sidecar
from ckpttool.formats.probe import WritingFormat
from ckpttool.libraries import tf_names
from ckpttool.libraries.schema import NO_LAYOUT, RecognizedAgent
from ckpttool.mapping.rules import (
    KEEP,
    Cast,
    MappingEntry,
    Move,
    Plan,
    Rule,
    ToTensor,
    ToValue,
    apply_plan,
    canonical_tree,
    chain_rules,
    parse_rule,
)

# Entries by the names that pair them, each with its path in its own tree.
Placed = Mapping[str, tuple[Leaf | ValueLeaf, Path]]
# A counter that the format's writer adds and no conversion maps.
WRITERS = frozenset(("save_counter",))
# Entries that a library writes into its own format itself: defaults that no conversion maps.
_LIBRARY = {
    "stable_baselines2": ("data/",),
    "stable_baselines3": (
        "data/",
        "system_info/",
        # For an optimizer that the source does not have: it starts anew.
        *(f"{name}/optimizer/param_groups/" for name in ("actor", "critic", "policy")),
    ),
}
_SHARED = ", shared"


@dataclass(frozen=True, slots=True)
class Reconversion:
    """Result of converting a checkpoint, as its format reads it back; tensors are not read yet.

    `places` maps each converted source path to its paths in `tree`. `kept` are source entries that only
    a sidecar keeps, or whose content the target implies. `dropped` are entries that a conversion leaves
    behind unmapped (`--allow-missing`), `accepted` those of them that the receipt lists. `settings` are
    optimizer settings in the target's sidecar. `library` are prefixes of entries that the library adds.
    """

    tree: Tree
    places: Mapping[Path, tuple[Path, ...]]
    kept: tuple[Path, ...] = ()
    dropped: tuple[Path, ...] = ()
    accepted: frozenset[Path] = frozenset()
    rules: tuple[MappingEntry, ...] = ()
    assumed: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] | None = None
    notes: tuple[str, ...] = ()
    by_receipt: bool = False
    library: tuple[str, ...] = ()
    folded: bool = False
    """whether observation statistics were folded into the first layers, which changes the agent's weights"""

    def is_added(self, name: str) -> bool:
        """Return whether the format's writer adds an entry of this name itself."""
        return name in WRITERS or name.startswith(self.library)


def reconvert(source: ComparisonSide, target: ComparisonSide) -> Reconversion | None:
    """Convert the source into the target's form, without writing it; return None if no such form exists.

    If the target may have several forms, the one that shares most entries with it is used. If none
    fits, the rules of the target's receipt are applied.
    """
    receipt = target.receipt.sidecar if target.is_converted_from(source) else None
    stored = set(target.checkpoint.tree.names.values())
    candidates: list[tuple[int, int, Reconversion]] = []
    for number, kind in enumerate(_target_kinds(target.checkpoint, target.layout)):
        other = kind.agent and kind.layout != target.layout
        if other and any(shared >= len(stored) - 1 for shared, _, _ in candidates):
            break
        with suppress_refusals():
            candidate = _plan_reconversion(source, target, kind, receipt)
            candidates.append((_count_shared(candidate, stored), -number, candidate))
    best = max(candidates, key=lambda candidate: candidate[:2], default=None)
    if best is not None and _names_match(best[0], best[2], stored):
        return best[2]
    if receipt is not None:
        with suppress_refusals():
            candidate = _by_rules(source.checkpoint.tree, target.checkpoint.tree, receipt)
            if _names_match(_count_shared(candidate, stored), candidate, stored):
                return candidate
    return None


def _names_match(shared: int, reconversion: Reconversion, stored: set[str]) -> bool:
    """Return whether the shared names suffice for one checkpoint: half of those of the smaller one."""
    return shared > 0 and 2 * shared >= min(len(reconversion.tree), len(stored - WRITERS))


def _count_shared(reconversion: Reconversion, stored: set[str]) -> int:
    return sum(name in stored for name in reconversion.tree.names.values())


def _target_kinds(target: Checkpoint, layout: str | None) -> Iterator[TargetKind]:
    """Yield the forms in which the target may have been written, those of its own layout first."""
    name = "pytorch" if target.format in CONTAINERS - {"safetensors"} else target.format
    kinds = [kind for kind in TARGETS.values() if kind.format == name]
    yield from (kind for kind in kinds if kind.agent and kind.layout == layout)
    by_name = tf_names.has_named_variables(target.tree)
    for kind in kinds:
        graph = kind.options.get("graph")
        if not kind.agent and (graph is None or graph != by_name):
            yield kind
    yield from (kind for kind in kinds if kind.agent and kind.layout != layout)


def _options(receipt: Sidecar | None) -> Mapping[str, Any]:
    """Return the `convert` options that the receipt records."""
    source = receipt.source if receipt is not None and receipt.source is not None else {}
    options = source.get("options")
    recorded = dict(options) if isinstance(options, Mapping) else {}
    if isinstance(source.get("part"), str):
        recorded["part"] = source["part"]
    return recorded


def _plan_reconversion(
    source: ComparisonSide, target: ComparisonSide, kind: TargetKind, receipt: Sidecar | None
) -> Reconversion:
    options = _options(receipt)
    known = _source_sidecar(source.receipt, receipt)
    stated = _optimizer_options_of(receipt)
    dropped_state = options.get("no_optimizers") is True
    request = parse_request(
        kind,
        FormatOptions(
            layout=_text(options.get("layout")),
            part=_text(options.get("part")),
            strip=options.get("strip") is True,
            restore=options.get("restore") is True,
            fold_weight_norm=options.get("fold_weight_norm") is True,
            fold_normalizer=options.get("fold_normalizer") is True,
            l2=() if dropped_state else stated.l2,
            optimizer=("none",) if dropped_state else stated.optimizer,
            kinds=_texts(options.get("kind")),
            flatten=_texts(options.get("flatten")),
            unflatten=_texts(options.get("unflatten")),
            weights=_text(options.get("weights")),
            from_=_text(options.get("from")),
        ),
    )
    # A reverse conversion restores the source from its record, which is no evidence, so plan it instead.
    before = None if known is None else replace(known, undo=None)
    plan = plan_conversion(source.checkpoint, request, before, source.binding)
    writer = cast(WritingFormat, plugins.find("formats", kind.format).load())
    tree = write.with_stored_paths(writer, plan.tree, kind.options)
    rules = plan.report.mapped
    if options.get("cast") is True:
        tree, rules = _round_tree(tree, target.checkpoint.tree, rules)
    residue = frozenset(str(row.get("path")) for row in receipt.residue) if receipt is not None else ()
    unused = {made_name: path for path, made_name in plan.ready.names.items()}
    dropped = tuple(unused[name] for name in plan.report.unused if name in unused)
    # For a part, or for names without wrapper prefixes: the entries of the checkpoint itself.
    own = {name: path for path, name in source.checkpoint.tree.names.items()}
    stored = {path: own.get(name, path) for path, name in plan.ready.names.items()}
    return Reconversion(
        tree,
        {stored.get(path, path): places for path, places in _target_paths(plan, tree).items()},
        tuple(stored.get(path, path) for path in _unmoved_paths(plan, dropped)),
        tuple(stored.get(path, path) for path in dropped),
        frozenset(stored.get(path, path) for path in dropped if plan.ready.names[path] in residue),
        rules,
        plan.report.assumed,
        plan.settings,
        plan.report.notes,
        library=_LIBRARY.get(kind.format, ()),
        folded=request.options.fold_normalizer,
    )


def _round_tree(
    tree: Tree, target: Tree, rules: tuple[MappingEntry, ...]
) -> tuple[Tree, tuple[MappingEntry, ...]]:
    """Return the tree with floats rounded to the target's types, as with `--cast`, and the rules."""
    types = {target.names[path]: leaf.dtype for path, leaf in target.tensors()}
    leaves = dict(tree.leaves)
    casts: dict[str, str] = {}
    for path, leaf in tree.tensors():
        name = tree.names[path]
        dtype = types.get(name, leaf.dtype)
        if dtype != leaf.dtype and "float" in dtype and "float" in leaf.dtype:
            rule = Cast(dtype, rounded=not _holds_exactly(dtype, leaf.dtype))
            leaves[path], casts[name] = rule.leaf(leaf), rule.name
    lines = (
        replace(
            line, rule=casts[line.target] if line.rule == KEEP.name else f"{line.rule}, {casts[line.target]}"
        )
        if line.target in casts
        else line
        for line in rules
    )
    return Tree(leaves, tree.aliases, tree.containers), tuple(lines)


def _holds_exactly(wide: str, narrow: str) -> bool:
    """Return whether one floating-point type represents all values of another exactly."""
    dtype = np.promote_types(dtypes.numpy_dtype(wide), dtypes.numpy_dtype(narrow))
    return bool(dtype == dtypes.numpy_dtype(wide))


def _unmoved_paths(plan: ConversionPlan, dropped: tuple[Path, ...]) -> tuple[Path, ...]:
    moved = {move.source for move in plan.moves} | set(dropped)
    return tuple(path for path in plan.ready.tree if path not in moved)


def _target_paths(plan: ConversionPlan, tree: Tree) -> dict[Path, tuple[Path, ...]]:
    """Return the paths of each source entry in the target after reading it back."""
    back = write.stored_paths(plan.tree, tree)
    names = {name: path for path, name in tree.names.items()}
    paths: dict[Path, list[Path]] = {}
    for move in plan.moves:
        there = back.get(move.target) or names.get(display(move.target))
        if there is not None:
            paths.setdefault(move.source, []).append(there)
    return {source: tuple(dict.fromkeys(paths)) for source, paths in paths.items()}


def _source_sidecar(own: VerifiedSidecar, receipt: Sidecar | None) -> Sidecar | None:
    """Return the source's own sidecar with the facts given at the conversion."""
    known = None if own.stale else own.sidecar
    stated = {
        name: getattr(receipt, name)
        for name in FACTS
        if receipt is not None and receipt.provenance.get(name) == GIVEN
    }
    if not stated:
        return known
    base = known or Sidecar("")
    return replace(base, **stated, provenance={**base.provenance, **dict.fromkeys(stated, GIVEN)})


def _optimizer_options_of(receipt: Sidecar | None) -> OptimizerOptions:
    if receipt is None:
        return NO_OPTIMIZER_OPTIONS
    lines = [receipt.provenance.get(name, "") for name in OptimizerOptions._fields]
    return (
        read_optimizer_options(receipt)
        if any(text.startswith("given: ") for text in lines)
        else NO_OPTIMIZER_OPTIONS
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _by_rules(source: Tree, target: Tree, receipt: Sidecar) -> Reconversion:
    """Apply the receipt's rules to the source; raise CkpttoolError if they do not fit."""
    sources = {name: path for path, name in source.names.items()}
    targets = {name: path for path, name in target.names.items()}
    moves: list[Move] = []
    for line in receipt.rules:
        path, there = sources.get(str(line.get("source"))), targets.get(str(line.get("target")))
        rule = _rule(str(line.get("rule")).removesuffix(_SHARED))
        if path is not None and there is not None and rule is not None:
            moves.append(Move(path, there, rule))
    tree = apply_plan(source, Plan(tuple(moves)))
    places: dict[Path, list[Path]] = {}
    for move in moves:
        places.setdefault(move.source, []).append(move.target)
    left = [path for path in source if path not in places]
    residue = frozenset(str(row.get("path")) for row in receipt.residue)
    accepted = frozenset(path for path in left if source.names[path] in residue)
    return Reconversion(
        tree,
        {path: tuple(paths) for path, paths in places.items()},
        (),
        tuple(left),
        accepted,
        notes=("entries are paired by the rules in the receipt, not by a new conversion plan",),
        by_receipt=True,
    )


def _rule(text: str) -> Rule | None:
    parsed = parse_rule(text)
    if parsed is not None:
        return parsed
    rules: list[Rule] = []
    for part in text.split(", "):
        rule = parse_rule(part)
        if rule is None and part == ToValue().name:
            rule = ToValue()
        if rule is None and part.startswith("as "):
            rule = ToTensor(part.removeprefix("as "))
        if rule is None:
            return None
        rules.append(rule)
    return chain_rules(*rules)


@dataclass(frozen=True, eq=False)
class ComparisonSide:
    """One side of a comparison, with its recognised agent; `known_receipt` is its sidecar, if known.

    `agent` is the agent as `verify` restores it, with given facts.
    """

    checkpoint: Checkpoint
    binding: RecognizedAgent | None
    known_receipt: VerifiedSidecar | None = None
    agent: Agent | None = None

    @classmethod
    def restored(
        cls, checkpoint: Checkpoint, agent: Agent | None, receipt: VerifiedSidecar
    ) -> ComparisonSide:
        """Return the side of a restored agent; one that no layout recognises has no binding."""
        binding = None if agent is None or agent.binding.layout == NO_LAYOUT else agent.binding
        return cls(checkpoint, binding, receipt, agent)

    @cached_property
    def receipt(self) -> VerifiedSidecar:
        """The sidecar beside the checkpoint, even if it belongs to other weights."""
        return read_any_sidecar(self.checkpoint) if self.known_receipt is None else self.known_receipt

    @cached_property
    def sha256(self) -> str:
        """The digest of the checkpoint; computing it reads everything."""
        return self.receipt.sha256 or digest_checkpoint(self.checkpoint).sha256

    def is_converted_from(self, source: ComparisonSide) -> bool:
        """Return whether the receipt names exactly these source weights."""
        origin = self.receipt.origin
        return origin is not None and source.sha256 == origin

    @property
    def layout(self) -> str | None:
        """The name of the layout, None if no layout recognises an agent."""
        return None if self.binding is None else self.binding.layout

    def by_path(self) -> Placed:
        """Return all entries and their paths, by display path."""
        tree = self.checkpoint.tree
        return {tree.names[path]: (leaf, path) for path, leaf in tree.items()}

    def by_meaning(self, binding: RecognizedAgent) -> Placed:
        """Return the agent's entries by canonical path, and other tensors by their own paths."""
        tree = self.checkpoint.tree
        sources = {move.target: move.source for move in reversed(binding.moves.moves)}
        agent = {
            display(path): (leaf, sources[path]) for path, leaf in canonical_tree(tree, binding.moves).items()
        }
        bound = {move.source for move in binding.moves.moves}
        rest = {tree.names[path]: (leaf, path) for path, leaf in tree.tensors() if path not in bound}
        return {**rest, **agent}
