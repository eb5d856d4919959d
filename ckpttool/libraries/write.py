"""Writing an agent as a library stores it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, pairwise
from typing import Any, Literal

from ckpttool.core import dtypes
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UnsupportedError, abbreviate_list
from ckpttool.core.optimizers import ADAM, DefaultSetting, OptimizerFamily
from ckpttool.core.sidecar import Scores
from ckpttool.core.source import Inline
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, attr, display, index, key
from ckpttool.libraries import optimizers_write, schema
from ckpttool.libraries.optimizers_read import CanonicalOptimizer
from ckpttool.libraries.optimizers_write import make_tensor_rule
from ckpttool.libraries.schema import (
    NORMALIZER,
    AgentLayer,
    AgentNetwork,
    ObservationNormalizer,
    RecognizedAgent,
    list_kernel_shapes,
    matches_action_map,
)
from ckpttool.mapping.keras_names import object_graph_paths
from ckpttool.mapping.kind_table import SPELLING
from ckpttool.mapping.layer_kinds import LayerKind, WeightSpec
from ckpttool.mapping.rules import (
    KEEP,
    TRANSPOSE,
    AxisSlice,
    Cast,
    ConcatPart,
    Label,
    Move,
    Permute,
    Plan,
    Reshape,
    Rule,
    Settings,
    ToTensor,
    ToValue,
    chain_rules,
    compose_rules,
    constant_tensor,
)

_SAME = 1e-6  # twice the rounding error of float32 numbers, which most libraries store
_FIRST = (index(0), attr("kernel"))
_NOTE = "observation statistics are in the sidecar"


class StatisticsRow(NamedTuple):
    """The paths of mean, var, std and count ([obs_dim] each except count), and their conversion.

    `owner` is "critic_" for statistics of a critic's observations, which are only copied. `shape` is the
    tensors' shape (-1 is obs_dim); `epsilon`, `outside` and `clip` are those of ObservationNormalizer. If
    they are `required`, an agent without statistics gets neutral ones, and one whose statistics cannot be
    represented is refused. The same numbers give another function if epsilon is placed elsewhere or clipping
    differs. Then they are recomputed to preserve the function, or stored only in the sidecar if that is
    impossible.
    """

    places: Mapping[str, Path]
    dtype: str
    shape: tuple[int, ...] = (-1,)
    epsilon: float = 0.0
    outside: bool = False
    clip: float | None = None
    counter: str = "int64"
    owner: str = ""
    required: bool = False

    def placed(self, binding: RecognizedAgent, agent: Tree, library: str) -> Plan:
        """Return the plan of the agent's statistics, if it has any."""
        there = {name: agent.get(self.source(name)) for name in (*self.places, "mean", "var", "std")}
        leaves = {name: leaf for name, leaf in there.items() if isinstance(leaf, Leaf)}
        norm = binding.facts.norm
        if norm is None and "mean" in leaves and {"var", "std"} & leaves.keys():  # of an unknown formula
            norm = ObservationNormalizer(leaves["mean"], leaves.get("var"), leaves.get("std"))
            norm = norm if norm.var is None else norm._replace(std=None)
        if norm is None or (self.owner and not leaves):
            if not self.required:
                return Plan(())
            # The library has statistics in every network: neutral ones.
            part = next(part for part in binding.parts if part.acts)
            kernel = agent[(*part.prefix, *_FIRST)]
            width = kernel.shape[0] if isinstance(kernel, Leaf) else 0
            return Plan((), self._tensors(np.zeros(width), np.ones(width)))
        if self.places.keys() - {"count"} <= leaves.keys() and (self.owner or self._is(norm, leaves)):
            return self._kept(leaves)
        if self.owner:
            return Plan((), notes=(f"{_NOTE}: {library} stores them differently",))
        return self._computed(norm, leaves, library)

    def source(self, name: str) -> Path:
        """Return the canonical path of one of the statistics."""
        return (attr(NORMALIZER), attr(f"{self.owner}{name}"))

    def _is(self, norm: ObservationNormalizer, leaves: Mapping[str, Leaf]) -> bool:
        """Return whether the existing tensors are the agent's statistics in the library's formula."""
        if norm.clip != self.clip or any(leaves[n].dtype != self.dtype for n in self.places if n != "count"):
            return False
        std = leaves["std"] if "std" in self.places else None
        normalizer = ObservationNormalizer(
            leaves["mean"], leaves.get("var"), std, self.epsilon, outside=self.outside
        )
        pairs = (
            (compute_divisor(normalizer), compute_divisor(norm)),
            (to_float64_row(normalizer.mean), to_float64_row(norm.mean)),
        )
        return all(one.shape == two.shape and np.allclose(one, two, rtol=_SAME, atol=0) for one, two in pairs)

    def _kept(self, leaves: Mapping[str, Leaf]) -> Plan:
        moves = []
        for name in self.places:
            if name not in leaves:
                continue
            leaf = leaves[name]
            shape = () if name == "count" else _fill_shape(self.shape, leaf.size)
            rule: Rule = KEEP if leaf.shape == shape else Reshape(shape)
            if name == "count" and leaf.dtype != self.counter:
                rule = compose_rules(rule, Cast(self.counter))
            moves.append(Move(self.source(name), self.places[name], rule))
        if "count" not in self.places or "count" in leaves:
            return Plan(tuple(moves))
        zero = constant_tensor(self.counter, (), 0, role="counter")
        sentence = f"{NORMALIZER}/{self.owner}count = 0 (the source has none)"
        return Plan(tuple(moves), {self.places["count"]: zero}, assumed=(sentence,))

    def _computed(self, norm: ObservationNormalizer, leaves: Mapping[str, Leaf], library: str) -> Plan:
        """Return numbers for which the library's own formula gives the agent's normalisation."""
        mean, wide = to_float64_row(norm.mean), compute_divisor(norm)
        std = wide - self.epsilon if self.outside else np.sqrt(np.maximum(wide**2 - self.epsilon, 0))
        if norm.clip != self.clip or not (std > 0).all():
            limit = "does not clip" if self.clip is None else f"clips to {self.clip:g}"
            why = (
                f"{library} {limit} after normalising"
                if norm.clip != self.clip
                else "the variance of one dimension is too small"
            )
            if self.required:
                raise UnsupportedError(
                    f"the observation statistics cannot be expressed in the formula of {library}: {why}"
                )
            return Plan((), notes=(f"{_NOTE}: {why}",))
        note = f"observation statistics are recomputed so that {library}'s formula gives the same result"
        count = self._kept({name: leaf for name, leaf in leaves.items() if name == "count"})
        return replace(count, added={**self._tensors(mean, std), **count.added}, notes=(note,))

    def _tensors(self, mean: np.ndarray, std: np.ndarray) -> dict[Path, Leaf | ValueLeaf]:
        """Return the library's tensors of these numbers, float64 [obs_dim] each."""
        shape, dtype = _fill_shape(self.shape, mean.size), dtypes.numpy_dtype(self.dtype)
        return {
            self.places[name]: Leaf(self.dtype, shape, Inline(row.astype(dtype).tobytes()), "", "buffer")
            for name, row in {"mean": mean, "var": std**2, "std": std}.items()
            if name in self.places
        }


