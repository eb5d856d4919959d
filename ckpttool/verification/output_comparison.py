"""Networks of a checkpoint and comparison of their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core import plugins
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import EnvironmentMismatchError, MappingError, UnsupportedError, UsageError
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.tree import Tree
from ckpttool.evaluation import restore
from ckpttool.evaluation.agent_networks import build_agent_network, counterpart_title, shared_networks
from ckpttool.evaluation.restore import Agent, VerifiedSidecar, build_agent, select_network_leaves
from ckpttool.libraries import layer_connections, recognize
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import RecognizedAgent
from ckpttool.networks import numpy_backend
from ckpttool.networks.network import Dense, Network, Observation, Policy
from ckpttool.verification.inputs import OPPOSITE, move_channels
from ckpttool.verification.tolerances import OWN_ERROR

if TYPE_CHECKING:
    from ckpttool.networks.messages import CallRow, LayerRow

PARITY_OBSERVATIONS = 1000
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
    observation: Observation,
    outputs: tuple[np.ndarray, np.ndarray],
    tolerance: float | None = None,
    own: float = OWN_ERROR,
    *,
    exact: np.ndarray | None = None,
) -> Parity:
    """Return how far two outputs are from each other and from the float64 result.

    The error of both is measured against a float64 reference in numpy: a conversion is correct when B's error
    is no larger than that of A's own framework, give or take rounding.

    Args:
        title: the network's name.
        network: what is computed in float64.
        observation: the inputs.
        outputs: A's and B's.
        tolerance: how far B may be off, relative to the output's scale; without one, `own` times as far as A,
            or within rounding.
        own: the factor of A's error.
        exact: the network's float64 output, if known.
    """
    if exact is None:
        exact = run_network(numpy_backend.build(network.cast("float64")), to_float64(observation))
    largest = max(_largest_activation(network, observation), float(np.abs(exact).max()))
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


def _largest_activation(network: Network, observation: Observation) -> float:
    """Return the largest float64 magnitude of any dense layer's output, except the last."""
    dense = [n for n, node in enumerate(network.nodes, len(network.inputs)) if isinstance(node.layer, Dense)]
    exact, double = network.cast("float64"), to_float64(observation)
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


def to_float64(observation: Observation) -> Observation:
    """Return the inputs in float64."""
    if isinstance(observation, np.ndarray):
        return observation.astype(np.float64)
    return {name: array.astype(np.float64) for name, array in observation.items()}


def run_network(policy: Policy, observation: Observation) -> np.ndarray:
    """Return the output [batch, n] of a network without memory."""
    output, _ = policy.step(observation)
    return output


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
        return [{name: getattr(network, name) for name in kept} for network in self.networks]


def prepared_source_agent(
    checkpoint: Checkpoint, tree: Tree, binding: RecognizedAgent, own: VerifiedSidecar
) -> Agent:
    """Return the source's agent: the converted, prepared part of the checkpoint."""
    leaves, binding = select_network_leaves(tree, binding), layer_connections.check_connections(binding, tree)
    known = restore.merge_metadata(own.sidecar, restore.read_metadata(binding, leaves))
    whole = Tree({**leaves, **restore.select_encoder_leaves(tree, binding)})
    return Agent(checkpoint, binding, whole, own.sidecar, known, ())


def verify_outputs(source: Agent, written: Checkpoint, target: str, recorded: Sidecar) -> OutputVerification:
    """Compare the source with the output for `target`, read again, its layout recognised again.

    `recorded` is the sidecar to be written beside it. Raise DiffersError if a network computes something
    else. Both sides run in numpy, in float64: that tests the mapping without starting a framework. `verify`
    shows how the frameworks themselves run the two files.
    """
    written = replace(written, path=target)
    binding = recognize_checkpoint(written)
    if binding is None:
        return OutputVerification(
            notes=("no layout recognises the output, so its networks were not compared",)
        )
    there = build_agent(written, binding, VerifiedSidecar(replace(recorded, computation=None)))
    parities: list[Parity] = []
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
        try:
            parities.append(_compare_network(title, left, source, there))
        except _CANNOT as error:  # the source could run it
            parities.append(failed_parity(title))
            notes.append(f"{title} cannot be read back from the output: {error.message}")
    proof = OutputVerification(tuple(parities), tuple(notes))
    if not proof.within:
        raise OutputMismatchError(proof)
    return proof


