"""Networks of a checkpoint and comparison of their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ckpttool.commands import restore
from ckpttool.commands.model_inputs import OPPOSITE, move_channels
from ckpttool.commands.restore import (
    FACTS,
    Agent,
    VerifiedSidecar,
    build_agent,
    merge_metadata,
    policy_sizes,
    select_network_leaves,
)
from ckpttool.core import plugins
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import EnvironmentMismatchError, MappingError, UnsupportedError, UsageError
from ckpttool.core.kinds import ACTIVATIONS
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, Sidecar, assumption_sentences
from ckpttool.core.text import format_count
from ckpttool.core.tree import Tree
from ckpttool.core.urls import format_command
from ckpttool.libraries import recognize, schema, tf_names
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import (
    NO_LAYOUT,
    VALUES,
    AgentNetwork,
    Choices,
    RecognizedAgent,
    known_choices,
)
from ckpttool.networks import numpy_backend
from ckpttool.networks.build import (
    HEADS,
    NetworkSettings,
    layer_widths,
    policy_network,
    q_network,
    value_network,
)
from ckpttool.networks.network import Dense, Network, Observation, Policy

# Collects the facts that a network needs and its checkpoint lacks, with their origins, and builds it.


@dataclass(frozen=True, slots=True)
class ActionBounds:
    """Action bounds per dimension and their origin ("Pendulum-v1's action space").

    Without an origin they are placeholders that do not affect the network, and are not reported.
    """

    low: Sequence[float]
    high: Sequence[float]
    origin: str | None


def missing_options(agent: Agent, known: Sidecar) -> tuple[str, ...]:
    """Return the options for missing facts that the policy requires."""
    facts = agent.binding.facts
    hidden, _ = policy_sizes(agent.binding, agent.tree)
    activations = known.activations or facts.activations or facts.hidden
    found = ("--activation",) if hidden and not activations else ()
    return found if known.head or facts.head else (*found, "--head")


def require_facts(agent: Agent, *, needs_env: bool = False, other: Agent | None = None) -> None:
    """Raise UsageError with the possible values if no file contains the activations or the action map.

    `needs_env` is whether the command lacks an environment as well. Raise UnsupportedError for a fact that
    a file states in a form that is not understood, unless a value is given for it.
    """
    known = agent.known if other is None else _complete_metadata(agent, other)
    restore.require_understood(agent.binding, known, agent.checkpoint.path)
    missing = missing_options(agent, known)
    if schema.HALVES in agent.binding.facts.lacks and not missing:
        raise UsageError(
            "needs --env: the last layer may output the actions, or their means and deviations",
            file=agent.checkpoint.path,
            hint="add --env ID, or --bounds with a number for each action",
        )
    if not missing:
        return
    options = ["--env"] * needs_env + [*missing]
    unknown = " and ".join(_LACKED[option] for option in missing)
    raise UsageError(
        f"needs {_join_words(options)}: no file records {unknown}",
        file=agent.checkpoint.path,
        hint=f"add {_join_words([_POSSIBLE[option] for option in options])}, as the training program has it",
    )


def _join_words(words: Sequence[str]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1]) if len(words) > 1 else words)


_LACKED = {"--activation": "the activations", "--head": "the action map"}
_POSSIBLE = {
    "--env": "--env ID",
    "--activation": f"--activation NAME ({', '.join(ACTIVATIONS)})",
    "--head": f"--head NAME ({', '.join(HEADS)})",
}


def _require_scaled(agent: Agent, known: Sidecar, bounds: ActionBounds) -> None:
    """Raise UsageError if a model ends in tanh, but actions exceed that range."""
    read = known.is_read("head")
    low = bounds.low if known.action_low is None else known.action_low
    high = bounds.high if known.action_high is None else known.action_high
    if known.head == "unit_tanh" and read and not (np.all(np.equal(low, -1)) and np.all(np.equal(high, 1))):
        raise UsageError(
            "needs --head: the model ends in tanh, and no file records whether its program scales the "
            "actions",
            file=agent.checkpoint.path,
            expected="bounds -1 to 1",
            found=f"bounds {_format_bounds(low)} to {_format_bounds(high)}",
            hint="add --head affine if the program scales the actions to the bounds, --head unit_tanh if not",
        )


def require_even_bounds(agent: Agent, settings: NetworkSettings) -> None:
    """Raise UsageError for tanh times one number, a layout's default, between bounds of several sizes.

    No program has such bounds and this map: some bounds would be unreachable, others exceeded.
    """
    low, high = settings.action_low, settings.action_high
    assumed = agent.known.is_assumed("head")
    even = all(np.isclose(value, high[0]) for value in high) and all(np.isclose(v, -high[0]) for v in low)
    if settings.head != "tanh" or even or not assumed:
        return
    raise UsageError(
        "needs --head: tanh times one number, the layout's default, cannot produce these action bounds",
        file=agent.checkpoint.path,
        found=f"bounds {_format_bounds(low)} to {_format_bounds(high)}",
        hint="add --head affine if the program maps tanh to the bounds, --head tanh if it multiplies tanh by "
        "the first upper bound",
    )


def one_choice(agent: Agent) -> tuple[Choices, str]:
    """Return one choice among as many actions as the policy has outputs, and why that is assumed."""
    width = layer_widths(agent.tree, agent.binding.policy or agent.binding.parts[0])[1]
    return Choices((width,), (0,)), f"a discrete policy with {format_count(width, 'output')}"


def derive_network_settings(
    agent: Agent, bounds: ActionBounds, other: Agent | None = None
) -> tuple[NetworkSettings, LedgerEntries]:
    """Return the settings and a ledger entry for each assumption.

    The agent's sidecar or files decide; where they record nothing, `other` decides (the same agent
    in another form); then the layout's default, and `bounds` for the actions.
    """
    require_facts(agent, other=other)
    known = agent.known if other is None else _complete_metadata(agent, other)
    facts = agent.binding.facts
    recorded = known_choices(known)
    if facts.atom_range is not None and (recorded is None or recorded.scores != "atoms"):
        width = layer_widths(agent.tree, agent.binding.policy or agent.binding.parts[0])[1]
        raise UnsupportedError(
            "a categorical DQN: no file contains how many atoms each action has",
            file=agent.checkpoint.path,
            found=f"{width} outputs",
            hint="--env ID, where ID is the environment: its number of actions shows it",
        )
    sidecars = [each.sidecar for each in (agent, other) if each is not None]
    assumed = list(restore.assumed_entries(agent.binding, known, *sidecars))
    epsilon = known.norm_epsilon(facts.epsilon) if agent.binding.has_norms else facts.epsilon
    low, high = known.action_low, known.action_high
    choices = known_choices(known)
    if choices is None and known.head == "argmax":
        # The scores of one choice and those of several are the same outputs.
        choices, origin = one_choice(agent)
        assumed.append(LedgerEntry("assumed", "discrete actions", choices.title, origin=origin))
    if choices is not None:
        low, high = (), ()
    elif low is None or high is None:
        low, high = bounds.low, bounds.high
        if bounds.origin is not None:
            value = f"action bounds {_format_bounds(low)} to {_format_bounds(high)}"
            assumed.append(LedgerEntry("assumed", "action bounds", value, origin=bounds.origin))
    if bounds.origin is not None or known.action_low is not None:
        _require_scaled(agent, known, bounds)
    read = known.is_read("head")
    if agent.binding.layout == NO_LAYOUT and known.head in ("identity", "unit_tanh") and read:
        sentence = "actions are the model's outputs: no file records what its program does with them"
        assumed.append(LedgerEntry("assumed", "action map", sentence))
    settings = NetworkSettings(
        tuple(known.activations or (facts.hidden,)),
        str(known.head or facts.head),
        float(epsilon),
        tuple(map(float, low)),
        tuple(map(float, high)),
        known.obs_norm,
        choices,
        network_hidden={name: tuple(own) for name, own in (known.network_activations or {}).items()},
    )
    return settings, tuple(assumed)


def _complete_metadata(agent: Agent, other: Agent) -> Sidecar:
    """Return the agent's facts, filled in from the other agent.

    The own sidecar always wins, because the agent is played with it; an agent without a record of
    normalised observations does not normalise.
    """
    both = merge_metadata(agent.known, other.known)
    own = {name: recorded for name in FACTS if (recorded := getattr(agent.sidecar, name, None)) is not None}
    # What the agent's own files state, understood or not, is not completed.
    own |= {name: getattr(agent.known, name) for name in agent.binding.facts.stated}
    provenance = {**both.provenance, **{name: agent.known.provenance.get(name, "") for name in own}}
    return replace(both, **{**own, "obs_norm": agent.known.obs_norm}, provenance=provenance)


def build_part_network(agent: Agent, part: AgentNetwork, settings: NetworkSettings) -> Network:
    """Return a part as a network: a policy, a state value, or a Q-function.

    A policy of discrete actions ends with their scores: equal choices do not show that they are equal.
    """
    if settings.choices is not None and not any(each.acts for each in agent.binding.parts):
        joined = agent.binding.with_q_policies(settings.choices.scores).parts
        part = next((each for each in joined if each.title == part.title), part)
    if part.acts:
        return policy_network(agent.tree, part, settings.scores)
    if part.component in VALUES:
        return value_network(agent.tree, part, settings)
    return q_network(agent.tree, part, settings, *network_sizes(agent))


def network_sizes(agent: Agent) -> tuple[int, int]:
    """Return the numbers of observations and of actions."""
    actor = agent.part("actor") or agent.part("actor_target")
    if actor is not None:
        return layer_widths(agent.tree, actor)
    # For a critic alone, how its inputs divide does not affect its output.
    total, _ = layer_widths(agent.tree, agent.binding.parts[0])
    return total - 1, 1


def _format_bounds(values: Sequence[float]) -> str:
    distinct = sorted(set(values))
    return f"{distinct[0]:g}" if len(distinct) == 1 else f"[{', '.join(f'{v:g}' for v in values)}]"


# Pairs the networks of two checkpoints of one agent, each as its own checkpoint specifies it.


def available_backend(agent: Agent) -> str:
    """Return the backend of the agent's own framework, or numpy if that framework is not installed."""
    return agent.framework if plugins.find("backends", agent.framework).available() else "numpy"


