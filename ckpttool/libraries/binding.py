"""Bind the tensors of a layout, which its table names, to the canonical agent."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from ckpttool.core import deferred
from ckpttool.core.tree import Leaf, Path, Tree, attr, display, key
from ckpttool.libraries import schema
from ckpttool.libraries.recognize import ComponentLayer, LayoutTable, NamedLeaf, find_orders
from ckpttool.libraries.schema import (
    BRANCHES,
    AgentLayer,
    AgentNetwork,
    RecognizedAgent,
    StreamInput,
    Streams,
)
from ckpttool.mapping.kind_table import SPELLING, recognize_kind
from ckpttool.mapping.layer_kinds import Name
from ckpttool.mapping.rules import (
    KEEP,
    AxisSlice,
    Move,
    MoveList,
    ToTensor,
    chain_rules,
    compose_rules,
    rule_steps,
)

if TYPE_CHECKING:
    from ckpttool.libraries.optimizers_read import OptimizerMoves


Recognition = Callable[..., RecognizedAgent | None]
# Calls `_bind`: once for all trees of one structure, where the checkpoints of a run follow each other.
BINDER: ContextVar[Recognition] = ContextVar("BINDER", default=lambda bind, *of: bind(*of))


def bind(tree: Tree, table: LayoutTable) -> RecognizedAgent | None:
    """Return the recognised agent, or None if the tree does not have this layout."""
    return BINDER.get()(_bind, tree, table)


def _bind(tree: Tree, table: LayoutTable) -> RecognizedAgent | None:
    leaves = tuple(list_leaves(tree))
    root = find_root([entry.segments for entry in leaves], table.components, rooted=table.rooted)
    if root is None:
        return None
    single = _move_named_tensors(leaves, root, table)
    placed = {move.source for move in single}
    parts, moves, refused = _collect_networks([e for e in leaves if e.path not in placed], root, table)
    if not parts:
        return None
    moves += single
    # File order, in which optimizers count their parameters.
    order = {path: number for number, path in enumerate(tree)}
    moves = tuple(sorted(moves, key=lambda move: order[move.source]))
    weights: dict[Path, list[Move]] = {}
    for move in moves:
        # A layer that is split in two has two paths for each moment; tensors shared by networks belong to the
        # first.
        if table.joined or move.source not in weights:
            weights.setdefault(move.source, []).append(move)
    state = [
        optimizer
        for name in table.optimizers
        if (optimizer := _move_optimizer(tree, root, table, name, weights))
    ]
    moves += tuple(move for found_state in state for move in found_state.moves)
    moves += tuple(move for move in _move_counters(tree, root, table) if move.source not in placed)
    notes = tuple(found_state.note for found_state in state if found_state.note)
    # If two optimizers map to one canonical one, the second's counts and settings repeat.
    first: dict[Path, Path] = {}
    stated = [move for found_state in state for move in found_state.moves]
    repeated = {m.source for m in stated if first.setdefault(m.target, m.source) != m.source}
    networks = ", ".join(dict.fromkeys(part.component for part in parts))
    return RecognizedAgent(
        layout=table.name,
        moves=MoveList(moves, (), notes),
        parts=parts,
        facts=table.facts,
        unplaced=_list_unplaced(leaves, root, table, moves) | refused,
        consumed=frozenset().union(*(found_state.consumed for found_state in state), repeated),
        evidence=f"{'/'.join(root)}/ has {networks}" if root else networks,
        of={slot: owner for found_state in state for slot, owner in (found_state.of or {}).items()},
        defaults={name: value for found_state in state for name, value in found_state.defaults.items()},
    )


def bind_means(
    tree: Tree,
    means: Mapping[str, str],
    noise: Collection[str],
    bind_plain: Callable[[Tree], RecognizedAgent | None],
) -> RecognizedAgent | None:
    """Bind a state_dict with noisy layers as it acts in evaluation: the means are the layers' weights.

    `means` are the names of the means, with those of a plain layer; tensors called as in `noise` are only
    consumed. `bind_plain` binds the tree with plain layers, which is the tree itself if none is noisy.
    """
    sources: dict[Path, Path] = {}
    unused: set[Path] = set()
    for path in filter(None, tree):
        module, _, name = str(path[-1].value).rpartition(".")
        if name in noise:
            unused.add(path)
        elif name in means:
            sources[*path[:-1], key(f"{module}.{means[name]}")] = path
    if not sources:
        return bind_plain(tree)
    if sources.keys() & tree.keys():  # two tensors of one name
        return None
    places = {path: target for target, path in sources.items()}
    kept = {places.get(path, path): leaf for path, leaf in tree.items() if path not in unused}
    binding = bind_plain(Tree(kept, tree.aliases, tree.containers))
    if binding is None:
        return None
    binding = binding.moved(lambda path: sources.get(path, path))
    binding = binding.noted(f"the noise of {len(sources) // 2} noisy layers was not converted")
    return replace(binding, consumed=binding.consumed | unused)


def is_whole_tree(binding: RecognizedAgent, tree: Tree) -> bool:
    """Return whether an agent without a policy is the whole tree: no other matrix is a parameter.

    A tree with `critic` and networks of other names is custom, and its policy would be lost.
    """
    if any(part.acts for part in binding.parts):
        return True
    used = {move.source for move in binding.moves.moves} | binding.consumed
    return not any(
        leaf.role == "parameter" and len(leaf.shape) > 1 and path not in used for path, leaf in tree.tensors()
    )


def _move_named_tensors(
    leaves: Sequence[NamedLeaf], root: tuple[str, ...], table: LayoutTable
) -> tuple[Move, ...]:
    """Return the moves of the tensors that the table names individually."""
    named = {(*root, *stored.split("/")): canonical for stored, canonical in table.tensors.items()}
    return tuple(
        Move(entry.path, tuple(map(attr, named[entry.segments].split("/"))), KEEP)
        for entry in leaves
        if entry.segments in named
    )


def _collect_networks(
    leaves: Sequence[NamedLeaf], root: tuple[str, ...], table: LayoutTable
) -> tuple[tuple[AgentNetwork, ...], tuple[Move, ...], dict[str, tuple[str, ...]]]:
    """Return the networks, the moves of their weights, and by component why they cannot be run."""
    parts: list[AgentNetwork] = []
    refused: dict[str, tuple[str, ...]] = {}
    moves: list[Move] = []
    chains: dict[tuple[str, str], tuple[ComponentLayer, ...]] = {}
    for stored, canonical in table.components.items():
        component, _, head = canonical.partition("/")
        if found_here := _collect_chain(leaves, root, stored, table):
            chains.setdefault((component, head), found_here)
    places = {entry.path: number for number, entry in enumerate(leaves)}
    policies = [layers for (component, _), layers in chains.items() if component in _POLICIES]
    actions = next((width for layers in policies if (width := _last_width(layers, table))), None)
    for (component, head), layers in chains.items():
        chain, branches = _split_branches(layers, table if component in _POLICIES else None)
        halved = table.joined and component in _POLICIES
        whole = bool(head) or component not in _CRITICS
        split = (chain,) if whole else split_critic(chain)
        if table.late and not policies:
            first, second = (*split[0][:2], None, None)[:2]
            more = (second.width_in or 0) - (first.width_out or 0) if first and second else 0
            actions = more if more > 0 and first and first.width_out is not None else None
            refused |= {component: (_LATE,)} if actions is not None else {}
        streams = [_list_streams(q_function) if component in _CRITICS else () for q_function in split]
        if not chain or not all(map(partial(_is_chain, extra=actions), split, streams)):
            continue
        for number, (q_function, own) in enumerate(zip(split, streams, strict=True), start=1):
            named = make_network(component, head or (None if whole else f"q{number}"), q_function, branches)
            if halved:
                named = named._replace(
                    branches=(("log_std", AgentLayer(("log_std",), q_function[-1].kind.name)),)
                )
            named = _name_layers(named, q_function, own, places)
            parts.append(named)
            moves.extend(_move_weights(named, q_function, branches, halved=halved))
            if table.user_written and not own and (unclear := _describe_unclear_order(q_function, actions)):
                refused.setdefault(component, (unclear,))
    return tuple(parts), tuple(moves), refused


def _describe_unclear_order(chain: Sequence[ComponentLayer], actions: int | None) -> str | None:
    """Return the reason not to run layers of which neither sizes nor numbers decide the order, else None."""
    dense = [module for module in chain if module.kind.name == "dense"]
    names = [module.name for module in dense]
    widths = [(module.width_in or 0, module.width_out or 0) for module in dense]
    orders, _ = find_orders(names, widths, None if is_connected(dense, None) else actions)
    if orders == [tuple(range(len(dense)))]:
        return None
    return f"{schema.UNKNOWN_ORDER}: {'; '.join(' '.join('/'.join(names[n]) for n in row) for row in orders)}"


def _name_layers(
    named: AgentNetwork, chain: Sequence[ComponentLayer], streams: Streams, places: Mapping[Path, int]
) -> AgentNetwork:
    """Return the network with names that give the order of its layers, where the file's do not."""
    if streams:
        return _name_streams(named, chain, streams)
    # The numbers within one module determine the order.
    firsts = [min(places[entry.path] for entry in module.tensors.values()) for module in chain]
    if firsts == sorted(firsts) or len({layer.name[:-1] for layer in named.layers}) == 1:
        return named
    return number_layers(named)


