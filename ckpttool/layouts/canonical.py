"""The canonical agent tree that every layout maps to and from, and what a layout found out on the way.

actor/<n>/kernel                      the policy's n-th layer, dense kernels [in, out]
critic/q1/<n>/kernel                  each Q-function has a head of its own
actor_target/..., critic_target/...   the slow copies
value/<n>/kernel, value_target/...    SAC's state value, where there is one; discriminator/... of GAIL
actor/log_std/kernel                  a Gaussian policy's other head: beside the chain that gives the mean
actor/log_std, actor/std              a deviation that does not depend on the observation
actor/action_scale, action_bias       the action's map per dimension, where the weights hold it
normalizer/mean, var (or std), count  statistics of the observations; critic_mean, ... those of a critic
critic/q_support                      the values of the atoms whose logits a critic gives
temperature/log_alpha                 SAC's entropy coefficient (alpha where it is stored as such)
actor_optimizer/m/<n>/kernel          a moment lies where its weight lies, under its slot's name
actor_optimizer/step                  updates made; learning_rate, beta_1, ... beside it
actor_optimizer/weight_decay/<n>/...  a setting that not all weights share lies where a moment lies
optimizer/m/actor/<n>/kernel          one optimizer of all online networks (PPO, A2C) names the network too
total_it, save_counter                counters of the agent and of its checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.layouts.fronts import Front
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, index
from ckpttool.ledger import Entry, Topic
from ckpttool.mapping.report import Move, Moves
from ckpttool.tree import Tree

NETWORKS = ("actor", "actor_target", "critic", "critic_target")
VALUES = ("value", "value_target", "discriminator")
# What a policy needs besides its networks, and what only training needs.
NORMALIZER, TEMPERATURE = "normalizer", "temperature"
STATISTICS = ("mean", "var", "std", "count")
RUN = (*NETWORKS, *VALUES, NORMALIZER)
OPTIMIZED = {"actor_optimizer": "actor", "critic_optimizer": "critic"}
# Optimizers that only some agents have.
OPTIMIZED_MORE = {"value_optimizer": "value", "temperature_optimizer": TEMPERATURE}
# What codebases call the module that gives a Gaussian policy's log standard deviations.
LOG_STD = dict.fromkeys(
    ("log_std", "logstd", "_logstd", "fc_logstd", "log_std_linear", "log_std_layer"), "log_std"
)
# What our own writers call a policy's further heads: `std` is a deviation before a softplus.
BRANCHES = {**LOG_STD, "std": "std"}
# Adam's, Adamax's, RMSprop's, Adagrad's, Adadelta's, and the sum of gradients of momentum
# (layouts/optimizers/families.py).
SLOTS = (
    *("m", "v", "vhat", "u", "rms", "mg", "squares", "mean_squares", "mean_deltas"),
    *("buffer", "velocity"),
)
# What an optimizer says of one weight alone: its group of parameters, its number, its name.
GROUP, NUMBER, NAMES = "group", "number", "param_names"


NO_LAYOUT = "none"
"""What --layout takes for no library's naming; the layout of a policy that none recognises."""

ALL_OPTIMIZED = {**OPTIMIZED, **OPTIMIZED_MORE}
# One optimizer of all networks that are trained, as on-policy algorithms have it.
JOINT = "optimizer"
TRAINED = ("actor", "critic", "value")
OPTIMIZERS = (*ALL_OPTIMIZED, JOINT)
_CONSTANT = ("action_scale", "action_bias", "q_support")


def trains(optimizer: str, weight_path: Path) -> bool:
    """Say whether the optimizer updates the tensor at a canonical path."""
    network = weight_path[0].value
    if optimizer != JOINT:
        return network == ALL_OPTIMIZED[optimizer]
    return network in TRAINED and weight_path[-1].value not in _CONSTANT


def settings_stay(number: int, where: str = "") -> str:
    """Return the note that an agent's settings, which the file has at `where`, have no canonical place."""
    at = f" ({where})" if where else ""
    if number == 1:
        return f"1 setting or record of training{at} stays behind"
    return f"{number:,} settings and records of training{at} stay behind"


def mapped_by_sidecar(path: Path) -> bool:
    """Say whether a canonical leaf is a fact that a sidecar tells as well as a tensor does."""
    return (path[0] == attr(NORMALIZER) and path[1].value in STATISTICS) or path in (
        (attr("actor"), attr("action_scale")),
        (attr("actor"), attr("action_bias")),
    )


class PartLayer(NamedTuple):
    """One layer: the module's name below its component, as a torch module would have it, and its kind."""

    name: tuple[str, ...]
    kind: str


class Operation(NamedTuple):
    """One step of a program: its kind, the numbers of the values that it takes, its arrays and settings."""

    kind: str
    inputs: tuple[int, ...]
    value: Mapping[str, Any]