def counterpart_title(part: AgentNetwork, agent: Agent, other: Agent) -> str | None:
    """Return the title of the other agent's network that should equal a part of `agent`; None without one.

    The only policy of a file without a layout (ONNX, TorchScript, weights) may be a Q-network, which that
    does not show.
    """
    if other.part(part.title) is not None or not part.acts or part.component.endswith("_target"):
        return part.title if other.part(part.title) is not None else None
    policy = other.part(other.title("actor"))
    alone = [each.binding.layout == NO_LAYOUT for each in (agent, other)]
    if policy is None or not policy.acts or all(alone) or not any(alone):
        return None
    return policy.title if part.chooses or policy.chooses else None


def shared_networks(a: Agent, b: Agent) -> list[str]:
    """Return the first agent's titles of the networks that both have."""
    return [part.title for part in a.binding.parts if counterpart_title(part, a, b) is not None]


def missing_networks(a: Agent, b: Agent) -> list[str]:
    """Return the titles of the networks that only the first agent has."""
    return [part.title for part in a.binding.parts if counterpart_title(part, a, b) is None]


def pair_networks(
    a: Agent, b: Agent, titles: Sequence[str], assumed: list[str]
) -> tuple[dict[str, tuple[Network, Network]], list[str]]:
    """Return network pairs, and a note for each critic or value that cannot run; a policy must run."""
    found, skipped = {}, []
    for title in titles:
        part = a.part(title)
        other = title if part is None else counterpart_title(part, a, b) or title
        try:
            found[title] = (
                build_agent_network(a, b, title, assumed),
                build_agent_network(b, a, other, assumed),
            )
        except (MappingError, UnsupportedError) as error:
            online = part is None or (part.acts and not part.component.endswith("_target"))
            if online or len(titles) == 1:
                raise
            skipped.append(f"{title} is not compared: {error.message}")
    return found, skipped


