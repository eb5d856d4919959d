"""What is known of an agent besides its weights: read from its files, told by its sidecar, or a habit."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ckpttool import documents, ledger, places, plugins, sidecar
from ckpttool.agents.components import widths
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import FormatError, MappingError, some
from ckpttool.formats import settings, text_proto, yaml_settings
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts import canonical, plan, small_arrays
from ckpttool.layouts.canonical import NO_LAYOUT, Binding, Facts, Norm, Part
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display
from ckpttool.ledger import Entries, Entry, Topic
from ckpttool.ops import evidence
from ckpttool.sidecar import Sidecar
from ckpttool.source import File, Inline
from ckpttool.tree import Tree

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.agents.envs import WrapperSpec

# The facts that the action's map consists of, and those of the observations.
FACTS = ("head", "activations", "action_low", "action_high", "obs_norm", "env", "epsilon")

_TEXT = "args.txt"
_ROUNDED = 1e-5
_WEIGHTS = "read from the weights"
NO_STATISTICS = "read from the source: it has none"
_STATISTICS: Topic = "observation statistics"


def with_companions(binding: Binding, checkpoint: Checkpoint) -> tuple[Binding, tuple[str, ...]]:
    """Return the binding with what files beside the checkpoint say, and a note for each that was read."""
    if binding.layout == NO_LAYOUT:
        return binding, ()
    layout = plan.told(plugins.find("layouts", binding.layout).load())
    notes = []
    for file in layout.companions(checkpoint.path) if layout is not None else ():
        if places.isfile(file) and layout is not None:
            if places.islink(file):
                File.beside(file, checkpoint.files[0].path)
            before, binding = binding, layout.told_by(binding, file, _companion(file))
            if binding is not before:
                notes.append(f"{os.path.relpath(file, os.path.dirname(checkpoint.path) or '.')} was read")
    return binding, tuple(notes)


def lacking(binding: Binding, told: Sidecar | None) -> Entries:
    """Return what neither the agent's own files tell nor its sidecar.

    A sidecar tells all that there is to tell, statistics of observations apart: where it has none, its
    provenance must say who knows that there are none.
    """
    if told is None:
        return binding.facts.lacks
    if not told.target_sha256:
        # Given facts alone are no sidecar: each tells of itself.
        given = {
            _TOPICS[names]
            for names in _TOPICS
            if names[0] in _ANSWERS and getattr(told, names[0]) is not None
        }
        return tuple(each for each in binding.facts.lacks if each.what not in given)
    known = told.obs_norm is not None or "obs_norm" in told.provenance
    return () if known else tuple(each for each in binding.facts.lacks if each.what == _STATISTICS)


def without_statistics(binding: Binding, told: Sidecar) -> Sidecar:
    """Return what is known, and that there are no statistics of observations if the agent lacks none."""
    if told.obs_norm is not None or any(each.what == _STATISTICS for each in binding.facts.lacks):
        return told
    return replace(told, provenance={"obs_norm": NO_STATISTICS, **told.provenance})


def ledger_of(
    checkpoint: Checkpoint,
    binding: Binding,
    own: Sidecar | None,
    known: Sidecar,
    sizes: tuple[int, int],
    given: Collection[str] = (),
) -> Entries:
    """Return the ledger of an agent: facts used, evidence not used, facts unknown, defaults assumed.

    `own` is the sidecar with the facts that were `given`, `known` all that is known, `sizes` are the numbers
    of the policy's observations and actions. Every command prints these entries, and adds those of its own
    work (an environment's bounds, settings of a target's optimizers).
    """
    unknown = lacking(binding, own)
    left = evidence.unused(checkpoint, binding, known, sizes)
    where = binding.facts.said.get("wrappers", known.origin("env"))
    named = wrapper_entries(wrappers_of(known), where)
    assumed = assumed_entries(binding, known, own)
    stored = _stored(own, known, given, os.path.basename(sidecar.beside(checkpoint.path)))
    return ledger.merged(
        _used(known, binding, stored),
        _arguments(known, binding, stored),
        named,
        binding.ledger,
        left,
        unknown,
        assumed,
    )


# The option that states a fact which a library's default decides otherwise.
_STATED_BY = {"activations": "--activation NAME", "head": "--head NAME"}


def assumed_entries(binding: Binding, known: Sidecar, *sidecars: Sidecar | None) -> Iterator[Entry]:
    """Yield an entry for whatever is assumed of an agent, of which `known` is known.

    `sidecars` are its own and that of the agent that it is compared with.
    """
    yield from ledger.assumed("architecture", binding.moves.assumed)
    facts = binding.facts
    layer_norm = any(layer.kind == "layer_norm" for part in binding.parts for layer in part.layers)
    hidden = ", ".join(dict.fromkeys(known.activations or facts.activations or (facts.hidden,)))
    epsilon = (known.epsilon or {}).get("layer_norm", facts.epsilon)
    rows: tuple[tuple[str, Topic, str], ...] = (
        ("activations", "activation", f"hidden activations {hidden}"),
        ("head", "action map", f"action map {known.head or facts.head}"),
        ("epsilon", "architecture", f"layer norm epsilon {epsilon:g}"),
    )
    for name, what, value in rows:
        if not known.is_assumed(name) or (name == "epsilon" and not layer_norm):
            continue
        stated = [each is not None and each.is_assumed(name) for each in sidecars]
        whose = "the sidecar" if stated[:1] == [True] else "the other one's sidecar"
        origin = known.origin(name) + (f" (so says {whose})" if any(stated) else "")
        yield Entry("assumed", what, value, origin=origin, hint=_STATED_BY.get(name))


def wrappers_of(known: Sidecar) -> tuple[WrapperSpec, ...]:
    """Return the wrappers of training that the agent's files or its sidecar name."""
    named = (known.env or {}).get("wrappers") or ()
    if not named:
        return ()  # a conversion needs none of the environments
    from ckpttool.agents.envs import WrapperSpec

    return tuple(WrapperSpec(each["name"], each.get("arguments", {})) for each in named)


