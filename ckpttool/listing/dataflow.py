"""Describe the dataflow of an agent's networks: observation, normaliser, layers, activations, action.

Shapes come from unread tensors, the order of layers and activations from the records that
networks/build.py follows (AgentNetwork, PolicyEncoder); tests/test_dataflow.py compares both. Facts that no
file contains name the default that they come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError, abbreviate_list, is_system_error
from ckpttool.core.sidecar import Sidecar, parse_activation
from ckpttool.core.source import Shape
from ckpttool.core.text import clean
from ckpttool.core.tree import Leaf, Path, Tree, attr
from ckpttool.libraries import schema
from ckpttool.libraries.schema import AgentNetwork, EncoderInput, PolicyEncoder, RecognizedAgent
from ckpttool.listing.strip_facts import FlowFacts, agent_facts, find_recorded_facts, listed_facts
from ckpttool.listing.strips import FlowStage, FlowStrip, StageKind, format_shape

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.evaluation.restore import Agent

# Names and details of the stages of each action map, as networks/build.HEADS builds them.
_BY, _TO = ("scale", "by upper bound"), ("scale", "to bounds")
_TANH, _CLIP = ("tanh", ""), ("clip", "to bounds")
HEADS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "tanh": (_TANH, _BY),
    "affine": (_TANH, _TO),
    "unit_tanh": (_TANH,),
    "identity": (),
    "clip": (_CLIP,),
    "clip_affine": (("clip", "-1 to 1"), _TO),
    "tanh_clip_affine": (_TANH, _BY, ("clip", "-1 to 1"), _TO),
    "clip_tanh_affine": (("clip", "-2 to 2"), _TANH, _TO),
}
_TITLES = {"lstm": "LSTM", "gru": "GRU", "gru_before": "GRU", "layer_norm": "layer norm"}
_WEIGHTS = ("kernel", "bias", "scale", "offset")
_UNKNOWN = "not stored; pass --activation"
# A checkpoint with more entries is not examined as a policy without a layout.
_FEW = 200


@dataclass(slots=True)
class _StripBuilder:
    """The stages of one network under construction; `shapes` are those of canonical tensors."""

    shapes: Mapping[Path, Shape]
    facts: FlowFacts
    stages: list[FlowStage] = field(default_factory=list)

    @property
    def last(self) -> Shape:
        return self.stages[-1].shape or ()

    def add(self, kind: StageKind, name: str, shape: Shape | None = None, **more: Any) -> None:
        self.stages.append(FlowStage(kind, name, self.last if shape is None else shape, **more))

    def size(self, path: Path, names: Iterable[str]) -> int:
        """Return the number of values of a layer's tensors."""
        shapes = (self.shapes.get((*path, attr(name))) for name in names)
        return sum(math.prod(shape) for shape in shapes if shape is not None)

    def normalize(self) -> None:
        """Add the statistics of observations, if their size is that of the last value."""
        if self.facts.normalizer and (self.facts.normalizer,) == self.last:
            clip = self.facts.clip
            self.add("normalizer", "normalize", detail="" if clip is None else f"clip {clip:g}")

    def activate(self, number: int) -> None:
        """Add the hidden activation with that number; a single one repeats."""
        hidden = self.facts.hidden
        if hidden:
            name = hidden[min(number, len(hidden) - 1)]
            kind: StageKind = "activation" if parse_activation(name) is not None else "unknown"
            self.add(kind, clean(name), assumed=self.facts.assumed.get("hidden", ""))
        else:
            self.add("unknown", "activation?", assumed=_UNKNOWN)


def build_strips(binding: RecognizedAgent, tree: Tree, facts: FlowFacts) -> tuple[FlowStrip, ...]:
    """Return a strip per network, those of equal structure once; `tree` is the checkpoint's."""
    if facts.choices is not None:
        binding = binding.with_q_policies(facts.choices.scores)
    moves = [*binding.moves.moves, *(move for front in binding.fronts.values() for move in front.moves)]
    shapes: dict[Path, Shape] = {}
    for move in moves:
        if move.target[0].value in schema.RUN:
            leaf = move.rule.leaf(tree[move.source])
            if isinstance(leaf, Leaf):
                shapes.setdefault(move.target, leaf.shape)
    policy = next(
        (part for part in binding.parts if part.acts and part.program is None and part.layers), None
    )
    sizes = None if policy is None else _policy_sizes(policy, shapes)
    strips = [
        _strip(binding, part, _StripBuilder(shapes, facts.of_network(part.component)), sizes)
        for part in binding.parts
    ]
    return _join_alike([strip for strip in strips if strip is not None])


