"""A layout as a table, and the one way in which every table binds a tree to the canonical agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Binding, Default, Facts, Part, PartLayer
from ckpttool.layouts.modules import (
    Entry,
    Module,
    Segments,
    by_definition,
    connected,
    entries,
    heads,
    modules,
    part,
    root_of,
)
from ckpttool.leaf import Leaf, Path, attr
from ckpttool.mapping.parts import Take
from ckpttool.mapping.report import Move, Moves
from ckpttool.mapping.rules import KEEP, Rule, ToTensor
from ckpttool.mapping.rules import chain as chain_rules
from ckpttool.tree import Tree

_LATE = "an action after the first layer, of unknown width without the policy"
_POLICIES, _CRITICS = ("actor", "actor_target"), ("critic", "critic_target")


@dataclass(frozen=True, slots=True)
class Table:
    """One codebase's naming of its agents.

    `components`, `optimizers` and `counters` map its names to the canonical ones: a name of several segments
    has slashes ("policy/actor"), and a component that is one head of a network names it ("critic/q1"), as
    does an optimizer of its own ("critic_optimizer/q1").
    `branches` map the names of modules that are a further head (`fc_logstd`) to the canonical branch, in
    every policy; `tensors` single tensors that are no layer's, by their whole name, to their canonical
    place ("temperature/log_alpha"); with `matrices` a weight [out, in] without a bias is a dense layer, which
    elsewhere may be an embedding; with `late` a Q-function without its policy may take the action after its
    first layer. `rooted` says that the agent may be an attribute of what was saved;
    `optimizer` binds an optimizer's state; `seen` names the real files (other people's, or written by the
    library itself) on which the layout was tried: where it is empty, no real file could be had.
    """

    name: str
    title: str
    framework: str
    components: Mapping[str, str]
    optimizers: Mapping[str, str]
    counters: Mapping[str, str]
    facts: Facts
    optimizer: Callable[[Optimizer], OptimizerMoves]
    rooted: bool = False
    seen: str = ""
    branches: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    joined: bool = False
    matrices: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer's binder may look at.

    `name` is canonical; `prefix` the segments before its state; `weights` its network's tensors in the
    order of the file, each with its canonical path and its rule.
    """

    name: str
    prefix: tuple[str, ...]
    tree: Tree
    weights: tuple[tuple[Path, Path, Rule], ...]

    @property
    def own(self) -> dict[Segments, Path]:
        """The optimizer's own leaves by their names below it, in the order of the file."""
        if not self.prefix:
            return {tuple(name.split("/")): path for path, name in self.tree.names.items()}
        start = "/".join(self.prefix)
        below, cut = f"{start}/", len(self.prefix)
        return {
            tuple(name.split("/"))[cut:]: path
            for path, name in self.tree.names.items()
            if name.startswith(below) or name == start
        }


@dataclass(frozen=True, slots=True)
class OptimizerMoves:
    """An optimizer's moves, the leaves that only repeat others, and each slot's parameter.

    `defaults` are settings of its library where they are not Keras's.
    """

    moves: tuple[Move, ...]
    consumed: frozenset[Path] = frozenset()
    of: Mapping[Path, Path] | None = None
    note: str = ""
    defaults: Mapping[str, Default] = field(default_factory=dict)


def bind(tree: Tree, table: Table) -> Binding | None:
    """Return the tree's way to the canonical agent, or None when it is not of this layout."""
    found = tuple(entries(tree))
    root = root_of([entry.segments for entry in found], table.components, rooted=table.rooted)
    if root is None:
        return None
    single = _single(found, root, table)
    placed = {move.source for move in single}
    parts, moves, assumed, late = _networks([e for e in found if e.path not in placed], root, table)
    if not parts:
        return None
    moves += single
    # In the order of the file: optimizers count their parameters in it.
    order = {path: number for number, path in enumerate(tree)}
    moves = tuple(sorted(moves, key=lambda move: order[move.source]))
    weights: dict[Path, list[Move]] = {}
    for move in moves:
        # A layer that is two has two places for each moment; what networks share belongs to the first.
        if table.joined or move.source not in weights:
            weights.setdefault(move.source, []).append(move)
    state = [each for name in table.optimizers if (each := _optimizer(tree, root, table, name, weights))]
    moves += tuple(move for found_state in state for move in found_state.moves)
    moves += tuple(move for move in _counters(tree, root, table) if move.source not in placed)
    notes = tuple(found_state.note for found_state in state if found_state.note)
    networks = ", ".join(dict.fromkeys(part.component for part in parts))
    return Binding(
        layout=table.name,
        moves=Moves(moves, assumed, notes),
        parts=parts,
        facts=table.facts,
        unplaced=_unplaced(found, root, table, moves) | dict.fromkeys(late, (_LATE,)),
        consumed=frozenset().union(*(found_state.consumed for found_state in state), _repeated(state)),
        evidence=f"{'/'.join(root)}/ has {networks}" if root else networks,
        of={slot: owner for found_state in state for slot, owner in (found_state.of or {}).items()},
        defaults={name: value for found_state in state for name, value in found_state.defaults.items()},
    )