def wrapper_entries(found: Sequence[WrapperSpec], where: str) -> Iterator[Entry]:
    """Yield an entry for each wrapper that is played, changes rewards, or is not known."""
    if not found:
        return
    from ckpttool.agents.envs import wrappers

    for each in found:
        shown = f"{each.title}{wrappers.shown(each.arguments)}"
        if not wrappers.known(each):
            hint = "--wrapper none plays without it, if it changes neither observations nor actions"
            yield Entry("cannot be known", "wrapper", f"what wrapper {each.name} does", where, "", True, hint)
        elif each.title in wrappers.REWARDS:
            yield Entry("not used", "wrapper", f"{shown}: returns are sums of unchanged rewards", where)
        elif each.title not in wrappers.HARMLESS:
            yield Entry("used", "wrapper", shown, where)


def contradicted(told: Sidecar | None, read: Sidecar) -> dict[str, Entry]:
    """Return an entry for each fact of a sidecar of which the checkpoint itself holds another value, by name.

    A sidecar is bound to the weights alone: whoever edits its facts keeps the digest. So the checkpoint's
    own values count, unless a person gave the sidecar's.
    """
    found: dict[str, Entry] = {}
    for names, what in _TOPICS.items():
        name = names[0]
        values = [getattr(told, each, None) for each in names]
        own = [getattr(read, each) for each in names]
        origin = str(read.provenance.get(name, ""))
        if name in ("env", "epsilon") or values[0] is None or own[0] is None or not origin:
            continue
        if told is None or read.is_assumed(name) or told.is_assumed(name):
            continue
        if _agree(name, values, own, origin):
            continue
        value = f"{_in_words(name, values)} in the sidecar; the checkpoint holds {_in_words(name, own)}"
        hint = "remove the sidecar, or convert the source again"
        found[name] = Entry(
            "not used", what, value, origin, decides=told.provenance.get(name) != "given", hint=hint
        )
    return found