def build_listed_strips(
    binding: RecognizedAgent | None, tree: Tree, recorded: Sidecar | None = None
) -> tuple[FlowStrip, ...]:
    """Return the strips of a listing's agent without reading a tensor; none without a runnable agent.

    `recorded` is its sidecar.
    """
    if binding is None:
        return ()
    try:
        return build_strips(binding, tree, listed_facts(binding, tree, recorded))
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return ()  # commands that run the agent report the error


def find_policy_sizes(strips: Sequence[FlowStrip]) -> tuple[int, int, bool] | None:
    """Return the sizes of the policy's observation and action, and whether the second counts choices.

    None for images, several inputs, and several choices at once.
    """
    for strip in strips:
        steps = strip.every
        first, last = steps[0].shape, steps[-1]
        if strip.streams or last.kind != "output" or not last.shape or first is None or len(first) != 1:
            continue
        if last.name == "one score per action":
            return first[0], last.shape[0], True
        if last.name == "action":
            # What turns scores into actions is the step before.
            scores, turn = (steps[-3].shape or (0,), steps[-2]) if len(steps) > 2 else ((0,), last)
            if turn.name == "above 0" or (turn.name == "argmax" and last.shape != (1,)):
                return None
            return (first[0], scores[0], True) if turn.name == "argmax" else (first[0], last.shape[0], False)
    return None


def build_agent_strips(agent: Agent) -> tuple[FlowStrip, ...]:
    """Return the strips of a restored agent."""
    return build_strips(agent.binding, agent.checkpoint.tree, agent_facts(agent))


def restore_strips(
    checkpoint: Checkpoint,
    layout: str | None = None,
    sha256: str | None = None,
    binding: RecognizedAgent | None = None,
) -> tuple[FlowStrip, ...]:
    """Return the strips of a checkpoint's agent or of a policy alone, with the facts of its sidecar.

    `sha256` is the checkpoint's digest, computed if needed; `binding` is the recognised agent, if known.
    Raise what restoring the agent raises, and UsageError if there is no network.
    """
    from ckpttool.evaluation import restore

    binding = binding or restore.recognize_playable_agent(checkpoint, layout)
    if binding is None:
        raise restore.no_agent_error(checkpoint)
    verified = restore.read_verified_sidecar(checkpoint, sha256)
    return build_agent_strips(restore.build_agent(checkpoint, binding, verified))


def find_strips(
    checkpoint: Checkpoint, binding: RecognizedAgent | None, sha256: str | None
) -> tuple[FlowStrip, ...]:
    """Return the strips for a report: of the restored agent, else of the listing; none without an agent.

    `sha256` is the checkpoint's digest, computed if needed.
    """
    if binding is None and len(checkpoint.tree) > _FEW:
        return ()
    try:
        return restore_strips(checkpoint, sha256=sha256, binding=binding)
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return build_listed_strips(binding, checkpoint.tree, find_recorded_facts(checkpoint))


def _join_alike(strips: Sequence[FlowStrip]) -> tuple[FlowStrip, ...]:
    alike: dict[Any, FlowStrip] = {}
    for strip in strips:
        key = (strip.stages, strip.streams, strip.notes)
        first = alike.setdefault(key, strip)
        if first is not strip:
            alike[key] = replace(first, alike=(*first.alike, strip.title))
    return tuple(alike.values())


def _dense_shapes(part: AgentNetwork, shapes: Mapping[Path, Shape]) -> list[Shape]:
    paths = [schema.canonical_weight_path(part, n, "kernel") for n in range(len(part.layers))]
    return [shapes[path] for path in paths if len(shapes.get(path, ())) == 2]


def _policy_sizes(part: AgentNetwork, shapes: Mapping[Path, Shape]) -> tuple[int, int] | None:
    dense = _dense_shapes(part, shapes)
    return (dense[0][0], dense[-1][1]) if dense else None


def _strip(
    binding: RecognizedAgent, part: AgentNetwork, builder: _StripBuilder, sizes: tuple[int, int] | None
) -> FlowStrip | None:
    """Return the strip of one network, None if it has no layer."""
    front = binding.fronts.get(part.component)
    streams: tuple[tuple[FlowStage, ...], ...] = ()
    if part.encoder and len(builder.facts.hidden) == 1:
        (name,), last = builder.facts.hidden, part.encoder - 1
        hidden = tuple("linear" if number == last else name for number in range(len(part.layers)))
        builder.facts = replace(builder.facts, hidden=hidden)
    notes = [] if front is None else [*front.assumed]
    if part.program is not None:
        _add_program(builder, part.program)
    elif not _dense_shapes(part, builder.shapes):
        return None
    elif front is not None and part.acts:
        streams = _add_encoder(builder, part.component, front)
        _add_layers(builder, part, front)
    elif part.streams:
        streams = _add_streams(builder, part)
    else:
        act_dim = _add_inputs(builder, part, binding, sizes)
        _add_layers(builder, part, late=None if act_dim is None else ("action", act_dim))
    left = binding.unplaced.get(part.component, ())
    if uncovered := [missing for missing in left if front is None or missing not in front.covers]:
        names = abbreviate_list([clean(missing) for missing in uncovered], 3)
        notes.append(f"cannot be run: {names}")
    if odd := sorted({s.name for s in builder.stages if s.kind == "unknown" and not s.assumed}):
        notes.append(f"cannot be run: {abbreviate_list(odd, 3)}")
    notes += [f"further head: {name}" for name, _ in part.branches]
    _add_output(builder, part, binding)
    return FlowStrip(part.title, tuple(builder.stages), streams, tuple(notes))