class Program(NamedTuple):
    """What a model's own graph computes: values are numbered, inputs and states first, then operations.

    `inputs` are names and shapes without the batch, `states` names and widths of what a recurrent policy
    carries; `output` is the number of the action.
    """

    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    states: Mapping[str, int]
    operations: tuple[Operation, ...]
    output: int
    width: int


class Part(NamedTuple):
    """One network: a component ("critic"), its head ("q1"; None for a policy), its layers in order.

    `branches` are further heads on the last hidden layer, by name ("log_std"), that do not make the action.
    A policy with a `program` computes that instead of layers.
    """

    component: str
    head: str | None
    layers: tuple[PartLayer, ...]
    branches: tuple[tuple[str, PartLayer], ...] = ()
    program: Program | None = None

    @property
    def prefix(self) -> Path:
        """The network's place in the canonical tree."""
        return (attr(self.component),) + ((attr(self.head),) if self.head else ())

    @property
    def acts(self) -> bool:
        """Say whether the network is a policy."""
        return self.component in ("actor", "actor_target")

    @property
    def title(self) -> str:
        """The network's name for people, such as `critic/q1`."""
        return f"{self.component}/{self.head}" if self.head else self.component


class Default(NamedTuple):
    """A hyperparameter that no checkpoint of the other framework holds, and whose default it is."""

    value: float | bool | None
    whose: str


class Norm(NamedTuple):
    """Statistics of the observations: `mean` and `var` [obs_dim], unread, or `std` instead of `var`.

    An observation becomes `(x - mean) / sqrt(var + epsilon)`, or with `outside` (epsilon outside the root)
    `(x - mean) / (sqrt(var) + epsilon)`, and is then limited to `[-clip, clip]`. `assumed` says that no file
    holds `epsilon` or `clip`.
    """

    mean: Leaf
    var: Leaf | None = None
    std: Leaf | None = None
    epsilon: float = 0.0
    clip: float | None = None
    outside: bool = False
    assumed: bool = False


class Facts(NamedTuple):
    """What is known of an agent's networks besides their weights: its codebase's habit, or what a file says.

    `head` is what turns the last layer into an action (see agents.components), `hidden` the activation
    after every hidden layer (`activations` where they differ, in their order), `epsilon` that of its layer
    norms. Bounds are per action; `env` is an environment's id, `env_arguments` what it was made with, and
    `wrappers` the names and arguments of what training wrapped it in, the first one innermost. `stacked` is
    the number of normalised observations that the policy takes at once. `said` names, for every fact that a
    file tells, where: "data/action_space"; the others are habits. `lacks` has an entry of the ledger
    (`ledger.unknown`) for each fact that no file holds.
    """

    head: str
    hidden: str
    epsilon: float
    activations: tuple[str, ...] | None = None
    action_low: tuple[float, ...] | None = None
    action_high: tuple[float, ...] | None = None
    norm: Norm | None = None
    env: str | None = None
    env_arguments: Mapping[str, Any] = MappingProxyType({})
    wrappers: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    stacked: int = 1
    said: Mapping[str, str] = MappingProxyType({})
    lacks: tuple[Entry, ...] = ()

    def read(self, where: str, **facts: Any) -> Facts:
        """Return the facts with those that the file says at `where`."""
        names = dict.fromkeys(facts, where)
        return self._replace(**facts, said=MappingProxyType({**self.said, **names}))

    def lacking(self, entry: Entry) -> Facts:
        """Return the facts with one more that no file holds."""
        return self._replace(lacks=(*self.lacks, entry))

    def without_lack(self, what: Topic) -> Facts:
        """Return the facts of which none about `what` is missing."""
        return self._replace(lacks=tuple(each for each in self.lacks if each.what != what))

    def bounded(self, where: str, low: Sequence[float], high: Sequence[float]) -> Facts | None:
        """Return the facts with the action's bounds that the file says at `where`, None if it says none."""
        if not low or len(low) != len(high):
            return None
        return self.read(where, action_low=tuple(low), action_high=tuple(high))