def _compare_network(title: str, left: Network, source: Agent, there: Agent) -> Parity:
    part = source.part(title)
    right = build_agent_network(
        there, source, title if part is None else counterpart_title(part, source, there) or title, []
    )
    if left.inputs != right.inputs or left.width != right.width:
        return failed_parity(title)
    rows = make_observations(left, OBSERVATIONS)
    with np.errstate(all="ignore"):
        first, second = (
            run_network(numpy_backend.build(n.cast("float64")), to_float64(rows)) for n in (left, right)
        )
    if not np.isfinite(first).all():
        # An agent whose training failed is converted like any other: equal NaN are equal outputs.
        same = np.array_equal(first, second, equal_nan=True)
        return Parity(title, len(first), 0.0, 0.0, 0.0, 0.0, within=True) if same else failed_parity(title)
    return measure_parity(title, left, rows, (first, second), exact=first)


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
    """Return the outputs that belong together, and those that B lacks.

    Names decide if all of one side's occur on the other, else the order.

    Args:
        a: A's outputs by name.
        b: B's.
        hows: the moves of the inputs' channels.
        layouts: where each side's convolutions have channels.
        assumed: gets the assumptions.
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
    pairs = []
    for x, y in rows:
        turned = how if how and a[x].ndim > 2 and a[x].ndim == b[y].ndim else ""
        if turned and a[x].shape == b[y].shape and len({*a[x].shape[1:]}) > 1:
            turned = ""
        if turned and move_channels(b[y], OPPOSITE[turned]).shape != a[x].shape:
            turned = ""
        if turned:
            assumed.append(f"output {x} of B has channels {turned}, like its convolutions")
        pairs.append(OutputNames(x, y, OPPOSITE[turned]))
    return pairs, missing


# A number on the way may be far larger than the output, e.g. the -1e9 of a mask: what rounding may cost is
# limited by this many times the output's own scale. A float64 run shows where rounding costs more.
_LARGEST = 32.0
# A feature whose numbers are smaller than this share of the output may be what is left of larger ones.
_RESIDUE = 1e-5
_EXACT_RESIDUE = 1e-9
# Constants in a model's code may be those of float32: so much of a constant offset counts as its range.
_CONSTANT = 1e-2


# A threshold in a model turns a last bit into any difference: so many times what rounding allows is excused.
_MOST_EXCUSED = 8
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
        calls: Sequence[CallRow],
        layers: Sequence[LayerRow],
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
        return cls(max((size for size in sizes if math.isfinite(size)), default=0.0), share)

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
    sensitivity: np.ndarray | None = None
    """how A's float64 outputs change with the last bits of float32 inputs"""
    smooth: bool = False
    """whether they change in proportion to the inputs, e.g. exponentials; used if both sides are exact"""

    @property
    def scale(self) -> float:
        """The largest number, 1 for zeros only."""
        return float(np.abs(self.reference).max(initial=0.0)) or 1.0

    @property
    def excused(self) -> np.ndarray | None:
        """The part of the sensitivity that explains a difference."""
        if self.sensitivity is None:
            return None
        most = _MOST_EXCUSED * ROUNDING * self.rounding.near(self.scale)
        return np.asarray(np.minimum(self.sensitivity, most))

    @property
    def own_error(self) -> np.ndarray | None:
        """A's own float32 error, at least what is excused; None if it is unknown."""
        return self.own if self.own is None or self.excused is None else np.maximum(self.own, self.excused)

    def allows(self, error: np.ndarray) -> bool:
        """Return whether float32 outputs may differ so much from the reference."""
        if self.tolerance is not None:
            return float(error.max(initial=0.0)) <= self.tolerance * self.scale
        share, scale = self.rounding.share, self.scale
        own = 0.0 if self.own_error is None else OWN_ERROR * float(self.own_error.max(initial=0.0))
        if self.smooth and self.both_exact and self.sensitivity is not None:
            own = max(own, share / UNIT * float(self.sensitivity.max(initial=0.0)))
        if float(error.max(initial=0.0)) > max(own, share * self.rounding.near(scale)):
            return False
        # In float64, residues of rounding are known for what they are.
        return self.both_exact or all(self._by_feature(error))

    def _by_feature(self, error: np.ndarray) -> Iterator[bool]:
        share, scale = self.rounding.share, self.scale
        own = np.zeros_like(error) if self.own_error is None else self.own_error
        for values, wide, known in zip(
            _features(error), _features(self.reference), _features(own), strict=True
        ):
            sizes = np.abs(wide).max(1, initial=0.0)
            near = np.minimum(max(self.rounding.largest, scale), _LARGEST * sizes)
            near = np.where(sizes < _RESIDUE * scale, scale, near)
            allowed = np.maximum(OWN_ERROR * known.max(1, initial=0.0), share * near)
            yield bool((values.max(1, initial=0.0) <= allowed).all())

    def allows_exact(self, error: np.ndarray) -> bool:
        """Return whether float64 outputs may differ so much: by float32 constants in a model's code."""
        if self.tolerance is not None:
            return True
        if (excused := self.excused) is not None:  # constants have last bits, too
            largest = excused.max(0, initial=0.0, keepdims=True)
            error = np.maximum(error - OWN_ERROR * largest, 0.0)
        if float(error.max(initial=0.0)) > ROUNDING * self.rounding.near(self.scale):
            return False
        for values, wide in zip(_features(error), _features(self.reference), strict=True):
            ranges = np.maximum(np.ptp(wide, axis=1) / 2, _CONSTANT * np.abs(wide).max(1))
            sizes = np.maximum(ranges, _EXACT_RESIDUE * self.scale)
            near = np.minimum(max(self.rounding.largest, self.scale), _LARGEST * sizes)
            if not (values.max(1, initial=0.0) <= ROUNDING * near).all():
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

    def differs_by_row(self, rows: int, *, exact: bool) -> bool:
        """Return whether A's output differs from row to row of the inputs: then it depends on them."""
        if self.bound is None or self.fixed is None or self.fixed.shape[:1] != (rows,) or rows < 2:
            return False
        return self.responds(np.roll(self.fixed, 1, axis=0), exact=exact)


