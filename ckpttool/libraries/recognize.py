"""Recognition of libraries by their tables."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

from ckpttool.core import deferred, filesystem, plugins
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import UnsupportedError, UsageError
from ckpttool.core.kinds import ACTIVATION_KINDS, TORCH_ACTIVATIONS
from ckpttool.core.sidecar import format_activation
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display, key
from ckpttool.libraries import schema
from ckpttool.libraries.schema import (
    BRANCHES,
    NO_LAYOUT,
    AgentLayer,
    AgentMetadata,
    AgentNetwork,
    RecognizedAgent,
    StreamInput,
    Streams,
)
from ckpttool.mapping import wrappers
from ckpttool.mapping.kind_table import SPELLING, recognize_kind
from ckpttool.mapping.layer_kinds import LayerKind, Name
from ckpttool.mapping.rules import (
    KEEP,
    AxisSlice,
    Move,
    MoveList,
    Plan,
    Settings,
    ToTensor,
    chain_rules,
    compose_rules,
    rule_steps,
)

if TYPE_CHECKING:
    from ckpttool.libraries.optimizers_read import OptimizerMoves, StoredOptimizer


# Edges that Keras inserts between a model and its layers; users do not name layers like this.
_PRIVATE = deferred.compile(r"_functional|_operations|_layers|layers|_self_tracked_trackables")

# The name that converted files give to Q-functions whose layers share names.
_QS = deferred.compile(r"q\d+")


class NamedLeaf(NamedTuple):
    """A leaf with its name relative to the agent, split into segments."""

    path: Path
    segments: Name
    leaf: Leaf


class ComponentLayer(NamedTuple):
    """One layer of a component: its name within the component, its kind, its tensors by stored name."""

    name: Name
    kind: LayerKind
    tensors: Mapping[str, NamedLeaf]

    @property
    def width_in(self) -> int | None:
        """The number of inputs of a dense layer."""
        return self._kernel_shape()[0] if self.kind.name == "dense" else None

    @property
    def width_out(self) -> int | None:
        """The number of outputs of a dense layer."""
        return self._kernel_shape()[1] if self.kind.name == "dense" else None

    @property
    def width_norm(self) -> int:
        """The width of a norm, whose tensors are all as long."""
        return next(iter(self.tensors.values())).leaf.shape[0]

    def _kernel_shape(self) -> tuple[int, ...]:
        first = self.kind.weights[0]
        shape = self.tensors[first.name].leaf.shape
        return shape if first.to_canonical == KEEP else shape[::-1]


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


_NUMBERED = deferred.compile(r"(\D*)(\d+)")
_NUMBERS = deferred.compile(r"\d+")
_TRIES = 20_000


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


def find_orders(
    names: Sequence[Name], widths: Sequence[tuple[int, int]], extra: int | None = None
) -> tuple[list[tuple[int, ...]], bool]:
    """Return up to two orders that the sizes of dense layers, and then the numbers in their names, allow.

    Orders are positions in `names`; `widths` are the inputs and outputs. With the orders comes whether sizes
    alone decide. Several orders mean that nothing does: the order of a file is no evidence. `extra` is the
    width of an action that enters at any layer.
    """
    by_size = _find_chains(names, widths, {}, extra=extra)
    if len(by_size) < 2:
        return by_size, True
    before = _list_predecessors(names)
    by_number = _find_chains(names, widths, before, extra=extra)
    if len(by_number) > 1:
        by_number = _find_chains(names, widths, before, together=True, extra=extra)
    return by_number or by_size, False


def _split_numbers(name: Name, names: frozenset[Name]) -> tuple[str, tuple[int, ...]]:
    """Return a name without its numbers, and the numbers; Keras omits the first layer's number."""
    text = "/".join(name)
    if not _NUMBERS.search(name[-1] if name else "") and any(
        other[:-1] == name[:-1] and re.fullmatch(re.escape(name[-1]) + r"_\d+", other[-1])
        for other in names
        if name and other
    ):
        text += "_0"
    return _NUMBERS.sub("#", text), tuple(int(n) for n in _NUMBERS.findall(text)[:9] if len(n) < 10)


