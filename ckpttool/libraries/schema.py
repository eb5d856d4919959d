"""The canonical agent: networks, distributions, normalisation, memory.

actor/<n>/kernel                      the policy's n-th layer, dense kernels [in, out]
critic/q1/<n>/kernel                  each Q-function has a separate head
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

import math
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UsageError
from ckpttool.core.sidecar import (
    NO_ACTION_MAP,
    NO_ACTIVATIONS,
    NO_BOUNDS,
    NO_ENVIRONMENT,
    STATISTICS_UNKNOWN,
    LedgerEntry,
    NotUnderstood,
    Scores,
    Sidecar,
    Topic,
    unknown_fact,
)
from ckpttool.core.source import Inline, Shape
from ckpttool.core.text import describe_record
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, index
from ckpttool.mapping.rules import KEEP, Move, MoveList, Reshape

if TYPE_CHECKING:
    from ckpttool.core.optimizers import DefaultSetting


KERNEL, RECURRENT, BIAS = attr("kernel"), attr("recurrent_kernel"), attr("bias")
KERNEL_DEVIATION, BIAS_DEVIATION = "kernel_deviation", "bias_deviation"
"""Standard deviations of a noisy layer's weights, beside their means `kernel` and `bias`."""
BIASES = (attr("bias_input"), attr("bias_recurrent"))


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One input of an encoder: flattened, or processed by an image encoder.

    `shape` is the shape used in training; images have the channels first. `strides` are those of its
    convolutions, each followed by ReLU; their output is flattened with the channels first, and goes
    through `dense` layers, each followed by ReLU. A `flattened` image goes through none of these.
    `scale` multiplies the input.
    """

    name: str
    shape: Shape
    scale: float = 1.0
    strides: tuple[int, ...] = ()
    dense: int = 0
    flattened: bool = False

    @property
    def size(self) -> int:
        """The number of values in one observation."""
        return math.prod(self.shape)

    @property
    def image(self) -> bool:
        """Return whether the input is an image; an environment may put its channels last."""
        return bool(self.strides) or self.flattened


class BatchNorm(NamedTuple):
    """A batch norm before the dense layer with that number, from 0; epsilon inside the square root."""

    number: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class PolicyEncoder:
    """The streams, whose features are concatenated in order, and the recurrent layers after them, by kind.

    `norms` are located among the policy's own layers. `moves` map the tensors to the canonical tree,
    `covers` are the entries of RecognizedAgent.unplaced that this encoder handles, `assumed` lists its
    assumptions.
    The tensors lie beside the policy's layers in the canonical tree of an agent that is to be played:
    actor/front/<input>/<n>/kernel      a convolution [height, width, in, out], or a dense layer after those
    actor/memory/<n>/kernel, ...        an lstm or gru: recurrent_kernel, bias_input, bias_recurrent beside it
    actor/norm/<n>/mean, var, ...       a batch norm before the n-th dense layer: scale and offset beside them
    No conversion takes them: there they are unmapped tensors of a network that cannot be written.
    """

    streams: tuple[EncoderInput, ...]
    cells: tuple[str, ...] = ()
    norms: tuple[BatchNorm, ...] = ()
    moves: tuple[Move, ...] = ()
    covers: frozenset[str] = frozenset()
    assumed: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every input by name."""
        return {stream.name: stream.shape for stream in self.streams}

    @property
    def joins_rows(self) -> bool:
        """Return whether nothing is computed but the inputs, which are rows, behind each other."""
        rows = all(not stream.image and len(stream.shape) == 1 for stream in self.streams)
        return rows and not self.cells and not self.norms

    def moved(self, new_path: Callable[[Path], Path]) -> PolicyEncoder:
        """Return the encoder with sources replaced by `new_path`."""
        return replace(self, moves=tuple(replace(move, source=new_path(move.source)) for move in self.moves))


def stream_layer_path(component: str, stream: str, number: int) -> Path:
    """Return the canonical path of a stream's layer."""
    return (attr(component), attr("front"), attr(stream), index(number))


def recurrent_layer_path(component: str, number: int) -> Path:
    """Return the canonical path of a recurrent layer."""
    return (attr(component), attr("memory"), index(number))


def batch_norm_path(component: str, number: int) -> Path:
    """Return the canonical path of the batch norm before a dense layer."""
    return (attr(component), attr("norm"), index(number))


NETWORKS = ("actor", "actor_target", "critic", "critic_target")
CRITICS = ("critic", "critic_target")
VALUES = ("value", "value_target", "discriminator")
# Entries that a policy needs besides its networks, and entries for training only.
NORMALIZER, TEMPERATURE = "normalizer", "temperature"
STATISTICS = ("mean", "var", "std", "count")
RUN = (*NETWORKS, *VALUES, NORMALIZER)
OPTIMIZED = {"actor_optimizer": "actor", "critic_optimizer": "critic"}
# Optimizers that not all agents have.
OPTIMIZED_MORE = {"value_optimizer": "value", "temperature_optimizer": TEMPERATURE}
# Module names for a Gaussian policy's log standard deviations.
LOG_STD = dict.fromkeys(
    ("log_std", "logstd", "_logstd", "fc_logstd", "log_std_linear", "log_std_layer"), "log_std"
)
# Names of a policy's further heads in files written by ckpttool: `std` precedes a softplus.
BRANCHES = {**LOG_STD, "std": "std"}
# Optimizer entries per weight: its parameter group, its number, its name.
GROUP, NUMBER, NAMES = "group", "number", "param_names"


NO_LAYOUT = "none"
"""Value of --layout for no library's naming; the layout of a policy that no library recognises."""

ALL_OPTIMIZED = {**OPTIMIZED, **OPTIMIZED_MORE}
# One optimizer of all trained networks, as in on-policy algorithms.
JOINT = "optimizer"
TRAINED = ("actor", "critic", "value")
OPTIMIZERS = (*ALL_OPTIMIZED, JOINT)
_CONSTANT = ("action_scale", "action_bias", "q_support")


def is_trained_by(optimizer: str, weight_path: Path) -> bool:
    """Return whether the optimizer updates the tensor at a canonical path."""
    network = weight_path[0].value
    if optimizer != JOINT:
        return network == ALL_OPTIMIZED[optimizer]
    return network in TRAINED and weight_path[-1].value not in _CONSTANT


DISCRETE_CHOICE = "choosing among discrete actions"
"""Why a policy that chooses among discrete actions is not played where its action space is unclear."""


UNKNOWN_ORDER = "several orders of its layers fit"
"""Why a network is not run whose layers only the file puts in an order."""
RECORDED_ORDER = (
    "use TorchScript, an ONNX model or a .keras file, which record the computation, or a whole module "
    "(torch.save(model)) of layers in sequence"
)


HALVES = unknown_fact(
    "architecture",
    "whether the last layer outputs deviations too, which the number of actions shows",
    decides=True,
)
"""Unknown fact of a policy whose last layer may have means, or means and deviations."""


DUELING = unknown_fact("architecture", "whether the network is dueling, with one output more than actions")
"""Unknown fact of a Q-network; the number of the environment's actions shows it."""

QUANTILES = unknown_fact(
    "action map",
    "whether the outputs are quantiles of fewer actions, which the number of actions shows",
    decides=True,
)
"""Unknown fact of a Q-network whose outputs may be values, or several quantiles of each value."""


def make_settings_note(number: int, where: str = "") -> str:
    """Return the note that an agent's settings, at `where` in the file, were not converted."""
    at = f" ({where})" if where else ""
    if number == 1:
        return f"1 training setting or record{at} was not converted"
    return f"{number:,} training settings and records{at} were not converted"