def _finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0.0).astype(np.float64)


def measure_output(
    name: str,
    outputs: tuple[np.ndarray, np.ndarray],
    exact: Sequence[np.ndarray | None],
    rounding: RoundingBound,
    tolerance: float | None,
    sensitivity: np.ndarray | None = None,
    *,
    smooth: bool = False,
) -> OutputResult:
    """Return the differences of one output, by the rule for agents; all arrays have A's order of axes.

    A's float64 run is the reference, else B's, else A's own output. B may be as far off as A only where A's
    own float64 run shows how far A is. If both runs exist, they must agree within float32 rounding of the
    output: they show differences that float32 hides. Infinite numbers and NaN must be at the same places,
    integers and truth values must be equal.

    Args:
        name: the output's name.
        outputs: A's and B's.
        exact: both sides' float64 runs, None where there is none.
        rounding: what rounding may cost.
        tolerance: how far B may be off, relative to the output's scale; None for the rule.
        sensitivity: how far A's outputs move with the last bits of the inputs: constants of code, e.g.
            angles, have no more bits.
        smooth: whether they move in proportion: then rounding costs as many last bits as of other outputs.
    """
    a, b = outputs
    if a.shape != b.shape or not a.size:
        return OutputResult(failed_parity(name))
    if not np.array_equal(a[~np.isfinite(a)], b[~np.isfinite(b)], equal_nan=True) or not np.array_equal(
        np.isfinite(a), np.isfinite(b)
    ):
        return OutputResult(failed_parity(name))
    there = np.isfinite(a)
    sides = [None if array is None or array.shape != a.shape else _masked(array, there) for array in exact]
    whole = a.dtype.kind in "iub" and b.dtype.kind in "iub"
    same = not whole or np.array_equal(a, b)
    a, b = _masked(a, there), _masked(b, there)
    reference = next((side for side in sides if side is not None), a)
    errors = [np.abs(array - reference) for array in (a, b)]
    both = all(side is not None for side in sides)
    own = errors[0] if sides[0] is not None else None
    bound = OutputBound(reference, rounding, own, both, tolerance, sensitivity, smooth)
    judged = errors[1] if sides[0] is not None else np.maximum(*errors)
    within = same and bound.allows(judged)
    if both:
        within = within and bound.allows_exact(np.abs(sides[0] - sides[1]))  # type: ignore[operator]
    between = float(np.abs(a - b).max())
    sizes = [float(error.max()) for error in errors]
    parity = Parity(name, len(a), between, between / bound.scale, sizes[0], sizes[1], within=within)
    return OutputResult(parity, bound, sides[0] if both else a)