def _list_predecessors(names: Sequence[Name]) -> dict[int, frozenset[int]]:
    """Return for each layer those with the same name and lower numbers, which precede it."""
    every = frozenset(names)
    keys = [_split_numbers(name, every) for name in names]
    return {
        n: frozenset(m for m, (stem, number) in enumerate(keys) if stem == mine and number < own)
        for n, (mine, own) in enumerate(keys)
    }


def _find_chains(
    names: Sequence[Name],
    widths: Sequence[tuple[int, int]],
    before: Mapping[int, frozenset[int]],
    *,
    together: bool = False,
    extra: int | None = None,
) -> list[tuple[int, ...]]:
    """Return up to two orders in which every layer's input size equals the previous output size.

    `before` are the layers that precede each; `together` keeps a module's layers adjacent. An input may have
    `extra` values more.
    """
    owners = [name[:-1] for name in names]
    chains: list[tuple[int, ...]] = []
    stack: list[tuple[int, ...]] = [(n,) for n in range(len(names) - 1, -1, -1) if not before.get(n)]
    tries = 0
    while stack and len(chains) < 2 and tries < _TRIES:
        tries += 1
        done = stack.pop()
        if len(done) == len(names):
            chains.append(done)
            continue
        width = widths[done[-1]][1]
        for n in range(len(names) - 1, -1, -1):
            fits = n not in done and widths[n][0] in (width, width + (extra or 0))
            left = together and owners[n] != owners[done[-1]]
            if left and any(owner == owners[done[-1]] for m, owner in enumerate(owners) if m not in done):
                continue
            if fits and before.get(n, frozenset()) <= frozenset(done):
                stack.append((*done, n))
    # An order is the only one if all were tried.
    return chains * 2 if stack and len(chains) == 1 else chains


def _number(name: Name) -> int | None:
    numbers = re.findall(r"\d+", name[-1]) if name else []
    return int(numbers[-1]) if numbers else None


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


# rllib/core/models/torch/encoder.py, TorchMultiStreamEncoder: `base_encoders.actions`, `base_encoders.obs`.
ENCODERS = "base_encoders"
_INPUTS: Mapping[str, StreamInput] = {"actions": "action", "obs": "obs"}
# Names of the other layers of such a Q-function: those that receive the joined outputs, and those after them.
JOINED, OUTPUT = "joined", "output"


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


_LATE = "an action that enters after the first layer: its width is unknown without the policy"
_POLICIES, _CRITICS = ("actor", "actor_target"), ("critic", "critic_target")


ANY = ("every recognised agent",)
"""Of a layout that writes the agents of every library."""


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """One library's naming of its agents.

    `components`, `optimizers` and `counters` map its names to the canonical ones: a name with several
    segments has slashes ("policy/actor"), and a component that is one head of a network includes the
    head ("critic/q1"), as does a separate optimizer per head ("critic_optimizer/q1"). `branches` map
    the module names of further heads (`fc_logstd`) to the canonical branch, in every policy; `tensors`
    map whole names of single tensors outside layers to their canonical path ("temperature/log_alpha");
    with `matrices` a weight [out, in] without a bias is a dense layer, which elsewhere may be an
    embedding; with `late` a Q-function without its policy may receive the action after its first layer.
    `rooted` means that the agent may be an attribute of the saved object; `optimizer` binds an
    optimizer's state if that is not its framework's own; `seen` names the real files (from other people, or
    written by the library itself) used to test the layout; it is empty if no real file was available.
    `statistics` names the place of the observation statistics that the layout reads; it is empty if it reads
    none. `user_written` means that users write the networks: the library's code shows neither the order of
    their layers nor whether it adds outputs to others; `joined` that a policy's last layer has the
    means, then the logarithms of the deviations. `plays` are the algorithms whose policies are played,
    `reads` those that are only read, and `writes` those that a conversion writes, or ANY; "PPO" includes
    discrete actions, "continuous PPO" does not.
    """

    name: str
    title: str
    framework: str
    facts: AgentMetadata
    components: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, str] = field(default_factory=dict)
    rooted: bool = False
    seen: str = ""
    plays: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    statistics: str = ""
    branches: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    joined: bool = False
    matrices: bool = False
    late: bool = False
    user_written: bool = False
    optimizer: Callable[[StoredOptimizer], OptimizerMoves] | None = None