def mapped_by_sidecar(path: Path) -> bool:
    """Return whether a sidecar can hold the fact in a canonical leaf as well as a tensor can."""
    return (path[0] == attr(NORMALIZER) and path[1].value in STATISTICS) or path in (
        (attr("actor"), attr("action_scale")),
        (attr("actor"), attr("action_bias")),
    )


NORM_LAYERS = ("layer_norm", "batch_norm")
"""Kinds of layers after a dense one and before its activation; those of an agent are of one kind."""


class AgentLayer(NamedTuple):
    """One layer: the module's name within its component, in torch's notation, and its kind."""

    name: tuple[str, ...]
    kind: str


class ProgramOperation(NamedTuple):
    """One step of a program: its kind, the numbers of its input values, its arrays and settings."""

    kind: str
    inputs: tuple[int, ...]
    value: Mapping[str, Any]


class Program(NamedTuple):
    """Computation of a model's own graph: values are numbered, inputs and states first, then operations.

    `inputs` are names and shapes without the batch, `states` names and widths of a recurrent policy's
    state; `output` is the number of the action.
    """

    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    states: Mapping[str, int]
    operations: tuple[ProgramOperation, ...]
    output: int
    width: int


StreamInput = Literal["obs", "action"]
Streams = tuple[tuple[StreamInput, int], ...]


class AgentNetwork(NamedTuple):
    """One network: a component ("critic"), its head ("q1"; None for a policy), its layers in order.

    `branches` are further heads on the last hidden layer, by name ("log_std"), that do not affect the
    action. A policy with a `program` computes that instead of layers. A Q-network that `chooses` gives a
    value for every discrete action: it is the policy of its agent. A dueling one gives advantages, which
    become values with its `state_value`, another chain on the observations. `members` are the other
    networks of a policy of several: what is computed from them is in `Choices.scores`. `streams` are the
    inputs that a Q-function encodes separately, each with its number of layers: these come first, in that
    order. Their joined outputs go through the other layers, which may receive them again after the output
    before them. `encoder` is the number of layers before fractions of quantiles join, 0 if no name shows it.
    """

    component: str
    head: str | None
    layers: tuple[AgentLayer, ...]
    branches: tuple[tuple[str, AgentLayer], ...] = ()
    program: Program | None = None
    chooses: bool = False
    state_value: AgentNetwork | None = None
    streams: Streams = ()
    members: tuple[AgentNetwork, ...] = ()
    encoder: int = 0

    @property
    def starts(self) -> tuple[int, ...]:
        """The positions of the layers that receive the inputs."""
        return tuple(accumulate((count for _, count in self.streams[:-1]), initial=0))

    @property
    def chains(self) -> tuple[AgentNetwork, ...]:
        """All chains of layers that the network's output is computed from, its own first."""
        return (self, *self.members, *([self.state_value] if self.state_value is not None else []))

    @property
    def prefix(self) -> Path:
        """The network's path in the canonical tree."""
        return (attr(self.component),) + ((attr(self.head),) if self.head else ())

    @property
    def acts(self) -> bool:
        """Return whether the network is a policy."""
        return self.component in ("actor", "actor_target") or self.chooses

    @property
    def activation_numbers(self) -> tuple[int | None, ...]:
        """The number of the hidden activation after each layer, None where none follows.

        The last dense layer has none; a norm comes before the activation, or before the first layer.
        """
        kinds = [layer.kind for layer in self.layers]
        dense = [position for position, kind in enumerate(kinds) if kind == "dense"]
        return tuple(
            sum(number <= position for number in dense) - 1
            if dense[0] <= position < dense[-1] and kinds[position + 1] not in NORM_LAYERS
            else None
            for position in range(len(kinds))
        )

    @property
    def title(self) -> str:
        """The network's display name, e.g. `critic/q1`."""
        return f"{self.component}/{self.head}" if self.head else self.component


class ObservationNormalizer(NamedTuple):
    """Observation statistics: `mean` and `var` [obs_dim], unread, or `std` instead of `var`.

    An observation becomes `(x - mean) / sqrt(var + epsilon)`, or with `outside` (epsilon outside the
    square root) `(x - mean) / (sqrt(var) + epsilon)`, and is then clipped to `[-clip, clip]`. `assumed`
    is the sentence on `epsilon` and `clip` if no file contains one of them. `parts` are the names and sizes
    of the normalised inputs, in the order of the statistics, if there are several inputs.
    """

    mean: Leaf
    var: Leaf | None = None
    std: Leaf | None = None
    epsilon: float = 0.0
    clip: float | None = None
    outside: bool = False
    assumed: str = ""
    parts: Mapping[str, int] = MappingProxyType({})


PROBABILITY_LIMIT = 1e-3
"""Least probability of an atom in AgileRL's Rainbow (agilerl/networks/custom_modules.py)."""


class Choices(NamedTuple):
    """Discrete actions: each of the `counts` choices is a number from `starts[i]` on, of the best score.

    `scores` states what the network's outputs are: one value per action ("values": Q-values or logits), or
    quantiles of it ("quantiles" with those of one number together, "quantiles_last" with those of one
    action), or logits of the probabilities of the values `support` ("atoms"). "dueling" are advantages,
    "dueling_quantiles" quantiles (those of one action together) and "dueling_atoms" logits of them, which
    need the state's value; probabilities of "dueling_limited_atoms" are at least PROBABILITY_LIMIT.
    "branches" are advantages by one network for each choice, with one state value; "mean" and
    "mean_quantiles" are the values by several networks, whose mean counts. "value_first" are the state's
    value, then the advantages. "proposed_fractions" and "drawn_fractions" are quantiles at fractions that a
    network gives (FQF) or that are drawn (IQN); another network embeds them. "bernoulli" has one logit for
    each choice of 0 or 1. `single` is false where an action is an array (MultiDiscrete, MultiBinary).
    """

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    scores: Scores = "values"
    support: tuple[float, ...] = ()
    single: bool = True

    @property
    def of_several(self) -> bool:
        """Return whether several networks give the scores."""
        return self.scores.startswith(("dueling", "branches", "mean")) or self.has_fractions

    @property
    def has_fractions(self) -> bool:
        """Return whether the scores are means of quantiles at fractions."""
        return self.scores.endswith("fractions")

    @property
    def title(self) -> str:
        """The action space, e.g. `Discrete(4)`."""
        if self.scores == "bernoulli":
            return f"MultiBinary({len(self.counts)})"
        if not self.single:
            return f"MultiDiscrete({list(self.counts)})"
        return f"Discrete({self.counts[0]}{f', start={self.starts[0]}' if self.starts[0] else ''})"

    def values_per_action(self, width: int) -> int:
        """Return how many outputs of `width` belong to an action; raise ValueError if that is no whole."""
        actions = len(self.counts) if self.scores == "bernoulli" else sum(self.counts)
        actions += self.scores == "value_first"
        number, rest = divmod(width, actions)
        if rest or number == 0 or (number > 1 and not self.scores.endswith(("atoms", "quantiles", "last"))):
            raise ValueError(f"{width} outputs for {actions} actions")
        return number

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in self._asdict().items()}

    @staticmethod
    def read(record: Mapping[str, Any]) -> Choices:
        """Return the choices of a JSON object in the form of `document`."""
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in record.items()}
        return Choices(**values)