def _masked(array: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the finite numbers in float64, 0 where A has none."""
    numbers = np.asarray(array, np.float64)
    return np.where(there & np.isfinite(numbers), numbers, 0.0)


_CREDIBLE = 1e-2


def are_close(plain: Outputs, exact: Outputs) -> bool:
    """Return whether a float64 run computes what the model computes: far more than rounding apart is not."""
    for name, array in plain.items():
        other = exact.get(name)
        if other is None or other.shape != array.shape:
            return False
        finite = np.isfinite(array) & np.isfinite(other)
        scale = float(np.abs(other[finite]).max(initial=0.0)) or 1.0
        apart = np.abs(array[finite].astype(np.float64) - other[finite])
        if float(apart.max(initial=0.0)) > _CREDIBLE * scale:
            return False
    return True


_REPEATED = 1e-4


def changing_outputs(first: Outputs, again: Outputs) -> list[str]:
    """Return the outputs that a second call with the same inputs changes by more than rounding."""
    names = []
    for name, array in first.items():
        other = again.get(name)
        if (
            other is None
            or other.shape != array.shape
            or not np.array_equal(np.isfinite(array), np.isfinite(other))
        ):
            names.append(name)
            continue
        scale = float(np.abs(_finite(array)).max(initial=0.0))
        if float(np.abs(_finite(array) - _finite(other)).max(initial=0.0)) > _REPEATED * scale:
            names.append(name)
    return names


_SHAKEN = 0.1


def shake_inputs(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return inputs of another order of rows, and near the given ones for floats."""
    generator = np.random.default_rng(1)
    shaken = []
    for array in arrays:
        if array.dtype.kind == "f":
            noise = generator.standard_normal(array.shape)
            shaken.append((array * (1 + _SHAKEN * noise)).astype(array.dtype))
        else:
            shaken.append(np.roll(array, 1, axis=0 if len(array) > 1 else -1))
    return shaken


MANY_BITS = 16
_PROPORTION = 2.0


def is_smooth(moved: np.ndarray, further: np.ndarray) -> bool:
    """Return whether `MANY_BITS` times the change of inputs moves an output as many times as far."""
    one, many = (float(array.max(initial=0.0)) for array in (moved, further))
    return one * MANY_BITS / _PROPORTION <= many <= one * MANY_BITS * _PROPORTION


def change_last_bits(arrays: Sequence[np.ndarray], bits: int = 1) -> list[np.ndarray]:
    """Return the inputs with each float moved by so many units in its last place."""
    generator = np.random.default_rng(2)
    return [
        array * (1 + bits * UNIT * generator.choice((-1, 1), array.shape)).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for array in arrays
    ]


@dataclass(slots=True)
class ComparisonRound:
    """What both sides return for one set of inputs, and the measured outputs."""

    outputs: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    exact: tuple[dict[str, np.ndarray] | None, dict[str, np.ndarray] | None]
    calls: tuple[list[CallRow], list[CallRow]]
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
        return (*(result.parity for result in self.results), *map(failed_parity, self.missing))

    @property
    def failed(self) -> bool:
        """Whether an output differs, or B lacks it."""
        return not all(parity.within for parity in self.parities)

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first output that differs, else the first, in A's order of axes."""
        rows = zip(self.names, self.results, strict=True)
        name = next((name for name, result in rows if not result.parity.within), self.names[0])
        a, b = self.exact if self.exact_on_both else self.outputs
        assert a is not None  # noqa: S101 - both sides ran in float64
        assert b is not None  # noqa: S101
        return a[name.a], move_channels(b[name.b], name.how)
