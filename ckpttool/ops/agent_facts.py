"""Facts about an agent that a person gives because no file holds them: activations, action map, bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from ckpttool import documents
from ckpttool.errors import UsageError, choice, some
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.sidecar import Sidecar

if TYPE_CHECKING:
    import numpy as np

GIVEN = "given"
# What people call things that have another name here; both spellings mean the same function.
_ACTIVATIONS = {"swish": "silu", "leakyrelu": "leaky_relu", "none": "linear", "identity": "linear"}
_HEADS = {"linear": "identity", "none": "identity", "squashed_gaussian": "affine"}
_SCALED_TANH = ("tanh", "affine", "tanh_clip_affine")
_MEAN = ("mean", "running_mean")
_VAR = ("var", "running_var", "variance")
_STD = ("std", "running_std")
# Statistics of other things than observations, in the files of Stable-Baselines3 and others.
_OTHERS = ("ret", "ret_rms", "return", "returns", "reward", "reward_rms", "rewards", "value", "critic")
# gymnasium/wrappers/stateful_observation.py and stable_baselines3/common/vec_env/vec_normalize.py.
_EPSILON = 1e-8
# Networks compute in float32.
_LARGEST = 3.4e38


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the checkpoint's files do not hold; a given fact wins over what they hold.

    Args:
        activations: after the hidden layers; one name, or one for each hidden layer.
        head: how the last layer becomes an action (agents.components.HEADS).
        action_low: lower bound of each action, or one number for all.
        action_high: upper bound of each action, or one number for all.
        obs_norm: a file with statistics of the observations, or `mean`, `var` and perhaps `epsilon`, `clip`.
        env: the Gymnasium id of the environment that the agent was trained in.

    """

    activations: str | Sequence[str] | None = None
    head: str | None = None
    action_low: float | Sequence[float] | None = None
    action_high: float | Sequence[float] | None = None
    obs_norm: str | Mapping[str, Any] | None = None
    env: str | None = None
    known: Mapping[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """the facts that were given, checked, under the names of a sidecar"""

    def __post_init__(self) -> None:
        """Check every fact; raise UsageError for an unknown name, wrong bounds or wrong statistics."""
        low, high = _bounds(self.action_low, self.action_high)
        found = {
            "activations": _activations(self.activations),
            "head": None if self.head is None else _head(self.head),
            "action_low": low,
            "action_high": high,
            "obs_norm": None if self.obs_norm is None else _statistics(self.obs_norm),
            "env": None if self.env is None else {"id": self.env},
        }
        object.__setattr__(self, "known", {k: value for k, value in found.items() if value is not None})

    def __bool__(self) -> bool:
        """Return whether any fact was given."""
        return bool(self.known)

    def over(self, sidecar: Sidecar | None) -> Sidecar | None:
        """Return the sidecar with these facts in the place of its own, None if there is nothing to return."""
        if not self.known:
            return sidecar
        base = sidecar or Sidecar("")
        provenance = {**base.provenance, **dict.fromkeys(self.known, GIVEN)}
        return replace(base, **self.known, provenance=provenance)

    def sized(self, hidden: int, actions: int) -> AgentFacts:
        """Return the facts for a policy of these sizes; raise UsageError if there are too many or too few."""
        names = self.known.get("activations", ())
        if len(names) not in (0, 1, hidden):
            raise UsageError(
                "the number of activations is not that of the hidden layers",
                expected=f"1 or {hidden}",
                found=str(len(names)),
                hint="--activation takes one name, or one for each hidden layer: --activation relu,tanh",
            )
        bounds = {name: self.known[name] for name in ("action_low", "action_high") if name in self.known}
        if any(len(values) not in (1, actions) for values in bounds.values()):
            raise UsageError(
                "the number of action bounds is not that of the actions",
                expected=f"1 or {actions}",
                found=str(max(map(len, bounds.values()))),
                hint="--bounds takes two numbers, or two lists with commas: --bounds -1,-2 1,2",
            )
        sized = replace(self)
        wide = {name: list(values) * (actions // len(values)) for name, values in bounds.items()}
        object.__setattr__(sized, "known", {**self.known, **wide})
        return sized

    def contradictions(self, read: Sidecar) -> Iterator[str]:
        """Yield a sentence for each fact of which the checkpoint, or its sidecar, holds another value."""
        for name, value in self.known.items():
            theirs, origin = getattr(read, name), str(read.provenance.get(name, ""))
            if theirs is None or not origin or read.is_assumed(name):
                continue
            if name == "activations" and len(value) == 1:
                value = list(value) * len(theirs)
            if name == "head" and theirs == "unit_tanh" and value in _SCALED_TANH:
                continue  # the model ends in tanh, and the program scales it
            if name == "env":
                value, theirs = value["id"], theirs.get("id")
            if value != theirs:
                what = "other values" if name == "obs_norm" else _shown(theirs)
                yield f"{name} given as {_described(name, value)}; the checkpoint holds {what} ({origin})"

    def described(self) -> str:
        """Return a short text of all given facts, for notes."""
        return ", ".join(f"{name} {_described(name, value)}" for name, value in self.known.items())


def merged(facts: AgentFacts | None, env: str | None) -> AgentFacts:
    """Return the facts with the environment that was given apart from them."""
    if facts is None or not facts:
        return NO_FACTS if env is None else AgentFacts(env=env)
    if env is None or facts.env == env:
        return facts
    return AgentFacts(
        **{f.name: getattr(facts, f.name) for f in fields(facts) if f.init and f.name != "env"}, env=env
    )


def _described(name: str, value: Any) -> str:
    return f"of {len(value['mean'])} observations" if name == "obs_norm" else _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("id"))
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    distinct = dict.fromkeys(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    return ", ".join(distinct) if len(distinct) == 1 else f"[{', '.join(map(str, value))}]"


def _activations(names: str | Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    from ckpttool.agents.network import ActivationName

    known = get_args(ActivationName)
    listed = names.split(",") if isinstance(names, str) else list(names)
    found = [_ACTIVATIONS.get(name.strip().lower(), name.strip().lower()) for name in listed]
    for name in found:
        if name not in known:
            raise UsageError(f"unknown activation {name!r}", hint=choice(name, known))
    if not found:
        raise UsageError("no activation was given", hint="such as --activation relu")
    return found


def _head(name: str) -> str:
    from ckpttool.agents.components import HEADS

    found = name.strip().lower().replace("-", "_")
    found = _HEADS.get(found, found)
    if found not in HEADS:
        raise UsageError(f"unknown action map {name!r}", hint=choice(name, (*HEADS, *_HEADS)))
    return found


def _bounds(
    low: float | Sequence[float] | None, high: float | Sequence[float] | None
) -> tuple[list[float] | None, list[float] | None]:
    if low is None and high is None:
        return None, None
    if low is None or high is None:
        raise UsageError("action bounds need a lower and an upper one", hint="such as --bounds -1 1")
    lows, highs = _numbers(low), _numbers(high)
    size = max(len(lows), len(highs))
    lows, highs = (values * size if len(values) == 1 else values for values in (lows, highs))
    if len(lows) != len(highs):
        raise UsageError(
            "there are not as many lower as upper action bounds",
            expected=f"{len(lows)} upper bounds",
            found=str(len(highs)),
        )
    if not lows or not all(math.isfinite(b) and abs(b) <= _LARGEST for b in (*lows, *highs)):
        raise UsageError("the action bounds are not finite numbers")
    if any(a >= b for a, b in zip(lows, highs, strict=True)):
        raise UsageError("a lower action bound is not below its upper one", found=f"{lows} to {highs}")
    return lows, highs


def _numbers(values: float | Sequence[float]) -> list[float]:
    if isinstance(values, int | float):
        return [float(values)]
    return [float(value) for value in values]


def bounds_of_text(pair: tuple[str, str] | None) -> tuple[list[float], list[float]] | tuple[None, None]:
    """Return the bounds that two words of a command line give: numbers, or lists of them with commas."""
    if pair is None:
        return None, None
    try:
        low, high = ([float(number) for number in word.split(",")] for word in pair)
    except ValueError:
        raise UsageError(
            "the action bounds are not numbers", found=" ".join(pair), hint="such as --bounds -1,-2 1,2"
        ) from None
    return low, high


def _statistics(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return statistics of observations as a sidecar holds them; raise UsageError where there are none."""
    import numpy as np

    file = given if isinstance(given, str) else None
    found = _of_file(given) if isinstance(given, str) else dict(given)
    if found.get("mean") is None or (found.get("var") is None and found.get("std") is None):
        raise UsageError("the statistics of observations need mean and var (or std)", file=file)
    mean = np.asarray(_array(found["mean"]), np.float64)
    spread = found["std"] if found.get("var") is None else found["var"]
    var = np.asarray(_array(spread), np.float64) ** (2 if found.get("var") is None else 1)
    epsilon, clip = found.get("epsilon"), found.get("clip")
    epsilon = _EPSILON if epsilon is None else float(epsilon)
    if mean.ndim != 1 or mean.shape != var.shape or not len(mean):
        raise UsageError(
            "mean and variance of the observations are not two rows of one length",
            file=file,
            found=f"{list(mean.shape)} and {list(var.shape)}",
        )
    numbers = np.concatenate([mean, var, [epsilon]])
    if not (np.abs(numbers) <= _LARGEST).all() or (var < 0).any() or epsilon < 0:
        raise UsageError(
            "the statistics of observations are not finite, or a variance is negative", file=file
        )
    if (var + epsilon == 0).any():
        raise UsageError("a variance of the observations is zero, and so is epsilon", file=file)
    if clip is not None and not 0 < float(clip) <= _LARGEST:
        raise UsageError("the limit of normalised observations is not a positive number", file=file)
    limit = None if clip is None else float(clip)
    return {"mean": mean.tolist(), "var": var.tolist(), "epsilon": epsilon, "clip": limit}


def _array(value: Any) -> np.ndarray | Any:
    return value.array() if isinstance(value, Leaf) else value


def _of_file(file: str) -> dict[str, Any]:
    if file.endswith(".json"):
        return _of_json(file)
    tree = open_checkpoint(file).tree
    named = {tuple(shown.split("/")): tree[path] for path, shown in tree.names.items()}
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for segments, leaf in named.items():
        for what, names in (("mean", _MEAN), ("var", _VAR), ("std", _STD)):
            if segments[-1:] and segments[-1] in names and isinstance(leaf, Leaf):
                groups.setdefault(segments[:-1], {}).setdefault(what, leaf)
    whole = {at: g for at, g in groups.items() if "mean" in g and ("var" in g or "std" in g)}
    ours = {at: g for at, g in whole.items() if not at or at[-1] not in _OTHERS} or whole
    if len(ours) != 1:
        raise UsageError(
            "the file holds no mean and var of observations"
            if not ours
            else "the file holds several statistics",
            file=file,
            expected="entries `mean` and `var` (or `std`) side by side",
            found=some(
                ["/".join(at) or "the top" for at in ours] or ["/".join(s) for s in named] or ["nothing"], 4
            ),
        )
    ((at, group),) = ours.items()
    if _plain(named, ("norm_obs",)) is False:
        raise UsageError("the file records that observations were not normalised", file=file, path="norm_obs")
    epsilon = next((v for at_ in (at, ()) if (v := _plain(named, (*at_, "epsilon"))) is not None), None)
    clip = next(
        (v for at_ in (at, ()) for n in ("clip", "clip_obs") if (v := _plain(named, (*at_, n))) is not None),
        None,
    )
    return {**group, "epsilon": epsilon, "clip": clip}


def _of_json(file: str) -> dict[str, Any]:
    found = documents.load(file, "the statistics", "sidecar_bytes")
    inner = found.get("obs_norm")
    document = dict(inner if isinstance(inner, Mapping) else found)
    for name in ("mean", "var", "std"):
        value = document.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(v, int | float) for v in value)
        ):
            raise UsageError("the statistics of observations are not lists of numbers", file=file, path=name)
    return document


def _plain(named: Mapping[tuple[str, ...], Leaf | ValueLeaf], at: tuple[str, ...]) -> Any:
    """Return a number or a truth value, stored as one or as a tensor of one element."""
    leaf = named.get(at)
    if isinstance(leaf, Leaf):
        return leaf.array().reshape(-1)[0].item() if math.prod(leaf.shape) == 1 else None
    value = leaf.value if leaf is not None else None
    return value if isinstance(value, int | float) else None


NO_FACTS = AgentFacts()