_Recognition = Callable[..., RecognizedAgent | None]
# Calls `_bind`: once for all trees of one structure, where the checkpoints of a run follow each other.
BINDER: ContextVar[_Recognition] = ContextVar("BINDER", default=lambda bind, *of: bind(*of))


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


class Layout(Protocol):
    """Interface of every layout module; its names are module-level."""

    TABLE: LayoutTable

    def recognise(self, tree: Tree, name: str) -> RecognizedAgent | None:
        """Return the recognised agent, or None; `name` is the checkpoint's file name."""
        ...


class CompanionReader(Protocol):
    """Additional interface of a layout that reads agent metadata from files beside the checkpoint."""

    def companions(self, location: str) -> Sequence[str]:
        """Return the files that may contain metadata of the checkpoint at `location`, even if missing."""
        ...

    def read_companion(self, binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
        """Return the binding with the facts in `tree`, which was read from one of those files."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryPlugin:
    """One of several layouts in a module, with the names of a single-layout module."""

    TABLE: LayoutTable
    recognise: Callable[[Tree, str], RecognizedAgent | None]
    plan: Callable[[RecognizedAgent, Tree, Settings], Plan] | None = None
    companions: Callable[[str], Sequence[str]] | None = None
    read_companion: Callable[[RecognizedAgent, str, Tree], RecognizedAgent] | None = None
    COPIES_TARGETS: str | None = None


def as_companion_reader(layout: object) -> CompanionReader | None:
    """Return the layout as a companion reader, None if it reads no companions."""
    return cast(CompanionReader, layout) if getattr(layout, "companions", None) else None


def can_write(layout: object) -> bool:
    """Return whether the layout can write an agent (has `plan(binding, canonical, told) -> Plan`)."""
    return getattr(layout, "plan", None) is not None


def list_never_run_components(layout: object) -> frozenset[str]:
    """Return the components whose networks cannot be run from any file of the layout (its `NEVER_RUN`)."""
    return cast(frozenset[str], getattr(layout, "NEVER_RUN", frozenset()))


_Asked = Callable[[Tree, str], RecognizedAgent | None]
# More entries than this with tensors are a model's modules, not separately saved objects.
_ENTRIES = 32
_MOST = 50_000


# Answers and errors of recognition in a block of `remembering`, with the tree, which must live as long.
_ANSWERS: ContextVar[dict[tuple[Any, ...], tuple[Any, Any, Tree]]] = ContextVar("answers")


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Recognize every tree once in the block; meanwhile the files beside a checkpoint must not change."""
    token = _ANSWERS.set({})
    try:
        yield
    finally:
        _ANSWERS.reset(token)


def remember(recognize: _Recognition, tree: Tree, *words: str | None, **more: Any) -> RecognizedAgent | None:
    """Return what the function answers for the tree; in a block of `remembering`, what it answered before."""
    known, question = _ANSWERS.get({}), (recognize, id(tree), *words)
    if question not in known:
        try:
            known[question] = recognize(tree, *words, **more), None, tree
        except (UsageError, UnsupportedError) as refusal:
            known[question] = None, refusal, tree
    result, error, _ = known[question]
    if error is not None:
        raise copy.copy(error) from error.__cause__  # callers add to it
    return cast(RecognizedAgent | None, result)


def recognize_checkpoint(checkpoint: Checkpoint, layout: str | None = None) -> RecognizedAgent | None:
    """Return the agent in the checkpoint, None if no layout matches; raise UsageError as `recognize_tree`."""
    if checkpoint.format == ONNX_FORMAT:
        # Constant names come from an exporter: the graph defines the computation, not a layout.
        if layout not in (None, NO_LAYOUT):
            raise UsageError(
                "--layout does not apply to ONNX models", file=checkpoint.path, hint="leave out --layout"
            )
        return None
    return recognize_tree(checkpoint.tree, os.path.basename(checkpoint.path), layout)


def recognize_tree(tree: Tree, name: str, layout: str | None = None) -> RecognizedAgent | None:
    """Return the recognised agent, or None if no layout matches.

    An agent may have been saved with wrappers around its modules (`module.`), or inside a dict of other
    things ("model", "epoch"): its names are also matched without wrapper prefixes, and in the only
    entry that is an agent. `name` is the checkpoint's file name; `layout` restricts the search to one
    layout, `none` skips all of them. Raise UsageError if the requested layout does not match, or if two
    layouts match the tree. A tree with very many entries is only matched against a requested layout: no
    agent has so many, and every layout reads all of them.
    """
    return remember(_recognize_tree, tree, name, layout)


def _recognize_tree(tree: Tree, name: str, layout: str | None) -> RecognizedAgent | None:
    # The code of a TorchScript archive defines the computation; a layout's defaults may contradict it.
    if layout == NO_LAYOUT or (layout is None and (is_script(tree) or len(tree) > _MOST)):
        return None
    # Scanning installed packages takes as long as importing numpy: at most once, and after the built-in
    # layouts.
    requested = (
        partial(_recognize_any, strangers=cache(_installed_layouts))
        if layout is None
        else cast(Layout, plugins.find("layouts", layout).load()).recognise
    )
    agent = (
        _recognize_unwrapped(tree, name, requested)
        or requested(tree, name)
        or _recognize_entry(tree, name, requested)
    )
    if agent is not None or layout is None:
        return agent
    raise UsageError(f"the checkpoint does not match layout {layout}")


def _recognize_any(
    tree: Tree, name: str, strangers: Callable[[], Sequence[plugins.Plugin]]
) -> RecognizedAgent | None:
    claims = _collect_claims(plugins.BUILT_IN["layouts"], tree, name) or _collect_claims(
        strangers(), tree, name
    )
    if len(claims) > 1:
        names = " and ".join(binding.layout for binding in claims)
        raise UsageError(f"the checkpoint matches several layouts: {names}", hint="choose one with --layout")
    return claims[0] if claims else None


def _collect_claims(layouts: Iterable[plugins.Plugin], tree: Tree, name: str) -> list[RecognizedAgent]:
    names = tuple(list_display_names(tree))
    modules = (cast(Layout, row.load()) for row in layouts if may_recognize(row, names, name))
    return [binding for layout in modules if (binding := layout.recognise(tree, name)) is not None]


def may_recognize(plugin: plugins.Plugin, names: Sequence[str], file: str) -> bool:
    """Return whether a library's row can match a tree with these names from a file of that name.

    Most trees belong to no library, and checking the row first avoids importing its module.
    """
    if not plugin.names and not plugin.files:
        return True
    of_file = plugin.files and re.compile(plugin.files, re.DOTALL).fullmatch(file)
    return bool(of_file or (plugin.names and _has_match(plugin.names, tuple(names))))


@lru_cache(maxsize=128)
def _has_match(pattern: str, names: tuple[str, ...]) -> bool:
    """Return whether a pattern matches a name: the checkpoints of a run have the same names."""
    return any(map(re.compile(pattern, re.DOTALL).fullmatch, names))


def list_display_names(tree: Tree) -> Iterator[str]:
    """Yield the names of all entries and their aliases, including those that share one."""
    yield from tree.displayed.values()
    for aliases in tree.aliases.values():
        yield from (display(alias.path) for alias in aliases)


def _installed_layouts() -> list[plugins.Plugin]:
    names = {plugin.name for plugin in plugins.BUILT_IN["layouts"]}
    return [p for p in plugins.installed("layouts") if p.name not in names]


# A layer of TorchRL's modules: root, number, tensor. Their `module` is no prefix of a wrapper.
_MODULE_LAYER = r"(|.*/)module/0/module/(?:0/)?(\d+)/(weight|bias)"
MODULE_LAYER = deferred.compile(_MODULE_LAYER)


def has_module_layer(tree: Tree) -> bool:
    """Return whether a tensor is named like one of TorchRL's modules."""
    return _has_match(_MODULE_LAYER, tuple(tree.names.values()))


def _recognize_unwrapped(tree: Tree, name: str, requested: _Asked) -> RecognizedAgent | None:
    """Match the tree under its module names without wrapper prefixes."""
    if has_module_layer(tree):
        return None
    plain = wrappers.strip_to_plain_names(tree)
    if plain is None:
        return None
    binding = requested(plain[0], name)
    return binding.moved(lambda path: plain[1].get(path, path)) if binding is not None else None


def _recognize_entry(tree: Tree, name: str, requested: _Asked) -> RecognizedAgent | None:
    """Match every entry of a dict that is itself a dict; None unless exactly one is an agent."""
    tops = {path[:1] for path, _ in tree.tensors() if len(path) > 1}
    if not 0 < len(tops) <= _ENTRIES:
        return None
    agents = [(top, binding) for top in tops if (binding := requested(tree.below(top), name)) is not None]
    if len(agents) != 1:
        return None
    top, binding = agents[0]
    evidence = f"{display(top)}/: {binding.evidence}"
    return replace(binding.moved(lambda path: (*top, *path)), evidence=evidence)


# Formats of Keras that may contain the configuration of a model.
KERAS_FORMATS = frozenset(("keras_h5", "keras_zip"))
# What TensorFlow 1's Saver writes: variables by name, and the graph of the program beside them.
SAVER_FORMATS = frozenset(("tensor_bundle", "tensorflow_v1"))
ONNX_FORMAT = "onnx"  # its reader is imported for such files only


def has_saver_graph(checkpoint: Checkpoint) -> bool:
    """Return whether a Saver of TensorFlow 1 stored its program's graph beside the checkpoint."""
    if checkpoint.format not in SAVER_FORMATS:
        return False
    from ckpttool.formats.tf_common import saver_graph_file

    return filesystem.isfile(saver_graph_file(checkpoint.path))


def is_script(tree: Tree) -> bool:
    """Return whether the tree is that of a TorchScript archive."""
    # The names of all classes in such an archive (torch/csrc/jit/frontend/name_mangler.h).
    root = tree.containers.get(())
    return root is not None and (root.name or "").startswith("__torch__.")


PICKLED_MODULES = attr("_modules")
PICKLED_TENSORS = (attr("_parameters"), attr("_buffers"))
TORCH_CLASSES = "torch.nn.modules."
_ACTIVATION, _IDENTITY = f"{TORCH_CLASSES}activation.", f"{TORCH_CLASSES}linear.Identity"


@dataclass(frozen=True, slots=True)
class PickledModule:
    """A whole module: its `state` with state_dict keys, their paths in the file, classes by module."""

    tree: Tree
    state: Tree
    sources: Mapping[Path, Path]
    classes: Mapping[str, str]

    def value(self, module: str, name: str) -> object:
        """Return a plain attribute of the module (`pi`, `pi.net.1`), None if it is missing."""
        leaf = self.tree.get((*_parse_module_path(module), attr(name)))
        return leaf.value if isinstance(leaf, ValueLeaf) else None

    def has(self, module: str, name: str) -> bool:
        """Return whether the module has an attribute, a buffer or a parameter of that name."""
        ways = ((attr(name),), *((kind, key(name)) for kind in PICKLED_TENSORS))
        places = [(*_parse_module_path(module), *way) for way in ways]
        return any(path[: len(location)] == location for path in self.tree for location in places)

    def children(self, module: str) -> list[str]:
        """Return the names of a Sequential's parts in the order of use, which is file order."""
        return [name for name in self.classes if name.rpartition(".")[0] == module]

    def activation(self, module: str) -> str | None:
        """Return the canonical name of the activation module, None for other modules."""
        return activation_of(self.classes.get(module, ""), lambda name: self.value(module, name))

    def bound(self, binding: RecognizedAgent) -> RecognizedAgent:
        """Return a binding of the state as one of the file; other leaves describe the module's structure."""
        moved = binding.moved(self.sources.__getitem__)
        plain = frozenset(path for path, _ in self.tree.plain())
        return replace(moved, consumed=moved.consumed | plain)


def activation_of(name: str, value: Callable[[str], object]) -> str | None:
    """Return the canonical activation for a class name; `value` returns its attributes.

    None for another class, and for one with a non-default limit or approximation.
    """
    if name == _IDENTITY:
        return "linear"
    short = name.removeprefix(_ACTIVATION)
    slope = value("negative_slope") if name == f"{_ACTIVATION}LeakyReLU" else None
    if isinstance(slope, float | int) and not isinstance(slope, bool) and math.isfinite(slope):
        return format_activation("leaky_relu", float(slope))
    if any(value(argument) != default for argument, default in _arguments_of(short).items()):
        return None
    return TORCH_ACTIVATIONS.get(short) if name.startswith(_ACTIVATION) else None


def _arguments_of(cls: str) -> Mapping[str, object]:
    """Return the arguments of an activation of policies that change the function, with their defaults."""
    return ACTIVATION_KINDS[TORCH_ACTIVATIONS[cls]].arguments if cls in TORCH_ACTIVATIONS else {}


def called_activation(name: str, listed: Sequence[object], named: Mapping[str, object]) -> str | None:
    """Return the canonical activation that a class makes of arguments by position and by name.

    None for another class, and for arguments that are unknown or that `activation_of` does not represent.
    """
    known = _arguments_of(name.removeprefix(_ACTIVATION))
    # Every class with numbers takes these first, in this order; then `inplace`, which changes no result.
    positional = dict(zip((*known, "inplace"), listed, strict=False))
    if len(listed) > len(known) + 1 or not {*named} <= {"inplace", *known} - {*positional}:
        return None
    return activation_of(name, {**known, **positional, **named}.get)


def _parse_module_path(module: str) -> Path:
    return tuple(step for part in module.split(".") for step in (PICKLED_MODULES, key(part)))


def read_pickled_module(tree: Tree) -> PickledModule | None:
    """Return the tree as a whole module, None if it is not one.

    Source: torch/nn/modules/module.py, Module.__setstate__: a module's attributes are its state; its parts
    are in `_modules`, its tensors in `_parameters` and `_buffers`.
    """
    sources: dict[Path, Path] = {
        (key(name),): path for path in tree if (name := _tensor_name(path)) is not None
    }
    if not sources:
        return None
    state = Tree({target: tree[path] for target, path in sources.items() if isinstance(tree[path], Leaf)})
    classes = {
        ".".join(names): container.name
        for path, container in tree.containers.items()
        if container.name and (names := _module_path(path))
    }
    return PickledModule(tree, state, sources, classes)


def _tensor_name(path: Path) -> str | None:
    """Return a tensor's state_dict name: `pi.net.0.weight` for its path through modules' attributes."""
    if len(path) < 2 or path[-2] not in PICKLED_TENSORS:
        return None
    above = _module_path(path[:-2])
    return None if above is None else ".".join((*above, str(path[-1].value)))


def _module_path(path: Path) -> list[str] | None:
    if len(path) % 2 or any(step != PICKLED_MODULES for step in path[::2]):
        return None
    return [str(step.value) for step in path[1::2]]