def _fill_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(size if extent == -1 else extent for extent in shape)


def compute_divisor(norm: ObservationNormalizer) -> np.ndarray:
    """Return the divisor of the centred observations, float64 [obs_dim]."""
    std = to_float64_row(norm.std) if norm.std is not None else np.sqrt(to_float64_row(norm.var))
    return std + norm.epsilon if norm.outside else np.sqrt(std**2 + norm.epsilon)


def to_float64_row(leaf: Leaf | None) -> np.ndarray:
    """Return a tensor's numbers in one row, float64 [obs_dim]."""
    assert leaf is not None  # noqa: S101 - a Norm has a deviation or a variance
    return leaf.array().astype("f8").reshape(-1)


TORCH: Mapping[str, LayerKind] = {kind: SPELLING["torch", kind] for kind in ("dense", "layer_norm")}


class LayerNames(NamedTuple):
    """A library's layer names in one network.

    Patterns may have holes: `{n}` is a dense layer's number from `first`, `{i}` from 0, `{s}` its
    position in a Sequential with an activation after every hidden layer. `norm` is a layer norm's
    pattern, None if layer norms are not supported; its `{n}` and `{i}` are those of its dense layer.
    `branches` name further heads by their canonical names; with `joined` the last layer outputs the
    mean and then the branch "log_std". Without `last`, the last layer is named like the hidden ones.
    """

    hidden: str
    last: str | None = None
    branches: Mapping[str, str] = {}  # a tuple's default, never modified
    norm: str | None = None
    joined: bool = False
    first: int = 1


class NetworkRow(NamedTuple):
    """One canonical network ("critic/q1"), the entry for its tensors, and its layers' names.

    `outputs` are the extents of two axes of its outputs ([quantiles, actions]) that the library has in the
    other order. `span` are the positions of the layers that the row names, if other rows name the rest:
    layers before it, where another network has equal ones (`trunk`), are not written again. The last layer
    is several layers, if there are `parts`: their names, and the first and the last of their outputs.
    """

    place: str
    entry: Path
    names: LayerNames
    outputs: tuple[int, int] | None = None
    span: slice = slice(None)
    trunk: bool = False
    parts: Mapping[str, tuple[int, int]] = {}


class SingleTensorRow(NamedTuple):
    """One tensor outside layers: its canonical path ("temperature/log_alpha") and the target's path.

    It gets `shape` (-1 is the remainder) if the library requires one. If the agent lacks it, it is
    `default`, is missing, or with `optional` is omitted; the logarithm of a standard deviation is
    computed.
    """

    place: str
    target: Path
    shape: tuple[int, ...] | None = None
    default: Leaf | None = None
    optional: bool = False


def make_torch_path(entry: Path, layer: str, weight: str) -> Path:
    """Return a tensor's path in a torch state_dict, which is one dict of dotted names."""
    return (*entry, key(f"{layer}.{weight}"))