class ActionDistribution(NamedTuple):
    """How training draws actions from a policy's outputs: a fact of a library's table.

    "categorical" outputs are logits of discrete actions. A "gaussian" policy outputs a mean, to which noise
    times a standard deviation is added: in front of the action map ("mean"), behind it ("action"), or behind
    its tanh, where the sum is clipped to [-1, 1] and mapped to the bounds ("unit"). The stored logarithm of
    the deviation is within `limits`: clipped ("clip"), or the range of a tanh or sigmoid. The noise of
    "gsde" depends on the state, through a matrix that is kept for many steps
    (https://arxiv.org/abs/2005.05719); it is not drawn. `assumed` is a sentence on what no file contains.
    """

    kind: Literal["categorical", "gaussian", "gsde"]
    limits: tuple[float, float] | None = None
    limited: Literal["clip", "tanh", "sigmoid"] = "clip"
    place: Literal["mean", "action", "unit"] = "mean"
    assumed: str = ""

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return self._replace(limits=list(self.limits) if self.limits else None)._asdict()  # type: ignore[arg-type]


CATEGORICAL, GAUSSIAN = ActionDistribution("categorical"), ActionDistribution("gaussian")
LIMITED_GAUSSIAN = GAUSSIAN._replace(limits=(-20.0, 2.0))
"""Gaussian policies of SAC in most libraries, after its authors' code."""

StatedFact = Literal["activations", "head", "epsilon", "obs_norm"]
# Facts whose names differ from those in a sidecar.
_SIDECAR_NAMES = {"hidden": "activations", "norm": "obs_norm"}


# What the files of each library leave open, by the rule in core/sidecar.py. Names with a suffix are those of
# algorithms whose files differ.
LEFT_OPEN: Mapping[str, tuple[LedgerEntry, ...]] = {
    # One activation and one action map, constants in the library's code.
    **dict.fromkeys(("elegantrl", "fasttd3", "fujimoto", "tf2rl"), (NO_BOUNDS,)),
    "cleanrl ppo": (NO_BOUNDS, STATISTICS_UNKNOWN),  # NormalizeObservation; the statistics are not saved
    "stable_baselines": (STATISTICS_UNKNOWN,),  # VecNormalize stores them in a separate file
    # The activation is an argument of `Net`; VectorEnvNormObs, in the checkpoint of some examples.
    "tianshou sac": (NO_BOUNDS, NO_ACTIVATIONS, STATISTICS_UNKNOWN),
    "tianshou q": (NO_ACTIVATIONS, STATISTICS_UNKNOWN),
    # Activations or action maps that users write, or set for each run.
    "acme": (NO_BOUNDS, NO_ACTION_MAP, NO_ACTIVATIONS),
    "d3rlpy": (
        unknown_fact("action map", "the action scaler", decides=True),
        STATISTICS_UNKNOWN,  # a scaler in params.json
        NO_ACTIVATIONS,
    ),
    "keras_rl": (NO_ACTIVATIONS, NO_ACTION_MAP),
    "rl_games": (NO_BOUNDS, NO_ACTIVATIONS),
    "rlgraph": (NO_BOUNDS, NO_ACTIVATIONS),
    "rllib": (NO_ENVIRONMENT, NO_ACTIVATIONS),
    "rllib policy": (NO_ACTIVATIONS,),
    # In training, samples are tanh of a Gaussian; without noise the library's own code applies no tanh.
    "rllib sac": (
        NO_ENVIRONMENT,
        NO_ACTIVATIONS,
        unknown_fact(
            "action map",
            "whether tanh limits the mean (yes in training: --head affine; no where RLlib acts with "
            "explore=False: --head clip_affine)",
            decides=True,
        ),
    ),
    "rsl_rl": (NO_ACTIVATIONS,),
    # Arguments of the networks; a pickled module or a graph has them.
    "spinningup": (NO_ACTIVATIONS,),
    # Custom programs: their code has the classes of the networks, and how their output becomes an action.
    "td3": (NO_ACTIVATIONS, NO_ACTION_MAP),
    "tf_agents": (NO_BOUNDS, NO_ACTIVATIONS),
    "skrl": (NO_ACTIVATIONS, NO_ACTION_MAP, NO_BOUNDS),
    "tianshou": (
        NO_BOUNDS,
        NO_ACTIVATIONS,
        STATISTICS_UNKNOWN,
        unknown_fact(
            "action map",
            "the actor's max_action (the first upper bound in Tianshou's examples: --head tanh_clip_affine; "
            "1 by default: --head affine)",
            decides=True,
        ),
    ),
    # examples/mujoco/mujoco_ppo.py (and a2c, npg, trpo, reinforce) vs. highlevel/module/actor.py.
    "tianshou ppo": (
        NO_BOUNDS,
        STATISTICS_UNKNOWN,
        unknown_fact(
            "activation",
            "the activations (tanh in Tianshou's examples, ReLU in its high-level default: "
            "--activation NAME)",
            decides=True,
        ),
        unknown_fact(
            "action map",
            "whether tanh limits the mean (no in its examples: --head clip_affine; yes in its high-level "
            "default: --head affine)",
            decides=True,
        ),
    ),
}

OBSERVATION = "obs"
"""Name of the input of agents whose observations are a single array."""
ObservationSpace = Mapping[str, Any]
"""The observations' space in sidecar form: `library` and, by input, `low` and `high` in `parts`."""
INFINITE = 1e30  # older spaces have the largest float32 in place of infinity
_MOST_BOUNDS = 4096


