"""A checkpoint in the form of another one: what its conversion holds, planned anew and compared, not written.

`diff` and `verify --all` compare a source with its conversion through the rules that a conversion follows
today: the layout of the agent, or the kinds of its layers. The receipt of the conversion adds the options
that were given, and the settings that the user stated. What it lists as left behind is accepted only for
entries that no rule converts, so that no edit of a receipt hides a change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ckpttool import dtypes, plugins
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import ChecksumError, CkpttoolError, is_of_system
from ckpttool.formats.probe import WritingFormat
from ckpttool.layouts import variables
from ckpttool.layouts.canonical import Binding
from ckpttool.leaf import Path, display
from ckpttool.mapping.plan import Plan, build
from ckpttool.mapping.report import Mapped, Move
from ckpttool.mapping.rules import KEEP, Cast, Rule, ToTensor, ToValue, chained
from ckpttool.mapping.spelling import parsed
from ckpttool.ops import save
from ckpttool.ops.agent_facts import GIVEN
from ckpttool.ops.digest import digest_of
from ckpttool.ops.knowledge import FACTS
from ckpttool.ops.layer_options import choices
from ckpttool.ops.optimizer_options import NOTHING_STATED, Stated, stated_in
from ckpttool.ops.plain_names import Wanted
from ckpttool.ops.request import Request
from ckpttool.ops.restore import own_sidecar
from ckpttool.ops.route import Route, route
from ckpttool.ops.targets import TARGETS, TargetKind
from ckpttool.ops.way_back import CONTAINERS
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

# A count that the format's writer adds, and that no conversion maps.
WRITERS = frozenset(("save_counter",))
# What a library writes into its own format by itself: defaults that no conversion maps.
_LIBRARY = {
    "stable_baselines2": ("data/",),
    "stable_baselines3": (
        "data/",
        "system_info/",
        # Of an optimizer that the source has not: it begins anew.
        *(f"{name}/optimizer/param_groups/" for name in ("actor", "critic", "policy")),
    ),
}
_SHARED = ", shared"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What the conversion of a checkpoint holds, as its format reads it back; the leaves are unread.

    `places` are the paths in `tree` of each source path that is converted. `kept` are the source entries that
    only a sidecar keeps, or whose content the target implies, `dropped` those that a conversion leaves behind
    unmapped (`--allow-missing`), and `accepted` those of them that the receipt lists. `settings` are those of
    optimizers that the target's sidecar holds. `library` are prefixes of entries that the library adds.
    """

    tree: Tree
    places: Mapping[Path, tuple[Path, ...]]
    kept: tuple[Path, ...] = ()
    dropped: tuple[Path, ...] = ()
    accepted: frozenset[Path] = frozenset()
    rules: tuple[Mapped, ...] = ()
    assumed: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] | None = None
    notes: tuple[str, ...] = ()
    by_receipt: bool = False
    library: tuple[str, ...] = ()
    folded: bool = False
    """whether statistics of observations became part of the first layers, so that an agent has others"""

    def is_added(self, name: str) -> bool:
        """Say whether the writer of the format adds an entry of this name by itself."""
        return name in WRITERS or name.startswith(self.library)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The sidecar beside a checkpoint, and whether it belongs to these very weights.

    `stale` says that the checkpoint was changed after the sidecar was written. `origin` is the digest of the
    checkpoint that it was converted from, None where the sidecar names none.
    """

    sidecar: Sidecar | None = None
    stale: bool = False

    @property
    def origin(self) -> str | None:
        """The digest of the source of the conversion."""
        source = self.sidecar.source if self.sidecar is not None else None
        return str(source["sha256"]) if source and source.get("sha256") else None


@dataclass(slots=True)
class Pair:
    """Two checkpoints with their receipts; digests are computed when a receipt names one."""

    source: Checkpoint
    target: Checkpoint
    source_receipt: Receipt = field(default_factory=Receipt)
    target_receipt: Receipt = field(default_factory=Receipt)
    digests: dict[int, str] = field(default_factory=dict)
    """of the checkpoints by their identity: a digest reads everything"""

    @property
    def linked(self) -> bool:
        """Say whether the target's receipt names these very source weights."""
        origin = self.target_receipt.origin
        if origin is None:
            return False
        if id(self.source) not in self.digests:
            self.digests[id(self.source)] = digest_of(self.source).sha256
        return self.digests[id(self.source)] == origin

    @property
    def turned(self) -> Pair:
        """The pair with source and target exchanged."""
        return Pair(self.target, self.source, self.target_receipt, self.source_receipt, self.digests)


def receipt_of(checkpoint: Checkpoint) -> Receipt:
    """Return the sidecar beside the checkpoint, also one that was written for other weights."""
    from ckpttool import sidecar

    try:
        return Receipt(own_sidecar(checkpoint).sidecar)
    except ChecksumError:
        return Receipt(sidecar.load(checkpoint.path), stale=True)