@dataclass(frozen=True, slots=True)
class WritingTable:
    """The complete output of a library; `library` is its display name ("skrl").

    `optimizers` and `counters` map canonical names ("critic_optimizer/q1") to their paths; with `fresh`
    the library needs the optimizers even if the agent has none; at `joint` it has one optimizer of all
    networks, which no canonical optimizer is. `head` is the action map of its classes (build.HEADS),
    `hidden` their default activation, `depth` the number of their layers; "" and 0 mean any. `alike`
    means that all networks have the same hidden sizes, `values` that Q-functions have one output,
    `late` that they may receive the action after the first layer. An agent without one of `needs` is
    refused; `constants` are further entries that the library's loader requires. Its discrete actions are
    one choice from 0 by `scores`, or also what `spaces` lists: "several" choices, choices with "starts".
    `modules` are the first parts of the names of all parameters in the order of the joint optimizer, if it
    is not that of the rows; `family` is the class of that optimizer.
    """

    library: str
    rows: Sequence[NetworkRow | SingleTensorRow | StatisticsRow]
    head: str
    hidden: str = "relu"
    depth: int = 0
    alike: bool = False
    optimizers: Mapping[str, Path] = field(default_factory=dict)
    counters: Mapping[str, Path] = field(default_factory=dict)
    fresh: bool = False
    joint: Path | None = None
    needs: tuple[str, ...] = ("actor",)
    values: bool = True
    late: bool = False
    kinds: Mapping[str, LayerKind] = field(default_factory=lambda: TORCH)
    path: Callable[[Path, str, str], Path] = make_torch_path
    containers: Mapping[Path, Container] = field(default_factory=dict)
    constants: Mapping[Path, Leaf | ValueLeaf] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    scores: tuple[Scores, ...] = ("values",)
    spaces: frozenset[Literal["several", "starts"]] = frozenset()
    modules: tuple[str, ...] = ()
    family: OptimizerFamily = ADAM

    @property
    def stored(self) -> dict[str, NetworkRow]:
        """The networks of the library, by their canonical titles."""
        return {row.place: row for row in self.rows if isinstance(row, NetworkRow)}


def iterate_layer_names(part: AgentNetwork, names: LayerNames) -> Iterator[tuple[int | str, AgentLayer, str]]:
    """Yield a network's layers and the branches that the library has: position, layer, name."""
    dense = [position for position, layer in enumerate(part.layers) if layer.kind == "dense"]
    last = names.hidden if names.last is None else names.last
    number = step = -1
    for position, layer in enumerate(part.layers):
        norm = layer.kind == "layer_norm"
        number += not norm
        # Linear 0, activation 1, Linear 2; with a norm Linear 0, norm 1, activation 2, Linear 3.
        step += 1 if norm or not position else 2
        pattern = names.norm if norm and names.norm is not None else names.hidden
        pattern = last if position == dense[-1] else pattern
        yield position, layer, pattern.format(n=number + names.first, i=number, s=step)
    for branch, layer in part.branches:
        if names.joined and branch == "log_std":
            yield branch, layer, last.format(n=number + names.first, i=number, s=step)
        elif branch in names.branches:
            yield branch, layer, names.branches[branch]


MAPS = {
    "tanh": "tanh times one number",
    "affine": "tanh mapped to the action bounds",
    "identity": "the last layer unchanged",
    "clip": "the last layer clipped to the action bounds",
    "clip_affine": "the last layer clipped to [-1, 1] and mapped to the action bounds",
    "tanh_clip_affine": "max_action times tanh, clipped to [-1, 1] and mapped to the action bounds",
    "argmax": "the discrete action with the largest output",
    "clip_tanh_affine": "tanh of the last layer clipped to [-2, 2], mapped to the action bounds",
}
# Equal to tanh mapped to the bounds only for particular bounds, which are rare in practice.
_CLIPPED = "tanh_clip_affine"
_DEVIATIONS = {f"actor/{name}": (attr("actor"), attr(name)) for name in ("log_std", "std")}
SAVES = (attr("save_counter"),)  # tf.train.Checkpoint's own


def require_support(writing: WritingTable, binding: RecognizedAgent, agent: Tree) -> None:
    """Raise UnsupportedError for an agent that the library cannot represent under any layer names."""
    titles = {part.title for part in binding.parts}
    absent = [name for name in writing.needs if not any(t.partition("/")[0] == name for t in titles)]
    if absent:
        raise UnsupportedError(
            f"{writing.library} cannot save an agent without {' and '.join(absent)}",
            found=", ".join(sorted(titles)),
        )
    _require_choices(writing, binding)
    names = writing.stored.keys()
    heads = {title.partition("/")[0] for title in names if "/" in title}
    many = sorted(title for title in titles - names if title.partition("/")[0] in heads)
    if many:
        raise UnsupportedError(f"{writing.library} supports fewer Q-functions", found=", ".join(many))
    if writing.values:
        _require_values(writing, binding, agent)
    _require_deviation(writing, binding, agent)
    fits = not writing.head or matches_action_map(binding.facts, agent, writing.head)
    if fits is False or (fits is None and binding.facts.head == _CLIPPED):
        raise UnsupportedError(
            f"{writing.library} computes actions differently from this agent: {MAPS[writing.head]}"
            + (f", not {MAPS[head]}" if (head := binding.facts.head) in MAPS else ""),
            expected=writing.head,
            found=head,
            hint=_action_map_hint(writing.head, binding.facts, fits),
        )