def _add_inputs(
    builder: _StripBuilder, part: AgentNetwork, binding: RecognizedAgent, sizes: tuple[int, int] | None
) -> int | None:
    """Add the observation, and the action of a Q-function; return the action's size if it joins later."""
    first, choices = _dense_shapes(part, builder.shapes)[0][0], builder.facts.choices
    if choices is not None and choices.has_fractions and not part.acts:
        builder.add("input", "cosines of a fraction" if part.head == "q2" else "encoded obs", (first,))
        return None
    critic = part.component.startswith("critic")
    if not critic or sizes is None or first not in (sizes[0], sum(sizes)):
        name = "features" if binding.fronts else "obs, action" if critic else "obs"
        builder.add("input", name, (first,))
        builder.normalize()
        return None
    builder.add("input", "obs", (sizes[0],))
    builder.normalize()
    if first == sum(sizes):
        builder.add("join", "+ action", (first,))
    return sizes[1]


def _add_streams(builder: _StripBuilder, part: AgentNetwork) -> tuple[tuple[FlowStage, ...], ...]:
    """Add a Q-function that encodes its inputs separately; return the stages of each input."""
    streams, rest = [], 0
    for name, count in part.streams:
        builder.stages = []
        builder.add("input", name, builder.shapes[schema.canonical_weight_path(part, rest, "kernel")][:1])
        if name == "obs":
            builder.normalize()
        _add_layers(builder, part, positions=range(rest, rest + count))
        streams.append(tuple(builder.stages))
        rest += count
    width = sum((stages[-1].shape or (0,))[0] for stages in streams)
    builder.stages = []
    builder.add("join", "concat", (width,))
    _add_layers(builder, part, late=("concat", width), positions=range(rest, len(part.layers)))
    return tuple(streams)


def _add_layers(
    builder: _StripBuilder,
    part: AgentNetwork,
    front: PolicyEncoder | None = None,
    late: tuple[str, int] | None = None,
    positions: range | None = None,
) -> None:
    """Add the layers, or those at `positions`; layers with so many more inputs also receive `late`."""
    norms = {} if front is None else {norm.number: norm for norm in front.norms}
    numbers, dense = part.activation_numbers, 0
    for position in range(len(numbers)) if positions is None else positions:
        number = numbers[position]
        path = schema.canonical_weight_path(part, position, "kernel")[:-1]
        size = builder.size(path, _WEIGHTS)
        if part.layers[position].kind == "dense":
            rows, columns = builder.shapes[(*path, attr("kernel"))]
            if late is not None and dense and rows == builder.last[0] + late[1]:
                builder.add("join", f"+ {late[0]}", (rows,))
            if dense in norms:
                norm_size = builder.size(schema.batch_norm_path(part.component, dense), _WEIGHTS)
                builder.add("layer", "batch norm", parameters=norm_size)
            builder.add("layer", "dense", (columns,), parameters=size)
            dense += 1
        else:
            builder.add("layer", part.layers[position].kind.replace("_", " "), parameters=size)
        if number is not None:
            builder.activate(number)


def _add_encoder(
    builder: _StripBuilder, component: str, front: PolicyEncoder
) -> tuple[tuple[FlowStage, ...], ...]:
    """Add an encoder; return the stages of each input if there are several, which are then joined."""
    streams = []
    for stream in front.streams:
        builder.stages = []
        builder.add("input", clean(stream.name), stream.shape)
        if stream.image:
            _add_image(builder, component, stream)
        elif len(stream.shape) > 1:
            builder.add("map", "flatten", (stream.size,))
        if len(front.streams) == 1 and not stream.image:
            builder.normalize()
        streams.append(tuple(builder.stages))
    if len(streams) > 1:
        builder.stages = []
        builder.add("join", "concat", (sum((stream[-1].shape or (0,))[0] for stream in streams),))
    for number, kind in enumerate(front.cells):
        path = schema.recurrent_layer_path(component, number)
        units = builder.shapes[(*path, schema.RECURRENT)][0]
        names = ("kernel", "recurrent_kernel", "bias_input", "bias_recurrent")
        builder.add("layer", _TITLES[kind], (units,), parameters=builder.size(path, names))
    return tuple(streams) if len(streams) > 1 else ()