def is_all(binding: Binding, tree: Tree) -> bool:
    """Say whether an agent without a policy is all of the tree: beside it no matrix is a parameter.

    A tree with `critic` and networks of other names is a program's own, whose policy would be left behind.
    """
    if any(part.acts for part in binding.parts):
        return True
    used = {move.source for move in binding.moves.moves} | binding.consumed
    return not any(
        leaf.role == "parameter" and len(leaf.shape) > 1 and path not in used for path, leaf in tree.tensors()
    )


def _repeated(state: Sequence[OptimizerMoves]) -> frozenset[Path]:
    """Return what only repeats: of two optimizers for one canonical one the second's counts and settings."""
    first: dict[Path, Path] = {}
    moves = [move for found_state in state for move in found_state.moves]
    return frozenset(
        move.source for move in moves if first.setdefault(move.target, move.source) != move.source
    )


def _single(found: Sequence[Entry], root: tuple[str, ...], table: Table) -> tuple[Move, ...]:
    """Return the moves of the tensors that the table names one by one."""
    named = {(*root, *theirs.split("/")): ours for theirs, ours in table.tensors.items()}
    return tuple(
        Move(entry.path, tuple(map(attr, named[entry.segments].split("/"))), KEEP)
        for entry in found
        if entry.segments in named
    )


def _networks(
    found: Sequence[Entry], root: tuple[str, ...], table: Table
) -> tuple[tuple[Part, ...], tuple[Move, ...], tuple[str, ...], frozenset[str]]:
    parts: list[Part] = []
    late: set[str] = set()
    moves: list[Move] = []
    assumed: list[str] = []
    chains: dict[tuple[str, str], tuple[Module, ...]] = {}
    for theirs, ours in table.components.items():
        component, _, head = ours.partition("/")
        if found_here := _chain(found, root, theirs, table):
            chains.setdefault((component, head), found_here)
    places = {entry.path: number for number, entry in enumerate(found)}
    policies = [layers for (component, _), layers in chains.items() if component in _POLICIES]
    actions = next((width for layers in policies if (width := _last_width(layers, table))), None)
    for (component, head), layers in chains.items():
        chain, branches = _branched(layers, table if component in _POLICIES else None)
        halved = table.joined and component in _POLICIES
        whole = bool(head) or component not in _CRITICS
        split = (chain,) if whole else heads(chain)
        if table.late and not policies:
            actions = _late_actions(split[0])
            late |= {component} if actions is not None else set()
        if not chain or not all(connected(each, actions) for each in split):
            continue
        for number, each in enumerate(split, start=1):
            named = part(component, head or (None if whole else f"q{number}"), each, branches)
            if halved:
                named = named._replace(branches=(("log_std", PartLayer(("log_std",), each[-1].kind.name)),))
            if not _in_file_order(each, places):
                named = named._replace(layers=_numbered(named))
            parts.append(named)
            moves.extend(_weights(named, each, branches, halved=halved))
            if by_definition(each):
                order = ", ".join("/".join(layer.name) for layer in named.layers)
                assumed.append(f"the layers of {named.title} are used in the order of the file: {order}")
    return tuple(parts), tuple(moves), tuple(assumed), frozenset(late)


def _late_actions(chain: Sequence[Module]) -> int | None:
    """Return how many numbers more the second layer takes than the first gives, None if it takes as many."""
    if len(chain) < 2 or chain[0].width_out is None or chain[1].width_in is None:
        return None
    more = chain[1].width_in - chain[0].width_out
    return more if more > 0 else None


def _in_file_order(chain: Sequence[Module], places: Mapping[Path, int]) -> bool:
    firsts = [min(places[entry.path] for entry in module.tensors.values()) for module in chain]
    return firsts == sorted(firsts)


def _numbered(named: Part) -> tuple[PartLayer, ...]:
    """Return the layers with numbers for names, unless one module's own numbers tell their order."""
    if len({layer.name[:-1] for layer in named.layers}) == 1:
        return named.layers
    return tuple(PartLayer((f"l{n}",), layer.kind) for n, layer in enumerate(named.layers, start=1))