def _require_deviation(writing: WritingTable, binding: RecognizedAgent, agent: Tree) -> None:
    """Raise UnsupportedError for the matrix of gSDE where a library has one deviation for each action."""
    acting = next((part for part in binding.parts if part.title == "actor"), None)
    for row in writing.rows:
        if acting is None or not isinstance(row, SingleTensorRow) or row.place not in _DEVIATIONS:
            continue
        leaf, actions = agent.get(_DEVIATIONS[row.place]), list_kernel_shapes(acting, agent)[-1][1]
        if isinstance(leaf, Leaf) and math.prod(leaf.shape) != actions:
            raise UnsupportedError(
                f"{writing.library} has one standard deviation for each action; this agent's depend on the "
                "observation, through a matrix (gSDE)",
                path=row.place,
                expected=f"[{actions}]",
                found=str([*leaf.shape]),
                hint="use --to torch, which keeps the matrix, or --to onnx, which writes the policy alone",
            )


def _require_choices(writing: WritingTable, binding: RecognizedAgent) -> None:
    """Raise UnsupportedError for discrete actions, or outputs of them, that the library cannot represent."""
    choices = binding.facts.choices
    if choices is None:
        return
    if choices.scores not in writing.scores:
        raise UnsupportedError(
            f"{writing.library} has no network of this kind for these discrete actions",
            expected=" or ".join(writing.scores),
            found=choices.scores,
        )
    if not choices.single and "several" not in writing.spaces:
        raise UnsupportedError(f"{writing.library} has only one discrete action", found=choices.title)
    if any(choices.starts) and "starts" not in writing.spaces:
        raise UnsupportedError(f"the discrete actions of {writing.library} start at 0", found=choices.title)


def _action_map_hint(head: str, facts: schema.AgentMetadata, fits: bool | None) -> str | None:
    """Return what helps if a library's action map is not the agent's."""
    if fits is None:
        return "pass --bounds LOW HIGH to check whether the two are equal"
    if (head, facts.head) == ("identity", "clip"):
        return "use --head identity if the target's program clips the actions itself (clip_actions)"
    if (head, facts.head) == ("clip", "identity") and "head" not in facts.origins:
        return "use --head clip if the source's program clips the actions itself (clip_actions)"
    return None


def _require_values(writing: WritingTable, binding: RecognizedAgent, agent: Tree) -> None:
    for part in binding.parts:
        if part.head is None or part.title not in writing.stored:
            continue
        shapes = list_kernel_shapes(part, agent)
        if shapes and shapes[-1][-1] != 1:
            raise UnsupportedError(
                f"{writing.library} requires Q-functions with one output",
                found=f"{part.title} has {shapes[-1][-1]} outputs",
            )
        if not writing.late and any(one[-1] != two[0] for one, two in pairwise(shapes)):
            raise UnsupportedError(
                f"the Q-functions of {writing.library} must receive observation and action in layer 1",
                found=f"{part.title} receives the action at a later layer",
            )


def require_layers(
    part: AgentNetwork, names: LayerNames, binding: RecognizedAgent, writing: WritingTable
) -> None:
    """Raise UnsupportedError for layers, or tensors of unsupported kinds, that the network cannot have."""
    able = {"dense", *(["layer_norm"] if names.norm is not None else [])}
    strange = [
        f"{part.title}/{'/'.join(layer.name)}: {layer.kind}"
        for layer in part.layers
        if layer.kind not in able
    ]
    if part.streams:
        raise UnsupportedError(
            f"the Q-functions of {writing.library} must receive observation and action in layer 1",
            found=f"{part.title} encodes them separately",
        )
    left = binding.unplaced.get(part.component, ())
    if order := [reason for reason in left if reason.startswith(schema.UNKNOWN_ORDER)]:
        raise UnsupportedError(
            f"{writing.library} numbers its layers, but {part.title} has layers in an unknown order",
            found=order[0],
            hint=schema.RECORDED_ORDER,
        )
    if strange or left:
        kinds = "only dense layers" if names.norm is None else "only dense layers and layer norms"
        raise UnsupportedError(
            f"{writing.library} supports {kinds}", found=abbreviate_list([*strange, *left], 3)
        )
    known, present = {"log_std"} if names.joined else set(names.branches), {name for name, _ in part.branches}
    if part.acts and names.joined and not known <= present:
        raise UnsupportedError(
            f"the last layer of {writing.library} outputs mean and standard deviation, but this policy has "
            "no standard deviation"
        )


def require_activation(binding: RecognizedAgent, library: str, able: Collection[str]) -> str:
    """Return the activation of all hidden layers; raise UnsupportedError for several or an unknown one."""
    hidden = {name for part in binding.parts for name in binding.facts.activations_of(part.component)}
    if len(hidden) > 1 or not hidden <= {*able}:
        raise UnsupportedError(
            f"{library} requires the same activation in all hidden layers",
            expected=", ".join(sorted(able)),
            found=", ".join(sorted(hidden)),
        )
    return hidden.pop()