def number_layers(named: AgentNetwork) -> AgentNetwork:
    """Return the network with layers named by number."""
    layers = (AgentLayer((f"l{n}",), layer.kind) for n, layer in enumerate(named.layers, start=1))
    return named._replace(layers=tuple(layers))


def _collect_chain(
    leaves: Sequence[NamedLeaf], root: tuple[str, ...], stored: str, table: LayoutTable
) -> tuple[ComponentLayer, ...]:
    """Return the layers under a component's name, or under several in sequence."""
    names = stored.split("+")
    layers: list[ComponentLayer] = []
    for name in names:
        prefix = (*root, *name.split("/"))
        cut = len(prefix)
        mine = [entry for entry in leaves if entry.segments[:cut] == prefix]
        if not mine:
            return ()
        # Layers of several modules are distinguished by module name.
        own = group_layers(mine, cut - (len(names) > 1), table.framework, matrices=table.matrices)
        if not own:
            return ()
        layers += own
    return tuple(layers)


def _split_branches(
    layers: Sequence[ComponentLayer], table: LayoutTable | None
) -> tuple[tuple[ComponentLayer, ...], dict[str, ComponentLayer]]:
    """Return the chain without further heads, and those heads by their canonical names."""
    known = table.branches if table is not None else {}
    ends = {tuple(name.split("/")): canonical for name, canonical in known.items()}
    branches = {canonical: m for m in layers for end, canonical in ends.items() if m.name[-len(end) :] == end}
    return tuple(m for m in layers if m not in branches.values()), branches