def agent_network_settings(agent: Agent, other: Agent) -> tuple[NetworkSettings, LedgerEntries]:
    """Return how the agent's layers become networks, and a ledger entry for each assumption."""
    obs_dim, act_dim = network_sizes(agent)
    _, actions = network_sizes(other)
    if actions != act_dim and len(agent.known.action_low or other.known.action_low or ()) == actions:
        paths = (other.checkpoint.path, agent.checkpoint.path)
        raise EnvironmentMismatchError(
            "the two policies have different sizes, and one records no action bounds",
            file=agent.checkpoint.path,
            expected=format_count(actions, "action"),
            found=f"{format_count(obs_dim, 'observation')}, {format_count(act_dim, 'action')}",
            hint=format_command("diff", *paths),
        )
    unit = ActionBounds(
        [-1.0] * act_dim, [1.0] * act_dim, "same default for both sides, because neither records bounds"
    )
    return derive_network_settings(agent, unit, other)


def build_agent_network(agent: Agent, other: Agent, title: str, assumed: list[str]) -> Network:
    """Return one network of the agent; append its assumptions."""
    part = agent.runnable(title)
    if part is None:
        raise UsageError(f"the checkpoint has no network {title}", file=agent.checkpoint.path)
    settings, guesses = agent_network_settings(agent, other)
    assumed.extend(assumption_sentences(guesses))
    return build_part_network(agent, part, settings)