def list_consumed(agent: Tree) -> tuple[Path, ...]:
    """Return the paths stored in the sidecar, and TensorFlow's count of saves."""
    return tuple(path for path in agent if schema.mapped_by_sidecar(path) or path == SAVES)


def list_writingnotes(writing: WritingTable, binding: RecognizedAgent, agent: Tree) -> tuple[str, ...]:
    """Return notes for people: entries not converted, and arguments that the library needs."""
    notes = list(writing.notes)
    functions: dict[str, list[str]] = {}
    for part in binding.parts:
        if part.title in writing.stored:
            for name in sorted({*binding.facts.activations_of(part.component)}):
                functions.setdefault(name, []).append(part.title)
    if writing.hidden and functions.keys() != {writing.hidden}:
        apart = binding.facts.network_activations
        uses = ", ".join(
            f"{name} in {', '.join(titles)}" if apart else name for name, titles in sorted(functions.items())
        )
        notes.append(
            f"{writing.library} uses {writing.hidden} in hidden layers by default; configure it with {uses}"
        )
    stored = writing.stored
    depths = {len(part.layers) for part in binding.parts if part.title in stored}
    if writing.depth and depths != {writing.depth}:
        notes.append(
            f"{writing.library}'s own classes have {writing.depth} layers, but this agent has a different "
            "number"
        )
    sizes = {
        tuple(shape[-1] for shape in list_kernel_shapes(p, agent)[:-1])
        for p in binding.parts
        if p.title in stored
    }
    if writing.alike and len(sizes) > 1:
        notes.append(
            f"{writing.library} uses the same hidden sizes for all networks, but this agent has several"
        )
    if writing.head and matches_action_map(binding.facts, agent, writing.head) is None:
        notes.append(
            f"unknown action bounds (pass --bounds LOW HIGH); {writing.library} uses {MAPS[writing.head]}"
        )
    slow = {part.component for part in binding.parts if part.component.endswith("_target")}
    if slow and not any(component.partition("/")[0] in slow for component in stored):
        notes.append(f"{writing.library} does not save targets")
    if SAVES in agent:
        notes.append("save_counter, TensorFlow's count of saves, was not converted")
    return tuple(notes)


_STD, _LOG_STD = "actor/std", "actor/log_std"


# The place of a row ("critic/q1") and its part of a plan.
_PlacedRow = tuple[str, Plan]


def place_rows(writing: WritingTable, binding: RecognizedAgent, agent: Tree) -> list[_PlacedRow]:
    """Return every row's plan, in table order."""
    parts = {part.title: part for part in binding.parts}
    rows: list[_PlacedRow] = []
    for row in writing.rows:
        if isinstance(row, NetworkRow):
            rows.append((row.place, _place_network(row, parts, binding, agent, writing)))
        elif isinstance(row, SingleTensorRow):
            rows.append((row.place, _place_tensor(row, agent)))
        else:
            rows.append((schema.NORMALIZER, row.placed(binding, agent, writing.library)))
    return rows


def _place_network(
    row: NetworkRow,
    parts: Mapping[str, AgentNetwork],
    binding: RecognizedAgent,
    agent: Tree,
    writing: WritingTable,
) -> Plan:
    online = row.place.replace("_target", "")
    part = parts.get(row.place)
    assumed: tuple[str, ...] = ()
    if part is None and row.place != online and online in parts:
        part = parts[online]
        assumed = (f"{row.place.partition('/')[0]} is a copy of the online network: the source has none",)
    if part is None:
        return Plan((), missing=(row.place,))
    require_layers(part, row.names, binding, writing)
    repeated: tuple[Path, ...] = ()
    if row.trunk:
        before = [(*part.prefix, index(position)) for position in range(len(part.layers))[: row.span.start]]
        repeated = tuple(path for path in agent if any(path[: len(prefix)] == prefix for prefix in before))
    return Plan(tuple(_move_tensors(row, part, agent, writing)), assumed=assumed, consumed=repeated)


def _move_tensors(row: NetworkRow, part: AgentNetwork, agent: Tree, writing: WritingTable) -> Iterator[Move]:
    """Yield a network's tensors, weight before bias, in layer order."""
    own = part._replace(layers=part.layers[row.span])
    for number, layer, name in iterate_layer_names(own, row.names):
        position = number + (row.span.start or 0) if isinstance(number, int) else number
        for weight in writing.kinds[layer.kind].weights:
            source = schema.canonical_weight_path(part, position, weight.canonical)
            if source in agent:
                rule = weight.to_canonical.inverse(agent[source])
                if row.names.joined:
                    rule = compose_rules(rule, _half_rule(part, position, agent, rule, weight.rank))
                if row.outputs is not None and position == len(part.layers) - 1:
                    leaf = agent[source]
                    *before, _ = shape = leaf.shape if isinstance(leaf, Leaf) else ()
                    axes = (*range(len(before)), len(before) + 1, len(before))
                    swap = chain_rules(Reshape((*before, *row.outputs)), Permute(axes), Reshape(shape))
                    rule = compose_rules(swap, rule)
                if not row.parts or position != len(part.layers) - 1:
                    yield Move(source, writing.path(row.entry, name, weight.name), rule)
                    continue
                width = max(stop for _, stop in row.parts.values())
                for part_name, (start, stop) in row.parts.items():
                    cut = compose_rules(AxisSlice(weight.rank - 1, start, stop, width), rule)
                    yield Move(source, writing.path(row.entry, part_name, weight.name), cut)
            elif not weight.optional:
                raise UnsupportedError(
                    "the layer cannot be written without this tensor", path=display(source)
                )