def _add_image(builder: _StripBuilder, component: str, stream: EncoderInput) -> None:
    """Add the convolutions of an image [channels, height, width], and the dense layers after them."""
    if stream.scale != 1:
        name = f"/ {1 / stream.scale:g}" if stream.scale < 1 else f"* {stream.scale:g}"
        builder.add("normalizer", name)
    for number in range(len(stream.strides) + stream.dense):
        path = schema.stream_layer_path(component, stream.name, number)
        kernel = builder.shapes[(*path, schema.KERNEL)]
        size = builder.size(path, _WEIGHTS)
        if number < len(stream.strides):
            height, width, _, channels = kernel
            step = stream.strides[number]
            rest = ((n - k) // step + 1 for n, k in zip(builder.last[1:], (height, width), strict=True))
            builder.add("layer", f"conv {height}x{width}/{step}", (channels, *rest), parameters=size)
        else:
            builder.add("layer", "dense", (kernel[1],), parameters=size)
        builder.add("activation", "relu")
        if number == len(stream.strides) - 1:
            builder.add("map", "flatten", (math.prod(builder.last),))


def _add_program(builder: _StripBuilder, program: schema.Program) -> None:
    """Add the operations of a model's own graph, in its order."""
    ((name, shape),) = program.inputs
    builder.add("input", clean(name), shape)
    builder.normalize()
    for operation in program.operations:
        value = operation.value
        size = sum(math.prod(array.shape) for array in value.values() if hasattr(array, "shape"))
        match operation.kind:
            case "activation":
                builder.add("activation", str(value["name"]))
            case "dense":
                builder.add("layer", "dense", (value["kernel"].shape[1],), parameters=size)
            case "lstm" | "gru":
                size += sum(math.prod(array.shape) for array in value["biases"])
                units = value["recurrent"].shape[0]
                builder.add("layer", _TITLES[operation.kind], (units,), parameters=size)
            case "layer_norm":
                builder.add("layer", "layer norm", parameters=size)
            case other:
                builder.add("map", other.replace("_", " "))


def _add_output(builder: _StripBuilder, part: AgentNetwork, binding: RecognizedAgent) -> None:
    """Add the action map and the action with its bounds, or the value."""
    if not part.acts:
        builder.add("output", "value" if part.component in schema.VALUES else "Q")
        return
    facts = builder.facts
    if schema.DISCRETE_CHOICE in "".join(binding.unplaced.get(part.component, ())):
        builder.add("output", "one score per action")
        return
    if facts.choices is not None:
        _add_choice(builder, facts.choices, part)
        return
    origin = facts.assumed.get("head", "")
    if facts.head == "argmax":  # the file has no list of the actions
        builder.add("output", "one score per action")
        return
    if not facts.head:
        builder.add("unknown", "action map?", assumed="not stored; pass --head")
    for name, detail in HEADS.get(facts.head, ()):
        builder.add("activation" if name == "tanh" else "map", name, detail=detail, assumed=origin)
    bounds = "environment's bounds" if facts.bounds is None else format_bounds(*facts.bounds)
    whole = "" if facts.bounds is None else f"low {list(facts.bounds[0])}, high {list(facts.bounds[1])}"
    if facts.head in ("identity", "unit_tanh"):
        bounds = "" if facts.head == "identity" else "-1 to 1"
    builder.add("output", "action", detail=bounds, note=whole)


def _add_choice(builder: _StripBuilder, choices: schema.Choices, part: AgentNetwork) -> None:
    """Add what the outputs become the scores of actions by, and the choice among them."""
    actions, scores = sum(choices.counts), choices.scores
    if scores.startswith("dueling") or scores == "value_first":
        builder.add("map", "plus value minus mean", (actions,))
    if choices.has_fractions:
        builder.add("map", "mean of quantiles at fractions", (actions,))
    elif scores not in ("values", "dueling", "value_first", "bernoulli"):
        kind = scores.removeprefix("dueling_").partition("_")[0]
        builder.add("map", f"mean of {kind}", (actions,))
    builder.add("map", "Q" if part.chooses else "logits", detail=format_shape(builder.last))
    builder.add("map", "above 0" if scores == "bernoulli" else "argmax", (len(choices.counts),))
    builder.add("output", "action", detail=choices.title)


def format_bounds(low: Sequence[float], high: Sequence[float]) -> str:
    """Return action bounds, in short if every dimension has the same."""
    if len(set(low)) == len(set(high)) == 1:
        return f"{low[0]:g} to {high[0]:g}"
    return f"{min(low):g} to {max(high):g} (per dimension)"