# Output differences of one network, and their bound.
#
# The error of both is measured against a float64 reference in numpy: a conversion is correct when B's error
# is no larger than that of A's own framework, give or take rounding.

PARITY_OBSERVATIONS = 1000
OWN_ERROR = 2.0
# Relative to the largest intermediate number, not the output: docs/decisions/0016-verification-bounds.md.
SCALE = 1e-5
# Two float32 computations of one sum differ by a few units in the last place of the largest intermediate
# number: a policy's tanh hides how large earlier numbers were, and how far rounding moved them.
UNIT = float(np.finfo(np.float32).eps)
ROUNDING = 4 * UNIT


@dataclass(frozen=True, slots=True)
class Parity:
    """Output differences of one network: B from A, absolute and relative to the output's scale.

    `error_a` and `error_b` are the largest differences from the float64 reference.
    """

    name: str
    n: int
    max_abs: float
    max_rel: float
    error_a: float
    error_b: float
    within: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def failed_parity(title: str) -> Parity:
    """Return the result for a network that B lacks, or has in another size."""
    return Parity(title, 0, np.inf, np.inf, np.inf, np.inf, within=False)


def measure_parity(
    title: str,
    network: Network,
    given: Observation,
    outputs: tuple[np.ndarray, np.ndarray],
    tolerance: float | None = None,
    own: float = OWN_ERROR,
    *,
    exact: np.ndarray | None = None,
) -> Parity:
    """Return how far two outputs for `given` are from each other and from the float64 result.

    Without a `tolerance`, B may be `own` times as far off as A, or within rounding. `exact` is the
    network's float64 output, if known.
    """
    if exact is None:
        exact = run_network(numpy_backend.build(network.cast("float64")), to_float64(given))
    largest = max(_largest_activation(network, given), float(np.abs(exact).max()))
    scale = float(np.abs(exact).max()) or 1.0
    errors = [float(np.abs(output.astype(np.float64) - exact).max()) for output in outputs]
    between = float(np.abs(outputs[0].astype(np.float64) - outputs[1]).max())
    usual = allowed_error(errors[0], _rounding_share(network), largest, own)
    allowed = usual if tolerance is None else tolerance * scale
    return Parity(
        title, len(exact), between, between / scale, errors[0], errors[1], within=errors[1] <= allowed
    )


def allowed_error(error_a: float, share: float, largest: float, own: float = OWN_ERROR) -> float:
    """Return how far B may be from the float64 reference without a tolerance.

    `share` is what rounding may cost of the `largest` number on the way, `own` the factor of A's error.
    """
    allowed = min(max(own * error_a, share * largest), SCALE * largest)
    # For extreme inputs, A's own error can exceed that; B need not be better than A.
    return max(allowed, error_a)


def _largest_activation(network: Network, given: Observation) -> float:
    """Return the largest float64 magnitude of any dense layer's output, except the last."""
    dense = [n for n, node in enumerate(network.nodes, len(network.inputs)) if isinstance(node.layer, Dense)]
    exact, double = network.cast("float64"), to_float64(given)
    inner = (
        run_network(numpy_backend.build(replace(exact, output=n)), double)
        for n in dense
        if n != network.output
    )
    return max((float(np.abs(output).max()) for output in inner), default=0.0)


def _rounding_share(network: Network) -> float:
    """Return the share of the largest number that rounding may cost: the root of the term count.

    TensorFlow adds terms one after the other, PyTorch in blocks: with 256 terms TensorFlow was off by 6
    units from float64 where PyTorch was off by 2.
    """
    kernels = (node.layer.kernel for node in network.nodes if isinstance(node.layer, Dense))
    terms = max((kernel.shape[0] for kernel in kernels), default=1)
    return max(ROUNDING, UNIT * float(np.sqrt(terms)) / 2)