def conversion(pair: Pair, agent: Binding | None, layout: str | None) -> Conversion | None:
    """Return what the source's conversion into the target's form holds; None where there is no such one.

    `agent` is that in the source, `layout` that of the agent in the target. Of several forms that the target
    may have, the one is taken whose entries it has most. Where none fits, the rules of the target's receipt
    are applied.
    """
    linked = pair.linked
    options = _options(pair.target_receipt.sidecar) if linked else {}
    stored = set(pair.target.tree.names.values())
    found: list[tuple[int, int, Conversion]] = []
    for number, kind in enumerate(_kinds(pair.target, layout)):
        if kind.agent and kind.layout != layout and any(shared >= len(stored) - 1 for shared, _, _ in found):
            break
        with _unless_refused():
            made = _planned(pair, agent, kind, options, linked=linked)
            found.append((_shared(made, stored), -number, made))
    best = max(found, key=lambda each: each[:2], default=None)
    if best is not None and _fits(best[0], best[2], stored):
        return best[2]
    if linked and pair.target_receipt.sidecar is not None:
        with _unless_refused():
            made = _by_rules(pair, pair.target_receipt.sidecar)
            if _fits(_shared(made, stored), made, stored):
                return made
    return None


@contextlib.contextmanager
def _unless_refused() -> Iterator[None]:
    """Leave the block where a conversion is refused; what the operating system refuses is an error."""
    try:
        yield
    except CkpttoolError as error:
        if is_of_system(error):
            raise


def _fits(shared: int, made: Conversion, stored: set[str]) -> bool:
    """Say whether the two name enough alike to be one checkpoint: half of the smaller one."""
    return shared > 0 and 2 * shared >= min(len(made.tree), len(stored - WRITERS))


def _shared(made: Conversion, stored: set[str]) -> int:
    return sum(name in stored for name in made.tree.names.values())


def _kinds(target: Checkpoint, layout: str | None) -> Iterator[TargetKind]:
    """Go through the forms that the target may have been written in, those of its own layout first."""
    name = "pytorch" if target.format in CONTAINERS - {"safetensors"} else target.format
    kinds = [kind for kind in TARGETS.values() if kind.format == name]
    yield from (kind for kind in kinds if kind.agent and kind.layout == layout)
    by_name = variables.by_name(target.tree)
    for kind in kinds:
        graph = kind.options.get("graph")
        if not kind.agent and (graph is None or graph != by_name):
            yield kind
    yield from (kind for kind in kinds if kind.agent and kind.layout != layout)


def _options(receipt: Sidecar | None) -> Mapping[str, Any]:
    """Return the options of `convert` that the receipt records."""
    source = receipt.source if receipt is not None and receipt.source is not None else {}
    options = source.get("options")
    found = dict(options) if isinstance(options, Mapping) else {}
    if isinstance(source.get("part"), str):
        found["part"] = source["part"]
    return found


def _planned(
    pair: Pair, agent: Binding | None, kind: TargetKind, options: Mapping[str, Any], *, linked: bool
) -> Conversion:
    receipt = pair.target_receipt.sidecar if linked else None
    known = _known(pair.source_receipt, receipt)
    request = Request(
        kind,
        _text(options.get("layout")),
        _text(options.get("part")),
        Wanted(*(options.get(name) is True for name in ("strip", "restore", "fold_weight_norm"))),
        stated=_stated(receipt),
        given=choices(*(_texts(options.get(name)) for name in ("kind", "flatten", "unflatten"))),
        weights=_text(options.get("weights")),
        fold_normalizer=options.get("fold_normalizer") is True,
        source=_text(options.get("from")),
        no_optimizers=options.get("no_optimizers") is True,
    )
    # A conversion back restores the source from its record, which is no evidence: it is planned.
    before = None if known is None else replace(known, undo=None)
    made = route(pair.source, request, before, agent)
    writer = cast(WritingFormat, plugins.find("formats", kind.format).load())
    tree = save.as_stored(writer, made.tree, kind.options)
    rules = made.report.mapped
    if options.get("cast") is True:
        tree, rules = _rounded(tree, pair.target.tree, rules)
    residue = frozenset(str(each.get("path")) for each in receipt.residue) if receipt is not None else ()
    unused = {made_name: path for path, made_name in made.names.items()}
    dropped = tuple(unused[name] for name in made.report.unused if name in unused)
    # Of a part, or of names without wrappers, the entries of the checkpoint itself.
    own = {name: path for path, name in pair.source.tree.names.items()}
    stored = {path: own.get(name, path) for path, name in made.names.items()}
    return Conversion(
        tree,
        {stored.get(path, path): places for path, places in _places(made, tree).items()},
        tuple(stored.get(path, path) for path in _left(made, dropped)),
        tuple(stored.get(path, path) for path in dropped),
        frozenset(stored.get(path, path) for path in dropped if made.names[path] in residue),
        rules,
        made.report.assumed,
        made.settings,
        made.report.notes,
        library=_LIBRARY.get(kind.format, ()),
        folded=request.fold_normalizer,
    )