def _agree(name: str, ones: Sequence[Any], others: Sequence[Any], origin: str) -> bool:
    """Return whether two statements of a fact mean the same, within the rounding of float32."""
    import numpy as np

    one, other = ones[0], others[0]
    if name == "head":
        return bool(one == other) or "unit_tanh" in (one, other)  # the program scales what the model gives
    if name == "activations":
        most = max(len(one), len(other))
        longer = [list(each) * most if len(each) == 1 else list(each) for each in (one, other)]
        return longer[0] == longer[1]
    if name == "action_low":
        return _close(list(zip(ones, others, strict=True)))
    rows = [(one[row], other[row]) for row in ("mean", "var")]
    if origin == _WEIGHTS and _close(rows):
        return True  # two tensors, of which no file holds the formula
    spreads = [np.sqrt(np.asarray(n["var"]) + float(n.get("epsilon", 1e-8))) for n in (one, other)]
    limits = [[n.get("clip") or 0.0] for n in (one, other)]
    same_limits = origin == _WEIGHTS or limits[0] == limits[1]
    return same_limits and _close([rows[0], (spreads[0], spreads[1])])


def _close(pairs: Sequence[tuple[Any, Any]]) -> bool:
    import numpy as np

    return all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=_ROUNDED, atol=_ROUNDED) for a, b in pairs
    )


def _stored(own: Sidecar | None, known: Sidecar, given: Collection[str], file: str) -> Mapping[str, str]:
    """Return the name of the sidecar for each fact that is believed because the sidecar holds it.

    Whoever writes a sidecar writes its provenance too: where a fact is from is what the sidecar claims.
    """
    if own is None or not own.target_sha256:
        return {}
    held = (name for name in FACTS if getattr(own, name) is not None and name not in given)
    return {name: file for name in held if own.provenance.get(name) == known.provenance.get(name)}


def _arguments(known: Sidecar, binding: Binding, stored: Mapping[str, str]) -> Iterator[Entry]:
    """Yield an entry for each argument that a file gives the environment."""
    where = stored.get("env") or binding.facts.said.get("env_arguments") or known.origin("env")
    for name, value in ((known.env or {}).get("arguments") or {}).items():
        yield Entry("used", "environment", f"{name} = {json.dumps(value)[:60]}", where)


def _used(known: Sidecar, binding: Binding, stored: Mapping[str, str]) -> Iterator[Entry]:
    """Yield an entry for each fact that a file, a sidecar or the command line holds."""
    normed = any(layer.kind == "layer_norm" for part in binding.parts for layer in part.layers)
    for names, what in _TOPICS.items():
        name = names[0]
        if name == "epsilon" and not normed:
            continue
        value, origin = getattr(known, name), known.origin(name)
        if value is None or known.is_assumed(name):
            continue
        where = stored.get(name) or (origin if known.is_read(name) else "")
        values = [getattr(known, each) for each in names]
        yield Entry("used", what, _in_words(name, values), where, origin="" if where == origin else origin)


def _in_words(name: str, values: Sequence[Any]) -> str:
    value = values[0]
    if name == "obs_norm":
        clip = "" if value.get("clip") is None else f", clip {value['clip']:g}"
        return f"of {len(value['mean'])} values{clip}"
    if name == "action_low":
        low, high = ([f"{number:g}" for number in dict.fromkeys(each)] for each in values)
        return f"{_few(low)} to {_few(high)}"
    if name == "env":
        return str(value.get("id"))
    if name == "epsilon":
        return f"layer norm epsilon {value.get('layer_norm', 0):g}"
    return ", ".join(dict.fromkeys(value)) if isinstance(value, list | tuple) else str(value)