def _list_unplaced(
    leaves: Sequence[NamedLeaf], root: tuple[str, ...], table: LayoutTable, moves: Sequence[Move]
) -> dict[str, tuple[str, ...]]:
    moved = {move.source for move in moves}
    places = {
        (*root, *name.split("/")): canonical.partition("/")[0]
        for stored, canonical in table.components.items()
        for name in stored.split("+")
    }
    left: dict[str, list[str]] = {}
    for entry in leaves:
        # An array among a module's tensors is a buffer that the program stored as a NumPy array.
        is_part = entry.leaf.role in ("parameter", "buffer") or (
            entry.leaf.role == "other" and "float" in entry.leaf.dtype
        )
        if is_part and entry.path not in moved:
            for prefix, component in places.items():
                if entry.segments[: len(prefix)] == prefix:
                    left.setdefault(component, []).append("/".join(entry.segments))
                    break
    return {component: tuple(names) for component, names in left.items()}


def _last_width(layers: Sequence[ComponentLayer], table: LayoutTable) -> int | None:
    widths = [m.width_out for m in _split_branches(layers, table)[0] if m.width_out is not None]
    return widths[-1] // (2 if table.joined else 1) if widths else None


def _move_weights(
    named: AgentNetwork,
    chain: Sequence[ComponentLayer],
    branches: Mapping[str, ComponentLayer],
    *,
    halved: bool = False,
) -> list[Move]:
    if halved:
        return _move_weights(named, chain[:-1], branches) + _move_halves(named, chain)
    placed: list[tuple[int | str, ComponentLayer]] = [*enumerate(chain), *branches.items()]
    return [
        Move(
            module.tensors[w.name].path,
            schema.canonical_weight_path(named, position, w.canonical),
            w.to_canonical,
        )
        for position, module in placed
        for w in module.kind.weights
        if w.name in module.tensors
    ]