@dataclass(frozen=True, slots=True)
class Binding:
    """A tree recognised as an agent: every leaf's way to the canonical tree.

    `consumed` are leaves that carry no information of their own once the rest is mapped (indices);
    `unplaced` names, by component, the trained tensors that no known kind of layer took: such a network
    can be listed, but running it without them would be running another one. `defaults` are settings of the
    optimizers that the library fills in where the program gave none, if they are not those of Keras or torch.
    `fronts` say by component what a policy computes before its layers. `ledger` lists what else could change
    the numbers: what the layout used, assumed, or found and cannot use.
    """

    layout: str
    moves: Moves
    parts: tuple[Part, ...]
    facts: Facts
    consumed: frozenset[Path] = frozenset()
    unplaced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    evidence: str = ""
    of: Mapping[Path, Path] = field(default_factory=dict)
    defaults: Mapping[str, Default] = field(default_factory=dict)
    fronts: Mapping[str, Front] = field(default_factory=dict)
    ledger: tuple[Entry, ...] = ()

    def moved(self, place: Callable[[Path], Path]) -> Binding:
        """Return the binding of the tree whose leaves lie at `place` of where this one's lie."""
        moves = tuple(replace(move, source=place(move.source)) for move in self.moves.moves)
        return replace(
            self,
            moves=replace(self.moves, moves=moves),
            consumed=frozenset(map(place, self.consumed)),
            of={place(slot): place(owner) for slot, owner in self.of.items()},
            fronts={component: front.moved(place) for component, front in self.fronts.items()},
        )

    def noted(self, *notes: str) -> Binding:
        """Return the binding with more for people to know of the mapping."""
        return replace(self, moves=replace(self.moves, notes=(*self.moves.notes, *notes)))

    def entered(self, *entries: Entry) -> Binding:
        """Return the binding with more entries of the ledger."""
        return replace(self, ledger=(*self.ledger, *entries))

    def refused(self, component: str, *reasons: str) -> Binding:
        """Return the binding with more reasons why a component's networks cannot be run."""
        found = (*self.unplaced.get(component, ()), *reasons)
        return replace(self, unplaced={**self.unplaced, component: found})

    def without(self, left: Collection[str]) -> Binding:
        """Return the binding without tensors, by name, that nothing which a network computes depends on."""
        unplaced = {
            component: kept
            for component, names in self.unplaced.items()
            if (kept := tuple(name for name in names if name not in left))
        }
        return replace(self, unplaced=unplaced)

    def statistics(self, tree: Tree) -> dict[str, Leaf]:
        """Return the tensors of the observations' statistics by their canonical names ("mean", "var")."""
        return {
            str(move.target[1].value): leaf
            for move in self.moves.moves
            if move.target[0] == attr(NORMALIZER) and isinstance(leaf := tree[move.source], Leaf)
        }


def with_targets(binding: Binding, agent: Tree) -> tuple[Binding, dict[Path, Leaf | ValueLeaf]]:
    """Return the binding with targets that are copies of its networks, and the copies' canonical leaves.

    Only an actor with Q-functions trains with targets, a Gaussian one with those of its Q-functions. An agent
    that has a target of either kind, or a value of the state, stays as it is.
    """
    titles = {part.component for part in binding.parts}
    if not {"actor", "critic"} <= titles or titles & {*VALUES, "actor_target", "critic_target"}:
        return binding, {}
    deviations = {path[1].value for path in agent if path[0] == attr("actor") and len(path) > 1}
    copied = ("critic",) if deviations & {"log_std", "std"} else ("actor", "critic")
    parts = [part for part in binding.parts if part.component in copied]
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    moves: list[Move] = []
    for move in binding.moves.moves:
        path = move.target
        if path[0].value in copied and path in agent and not mapped_by_sidecar(path):
            place = (attr(f"{path[0].value}_target"), *path[1:])
            leaves[place] = agent[path]
            moves.append(replace(move, target=place))
    more = tuple(part._replace(component=f"{part.component}_target") for part in parts)
    every = replace(binding.moves, moves=(*binding.moves.moves, *moves))
    return replace(binding, parts=(*binding.parts, *more), moves=every), leaves


def apart(parts: Sequence[Part]) -> bool:
    """Say whether networks of one component have layers of the same names: each gets its own name before."""
    names = [layer.name for part in parts for layer in part.layers]
    return len(set(names)) < len(names)


def written(position: int | str, layer: PartLayer) -> tuple[str, ...]:
    """Return the name under which a layer is written; a further head gets one that every layout knows."""
    if isinstance(position, int) or layer.name[-1] in LOG_STD:
        return layer.name
    return (position,)


def weight(part: Part, position: int | str, name: str) -> Path:
    """Return the canonical path of a tensor of the layer at a position, or of a branch by its name."""
    step = index(position) if isinstance(position, int) else attr(position)
    return (*part.prefix, step, attr(name))


def slot(optimizer: str, name: str, weight_path: Path) -> Path:
    """Return the canonical path of a weight's moment or setting: its own path below optimizer and name."""
    return (attr(optimizer), attr(name), *owned(optimizer, weight_path))


def owned(optimizer: str, weight_path: Path) -> Path:
    """Return a weight's path as its optimizer's moments have it: without the network, if that has its own."""
    return weight_path if optimizer == JOINT else weight_path[1:]


def owner(slot_path: Path) -> Path:
    """Return a weight's path, as `slot` takes it, from that of one of its moments or settings."""
    return slot_path[2:] if slot_path[0].value == JOINT else slot_path[1:]


def setting(optimizer: str, name: str) -> Path:
    """Return the canonical path of an optimizer's counter or hyperparameter."""
    return (attr(optimizer), attr(name))