def _few(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"[{some(numbers, 4)}]"


# Facts that leave nothing open about their topic once they are given.
_ANSWERS = frozenset(("action_low", "obs_norm", "activations", "head"))
# The facts that the ledger lists, with those that belong to each, and what each is.
_TOPICS: Mapping[tuple[str, ...], Topic] = {
    ("activations",): "activation",
    ("head",): "action map",
    ("action_low", "action_high"): "action bounds",
    ("obs_norm",): "observation statistics",
    ("env",): "environment",
    ("epsilon",): "architecture",
}


def _companion(file: str) -> Tree:
    """Return what a file beside a checkpoint holds: settings in YAML or JSON, or a checkpoint of its own."""
    if file.endswith(".json"):
        return settings.tree(documents.load(file, "settings"), "the file")
    if os.path.basename(file) == _TEXT:
        return _text(file)
    if file.endswith(".pbtxt"):
        return settings.tree(text_proto.read(file), "the file")
    return yaml_settings.read(file) if file.endswith((".yml", ".yaml")) else open_checkpoint(file).tree


def _text(file: str) -> Tree:
    """Return arguments as JSON or as lines of `name: value`, both of which YAML is; nothing of other text."""
    try:
        return yaml_settings.read(file)
    except FormatError:
        # The name is anybody's: what another program keeps there is no reason to refuse the checkpoint.
        return Tree({})


def of_files(binding: Binding, agent: Tree) -> Sidecar:
    """Return what the checkpoint itself says of the agent, and its layout's habits marked as assumed.

    `agent` is the canonical tree; the few small tensors that are facts (statistics, action maps) are read.
    """
    facts = binding.facts
    alone = binding.layout == NO_LAYOUT
    habit = "assumed: the framework's default" if alone else f"assumed: the habit of layout {binding.layout}"
    kinds = [[layer.kind for layer in part.layers] for part in binding.parts]
    normed = any("layer_norm" in each for each in kinds)
    policy = next((part for part in binding.parts if part.acts), None)
    found: dict[str, Any] = {
        "head": facts.head or None,
        "activations": list(facts.activations)
        if facts.activations is not None
        else [facts.hidden] * (max(each.count("dense") for each in kinds) - 1)
        if facts.hidden
        else None,
        "epsilon": {"layer_norm": facts.epsilon} if normed else None,
        "obs_dim": widths(agent, policy)[0]
        if policy is not None and policy.component not in binding.fronts
        else None,
        **_bounds(facts, agent, policy),
        "obs_norm": _norm(facts.norm or _normalizer(agent)),
    }
    found["env"] = _env(facts, found["obs_norm"])
    if facts.stacked > 1 and found["obs_norm"] is not None:
        # Statistics are those of one observation, and the policy takes several that were normalised.
        found["obs_norm"] |= {name: found["obs_norm"][name] * facts.stacked for name in ("mean", "var")}
    provenance = {name: _origin(name, facts, habit) for name, value in found.items() if value is not None}
    return Sidecar("", **found, provenance=provenance)


def _origin(name: str, facts: Facts, habit: str) -> str:
    fact = {"obs_norm": "norm", "activations": "activations" if facts.activations else "hidden"}.get(
        name, name
    )
    if fact in facts.said:
        return f"read from {facts.said[fact]}"
    # What no habit can give was read from the weights.
    if name == "env":
        return f"read from {facts.said.get('wrappers', 'the settings')}"
    return habit if name in ("head", "activations", "epsilon") else _WEIGHTS


def _env(facts: Facts, norm: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the environment as a sidecar holds it: its id, its arguments and its wrappers."""
    wrappers = [{"name": name, "arguments": dict(arguments)} for name, arguments in facts.wrappers]
    if facts.stacked > 1:
        # rl_zoo3/utils.py, create_test_env: stacked after VecNormalize, so that what is missing is the mean.
        padding = {} if norm is None else {"padding": norm["mean"]}
        wrappers.append({"name": "VecFrameStack", "arguments": {"n_stack": facts.stacked, **padding}})
    found = {"id": facts.env, "arguments": dict(facts.env_arguments), "wrappers": wrappers}
    found = {name: value for name, value in found.items() if value}
    return found or None


def _bounds(facts: Facts, agent: Tree, policy: Part | None) -> dict[str, list[float] | None]:
    """Return the action's bounds: the file's own, or those that its scale and bias make of [-1, 1]."""
    if facts.action_low is not None and facts.action_high is not None:
        return {"action_low": list(facts.action_low), "action_high": list(facts.action_high)}
    scale, bias = (agent.get((attr("actor"), attr(n))) for n in ("action_scale", "action_bias"))
    if not isinstance(scale, Leaf) or policy is None:
        return {"action_low": None, "action_high": None}
    import numpy as np

    count = widths(agent, policy)[1]
    for leaf in (scale, bias):
        if isinstance(leaf, Leaf) and math.prod(leaf.shape) not in (1, count):
            raise MappingError(
                "the action's map has another size than the action",
                path=leaf.key,
                expected=f"1 number or {count}",
                found=str(list(leaf.shape)),
            )
    wide = np.broadcast_to(scale.array().astype(np.float64).reshape(-1), (count,))
    middle = bias.array().astype(np.float64).reshape(-1) if isinstance(bias, Leaf) else np.zeros(1)
    return {"action_low": (middle - wide).tolist(), "action_high": (middle + wide).tolist()}


def _normalizer(agent: Tree) -> Norm | None:
    """Return the statistics that stand in the canonical tree; a layout says more of them in its facts."""
    mean, var, std = (agent.get((attr(canonical.NORMALIZER), attr(n))) for n in ("mean", "var", "std"))
    if not isinstance(mean, Leaf):
        return None
    if isinstance(var, Leaf):
        return Norm(mean, var)
    return Norm(mean, std=std) if isinstance(std, Leaf) else None


def _norm(norm: Norm | None) -> dict[str, Any] | None:
    """Return the statistics as a sidecar holds them: mean, var, epsilon inside the root, clip."""
    if norm is None:
        return None
    import numpy as np

    var = _flat(norm.var) if norm.var is not None else _flat(cast(Leaf, norm.std)) ** 2
    epsilon = norm.epsilon
    if norm.outside:
        var, epsilon = (np.sqrt(var) + epsilon) ** 2, 0.0
    return {"mean": _flat(norm.mean).tolist(), "var": var.tolist(), "epsilon": epsilon, "clip": norm.clip}


def norm(known: Sidecar) -> Norm | None:
    """Return the statistics of the observations that are known, whoever says so."""
    told = known.obs_norm
    if told is None:
        return None
    clip = told.get("clip")
    mean, var = (
        small_arrays.tensor([float(value) for value in told[name]], name) for name in ("mean", "var")
    )
    return Norm(
        mean, var, epsilon=float(told.get("epsilon", 1e-8)), clip=None if clip is None else float(clip)
    )


def action_map(known: Sidecar, agent: Tree) -> dict[Path, Leaf | ValueLeaf]:
    """Return the action's scale and bias [act_dim] as canonical leaves, for layouts whose weights hold them.

    None where the tree has them already, or where nobody knows the bounds.
    """
    scale, bias = ((attr("actor"), attr(name)) for name in ("action_scale", "action_bias"))
    low, high = known.action_low, known.action_high
    if scale in agent or low is None or high is None:
        return {}
    pairs = tuple(zip(low, high, strict=True))
    # In float32, as torch computes it from a float32 Box (CleanRL, td3_continuous_action.py).
    numbers = {scale: [(b - a) / 2 for a, b in pairs], bias: [(b + a) / 2 for a, b in pairs]}
    return {
        path: Leaf("float32", (len(v),), Inline(struct.pack(f"<{len(v)}f", *v)), display(path), "buffer")
        for path, v in numbers.items()
    }


def _flat(leaf: Leaf) -> np.ndarray:
    return leaf.array().astype("float64").reshape(-1)


def merged(told: Sidecar | None, read: Sidecar) -> Sidecar:
    """Return what is known: what the sidecar says, unless that was assumed there and a file says it."""
    if told is None:
        return read
    better = {
        name: getattr(read, name)
        for name in FACTS
        if getattr(read, name) is not None
        and (getattr(told, name) is None or told.is_assumed(name))
        and not (getattr(told, name) is not None and read.is_assumed(name))
    }
    if told.obs_dim is None and read.obs_dim is not None:
        better["obs_dim"] = read.obs_dim
    provenance = {**told.provenance, **{name: read.provenance.get(name, "given") for name in better}}
    return replace(told, **better, provenance=provenance)