def _half_rule(part: AgentNetwork, position: int | str, agent: Tree, rule: Rule, rank: int) -> Rule:
    """Return the position of a mean or a standard deviation in the one layer that outputs both."""
    if isinstance(position, int) and position < len(part.layers) - 1:
        return KEEP
    last = agent[schema.canonical_weight_path(part, len(part.layers) - 1, "kernel")]
    width = last.shape[-1] if isinstance(last, Leaf) else 0
    start = 0 if isinstance(position, int) else width
    return ConcatPart(0 if rule == TRANSPOSE else rank - 1, start, start + width, 2 * width)


def _place_tensor(row: SingleTensorRow, agent: Tree) -> Plan:
    source = parse_edge_path(row.place)
    tensor = agent.get(source)
    if isinstance(tensor, Leaf):
        shape = _row_shape(row, tensor)
        rule = KEEP if shape == tensor.shape else Reshape(shape)
        return Plan((Move(source, row.target, rule),))
    if row.place.endswith(_LOG_STD) and isinstance(std := agent.get(parse_edge_path(_STD)), Leaf):
        numbers = np.log(std.array().astype("f8")).astype("f4")
        leaf = Leaf("float32", _row_shape(row, std), Inline(numbers.tobytes()), "", "parameter")
        note = f"{_LOG_STD} is computed as the logarithm of {_STD}"
        return Plan((), {row.target: leaf}, consumed=(parse_edge_path(_STD),), notes=(note,))
    if row.default is not None:
        numbers = row.default.array().reshape(-1)
        value = f"{numbers[0]:g}" if numbers.size == 1 else f"{numbers[0]:g} to {numbers[-1]:g}"
        sentence = f"{row.place} = {value} (the source has none)"
        return Plan((), {row.target: row.default}, assumed=(sentence,))
    return Plan((), missing=() if row.optional else (display(row.target),))


def _row_shape(row: SingleTensorRow, leaf: Leaf) -> tuple[int, ...]:
    return leaf.shape if row.shape is None else _fill_shape(row.shape, leaf.size)


def list_trained_moves(optimizer: str, rows: Iterable[_PlacedRow]) -> list[Move]:
    """Return the moves of an optimizer's weights, by its canonical name ("critic_optimizer/q1")."""
    canonical, _, head = optimizer.partition("/")
    trains = "/".join(filter(None, (schema.ALL_OPTIMIZED[canonical], head)))
    return [
        move
        for component, row in rows
        if component == trains or component.startswith(f"{trains}/")
        for move in row.moves
        if not schema.mapped_by_sidecar(move.source)
    ]


DICT, ORDERED, LIST = Container("dict"), Container("OrderedDict"), Container("list")
# torch/optim/adam.py, Adam.__init__: defaults of settings that the agent lacks.
_ADAM_SETTINGS = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
_ADAM = {name: DefaultSetting(value, "torch") for name, value in _ADAM_SETTINGS.items()}
_OUTPUTS = "the policy's outputs are the logits of its actions' probabilities"