def _chain(found: Sequence[Entry], root: tuple[str, ...], theirs: str, table: Table) -> tuple[Module, ...]:
    """Return the layers below a component's name, or below several one after the other."""
    names = theirs.split("+")
    layers: list[Module] = []
    for name in names:
        prefix = (*root, *name.split("/"))
        mine = [entry for entry in found if entry.segments[: len(prefix)] == prefix]
        if not mine:
            return ()
        # Layers of several modules are told apart by the modules' names.
        own = modules(mine, len(prefix) - (len(names) > 1), table.framework, matrices=table.matrices)
        if not own:
            return ()
        layers += own
    return tuple(layers)


def _branched(layers: Sequence[Module], table: Table | None) -> tuple[tuple[Module, ...], dict[str, Module]]:
    """Return the chain without its further heads, and those by their canonical names."""
    known = table.branches if table is not None else {}
    ends = {tuple(name.split("/")): ours for name, ours in known.items()}
    branches = {ours: m for m in layers for end, ours in ends.items() if m.name[-len(end) :] == end}
    return tuple(m for m in layers if m not in branches.values()), branches


def _unplaced(
    found: Sequence[Entry], root: tuple[str, ...], table: Table, moves: Sequence[Move]
) -> dict[str, tuple[str, ...]]:
    taken = {move.source for move in moves}
    places = {
        (*root, *name.split("/")): ours.partition("/")[0]
        for theirs, ours in table.components.items()
        for name in theirs.split("+")
    }
    left: dict[str, list[str]] = {}
    for entry in found:
        # An array among a module's tensors is a buffer that the program kept as NumPy's.
        is_part = entry.leaf.role in ("parameter", "buffer") or (
            entry.leaf.role == "other" and "float" in entry.leaf.dtype
        )
        if is_part and entry.path not in taken:
            for place, ours in places.items():
                if entry.segments[: len(place)] == place:
                    left.setdefault(ours, []).append("/".join(entry.segments))
                    break
    return {component: tuple(names) for component, names in left.items()}


def _last_width(layers: Sequence[Module], table: Table) -> int | None:
    widths = [m.width_out for m in _branched(layers, table)[0] if m.width_out is not None]
    return widths[-1] // (2 if table.joined else 1) if widths else None


def _weights(
    named: Part, chain: Sequence[Module], branches: Mapping[str, Module], *, halved: bool = False
) -> list[Move]:
    if halved:
        return _weights(named, chain[:-1], branches) + _halves(named, chain)
    placed: list[tuple[int | str, Module]] = [*enumerate(chain), *branches.items()]
    return [
        Move(module.tensors[w.name].path, canonical.weight(named, position, w.canonical), w.to_canonical)
        for position, module in placed
        for w in module.kind.weights
        if w.name in module.tensors
    ]


def _halves(named: Part, chain: Sequence[Module]) -> list[Move]:
    """Return the moves of a last layer that is two: the mean, then the log standard deviation."""
    last, width = chain[-1], chain[-1].width_out or 0
    halves = ((len(chain) - 1, 0, width // 2), ("log_std", width // 2, width))
    return [
        Move(
            last.tensors[w.name].path,
            canonical.weight(named, place, w.canonical),
            # The outputs are the last axis of a canonical kernel, and the only one of a bias.
            chain_rules(w.to_canonical, Take(w.rank - 1, start, stop, width)),
        )
        for place, start, stop in halves
        for w in last.kind.weights
        if w.name in last.tensors
    ]


def _optimizer(
    tree: Tree, root: tuple[str, ...], table: Table, theirs: str, weights: Mapping[Path, Sequence[Move]]
) -> OptimizerMoves | None:
    """Return the moves of one optimizer; None for one of all networks that the file does not have.

    Slots that stand below their variables name no optimizer: they are those of the networks' own.
    """
    ours, _, head = table.optimizers[theirs].partition("/")
    mine = tuple(
        (path, move.target, move.rule)
        for path, places in weights.items()
        for move in places
        if canonical.trains(ours, move.target) and (not head or move.target[1] == attr(head))
    )
    found = Optimizer(ours, (*root, *theirs.split("/")), tree, mine)
    return table.optimizer(found) if ours != canonical.JOINT or found.own else None


def _counters(tree: Tree, root: tuple[str, ...], table: Table) -> tuple[Move, ...]:
    """Return the moves of the agent's own counters: those that the table names, and any other by its name."""
    found = []
    for path, leaf in tree.items():
        *owner, name = tree.names[path].split("/")
        if tuple(owner) in ((), root) and (name in table.counters or leaf.role == "counter"):
            rule = KEEP if isinstance(leaf, Leaf) else ToTensor("int64")
            found.append(Move(path, (attr(table.counters.get(name, name)),), rule))
    return tuple(found)