def _move_halves(named: AgentNetwork, chain: Sequence[ComponentLayer]) -> list[Move]:
    """Return the moves of a joint last layer: the mean, then the log standard deviation."""
    last, width = chain[-1], chain[-1].width_out or 0
    halves = ((len(chain) - 1, 0, width // 2), ("log_std", width // 2, width))
    return [
        Move(
            last.tensors[w.name].path,
            schema.canonical_weight_path(named, name, w.canonical),
            # The outputs are the last axis of a canonical kernel, and the only axis of a bias.
            compose_rules(w.to_canonical, AxisSlice(w.rank - 1, start, stop, width)),
        )
        for name, start, stop in halves
        for w in last.kind.weights
        if w.name in last.tensors
    ]


def rejoin_last_layer(binding: RecognizedAgent) -> RecognizedAgent:
    """Return the binding of a `joined` table's agent whose last layer has no deviations: undivided."""
    moves = []
    for move in binding.moves.moves:
        kept = [step for step in rule_steps(move.rule) if not isinstance(step, AxisSlice)]
        if move.target[0].value not in _POLICIES or len(kept) == len(rule_steps(move.rule)):
            moves.append(move)
        elif move.target[1] != attr("log_std"):
            moves.append(replace(move, rule=chain_rules(*kept)))
    parts = tuple(part._replace(branches=()) if part.acts else part for part in binding.parts)
    return replace(binding, moves=replace(binding.moves, moves=tuple(moves)), parts=parts)


def _move_optimizer(
    tree: Tree, root: tuple[str, ...], table: LayoutTable, stored: str, weights: Mapping[Path, Sequence[Move]]
) -> OptimizerMoves | None:
    """Return the moves of one optimizer; None for a joint optimizer that is not in the file.

    Slots stored under their variables have no optimizer name: they belong to the networks' own
    optimizers.
    """
    from ckpttool.libraries.optimizers_read import StoredOptimizer, from_keras, from_torch

    canonical, _, head = table.optimizers[stored].partition("/")
    mine = tuple(
        (path, move.target, move.rule)
        for path, places in weights.items()
        for move in places
        if schema.is_trained_by(canonical, move.target) and (not head or move.target[1] == attr(head))
    )
    optimizer = StoredOptimizer(canonical, (*root, *stored.split("/")), tree, mine)
    binder = table.optimizer or (from_torch if table.framework == "torch" else from_keras)
    return binder(optimizer) if canonical != schema.JOINT or optimizer.own else None


def _move_counters(tree: Tree, root: tuple[str, ...], table: LayoutTable) -> tuple[Move, ...]:
    """Return the moves of the agent's counters: those that the table names, and any other by its name."""
    counters = []
    for path, leaf in tree.items():
        *owner, name = tree.names[path].split("/")
        if tuple(owner) in ((), root) and (name in table.counters or leaf.role == "counter"):
            rule = KEEP if isinstance(leaf, Leaf) else ToTensor("int64")
            counters.append(Move(path, (attr(table.counters.get(name, name)),), rule))
    return tuple(counters)


def list_leaves(tree: Tree) -> Iterator[NamedLeaf]:
    """Yield all tensors in tree order, each under all its names: layers that networks share come first."""
    for path, leaf in tree.tensors():
        yield NamedLeaf(path, tuple(tree.names[path].split("/")), leaf)
        for alias in tree.aliases.get(path, ()):
            yield NamedLeaf(path, tuple(display(alias.path).split("/")), leaf)


def find_root(names: Sequence[Name], components: Mapping[str, str], *, rooted: bool) -> Name | None:
    """Return the prefix of most components (`policy`), or None if there are no components.

    `rooted` allows one object between the top and the components, as in `Checkpoint(policy=agent)`.
    """
    components_by_root: dict[Name, set[str]] = {}
    component_names = {
        tuple(name.split("/")) for alternatives in components for name in alternatives.split("+")
    }
    lengths = {len(name) for name in component_names}
    for segments in names:
        for depth in range(2 if rooted else 1):
            for length in lengths:
                stop = depth + length
                if len(segments) > stop and segments[depth:stop] in component_names:
                    components_by_root.setdefault(segments[:depth], set()).add("/".join(segments[depth:stop]))
    if not components_by_root:
        return None
    return max(components_by_root, key=lambda root: (len(components_by_root[root]), -len(root)))


def group_layers(
    leaves: Sequence[NamedLeaf], cut: int, framework: str, *, matrices: bool = False
) -> tuple[ComponentLayer, ...]:
    """Group a component's tensors (whose names start after `cut` segments) into layers, in order.

    With `matrices` a separate torch weight with two axes is a dense layer without a bias.
    """
    groups: dict[Name, dict[str, NamedLeaf]] = {}
    keys: set[tuple[Path, str]] = set()
    for entry in leaves:
        # A tensor's other names only count in components (of critics: Q-functions) without its own name.
        first = entry.segments[cut]
        layer_key = (entry.path, first if _QS.fullmatch(first) else "")
        if entry.leaf.role in ("parameter", "buffer") and layer_key not in keys:
            keys.add(layer_key)
            groups.setdefault(entry.segments[cut:-1], {})[entry.segments[-1]] = entry
    dense = SPELLING[framework, "dense"]
    kinds = {
        name: dense
        if matrices and group.keys() == {"weight"} and len(group["weight"].leaf.shape) == 2
        else recognize_kind({n: entry.leaf for n, entry in group.items()}, framework)
        for name, group in groups.items()
    }
    return _sort_layers([ComponentLayer(n, kind, groups[n]) for n, kind in kinds.items() if kind is not None])


def split_critic(layers: tuple[ComponentLayer, ...]) -> tuple[tuple[ComponentLayer, ...], ...]:
    """Split a critic into its Q-functions: by module if each has its own, else after the end of a chain.

    The flat form of the TD3 authors keeps both in one module as l1..l3 and l4..l6: a new Q-function
    starts after a layer with one output.
    """
    by_first: dict[str, list[ComponentLayer]] = {}
    by_owner: dict[Name, list[ComponentLayer]] = {}
    for module in layers:
        by_first.setdefault(module.name[0] if len(module.name) > 1 else "", []).append(module)
        by_owner.setdefault(_public_name(module.name)[:-1], []).append(module)
    if len(by_first) > 1 and all(_QS.fullmatch(name) for name in by_first):
        return tuple(tuple(group) for group in by_first.values())
    ends = [[m.width_out for m in group if m.width_out is not None][-1:] for group in by_owner.values()]
    starts = [[m.width_in for m in group if m.width_in is not None][:1] for group in by_owner.values()]
    # A trunk and a head are separate modules but parts of one Q-function. Quantile Q-functions have equal
    # input and output sizes.
    alike = ends[:1] != [[]] and all(names[:1] * len(names) == names for names in (ends, starts))
    if len(by_owner) > 1 and (all(end == [1] for end in ends) or alike):
        return tuple(tuple(group) for group in by_owner.values())
    chains: list[list[ComponentLayer]] = [[]]
    for module in layers:
        if chains[-1] and chains[-1][-1].width_out == 1:
            chains.append([])
        chains[-1].append(module)
    return tuple(tuple(chain) for chain in chains if chain)


def _list_streams(chain: Sequence[ComponentLayer]) -> Streams:
    """Return the inputs that the first layers encode separately, each with its number of layers."""

    def encoded(module: ComponentLayer) -> StreamInput | None:
        names = (*module.name, "")
        return _INPUTS.get(names[names.index(ENCODERS) + 1]) if ENCODERS in names else None

    counts = [(name, sum(1 for _ in group)) for name, group in groupby(chain, encoded)]
    streams = tuple((name, count) for name, count in counts if name is not None)
    ordered = len(streams) == len(counts) - 1 == len(dict(streams)) and counts[-1][0] is None
    return streams if ordered else ()


def _is_chain(chain: Sequence[ComponentLayer], streams: Sequence[tuple[str, int]], extra: int | None) -> bool:
    """Return whether the layers are connected, after encoders of the inputs if there are any."""
    if not streams:
        return is_connected(chain, extra)
    start = width = 0
    for _, count in streams:
        encoder = chain[start : start + count]
        if not is_connected(encoder, None):
            return False
        start, width = start + count, width + (encoder[-1].width_out or 0)
    return chain[start].width_in == width and is_connected(chain[start:], width)


def _name_streams(named: AgentNetwork, chain: Sequence[ComponentLayer], streams: Streams) -> AgentNetwork:
    """Return the network with names whose alphabetical order is that of its layers."""
    stored = {canonical: input_ for input_, canonical in _INPUTS.items()}
    owners: list[Name] = [(ENCODERS, stored[name]) for name, count in streams for _ in range(count)]
    rest = chain[len(owners) :]
    owners += [(JOINED,), *((JOINED if b.width_in != a.width_out else OUTPUT,) for a, b in pairwise(rest))]
    layers = (
        layer._replace(name=(*owner, str(owners[:number].count(owner))))
        for number, (layer, owner) in enumerate(zip(named.layers, owners, strict=True))
    )
    return named._replace(layers=tuple(layers), streams=streams)


def make_network(
    component: str,
    head: str | None,
    chain: Sequence[ComponentLayer],
    branches: Mapping[str, ComponentLayer] | None = None,
) -> AgentNetwork:
    """Return the network's record, with layer names as in a torch module."""
    names = [_public_name(module.name) for module in chain]
    if all(name and name[-1].isdigit() for name in names) and chain[0].kind.framework == "tensorflow":
        names = _sequential_names(names, chain)
    layers = (AgentLayer(name, m.kind.name) for name, m in zip(names, chain, strict=True))
    more = (
        (name, AgentLayer(_public_name(m.name) if m.name[-1] in BRANCHES else (name,), m.kind.name))
        for name, m in (branches or {}).items()
    )
    return AgentNetwork(component, head, tuple(layers), tuple(more))


_LATE = "an action that enters after the first layer: its width is unknown without the policy"
_POLICIES, _CRITICS = ("actor", "actor_target"), ("critic", "critic_target")


# The name that converted files give to Q-functions whose layers share names.
_QS = deferred.compile(r"q\d+")


def _sort_layers(stored: list[ComponentLayer]) -> tuple[ComponentLayer, ...]:
    """Return numbered layers (l1, l2, ...) in numeric order, others as stored.

    Norms that are defined separately (l1, l2, l3, n1, n2) follow the dense layer with their number.
    """
    if all(module.name and module.name[-1].isdigit() for module in stored):
        return tuple(sorted(stored, key=_rank_key(stored)))
    dense = [module for module in stored if module.kind.name == "dense"]
    placed = sorted(dense, key=_rank_key(dense))
    by_number = {(m.name[:-1], _number(m.name)): m for m in dense}
    for position, module in enumerate(stored):
        if module.kind.name == "dense":
            continue
        before = [m for m in stored[:position] if m.kind.name == "dense"]
        owner = by_number.get((module.name[:-1], _number(module.name))) or (before[-1] if before else None)
        placed.insert(placed.index(owner) + 1 if owner is not None else 0, module)
    return tuple(placed)


def _rank_key(layers: Sequence[ComponentLayer]) -> Callable[[ComponentLayer], tuple[int, ...]]:
    siblings: dict[Name, dict[str, int]] = {}
    for module in layers:
        for depth, segment in enumerate(module.name):
            names = siblings.setdefault(module.name[:depth], {})
            names.setdefault(segment, len(names))
    for names in siblings.values():
        numbers = {name: match for name in names if (match := _NUMBERED.fullmatch(name))}
        if len({match[1] for match in numbers.values()}) == 1:
            # Unnumbered names (log_std) keep their positions, the others are sorted.
            places = sorted(names[name] for name in numbers)
            names.update(zip(sorted(numbers, key=lambda name: int(numbers[name][2])), places, strict=True))
    return lambda module: tuple(siblings[module.name[:d]][s] for d, s in enumerate(module.name))


# rllib/core/models/torch/encoder.py, TorchMultiStreamEncoder: `base_encoders.actions`, `base_encoders.obs`.
ENCODERS = "base_encoders"
_INPUTS: Mapping[str, StreamInput] = {"actions": "action", "obs": "obs"}
# Names of the other layers of such a Q-function: those that receive the joined outputs, and those after them.
JOINED, OUTPUT = "joined", "output"


def _public_name(name: Name) -> Name:
    kept = tuple(segment for segment in name if not _PRIVATE.fullmatch(segment))
    return kept or name


def _sequential_names(names: Sequence[Name], chain: Sequence[ComponentLayer]) -> list[Name]:
    # Keras counts layers that own weights (and an input layer); torch's Sequential also counts the activation
    # after each hidden layer: Linear 0, ReLU 1, Linear 2, ...
    renamed, position = [], 0
    for number, name in enumerate(names):
        renamed.append((*name[:-1], str(position)))
        followed_by_norm = number + 1 < len(chain) and chain[number + 1].kind.name == "layer_norm"
        position += 1 if followed_by_norm else 2
    return renamed


# Edges that Keras inserts between a model and its layers; users do not name layers like this.
_PRIVATE = deferred.compile(r"_functional|_operations|_layers|layers|_self_tracked_trackables")
_NUMBERED = deferred.compile(r"(\D*)(\d+)")


def _number(name: Name) -> int | None:
    numbers = re.findall(r"\d+", name[-1]) if name else []
    return int(numbers[-1]) if numbers else None


def is_connected(chain: Sequence[ComponentLayer], extra: int | None) -> bool:
    """Return whether each layer's input size equals the previous output (or that plus `extra` actions).

    A norm must have the width of the dense layer before it.
    """
    width: int | None = None
    for module in chain:
        inputs = module.width_in
        if inputs is None:
            if module.width_norm != width:
                return False
            continue
        if width is not None and inputs != width and (extra is None or inputs != width + extra):
            return False
        width = module.width_out
    return width is not None