def make_observation_space(
    library: str, parts: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> ObservationSpace | None:
    """Return the space with the bounds of each input; None if no input has them.

    `library` is that of the space's class. One number stands for equal ones, None for no bound. Inputs
    without bounds, or with thousands of different ones, are left out.
    """
    every = {
        name: {"low": _shorten_bound(low), "high": _shorten_bound(high)}
        for name, (low, high) in parts.items()
        if low and len(low) == len(high)
    }
    inputs = {name: part for name, part in every.items() if max(map(len, part.values())) <= _MOST_BOUNDS}
    return {"library": library, "parts": inputs} if inputs else None


def observation_bounds(space: ObservationSpace | None) -> dict[str, tuple[list[float], list[float]]]:
    """Return low and high of each input of a space, infinite where there is no bound; {} for None."""
    return {
        name: (_widen_bound(part["low"], -math.inf), _widen_bound(part["high"], math.inf))
        for name, part in ({} if space is None else space["parts"]).items()
    }


def _widen_bound(row: Sequence[float | None], unbounded: float) -> list[float]:
    return [unbounded if bound is None else bound for bound in row]


def make_choices(counts: Sequence[int], starts: Sequence[int] = (), *, single: bool) -> Choices | None:
    """Return the choices of a space with `n` or `nvec`; None without them, or with unequally many `starts`.

    Most libraries give the environment numbers from 0, whatever the space's `start` is, so that they have no
    `starts` (stable_baselines3/common/env_checker.py warns of others; ray/rllib has no use of it).
    """
    starts = tuple(starts) or (0,) * len(counts)
    if not counts or min(counts) < 1 or len(starts) != len(counts):
        return None
    return Choices(tuple(counts), starts, single=single)


def make_binary_choices(count: int) -> Choices:
    """Return the choices of a MultiBinary space of `count` values, each of one logit."""
    return Choices((2,) * count, (0,) * count, "bernoulli", single=False)


def known_choices(known: Sidecar) -> Choices | None:
    """Return the known discrete actions, None for continuous ones."""
    return None if known.choices is None else Choices.read(known.choices)


def known_distribution(known: Sidecar, facts: AgentMetadata) -> ActionDistribution | None:
    """Return how training drew actions: as a conversion recorded it, or else as the library draws them."""
    if known.distribution is None:
        return facts.distribution
    limits = known.distribution["limits"]
    return ActionDistribution(**{**known.distribution, "limits": tuple(limits) if limits else None})


def _shorten_bound(numbers: Sequence[float]) -> list[float | None]:
    row = [float(number) if abs(number) < INFINITE else None for number in numbers]
    return row[:1] if len(set(row)) == 1 else row


class AgentMetadata(NamedTuple):
    """Facts about an agent's networks besides their weights: library defaults, or read from a file.

    `head` maps the last layer to an action (see build.HEADS), `hidden` is the activation after every
    hidden layer (`activations` if they differ, in order), `epsilon` that of its layer norms;
    `network_activations` are those of the networks that have other ones than the policy, by component without
    `_target`. Bounds are
    per action; `choices` are discrete actions, whose `head` is "argmax"; `observation_space` is as in a
    sidecar; `env` is an environment's id, `env_arguments` its arguments, and `wrappers` the names and
    arguments of its wrappers in training, the innermost first. `stacked` is the number of
    normalised observations that the policy receives at once; `distribution` is that of its actions in
    training, None if it is not known or there is none; `one_hot` has the discrete observations of the inputs
    that are one-hot rows of them. `origins` maps every fact read from a file to
    its location: "data/action_space"; the others are defaults. `lacks` has a ledger entry
    (`sidecar.unknown_fact`) for each fact that no file contains. `stated` are facts that a file states in
    a form that is not understood, by their names in a sidecar ("activations"): their defaults do not hold.
    """

    head: str
    hidden: str
    epsilon: float
    activations: tuple[str, ...] | None = None
    network_activations: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    action_low: tuple[float, ...] | None = None
    action_high: tuple[float, ...] | None = None
    choices: Choices | None = None
    observation_space: ObservationSpace | None = None
    norm: ObservationNormalizer | None = None
    env: str | None = None
    env_arguments: Mapping[str, Any] = MappingProxyType({})
    wrappers: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    stacked: int = 1
    distribution: ActionDistribution | None = None
    one_hot: Mapping[str, Choices] = MappingProxyType({})
    atom_range: tuple[float, float] | None = None
    origins: Mapping[str, str] = MappingProxyType({})
    lacks: tuple[LedgerEntry, ...] = ()
    stated: Mapping[str, NotUnderstood] = MappingProxyType({})

    def read(self, where: str, **facts: Any) -> AgentMetadata:
        """Return the facts with those read from the file at `where`; `norm` may be None, for none."""
        names = dict.fromkeys(facts, where)
        understood = {_SIDECAR_NAMES.get(name, name) for name in facts}
        stated = {name: fact for name, fact in self.stated.items() if name not in understood}
        origins = MappingProxyType({**self.origins, **names})
        known = self.without_lack(STATISTICS_UNKNOWN) if "norm" in facts else self
        known = known.without_lack("activation") if {"hidden", "activations"} & facts.keys() else known
        return known._replace(**facts, origins=origins, stated=MappingProxyType(stated))

    def read_network(self, component: str, where: str | None, names: tuple[str, ...]) -> AgentMetadata:
        """Return the facts with the activations of one network besides the policy.

        They were read from the file at `where`, or with None are the library's defaults.
        """
        online, depth = component.removesuffix("_target"), len(names)
        others = {name: own for name, own in self.network_activations.items() if name != online}
        policy = self.activations or (self.hidden,)
        known = where is None or {"activations", "hidden"} & self.origins.keys()
        # The last activation repeats. What replaces an unknown one of the policy is not the network's.
        if known and (*policy, *policy[-1:] * depth)[:depth] == names:
            return self._replace(network_activations=others)
        others[online] = names
        if where is None:
            return self._replace(network_activations=others)
        return self.read(where, network_activations=others)

    def activations_of(self, component: str) -> tuple[str, ...]:
        """Return the activations after the hidden layers of a network; the last one repeats."""
        own = self.network_activations.get(component.removesuffix("_target"))
        return own or self.activations or (self.hidden,)

    def not_understood(self, name: StatedFact, text: str, where: str) -> AgentMetadata:
        """Return the facts with one that the file at `where` states as `text`, which is not understood."""
        stated = {**self.stated, name: NotUnderstood(text, where)}
        return self._replace(stated=MappingProxyType(stated))

    def lacking(self, entry: LedgerEntry) -> AgentMetadata:
        """Return the facts with one more unknown fact, each once."""
        return self if entry in self.lacks else self._replace(lacks=(*self.lacks, entry))

    def without_lack(self, *known: Topic | LedgerEntry) -> AgentMetadata:
        """Return the facts without the unknown facts that are `known`: all of a topic, or single ones."""
        return self._replace(
            lacks=tuple(lack for lack in self.lacks if lack not in known and lack.what not in known)
        )

    def bounded(self, where: str, low: Sequence[float], high: Sequence[float]) -> AgentMetadata | None:
        """Return the facts with the action bounds from the file at `where`, None if there are none."""
        if not low or len(low) != len(high):
            return None
        return self.read(where, action_low=tuple(low), action_high=tuple(high))


@dataclass(frozen=True, slots=True)
class RecognizedAgent:
    """A tree recognised as an agent: the mapping of every leaf to the canonical tree.

    `consumed` are leaves without information of their own once the rest is mapped (indices); `unplaced`
    names, by component, the trained tensors that belong to no supported kind of layer: such a network
    can be listed, but running it without them would give other results. `defaults` are the library's
    optimizer defaults, if they differ from those of Keras or torch. `fronts` are encoders before the
    layers, by component. `ledger` lists what else could change the numbers: used, assumed, or found and
    unusable.
    """

    __repr__ = describe_record

    layout: str
    moves: MoveList
    parts: tuple[AgentNetwork, ...]
    facts: AgentMetadata
    consumed: frozenset[Path] = frozenset()
    unplaced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    evidence: str = ""
    of: Mapping[Path, Path] = field(default_factory=dict)
    defaults: Mapping[str, DefaultSetting] = field(default_factory=dict)
    fronts: Mapping[str, PolicyEncoder] = field(default_factory=dict)
    ledger: tuple[LedgerEntry, ...] = ()

    @property
    def policy(self) -> AgentNetwork | None:
        """The first network that acts, None if there is none."""
        return next((part for part in self.parts if part.acts), None)

    @property
    def norm_kind(self) -> str | None:
        """The kind of the networks' norms, whose epsilon matters; None without one."""
        kinds = (layer.kind for part in self.parts for layer in part.layers)
        return next((kind for kind in kinds if kind in NORM_LAYERS), None)

    def moved(self, new_path: Callable[[Path], Path]) -> RecognizedAgent:
        """Return the binding with sources replaced by `new_path`."""
        moves = tuple(replace(move, source=new_path(move.source)) for move in self.moves.moves)
        return replace(
            self,
            moves=replace(self.moves, moves=moves),
            consumed=frozenset(map(new_path, self.consumed)),
            of={new_path(slot): new_path(owner) for slot, owner in self.of.items()},
            fronts={component: front.moved(new_path) for component, front in self.fronts.items()},
        )

    def without_optimizers(self, tree: Tree) -> RecognizedAgent | None:
        """Return the binding for its tree without optimizers; None for a tree with other differences."""
        gone = {move.target[0] for move in self.moves.moves if move.source not in tree}
        if not gone or not gone <= {attr(name) for name in OPTIMIZERS}:
            return None
        return replace(
            self,
            moves=replace(self.moves, moves=tuple(m for m in self.moves.moves if m.target[0] not in gone)),
            consumed=self.consumed & tree.keys(),
            of={slot: owner for slot, owner in self.of.items() if slot in tree and owner in tree},
        )

    def noted(self, *notes: str) -> RecognizedAgent:
        """Return the binding with further notes on the mapping."""
        return replace(self, moves=replace(self.moves, notes=(*self.moves.notes, *notes)))

    def assuming(self, *sentences: str) -> RecognizedAgent:
        """Return the binding with further assumptions on its networks."""
        return replace(self, moves=replace(self.moves, assumed=(*self.moves.assumed, *sentences)))

    def entered(self, *entries: LedgerEntry) -> RecognizedAgent:
        """Return the binding with further ledger entries."""
        return replace(self, ledger=(*self.ledger, *entries))

    def with_q_policies(self, scores: Scores = "values") -> RecognizedAgent:
        """Return the binding of an agent with discrete actions: without an actor its critics choose them.

        Of several networks that one policy consists of, the first one chooses. The second critic of a dueling
        network, or the last of one with branches, is the state value.
        """
        if any(part.acts and (scores == "values" or not part.chooses) for part in self.parts):
            return self
        ordered = sorted(self.parts, key=lambda part: (len(part.title), part.title))
        parts = []
        for part in self.parts:
            first, *others = (other for other in ordered if other.component == part.component)
            several = Choices((), (), scores).of_several
            chooses = part.component in CRITICS and (part is first or not several)
            apart = scores.startswith("mean") or scores.endswith("fractions")
            valued = chooses and bool(others) and several and not apart
            value = others.pop(-1 if scores == "branches" else 0) if valued else None
            joined = chooses and (apart or scores == "branches")
            members = tuple(others) if joined else ()
            parts.append(part._replace(chooses=chooses, state_value=value, members=members))
        return replace(self, parts=tuple(parts))

    def choosing(
        self,
        tree: Tree,
        scores: Scores = "values",
        support: Sequence[float] = (),
        outputs: int = 1,
        where: str = "",
    ) -> RecognizedAgent:
        """Return the binding of an agent that takes the discrete action with the best output.

        The file does not list the actions: the last layer has `outputs` for each.

        Args:
            tree: the canonical tree, whose last layer counts the actions.
            scores: what the outputs are (Choices).
            support: values of the atoms, where outputs are logits of these.
            outputs: numbers for each action. If it is 1, an environment of as many actions shows whether they
                are one choice or several.
            where: what contains their number.
        """
        facts = self.facts.without_lack("action bounds", "action map")._replace(head="argmax")
        binding = replace(self, facts=facts).with_q_policies(scores)
        if scores == "values":
            return binding
        acting = next(part for part in binding.parts if part.acts)
        counts = []
        for part in (acting, *(acting.members if scores == "branches" else ())):
            kernel = canonical_weight_path(part, len(part.layers) - 1, "kernel")
            last = next(move for move in binding.moves.moves if move.target == kernel)
            leaf = last.rule.leaf(tree[last.source])
            width = leaf.shape[-1] if isinstance(leaf, Leaf) else 0
            if not outputs or not width or width % outputs:
                return binding.refused(acting.component, f"{width} outputs for actions of {outputs} {scores}")
            counts.append(width // outputs)
        single = scores != "branches"
        choices = Choices(tuple(counts), (0,) * len(counts), scores, tuple(support), single=single)
        return replace(binding, facts=facts.read(where, choices=choices))

    def refused(self, component: str, *reasons: str) -> RecognizedAgent:
        """Return the binding with further reasons why a component's networks cannot be run."""
        all_reasons = (*self.unplaced.get(component, ()), *reasons)
        return replace(self, unplaced={**self.unplaced, component: all_reasons})

    def refusing_policy(self, *reasons: str) -> RecognizedAgent:
        """Return the binding with further reasons why its policy, else its first network, cannot be run."""
        return self.refused((self.policy or self.parts[0]).component, *reasons)

    def without(self, left: Collection[str]) -> RecognizedAgent:
        """Return the binding without the named tensors, which no network's output depends on."""
        unplaced = {
            component: kept
            for component, names in self.unplaced.items()
            if (kept := tuple(name for name in names if name not in left))
        }
        return replace(self, unplaced=unplaced)

    def statistics(self, tree: Tree) -> dict[str, Leaf]:
        """Return the observation statistics tensors by their canonical names ("mean", "var")."""
        return {
            str(move.target[1].value): leaf
            for move in self.moves.moves
            if move.target[0] == attr(NORMALIZER) and isinstance(leaf := tree[move.source], Leaf)
        }


def add_targets(
    binding: RecognizedAgent, agent: Tree
) -> tuple[RecognizedAgent, dict[Path, Leaf | ValueLeaf]]:
    """Return the binding with targets copied from its networks, and the copies' canonical leaves.

    Only an actor with Q-functions is trained with targets, a Gaussian one with those of its
    Q-functions. An agent that has a target of either kind, or a state value, is returned unchanged.
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
            target = (attr(f"{path[0].value}_target"), *path[1:])
            leaves[target] = agent[path]
            moves.append(replace(move, target=target))
    more = tuple(part._replace(component=f"{part.component}_target") for part in parts)
    every = replace(binding.moves, moves=(*binding.moves.moves, *moves))
    return replace(binding, parts=(*binding.parts, *more), moves=every), leaves


def canonical_weight_path(part: AgentNetwork, position: int | str, name: str) -> Path:
    """Return the canonical path of a tensor of the layer at a position, or of a named branch."""
    step = index(position) if isinstance(position, int) else attr(position)
    return (*part.prefix, step, attr(name))


_LAYER_TENSORS = ("kernel", "bias", "scale", "offset", "mean", "variance")


def read_layer_arrays(agent: Tree, part: AgentNetwork, position: int) -> dict[str, np.ndarray]:
    """Return the tensors of the layer at a position of the canonical agent by their names, float32."""
    arrays = {}
    for name in (*_LAYER_TENSORS, KERNEL_DEVIATION, BIAS_DEVIATION):
        leaf = agent.get(canonical_weight_path(part, position, name))
        if isinstance(leaf, Leaf):
            arrays[name] = leaf.array().astype("f4")
    return arrays


def count_shared_layers(agent: Tree, part: AgentNetwork, other: AgentNetwork) -> int:
    """Return how many of the first layers of two networks on one input are equal, with their activations."""
    pairs = zip(part.layers, other.layers, part.activation_numbers, other.activation_numbers, strict=False)
    for position, (layer, twin, activation, its_activation) in enumerate(pairs):
        tensors, its_tensors = (read_layer_arrays(agent, network, position) for network in (part, other))
        if (
            (layer.kind, activation) != (twin.kind, its_activation)
            or tensors.keys() != its_tensors.keys()
            or KERNEL_DEVIATION in tensors  # each layer draws its own noise
            or not all(np.array_equal(tensors[name], its_tensors[name]) for name in tensors)
        ):
            return position
    return min(len(part.layers), len(other.layers))


def canonical_slot_path(optimizer: str, name: str, weight_path: Path) -> Path:
    """Return the canonical path of a weight's moment or setting: its path under optimizer and name."""
    return (attr(optimizer), attr(name), *get_optimizer_key(optimizer, weight_path))


def get_optimizer_key(optimizer: str, weight_path: Path) -> Path:
    """Return a weight's path within its optimizer: without the network, if the network has its own."""
    return weight_path if optimizer == JOINT else weight_path[1:]


def canonical_setting_path(optimizer: str, name: str) -> Path:
    """Return the canonical path of an optimizer's counter or hyperparameter."""
    return (attr(optimizer), attr(name))


Bounds = tuple[list[float], list[float]]

# Maps that are equal for some bounds (networks.build.HEADS lists all maps).
_FAMILIES = (frozenset(("tanh", "affine", "tanh_clip_affine")), frozenset(("clip", "clip_affine")))


def matches_action_map(facts: AgentMetadata, agent: Tree, head: str) -> bool | None:
    """Return whether the agent's action map equals `head` for its bounds; None if they are unknown.

    The two small tensors of the action map are read.
    """
    if facts.head == head:
        return True
    if not any({facts.head, head} <= family for family in _FAMILIES):
        return False
    bounds = action_bounds(agent)
    return (
        None
        if bounds is None
        else _simplify_action_map(facts.head, bounds) == _simplify_action_map(head, bounds)
    )


def _simplify_action_map(head: str, bounds: Bounds) -> str:
    """Return the simplest map that is equal for these bounds."""
    low, high = bounds
    even = all(value == high[0] for value in high) and all(value == -high[0] for value in low)
    # max_action * tanh equals tanh mapped to symmetric bounds of one size; clipping 1 * tanh changes nothing.
    if (head == "tanh" and even) or (head == "tanh_clip_affine" and high[0] == 1):
        return "affine"
    return "clip" if head == "clip_affine" and even and high[0] == 1 else head


def action_bounds(agent: Tree) -> Bounds | None:
    """Return low and high of each action from the canonical agent's scale and bias, None without them."""
    scale, bias = (agent.get((attr("actor"), attr(name))) for name in ("action_scale", "action_bias"))
    if not isinstance(scale, Leaf) or not isinstance(bias, Leaf):
        return None
    wide, middle = scale.array().reshape(-1), bias.array().reshape(-1)
    return (middle - wide).tolist(), (middle + wide).tolist()


def require_action_bounds(
    facts: AgentMetadata, agent: Tree, owner: str
) -> tuple[Sequence[float], Sequence[float]]:
    """Return low and high of each action, which `owner` must contain.

    Raise UsageError if they are unknown.
    """
    if facts.action_low is not None and facts.action_high is not None:
        return facts.action_low, facts.action_high
    known = action_bounds(agent)
    if known is None:
        raise UsageError(
            f"unknown action bounds, which {owner} must contain",
            hint="pass --bounds LOW HIGH",
        )
    return known


# Activations by RLlib setting (rllib/models/utils.py, `get_activation_fn`).
RLLIB = {"swish": "silu", "None": "linear"}


def list_distribution_notes(binding: RecognizedAgent, tree: Tree) -> tuple[str, ...]:
    """Return a note for each Q-function of the binding that has more than one output."""
    notes: list[str] = []
    moves = {move.target: move for move in binding.moves.moves}
    for part in binding.parts:
        if part.component not in CRITICS:
            continue
        move = moves.get(canonical_weight_path(part, len(part.layers) - 1, "kernel"))
        leaf = move.rule.leaf(tree[move.source]) if move is not None and move.source in tree else None
        if isinstance(leaf, Leaf) and leaf.shape[1] != 1:
            notes.append(f"{part.title} outputs {leaf.shape[1]} numbers of a distribution, not one value")
    return tuple(notes)


_CODES = {"float32": "f", "float64": "d"}
_WHOLE_CODES = {"int8": "b", "uint8": "B", "int16": "h", "int32": "i", "int64": "q"}
# A view can be larger than its file; no agent has that many actions or observations.
_MOST = 1 << 20


def are_equal(tree: Tree, one: Path, other: Path) -> bool:
    """Return whether two entries are tensors with the same type, shape and bytes."""
    first, second = tree[one], tree[other]
    if not isinstance(first, Leaf) or not isinstance(second, Leaf):
        return False
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and bytes(first.read()) == bytes(second.read())


def read_numbers(value: object) -> tuple[float, ...]:
    """Return a tensor's numbers, flat; none if it is not float32 or float64, or is large."""
    if not isinstance(value, Leaf) or value.dtype not in _CODES or value.size > _MOST:
        return ()
    return unpack_numbers(bytes(value.read()), value.dtype)


def read_whole_numbers(value: object) -> tuple[int, ...]:
    """Return a whole number, or an integer tensor's numbers, flat; none for others, or if it is large."""
    if isinstance(value, ValueLeaf) and isinstance(value.value, int) and not isinstance(value.value, bool):
        return (value.value,)
    if not isinstance(value, Leaf) or value.dtype not in _WHOLE_CODES or value.size > _MOST:
        return ()
    return struct.unpack(f"<{value.size}{_WHOLE_CODES[value.dtype]}", bytes(value.read()))


def unpack_numbers(data: bytes, dtype: str) -> tuple[float, ...]:
    """Return the little-endian numbers in the bytes, of a float or integer type; a remainder is dropped."""
    code = {**_CODES, **_WHOLE_CODES}[dtype]
    size = struct.calcsize(code)
    count = len(data) // size
    return struct.unpack(f"<{count}{code}", data[: count * size])


def make_float32_tensor(values: Sequence[float]) -> Leaf:
    """Return the numbers as a float32 tensor [n] without a file: a setting, e.g. a bound."""
    packed = struct.pack(f"<{len(values)}f", *values)
    return Leaf("float32", (len(values),), Inline(packed), "", "other")


def make_float64_tensor(values: Sequence[float], name: str = "") -> Leaf:
    """Return the numbers as a float64 tensor [n] without a file."""
    packed = struct.pack(f"<{len(values)}d", *values)
    return Leaf("float64", (len(values),), Inline(packed), name, "buffer")


DICT_UNKNOWN = unknown_fact(
    "observation statistics", "how the parts of a Dict observation are normalised", decides=True
)
"""Unknown fact of an agent whose file has separate statistics for parts of an observation."""

STATISTIC_NAMES = {
    "mean": "mean",
    "running_mean": "mean",
    "var": "var",
    "variance": "var",
    "running_var": "var",
    "running_variance": "var",
    "std": "std",
    "running_std": "std",
}
"""The roles of tensors of statistics by their names, without a leading underscore."""
_COUNT = frozenset(("count", "current_count", "n", "num", "num_samples"))
EPSILON_NAMES = ("epsilon", "eps")
CLIP_NAMES = ("clip", "clip_obs", "clip_max", "clip_range", "clip_threshold")
# What stands beside statistics and changes no observation: how they are updated, sizes and sums.
IDLE_NAMES = _COUNT | {"until", "shape", "size", "insize", "dim", "training", "m2", "sum", "summed_variance"}
# The clipping limit that a wrapper object stores beside the statistics (VecNormalize: obs_rms, clip_obs,
# epsilon).
_CLIP_OF_OBSERVATIONS = ("clip_obs", "obs_clip", "clip_observation", "clip_observations", "observation_clip")
_PAIR = deferred.compile(rf"(\w+?)_({'|'.join(sorted(STATISTIC_NAMES, key=len, reverse=True))})")
_OBSERVED = deferred.compile(
    r"(^|_)(obs|observations?|states?|inputs?|rms|norm|normali[sz](er|ation|e)|running|scaler|filter|stats?"
    r"|statistics|preprocessor|whiten\w*)(_|$)"
)
_OTHER = deferred.compile(
    r"(^|_)(ret|returns?|rews?|rewards?|adv|advantages?|values?|critics?|vf?|qf?|images?|grads?|acts?|actions?"
    r"|priv\w*|next|targets?)(_|$)"
)
# Siblings that identify a batch norm, which is a layer of the network.
_LAYER = frozenset(("weight", "bias", "gamma", "beta", "scale", "offset", "kernel", "num_batches_tracked"))
# The statistics of Keras's and TensorFlow 1's batch norms, whose epsilon no file has.
_OF_BATCHES = frozenset(("moving_mean", "moving_variance"))
_MOST_ENTRIES = 1 << 16


class _NormalizationFormula(NamedTuple):
    """Normalisation formula of the classes with these buffer names."""

    owner: str
    epsilon: float
    outside: bool = False
    clip: float | None = None
    std: bool = False


_EMPIRICAL = _NormalizationFormula("rsl_rl's EmpiricalNormalization", 1e-2, outside=True, std=True)
_SCALER = _NormalizationFormula("skrl's RunningStandardScaler", 1e-8, outside=True, clip=5.0)
_RL_GAMES = _NormalizationFormula("rl_games' RunningMeanStd", 1e-5, clip=5.0)
_WRAPPER = _NormalizationFormula("Gymnasium's NormalizeObservation", 1e-8)
# sqrt(var + 1e-14) equals Keras's maximum unless the variance is close to 1e-14.
_KERAS_FORMULA = _NormalizationFormula("Keras's Normalization", 1e-14)
_PLAIN = _NormalizationFormula("(x - mean) / std", 0.0, std=True)


def choose_formula(names: Collection[str]) -> _NormalizationFormula:
    """Return the formula of the class whose statistics have these names."""
    if {"_mean", "_std"} <= {*names}:
        return _EMPIRICAL
    if "running_variance" in names:
        return _SCALER
    if {"running_mean", "running_var"} <= {*names}:
        return _RL_GAMES
    if "variance" in names:
        return _KERAS_FORMULA
    variances = (name for name in names if STATISTIC_NAMES.get(name.lstrip("_")) == "var")
    return _WRAPPER if any(variances) else _PLAIN


@dataclass
class _StatisticsGroup:
    """Mean, variance and standard deviation stored together, by role; numbers as stored."""

    where: str
    rows: dict[str, Leaf] = field(default_factory=dict)
    paths: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    numbers: dict[str, float] = field(default_factory=dict)
    rest: list[Path] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of values; 0 if the group is not statistics."""
        rows = [self.rows.get(name) for name in ("mean", "var", "std")]
        sizes = {row.size for row in rows if row is not None}
        whole = rows[0] is not None and (rows[1] is not None or rows[2] is not None)
        return sizes.pop() if whole and len(sizes) == 1 else 0

    def number(self, names: Sequence[str]) -> float | None:
        """Return a setting stored beside the statistics."""
        return next((self.numbers[name] for name in names if name in self.numbers), None)


@dataclass(frozen=True, slots=True)
class StoredStatistics:
    """Observation statistics: the numbers with their formula, and their location.

    `moves` map the tensors to the canonical agent, `consumed` are entries without further information.
    """

    where: str
    size: int
    norm: ObservationNormalizer
    moves: tuple[Move, ...]
    consumed: frozenset[Path]

    @property
    def paths(self) -> frozenset[Path]:
        """All entries that make up the statistics."""
        return self.consumed | {move.source for move in self.moves}


def find_statistics(tree: Tree, claimed: Collection[Path] = ()) -> tuple[StoredStatistics, ...]:
    """Return all observation statistics in the tree, outside the entries in `claimed`.

    Layouts read the statistics of their libraries. This finds those of custom programs: `{actor, critic,
    obs_rms: {mean, var, count}}`, the state_dict of a normaliser, `obs_mean` and `obs_std`. The names of the
    buffers show the class, and with it the formula:

    rsl_rl/modules/normalization.py, EmpiricalNormalization: (x - _mean) / (_std + 1e-2)
    skrl/resources/preprocessors/torch/running_standard_scaler.py: (x - mean) / (sqrt(var) + 1e-8), limited to
    5 rl_games/algos_torch/running_mean_std.py: (x - mean) / sqrt(var + 1e-5), limited to 5 (without
    norm_only) gymnasium/wrappers/stateful_observation.py, NormalizeObservation: (x - mean) / sqrt(var + 1e-8)
    keras/src/layers/preprocessing/normalization.py, Normalization: (x - mean) / max(sqrt(variance), 1e-7)
    """
    return tuple(_make_statistics(group) for group in _group_statistics(tree, claimed) if group.size)


def apply_statistics(binding: RecognizedAgent, tree: Tree, size: int) -> RecognizedAgent:
    """Return the binding with observation statistics that its layout does not read.

    `size` is the number of the policy's observations. Nothing is applied if the layout has already read
    statistics, or if several differ.
    """
    mean = (attr(NORMALIZER), attr("mean"))
    moved = any(move.target == mean for move in binding.moves.moves)
    if moved or binding.facts.norm is not None or "norm" in binding.facts.origins:
        return binding
    # A layout may carry a normaliser's tensors under other names.
    sources = {move.source for move in binding.moves.moves if move.target[0] != attr(NORMALIZER)}
    sources |= binding.consumed
    every = find_statistics(tree, sources)
    fitting = [group for group in every if group.size == size]
    if len(fitting) == 1:
        return set_statistics(binding, fitting[0])
    parts = [group for group in every if group.size < size]
    if not fitting and len(parts) > 1 and sum(part.size for part in parts) == size:
        return replace(binding, facts=binding.facts.lacking(DICT_UNKNOWN))
    return binding


def set_statistics(binding: RecognizedAgent, chosen: StoredStatistics) -> RecognizedAgent:
    """Return the binding of an agent that normalises its observations with these statistics."""
    facts = binding.facts.without_lack("observation statistics").read(chosen.where, norm=chosen.norm)
    kept = (move for move in binding.moves.moves if move.source not in chosen.paths)
    assumed = (*binding.moves.assumed, *filter(None, [chosen.norm.assumed]))
    moves = replace(binding.moves, moves=(*kept, *chosen.moves), assumed=assumed)
    return replace(binding, facts=facts, moves=moves, consumed=binding.consumed | chosen.consumed)


def _group_statistics(tree: Tree, used: Collection[Path]) -> list[_StatisticsGroup]:
    """Return the groups: entries under one name, or with one prefix (`obs_mean`, `obs_std`)."""
    groups: dict[tuple[str, ...], _StatisticsGroup] = {}
    layers: set[tuple[str, ...]] = set()
    for segments, leaf, paths in list_rows(tree, used):
        last = segments[-1].removesuffix(":0").lower()
        if last in _LAYER:
            layers.add(segments[:-1])
        at, name = _split_statistic_name(segments[:-1], last)
        if not _is_observed(at) or last in _OF_BATCHES:
            continue
        group = groups.setdefault(at, _StatisticsGroup("/".join(at if at == segments[:-1] else segments)))
        what = STATISTIC_NAMES.get(name.lstrip("_"))
        if isinstance(leaf, Leaf) and what is not None and leaf.size == max(leaf.shape, default=0) > 0:
            group.rows.setdefault(what, leaf)
            group.paths.setdefault(what, paths)
            group.names.add(name)
        elif name.lstrip("_") in _COUNT:
            group.names.add(name)
            group.rest += paths
            if isinstance(leaf, Leaf) and leaf.size == 1:
                group.rows.setdefault("count", leaf)
                group.paths.setdefault("count", paths)
        elif (number := read_number(leaf)) is not None:
            group.numbers[name.lstrip("_")] = number
            group.rest += paths
    for at, group in groups.items():
        _add_wrapper_settings(group, at[:-1], tree, used)
    return [group for at, group in groups.items() if at not in layers]


def _add_wrapper_settings(
    group: _StatisticsGroup, above: tuple[str, ...], tree: Tree, used: Collection[Path]
) -> None:
    """Add the clipping limit, and a normaliser object's epsilon, stored one level above a group."""
    normalises = bool(above) and _OBSERVED.search(above[-1].lower()) is not None
    for path, leaf in tree.items():
        segments = tuple(tree.names.get(path, "").split("/"))
        name, number = segments[-1].lower().lstrip("_"), read_number(leaf)
        if number is None or segments[:-1] != above or path in used:
            continue
        if name in _CLIP_OF_OBSERVATIONS:
            group.numbers.setdefault("clip", number)
        elif normalises and name in EPSILON_NAMES:
            group.numbers.setdefault("epsilon", number)
        else:
            continue
        group.rest += (path,)


def list_rows(
    tree: Tree, claimed: Collection[Path]
) -> list[tuple[tuple[str, ...], Leaf | ValueLeaf, tuple[Path, ...]]]:
    """Return tensors and values with their name segments; a list of numbers as one row."""
    listed: dict[Path, list[tuple[Path, float]]] = {}
    rows: list[tuple[tuple[str, ...], Leaf | ValueLeaf, tuple[Path, ...]]] = []
    for path, leaf in tree.items():
        if path in claimed or not path or (isinstance(leaf, Leaf) and leaf.role == "slot"):
            continue
        if isinstance(leaf, ValueLeaf) and path[-1].kind == "index" and isinstance(leaf.value, int | float):
            listed.setdefault(path[:-1], []).append((path, float(leaf.value)))
        elif isinstance(leaf, ValueLeaf) or not leaf.dtype.startswith(("string", "complex")):
            rows.append((tuple(tree.names[path].split("/")), leaf, (path,)))
    for items in listed.values():
        if 1 < len(items) <= _MOST_ENTRIES:
            name = tuple(tree.names[items[0][0]].split("/")[:-1])
            row = make_float64_tensor([value for _, value in items], "/".join(name))
            rows.append((name, row, tuple(path for path, _ in items)))
    return [row for row in rows if row[0]]


def _split_statistic_name(above: tuple[str, ...], last: str) -> tuple[tuple[str, ...], str]:
    """Return a tensor's group and its name in it: `obs_mean` is `mean` of the group `obs`."""
    if last.lstrip("_") in STATISTIC_NAMES:
        return above, last
    pair = _PAIR.fullmatch(last)
    if pair is None or pair[1] in ("running",):
        return above, last
    return (*above, pair[1]), pair[2]


def _is_observed(at: tuple[str, ...]) -> bool:
    """Return whether a group's name refers to observations, and not to rewards, values or images."""
    near = [segment.lower() for segment in at[-3:] if not segment.isdigit()]
    # `v` in observation statistics means velocity.
    letters = ("v", "q") if any(re.search(r"(^|_)(ob|obs|observations?)(_|$)", word) for word in near) else ()
    others = (word for word in near if word not in ("actor_critic", "ac", *letters))
    return any(_OBSERVED.search(word) for word in near[-2:]) and not any(map(_OTHER.search, others))


def read_number(leaf: Leaf | ValueLeaf | None) -> float | None:
    """Return a number, also of a tensor with one element; None for a switch or anything else."""
    value = leaf.value if isinstance(leaf, ValueLeaf) else None
    if isinstance(leaf, Leaf) and leaf.size == 1 and leaf.dtype != "bool":
        value = leaf.array().reshape(-1)[0].item()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_switch(leaf: Leaf | ValueLeaf | None, *, default: bool) -> bool | None:
    """Return a switch: true or false, 1 or 0, also of a tensor with one element; None for anything else.

    `default` is the value if there is no entry.
    """
    value: object = default if leaf is None else leaf.value if isinstance(leaf, ValueLeaf) else None
    if isinstance(leaf, Leaf) and leaf.size == 1:
        value = leaf.array().reshape(-1)[0].item()
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def _make_statistics(group: _StatisticsGroup) -> StoredStatistics:
    formula, size = choose_formula(group.names), group.size
    epsilon, clip = group.number(EPSILON_NAMES), group.number(CLIP_NAMES)
    by_std = formula.std and "std" in group.rows
    used = ("mean", "std" if by_std or "var" not in group.rows else "var")
    epsilon_used = formula.epsilon if epsilon is None else epsilon
    if formula is _PLAIN and epsilon is None and not np.all(group.rows["std"].array() != 0):
        epsilon_used = 1e-8
    norm = ObservationNormalizer(
        group.rows["mean"],
        group.rows.get("var") if used[1] == "var" else None,
        group.rows["std"] if used[1] == "std" else None,
        epsilon=epsilon_used,
        clip=formula.clip if clip is None else clip,
        outside=formula.outside or used[1] == "std",
    )
    named = dict(group.rows)
    moves, consumed = [], set(group.rest)
    for name in ("mean", "var", "std", "count"):
        paths = group.paths.get(name, ())
        if len(paths) != 1:
            consumed |= set(paths)
            continue
        shape = () if name == "count" else (size,)
        rule = KEEP if named[name].shape == shape else Reshape(shape)
        moves.append(Move(paths[0], (attr(NORMALIZER), attr(name)), rule))
        consumed.discard(paths[0])
    if epsilon is None or clip is None:
        norm = norm._replace(assumed=_assumption(group, norm, formula))
    return StoredStatistics(group.where, size, norm, tuple(moves), frozenset(consumed))


def _assumption(group: _StatisticsGroup, norm: ObservationNormalizer, formula: _NormalizationFormula) -> str:
    position = "added to the standard deviation" if norm.outside else "added inside the square root"
    limit = "no clipping" if norm.clip is None else f"clipped to {norm.clip:g}"
    owner = formula.owner if formula is _PLAIN else f"of {formula.owner}"
    return (
        f"observations are normalised with {group.where}, using the formula {owner}: "
        f"epsilon {norm.epsilon:g} {position}, {limit}"
    )


def layer_widths(agent: Tree, part: AgentNetwork) -> tuple[int, int]:
    """Return the number of a network's inputs, those of its first dense layers, and of its outputs."""
    if part.program is not None:
        return math.prod(part.program.inputs[0][1]), part.program.width
    shapes = {
        position: leaf.shape
        for position, layer in enumerate(part.layers)
        if layer.kind == "dense"
        and isinstance(leaf := agent.get(canonical_weight_path(part, position, "kernel")), Leaf)
    }
    starts = part.starts if part.streams else [min(shapes)]
    return sum(shapes[position][0] for position in starts), shapes[max(shapes)][1]


def list_kernel_shapes(part: AgentNetwork, agent: Tree) -> list[tuple[int, ...]]:
    """Return the shapes [in, out] of a network's kernels, in order."""
    kernels = [agent.get(canonical_weight_path(part, n, "kernel")) for n in range(len(part.layers))]
    return [leaf.shape for leaf in kernels if isinstance(leaf, Leaf)]


# A plain environment id: the part before a colon would be imported.
_ENV = deferred.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+")


def plain_id(value: object) -> str | None:
    """Return the value if it is the plain id of an environment, None otherwise."""
    return value if isinstance(value, str) and _ENV.fullmatch(value) else None