def make_observations(network: Network, n: int = PARITY_OBSERVATIONS) -> Observation:
    """Return fixed inputs: zeros, ordinary and extreme values; float32 [n, ...], always the same."""
    generator = np.random.default_rng(0)
    scales = np.repeat([0.0, 1.0, 10.0], [1, n - n // 5 - 1, n // 5])
    drawn = {
        name: (generator.standard_normal((n, *shape)).T * scales).T.astype(np.float32)
        for name, shape in network.input_shapes.items()
    }
    if "action" in drawn:
        drawn["action"] = np.clip(drawn["action"], -1, 1)
    return drawn if len(drawn) > 1 else drawn[network.inputs[0][0]]


def to_float64(given: Observation) -> Observation:
    """Return the inputs in float64."""
    if isinstance(given, np.ndarray):
        return given.astype(np.float64)
    return {name: array.astype(np.float64) for name, array in given.items()}


def run_network(policy: Policy, given: Observation) -> np.ndarray:
    """Return the output [batch, n] of a network without memory."""
    output, _ = policy.step(given)
    return output


# Verifies a conversion before the output gets its name: it computes the same as the source.
#
# Both sides run in numpy, in float64: that tests the mapping without starting a framework. `verify` shows how
# the frameworks themselves run the two files.

OBSERVATIONS = 100
_CANNOT = (EnvironmentMismatchError, MappingError, UnsupportedError, UsageError)


class OutputMismatchError(Exception):
    """The output computes something else: stops writing; only `convert` handles it."""

    def __init__(self, proof: OutputVerification) -> None:
        """Store the parity result."""
        super().__init__()
        self.proof = proof


@dataclass(frozen=True, slots=True)
class OutputVerification:
    """Comparison of every network that source and target have; notes list those not compared."""

    networks: tuple[Parity, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """Return whether all networks give the same outputs."""
        return all(network.within for network in self.networks)

    def entry(self) -> list[dict[str, Any]]:
        """Return the record for the sidecar."""
        kept = ("name", "max_abs", "max_rel", "within")
        return [{name: getattr(each, name) for name in kept} for each in self.networks]


def prepared_source_agent(
    checkpoint: Checkpoint, tree: Tree, binding: RecognizedAgent, own: VerifiedSidecar
) -> Agent:
    """Return the source's agent: the converted, prepared part of the checkpoint."""
    found, binding = select_network_leaves(tree, binding), tf_names.check_connections(binding, tree)
    known = restore.merge_metadata(own.sidecar, restore.read_metadata(binding, found))
    return Agent(checkpoint, binding, found, own.sidecar, known, ())


def verify_outputs(source: Agent, written: Checkpoint, target: str, recorded: Sidecar) -> OutputVerification:
    """Compare the source with the output for `target`, read again, its layout recognised again.

    `recorded` is the sidecar to be written beside it. Raise DiffersError if a network computes something
    else.
    """
    written = replace(written, path=target)
    binding = recognize_checkpoint(written)
    if binding is None:
        return OutputVerification(
            notes=("no layout recognises the output, so its networks were not compared",)
        )
    there = build_agent(written, binding, VerifiedSidecar(replace(recorded, computation=None)))
    found: list[Parity] = []
    notes: list[str] = []
    never = recognize.list_never_run_components(plugins.find("layouts", there.binding.layout).load())
    for title in shared_networks(source, there):
        if title.partition("/")[0] in never:
            notes.append(
                f"{title} was not compared: files of layout {there.binding.layout} do not record "
                "how to run it"
            )
            continue
        try:
            left = build_agent_network(source, there, title, [])
        except _CANNOT as error:
            notes.append(f"{title} was not compared: {error.message}")
            continue
        found.append(_compare_network(title, left, source, there))
    proof = OutputVerification(tuple(found), tuple(notes))
    if not proof.within:
        raise OutputMismatchError(proof)
    return proof


def _compare_network(title: str, left: Network, source: Agent, there: Agent) -> Parity:
    part = source.part(title)
    try:
        right = build_agent_network(
            there, source, title if part is None else counterpart_title(part, source, there) or title, []
        )
    except _CANNOT:
        return failed_parity(title)  # the source could run it
    if left.inputs != right.inputs or left.width != right.width:
        return failed_parity(title)
    given = make_observations(left, OBSERVATIONS)
    with np.errstate(all="ignore"):
        first, second = (
            run_network(numpy_backend.build(n.cast("float64")), to_float64(given)) for n in (left, right)
        )
    if not np.isfinite(first).all():
        # An agent whose training failed is converted like any other: equal NaN are equal outputs.
        same = np.array_equal(first, second, equal_nan=True)
        return Parity(title, len(first), 0.0, 0.0, 0.0, 0.0, within=True) if same else failed_parity(title)
    return measure_parity(title, left, given, (first, second), exact=first)


# Outputs of two models: which belong together, how far they may differ, and whether they show anything.

Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class OutputNames:
    """An output of both sides: its names, and how B's channels move to A's order ("" if they do not)."""

    a: str
    b: str
    how: str


def pair_outputs(
    a: Outputs, b: Outputs, hows: set[str], layouts: Sequence[str], assumed: list[str]
) -> tuple[list[OutputNames], list[str]]:
    """Return the outputs that belong together, and those that B lacks; append assumptions.

    Names decide if all of one side's occur on the other, else the order. `hows` are the moves of the
    inputs' channels, `layouts` where each side's convolutions have channels.
    """
    if {*a} <= {*b} or {*b} <= {*a}:
        rows = [(name, name) for name in a if name in b]
        missing = [name for name in a if name not in b]
    else:
        rows, missing = list(zip(a, b, strict=False)), [*a][len(b) :]
        if len(a) > 1 or len(b) > 1:
            named = ", ".join(f"{x} = {y}" for x, y in rows)
            assumed.append(f"outputs are paired by order: {named}")
    if not hows and all(layouts) and layouts[0] != layouts[1]:
        hows = {layouts[1]}
    how = next(iter(hows)) if len(hows) == 1 else ""
    found = []
    for x, y in rows:
        turned = how if how and a[x].ndim > 2 and a[x].ndim == b[y].ndim else ""
        if turned and a[x].shape == b[y].shape and len({*a[x].shape[1:]}) > 1:
            turned = ""
        if turned and move_channels(b[y], OPPOSITE[turned]).shape != a[x].shape:
            turned = ""
        if turned:
            assumed.append(f"output {x} of B has channels {turned}, like its convolutions")
        found.append(OutputNames(x, y, OPPOSITE[turned]))
    return found, missing


# The bound of an output.

# A number on the way may be far larger than the output, e.g. the -1e9 of a mask: what rounding may cost is
# limited by this many times the output's own scale. A float64 run shows where rounding costs more.
_LARGEST = 32.0
# A feature whose numbers are smaller than this share of the output may be what is left of larger ones.
_RESIDUE = 1e-5
_EXACT_RESIDUE = 1e-9
# Constants in a model's code may be those of float32: so much of a constant offset counts as its range.
_CONSTANT = 1e-2


# How many times coarser the numbers of a shorter type are than float32's.
_COARSER = {"float16": 2**13, "bfloat16": 2**16}


@dataclass(frozen=True, slots=True)
class RoundingBound:
    """What rounding may cost: the largest number on the way, and its share."""

    largest: float
    share: float

    @classmethod
    def of(
        cls,
        calls: Sequence[Mapping[str, Any]],
        layers: Sequence[Mapping[str, Any]],
        rounded: str | None = None,
    ) -> RoundingBound:
        """Return the bound for the observed calls: terms of the longest sum, number of layers in sequence.

        `rounded` is a shorter type in which one side computes.
        """
        rows = [row for call in calls for row in call.get("made", ())]
        sizes = [float(row["largest"]) for row in rows if row["kind"] == "f"]
        terms, depth = 1, 0
        for layer in layers:
            shapes = [tensor["shape"] for tensor in layer["tensors"] if len(tensor["shape"]) > 1]
            depth += bool(shapes)
            terms = max([terms, *(math.prod(shape) // max(min(shape), 1) for shape in shapes)])
        share = max(ROUNDING, UNIT * math.sqrt(terms) / 2) * math.sqrt(max(depth, 1))
        share *= _COARSER.get(rounded or "", 1)
        return cls(max((each for each in sizes if math.isfinite(each)), default=0.0), share)

    def near(self, scale: float) -> float:
        """Return the number that rounding is relative to, for an output of this scale."""
        return min(max(self.largest, scale), _LARGEST * scale)


def _features(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array with the batch and all but one axis joined: the last axis, then the second."""
    for axis in dict.fromkeys((array.ndim - 1, 1)) if array.ndim > 1 else ():
        yield np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


@dataclass(frozen=True, slots=True)
class OutputBound:
    """How far an output may be from the reference: `within` judges differences of the output's shape.

    Each feature has its own scale: a large one would hide another one's error. The float64 runs of both
    sides are compared by the range of the features, because a constant offset hides what is added to it.
    """

    reference: np.ndarray
    rounding: RoundingBound
    own: np.ndarray | None
    both_exact: bool
    tolerance: float | None

    @property
    def scale(self) -> float:
        """The largest number, 1 for zeros only."""
        return float(np.abs(self.reference).max(initial=0.0)) or 1.0

    def allows(self, error: np.ndarray) -> bool:
        """Return whether float32 outputs may differ so much from the reference."""
        if self.tolerance is not None:
            return float(error.max(initial=0.0)) <= self.tolerance * self.scale
        share, scale = self.rounding.share, self.scale
        own = 0.0 if self.own is None else OWN_ERROR * float(self.own.max(initial=0.0))
        if float(error.max(initial=0.0)) > max(own, share * self.rounding.near(scale)):
            return False
        # In float64, residues of rounding are known for what they are.
        return self.both_exact or all(self._by_feature(error))

    def _by_feature(self, error: np.ndarray) -> Iterator[bool]:
        share, scale = self.rounding.share, self.scale
        own = np.zeros_like(error) if self.own is None else self.own
        for each, wide, known in zip(
            _features(error), _features(self.reference), _features(own), strict=True
        ):
            sizes = np.abs(wide).max(1, initial=0.0)
            near = np.minimum(max(self.rounding.largest, scale), _LARGEST * sizes)
            near = np.where(sizes < _RESIDUE * scale, scale, near)
            allowed = np.maximum(OWN_ERROR * known.max(1, initial=0.0), share * near)
            yield bool((each.max(1, initial=0.0) <= allowed).all())

    def allows_exact(self, error: np.ndarray) -> bool:
        """Return whether float64 outputs may differ so much: by float32 constants in a model's code."""
        if self.tolerance is not None:
            return True
        if float(error.max(initial=0.0)) > ROUNDING * self.rounding.near(self.scale):
            return False
        for each, wide in zip(_features(error), _features(self.reference), strict=True):
            ranges = np.maximum(np.ptp(wide, axis=1) / 2, _CONSTANT * np.abs(wide).max(1))
            sizes = np.maximum(ranges, _EXACT_RESIDUE * self.scale)
            near = np.minimum(max(self.rounding.largest, self.scale), _LARGEST * sizes)
            if not (each.max(1, initial=0.0) <= ROUNDING * near).all():
                return False
        return True


@dataclass(frozen=True, slots=True)
class OutputResult:
    """The measured differences of an output, and their bound; None if it could not be measured."""

    parity: Parity
    bound: OutputBound | None = None
    fixed: np.ndarray | None = None
    """A's own numbers: those of its float64 run if both sides have one"""

    def responds(self, other: np.ndarray, *, exact: bool) -> bool:
        """Return whether A's output for other inputs differs by more than the bound allows."""
        if self.bound is None or self.fixed is None or other.shape != self.fixed.shape:
            return True
        if other.dtype.kind in "iub":
            return not np.array_equal(other, self.fixed)
        with np.errstate(all="ignore"):
            apart = np.abs(_finite(other) - self.fixed)
        return not (self.bound.allows_exact(apart) if exact else self.bound.allows(apart))


def _finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0.0).astype(np.float64)


def measure_output(
    name: str,
    outputs: tuple[np.ndarray, np.ndarray],
    exact: Sequence[np.ndarray | None],
    rounding: RoundingBound,
    tolerance: float | None,
) -> OutputResult:
    """Return the differences of one output, by the rule for agents; all arrays have A's order of axes.

    A's float64 run is the reference, else B's, else A's own output. B may be as far off as A only where A's
    own float64 run shows how far A is. If both runs exist, they must agree within float32 rounding of the
    output: they show differences that float32 hides. Infinite numbers and NaN must be at the same places,
    integers and truth values must be equal.
    """
    a, b = outputs
    if a.shape != b.shape or not a.size:
        return OutputResult(failed_parity(name))
    if not np.array_equal(a[~np.isfinite(a)], b[~np.isfinite(b)], equal_nan=True) or not np.array_equal(
        np.isfinite(a), np.isfinite(b)
    ):
        return OutputResult(failed_parity(name))
    there = np.isfinite(a)
    sides = [None if each is None or each.shape != a.shape else _masked(each, there) for each in exact]
    whole = a.dtype.kind in "iub" and b.dtype.kind in "iub"
    same = not whole or np.array_equal(a, b)
    a, b = _masked(a, there), _masked(b, there)
    reference = next((each for each in sides if each is not None), a)
    errors = [np.abs(each - reference) for each in (a, b)]
    both = all(each is not None for each in sides)
    bound = OutputBound(reference, rounding, errors[0] if sides[0] is not None else None, both, tolerance)
    judged = errors[1] if sides[0] is not None else np.maximum(*errors)
    within = same and bound.allows(judged)
    if both:
        within = within and bound.allows_exact(np.abs(sides[0] - sides[1]))  # type: ignore[operator]
    between = float(np.abs(a - b).max())
    sizes = [float(each.max()) for each in errors]
    parity = Parity(name, len(a), between, between / bound.scale, sizes[0], sizes[1], within=within)
    return OutputResult(parity, bound, sides[0] if both else a)


def _masked(array: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the finite numbers in float64, 0 where A has none."""
    found = np.asarray(array, np.float64)
    return np.where(there & np.isfinite(found), found, 0.0)


# A float64 run that computes something else is no reference.

_CREDIBLE = 1e-2


def are_close(plain: Outputs, exact: Outputs) -> bool:
    """Return whether a float64 run computes what the model computes: far more than rounding apart is not."""
    for name, each in plain.items():
        other = exact.get(name)
        if other is None or other.shape != each.shape:
            return False
        finite = np.isfinite(each) & np.isfinite(other)
        scale = float(np.abs(other[finite]).max(initial=0.0)) or 1.0
        apart = np.abs(each[finite].astype(np.float64) - other[finite])
        if float(apart.max(initial=0.0)) > _CREDIBLE * scale:
            return False
    return True


# Whether an output repeats, up to the rounding of another order of sums.

_REPEATED = 1e-4


def changing_outputs(first: Outputs, again: Outputs) -> list[str]:
    """Return the outputs that a second call with the same inputs changes by more than rounding."""
    found = []
    for name, each in first.items():
        other = again.get(name)
        if (
            other is None
            or other.shape != each.shape
            or not np.array_equal(np.isfinite(each), np.isfinite(other))
        ):
            found.append(name)
            continue
        scale = float(np.abs(_finite(each)).max(initial=0.0))
        if float(np.abs(_finite(each) - _finite(other)).max(initial=0.0)) > _REPEATED * scale:
            found.append(name)
    return found


# Other inputs, which show whether A's outputs depend on them.

_SHAKEN = 0.1


def shake_inputs(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return inputs of another order of rows, and near the given ones for floats."""
    generator = np.random.default_rng(1)
    found = []
    for each in arrays:
        if each.dtype.kind == "f":
            noise = generator.standard_normal(each.shape)
            found.append((each * (1 + _SHAKEN * noise)).astype(each.dtype))
        else:
            found.append(np.roll(each, 1, axis=0 if len(each) > 1 else -1))
    return found


# Both sides' results for one set of inputs.


@dataclass(slots=True)
class ComparisonRound:
    """What both sides return for one set of inputs, and the measured outputs."""

    made: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    exact: tuple[dict[str, np.ndarray] | None, dict[str, np.ndarray] | None]
    calls: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    names: list[OutputNames]
    missing: list[str]
    results: list[OutputResult]

    @property
    def exact_on_both(self) -> bool:
        """Whether both sides ran in float64."""
        return self.exact[0] is not None and self.exact[1] is not None

    @property
    def parities(self) -> tuple[Parity, ...]:
        """The outputs' rows."""
        return (*(each.parity for each in self.results), *map(failed_parity, self.missing))

    @property
    def failed(self) -> bool:
        """Whether an output differs, or B lacks it."""
        return not all(each.within for each in self.parities)

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first output that differs, else the first, in A's order of axes."""
        rows = zip(self.names, self.results, strict=True)
        each = next((name for name, result in rows if not result.parity.within), self.names[0])
        a, b = self.exact if self.exact_on_both else self.made
        assert a is not None  # noqa: S101 - both sides ran in float64
        assert b is not None  # noqa: S101
        return a[each.a], move_channels(b[each.b], each.how)