def plan_torch_file(writing: WritingTable, binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan a torch file from the table.

    Missing targets are copied from the online networks. Raise UnsupportedError for networks, Q-functions or
    an action map that the library's classes cannot represent. A layout chooses the rows that fit the agent
    (one Q-function or two, a Gaussian policy or not) and passes them in the order of its files. Entries
    without a row are unused and listed.
    """
    require_support(writing, binding, agent)
    rows = place_rows(writing, binding, agent)
    states = [
        _plan_optimizer(writing, canonical, list_trained_moves(name, rows), path, binding, agent, settings)
        for name, path in writing.optimizers.items()
        for canonical in [name.partition("/")[0]]
        if writing.fresh or _has_state(canonical, agent)
    ]
    counted = tuple(
        Move(path, target, ToValue())
        for name, target in writing.counters.items()
        if (path := (attr(name),)) in agent
    )
    if writing.joint is not None:
        networks = [row for component, row in rows if component != schema.NORMALIZER]
        weights = [move for row in networks for move in row.moves]
        weights += [Move(path, path, KEEP) for row in networks for path in row.added]
        if writing.modules:
            ranks = {module: number for number, module in enumerate(writing.modules)}

            def rank(move: Move) -> int:
                name = f"{move.target[-1].value}."
                return next(number for module, number in ranks.items() if name.startswith(f"{module}."))

            weights.sort(key=rank)
        name, joint = schema.JOINT, writing.joint
        states.append(_plan_optimizer(writing, name, weights, joint, binding, agent, settings))
    counts = {move.target for move in counted}
    drawn = binding.facts.distribution and binding.facts.distribution.kind
    logits = binding.facts.head != "argmax" or has_q_policy(binding) or drawn == "categorical"
    return merge_plans(
        Plan(
            (),
            containers=_list_containers(writing, [row for _, row in rows]),
            assumed=() if logits else (_OUTPUTS,),
            consumed=list_consumed(agent),
            notes=list_writingnotes(writing, binding, agent),
        ),
        *(row for _, row in rows),
        Plan((), {path: leaf for path, leaf in writing.constants.items() if path not in counts}),
        *states,
        Plan(counted),
    )


def _plan_optimizer(
    writing: WritingTable,
    name: str,
    weights: Sequence[Move],
    path: Path,
    binding: RecognizedAgent,
    agent: Tree,
    settings: Settings,
) -> Plan:
    """Return the plan of one optimizer at `place`: the agent's own, or a new one that the loader requires.

    The state of another class of joint optimizer has no meaning for the library's: it is left out, by name.
    """
    notes: tuple[str, ...] = ()
    if not weights and name != schema.JOINT:
        return Plan(())
    if _has_state(name, agent):
        known = CanonicalOptimizer(name, agent, settings.get(name, {}), binding.defaults)
        own = optimizers_write.TorchOptimizerWriter(known, weights)
        if name != schema.JOINT or own.family is writing.family:
            return own.plan(path)
        notes = (
            f"the state of {own.family.name} is not converted, because {writing.library} trains with "
            f"{writing.family.name}: use --optimizer none to leave it out",
        )
    new = CanonicalOptimizer(name, Tree({}), {}, _ADAM)
    state = optimizers_write.TorchOptimizerWriter(new, weights).plan(path)
    sentence = f"{name} starts with the defaults of torch's Adam: the source has none"
    return replace(state, assumed=(sentence,), notes=notes)


def _has_state(name: str, agent: Tree) -> bool:
    return any(path[0] == attr(name) for path in agent)


def _list_containers(writing: WritingTable, rows: Iterable[Plan]) -> dict[Path, Container]:
    """Return the file's dicts: an OrderedDict for every state_dict, plain ones around them."""
    entries = {row.entry for row in writing.stored.values()}
    targets = [path for row in rows for path in (*(m.target for m in row.moves), *row.added)]
    containers: dict[Path, Container] = {(): DICT}
    for target in targets:
        for depth in range(1, len(target)):
            containers[target[:depth]] = DICT
    containers |= {entry: ORDERED for entry in entries if entry in containers}
    return {**containers, **writing.containers}


def merge_plans(*plans: Plan) -> Plan:
    """Return one plan that merges several."""
    merged: dict[str, Any] = {}
    for name in (plan_field.name for plan_field in fields(Plan)):
        values = [getattr(plan, name) for plan in plans]
        several = isinstance(values[0], tuple)
        merged[name] = tuple(chain(*values)) if several else dict(chain(*(value.items() for value in values)))
    return replace(Plan(**merged), assumed=tuple(dict.fromkeys(merged["assumed"])))


def count_critics(binding: RecognizedAgent) -> int:
    """Return the number of the agent's Q-functions."""
    return sum(part.component == "critic" for part in binding.parts)


def is_gaussian(binding: RecognizedAgent) -> bool:
    """Return whether the policy's standard deviation is a separate head, as in SAC."""
    return any(dict(part.branches).keys() & {"log_std", "std"} for part in binding.parts if part.acts)


def has_q_policy(binding: RecognizedAgent) -> bool:
    """Return whether a Q-network chooses the agent's discrete actions."""
    return any(part.chooses for part in binding.parts)


class QuantileOutputs(NamedTuple):
    """The quantiles of each action, and the extents for `NetworkRow.outputs` if a library's order differs."""

    number: int
    swapped: tuple[int, int] | None


def find_quantiles(binding: RecognizedAgent, agent: Tree, order: Scores) -> QuantileOutputs | None:
    """Return the quantiles that a Q-network outputs, None for another; `order` is the library's."""
    choices = binding.facts.choices
    if choices is None or choices.scores not in ("quantiles", "quantiles_last", "dueling_quantiles"):
        return None
    acting = next(part for part in binding.parts if part.acts)
    number = choices.values_per_action(list_kernel_shapes(acting, agent)[-1][-1])
    actions = sum(choices.counts)
    axes = (number, actions) if choices.scores == "quantiles" else (actions, number)
    return QuantileOutputs(number, None if choices.scores in (order, "dueling_quantiles") else axes)


def has_value_network(binding: RecognizedAgent) -> bool:
    """Return whether the agent is PPO-like: a policy and a state value."""
    components = {part.component for part in binding.parts}
    return "value" in components and "critic" not in components


KERAS: Mapping[str, LayerKind] = {kind: SPELLING["tensorflow", kind] for kind in ("dense", "layer_norm")}
# The order of tf.Module and of Sonnet's optimizers: by name.
SONNET: Mapping[str, LayerKind] = {
    "dense": LayerKind("dense", "tensorflow", (WeightSpec("b", "bias", 1), WeightSpec("w", "kernel", 2))),
    "layer_norm": LayerKind(
        "layer_norm", "tensorflow", (WeightSpec("offset", "offset", 1), WeightSpec("scale", "scale", 1))
    ),
}


def make_edge_path(entry: Path, layer: str, weight: str) -> Path:
    """Return a tensor's path: the entry's path, its layer's edges, and its own."""
    return (*entry, *map(attr, filter(None, layer.split("/"))), attr(weight))


def parse_edge_path(name: str) -> Path:
    """Return the path of a name with slashes; every segment becomes an edge."""
    return tuple(map(attr, name.split("/")))


def make_number(value: float, dtype: str) -> Leaf:
    """Return a one-number tensor for a library's own variable that no agent has."""
    leaf = ToTensor(dtype).leaf(ValueLeaf(value, "other"))
    assert isinstance(leaf, Leaf)  # noqa: S101  # the rule's promise
    return leaf


def plan_object_graph(
    writing: WritingTable,
    binding: RecognizedAgent,
    agent: Tree,
    settings: Settings,
    form: str | None = None,
    counted: str = "int64",
) -> Plan:
    """Plan a TensorFlow tree from the table; raise UnsupportedError as `plan_torch_file` does.

    Paths are edges from the checkpoint's root, layer names have slashes, and numeric segments are list
    indices.

    Args:
        writing: the table of names.
        binding: the source's agent.
        agent: its canonical tree.
        settings: optimizer settings.
        form: the form of optimizers; None omits them.
        counted: the type of the agent's own counters.
    """
    require_support(writing, binding, agent)
    placed = _index_lists(place_rows(writing, binding, agent))
    rows = [row for _, row in placed]
    states = list(_plan_optimizers(writing, placed, agent, settings, form)) if form is not None else []
    # tf.train.Checkpoint's own save count is an int64.
    counters = tuple(
        Move(path, target, make_tensor_rule(agent[path], "int64" if path == SAVES else counted))
        for name, target in writing.counters.items()
        if (path := (attr(name),)) in agent
    )
    targets = [move.target for row in rows for move in row.moves]
    labels = {path: Label("parameter", display(path[1:]) or display(path)) for path in targets}
    labels |= {path: Label("other", display(path[1:])) for row in rows for path in row.added}
    labels |= {move.target: Label("counter", display(move.target[-1:])) for move in counters}
    saved = any(move.source == SAVES for move in counters)
    rest_of = Tree({path: leaf for path, leaf in agent.items() if path != SAVES}) if saved else agent
    kept = {move.source for move in counters}
    first = Plan(
        (),
        consumed=tuple(path for path in list_consumed(agent) if path not in kept),
        notes=list_writingnotes(writing, binding, rest_of),
    )
    rest = merge_plans(first, *rows, Plan(counters, labels=labels))
    merged = copy_shared_tensors(merge_plans(rest, *states), agent)
    return replace(
        merged, notes=tuple(dict.fromkeys(merged.notes)), assumed=tuple(dict.fromkeys(merged.assumed))
    )


def copy_shared_tensors(plan: Plan, agent: Tree) -> Plan:
    """Return the plan with a separate leaf for every copy of a network.

    A variable shared by two objects is one in TensorFlow: the second object would not get its value.
    """
    keys: set[tuple[Path, str]] = set()
    moves: list[Move] = []
    added = dict(plan.added)
    for move in plan.moves:
        if (move.source, move.rule.name) in keys:
            added[move.target] = move.rule.leaf(agent[move.source])
        else:
            moves.append(move)
        keys.add((move.source, move.rule.name))
    return replace(plan, moves=tuple(moves), added=added)


def _index_lists(rows: Sequence[_PlacedRow]) -> list[_PlacedRow]:
    """Return the rows with list items numbered."""
    targets = [path for _, row in rows for path in (*(m.target for m in row.moves), *row.added)]
    paths = object_graph_paths(tuple(str(step.value) for step in path) for path in targets)

    def counted(path: Path) -> Path:
        return paths[tuple(str(step.value) for step in path)]

    return [
        (
            component,
            replace(
                row,
                moves=tuple(replace(move, target=counted(move.target)) for move in row.moves),
                added={counted(path): leaf for path, leaf in row.added.items()},
            ),
        )
        for component, row in rows
    ]


def _plan_optimizers(
    writing: WritingTable,
    rows: Sequence[_PlacedRow],
    agent: Tree,
    settings: Settings,
    form: str,
) -> Iterable[Plan]:
    for number, (name, top) in enumerate(writing.optimizers.items()):
        canonical, _, head = name.partition("/")
        weights = list_trained_moves(name, rows)
        if weights and _has_state(canonical, agent):
            called = f"adam_{number}" if number else "adam"
            known = CanonicalOptimizer(canonical, agent, settings.get(canonical, {}), {})
            optimizer = optimizers_write.KerasOptimizerWriter(known, called, weights, top, form=form).plan()
            # Two objects for one canonical optimizer have the same settings, which are stored once.
            yield optimizer if head in ("", "q1") else replace(optimizer, settings={}, notes=())