def _rounded(tree: Tree, target: Tree, rules: tuple[Mapped, ...]) -> tuple[Tree, tuple[Mapped, ...]]:
    """Return the tree with numbers rounded to the types of the target, as `--cast` does, and the rules."""
    types = {target.names[path]: leaf.dtype for path, leaf in target.tensors()}
    leaves = dict(tree.leaves)
    casts: dict[str, str] = {}
    for path, leaf in tree.tensors():
        name = tree.names[path]
        dtype = types.get(name, leaf.dtype)
        if dtype != leaf.dtype and "float" in dtype and "float" in leaf.dtype:
            rule = Cast(dtype, rounded=not _holds(dtype, leaf.dtype))
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


def _holds(wide: str, narrow: str) -> bool:
    """Say whether one type of floating numbers holds all of another exactly."""
    import numpy as np

    found = np.promote_types(dtypes.numpy_dtype(wide), dtypes.numpy_dtype(narrow))
    return bool(found == dtypes.numpy_dtype(wide))


def _left(made: Route, dropped: tuple[Path, ...]) -> tuple[Path, ...]:
    moved = {move.source for move in made.moves} | set(dropped)
    return tuple(path for path in made.source if path not in moved)


def _places(made: Route, tree: Tree) -> dict[Path, tuple[Path, ...]]:
    """Return the paths of each source entry as the target is read back."""
    back = save.places(made.tree, tree)
    names = {name: path for path, name in tree.names.items()}
    found: dict[Path, list[Path]] = {}
    for move in made.moves:
        there = back.get(move.target) or names.get(display(move.target))
        if there is not None:
            found.setdefault(move.source, []).append(there)
    return {source: tuple(dict.fromkeys(paths)) for source, paths in found.items()}


def _known(own: Receipt, receipt: Sidecar | None) -> Sidecar | None:
    """Return the source's own sidecar with the facts that were given at the conversion."""
    known = None if own.stale else own.sidecar
    given = {
        name: getattr(receipt, name)
        for name in FACTS
        if receipt is not None and receipt.provenance.get(name) == GIVEN
    }
    if not given:
        return known
    base = known or Sidecar("")
    return replace(base, **given, provenance={**base.provenance, **dict.fromkeys(given, GIVEN)})


def _stated(receipt: Sidecar | None) -> Stated:
    if receipt is None:
        return NOTHING_STATED
    said = [receipt.provenance.get(name, "") for name in Stated._fields]
    return stated_in(receipt) if any(text.startswith("given: ") for text in said) else NOTHING_STATED


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


# Through the rules that a receipt lists: for conversions by the user's own rules or model.


def _by_rules(pair: Pair, receipt: Sidecar) -> Conversion:
    """Return what the receipt's rules make of the source; raise CkpttoolError where they do not fit it."""
    sources = {name: path for path, name in pair.source.tree.names.items()}
    targets = {name: path for path, name in pair.target.tree.names.items()}
    moves: list[Move] = []
    for line in receipt.rules:
        source, target = sources.get(str(line.get("source"))), targets.get(str(line.get("target")))
        rule = _rule(str(line.get("rule")).removesuffix(_SHARED))
        if source is not None and target is not None and rule is not None:
            moves.append(Move(source, target, rule))
    tree = build(pair.source.tree, Plan(tuple(moves)))
    places: dict[Path, list[Path]] = {}
    for move in moves:
        places.setdefault(move.source, []).append(move.target)
    left = [path for path in pair.source.tree if path not in places]
    residue = frozenset(str(each.get("path")) for each in receipt.residue)
    accepted = frozenset(path for path in left if pair.source.tree.names[path] in residue)
    return Conversion(
        tree,
        {source: tuple(paths) for source, paths in places.items()},
        (),
        tuple(left),
        accepted,
        notes=("entries are paired by the rules in the receipt, not by a plan of our own",),
        by_receipt=True,
    )


def _rule(text: str) -> Rule | None:
    found = parsed(text)
    if found is not None:
        return found
    rules: list[Rule] = []
    for part in text.split(", "):
        rule = parsed(part)
        if rule is None and part == ToValue().name:
            rule = ToValue()
        if rule is None and part.startswith("as "):
            rule = ToTensor(part.removeprefix("as "))
        if rule is None:
            return None
        rules.append(rule)
    return chained(*rules)
