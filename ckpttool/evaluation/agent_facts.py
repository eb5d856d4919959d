"""Facts about an agent that its files do not contain, given by its user."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from ckpttool.core import sidecar
from ckpttool.core import text as documents
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UsageError, abbreviate_list, suggest_choice
from ckpttool.core.kinds import ACTIVATION_SYNONYMS, ACTIVATIONS
from ckpttool.core.sidecar import NotUnderstood, Sidecar
from ckpttool.core.tree import Leaf, Tree, ValueLeaf

GIVEN = "given"
_HEADS = {"linear": "identity", "none": "identity", "squashed_gaussian": "affine"}
_BOUNDS = "bounds are LOW and HIGH: two numbers, or a number for each action, separated by commas"
_SCALED_TANH = ("tanh", "affine", "tanh_clip_affine")
# Names of statistics other than those of observations, in the files of Stable-Baselines3 and others.
_OTHERS = ("ret", "ret_rms", "return", "returns", "reward", "reward_rms", "rewards", "value", "critic")
# Names of the switch that VecNormalize and other programs store beside statistics.
_SWITCHES = ("norm_obs", "normalize_obs", "obs_normalization")
# gymnasium/wrappers/stateful_observation.py and stable_baselines3/common/vec_env/vec_normalize.py.
_EPSILON = 1e-8
# Networks compute in float32.
_MAX_FLOAT32 = 3.4e38


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """Facts about an agent that its files do not contain; a given fact overrides a stored one.

    Args:
        activations: after the hidden layers; one name, or one for each hidden layer.
        head: how the last layer becomes an action (networks.build.HEADS).
        action_low: lower bound of each action, or one number for all.
        action_high: upper bound of each action, or one number for all.
        obs_norm: a file with observation statistics, or `mean`, `var` and optionally `epsilon`, `clip`.
        env: the Gymnasium id of the training environment.
    """

    activations: str | Sequence[str] | None = None
    head: str | None = None
    action_low: float | Sequence[float] | None = None
    action_high: float | Sequence[float] | None = None
    obs_norm: str | Mapping[str, Any] | None = None
    env: str | None = None
    known: Mapping[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """the given facts, checked, under their sidecar names"""

    def __post_init__(self) -> None:
        """Check every fact; raise UsageError for an unknown name, invalid bounds or invalid statistics."""
        low, high = _parse_bounds(self.action_low, self.action_high)
        parsed = {
            "activations": _parse_activations(self.activations),
            "head": None if self.head is None else _parse_head(self.head),
            "action_low": low,
            "action_high": high,
            "obs_norm": None if self.obs_norm is None else _parse_statistics(self.obs_norm),
            "env": None if self.env is None else {"id": self.env},
        }
        object.__setattr__(self, "known", {k: value for k, value in parsed.items() if value is not None})

    def __bool__(self) -> bool:
        """Return whether any fact was given."""
        return bool(self.known)

    def over(self, sidecar: Sidecar | None) -> Sidecar | None:
        """Return the sidecar with these facts replaced, None without facts and sidecar."""
        if not self.known:
            return sidecar
        base = sidecar or Sidecar("")
        provenance = {**base.provenance, **dict.fromkeys(self.known, GIVEN)}
        return replace(base, **self.known, provenance=provenance)

    def sized(self, hidden: int, actions: int) -> AgentFacts:
        """Return the facts for a policy of these sizes; raise UsageError for too many or too few values."""
        names = self.known.get("activations", ())
        if len(names) not in (0, 1, hidden):
            raise UsageError(
                "wrong number of activations for the hidden layers",
                expected=f"1 or {hidden}",
                found=str(len(names)),
                hint="use --activation NAME, or NAME,NAME,... with one name for each hidden layer",
            )
        bounds = {name: self.known[name] for name in ("action_low", "action_high") if name in self.known}
        if any(len(values) not in (1, actions) for values in bounds.values()):
            raise UsageError(
                "wrong number of action bounds for the actions",
                expected=f"1 or {actions}",
                found=str(max(map(len, bounds.values()))),
                hint=_BOUNDS,
            )
        sized = replace(self)
        wide = {name: list(values) * (actions // len(values)) for name, values in bounds.items()}
        object.__setattr__(sized, "known", {**self.known, **wide})
        return sized

    def contradictions(
        self, read: Sidecar, stated: Mapping[str, NotUnderstood] = MappingProxyType({})
    ) -> Iterator[str]:
        """Yield a sentence for each fact that differs from the value in the checkpoint or its sidecar.

        `stated` are facts that the checkpoint states in a form that is not understood: they may differ.
        """
        for name, fact in stated.items():
            if name in self.known:
                yield (
                    f"{name} given as {_describe_fact(name, self.known[name])} in place of {fact.text}, "
                    f"which the checkpoint states ({fact.source}) and which is not supported"
                )
        for name, value in self.known.items():
            recorded, origin = getattr(read, name), str(read.provenance.get(name, ""))
            if recorded is None or not origin or read.is_assumed(name):
                continue
            if name == "activations" and len(value) == 1:
                value = list(value) * len(recorded)
            if name == "head" and recorded == "unit_tanh" and value in _SCALED_TANH:
                continue  # the model ends in tanh, and the program scales its output
            if name == "env":
                value, recorded = value["id"], recorded.get("id")
            if value != recorded:
                what = "other values" if name == "obs_norm" else _format_fact(recorded)
                yield (
                    f"{name} given as {_describe_fact(name, value)}, but the checkpoint contains "
                    f"{what} ({origin})"
                )

    def described(self) -> str:
        """Return a short text of all given facts, for notes."""
        return ", ".join(f"{name} {_describe_fact(name, value)}" for name, value in self.known.items())


def add_environment(facts: AgentFacts | None, env: str | None) -> AgentFacts:
    """Return the facts, with the separately given environment added."""
    if facts is None or not facts:
        return NO_FACTS if env is None else AgentFacts(env=env)
    if env is None or facts.env == env:
        return facts
    return AgentFacts(
        **{f.name: getattr(facts, f.name) for f in fields(facts) if f.init and f.name != "env"}, env=env
    )


def _describe_fact(name: str, value: Any) -> str:
    return f"of {len(value['mean'])} observations" if name == "obs_norm" else _format_fact(value)


def _format_fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("id"))
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    distinct = dict.fromkeys(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return ", ".join(distinct) if len(distinct) == 1 else f"[{', '.join(map(str, value))}]"


def _parse_activations(names: str | Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    listed = names.split(",") if isinstance(names, str) else list(names)
    activations = [ACTIVATION_SYNONYMS.get(name.strip().lower(), name.strip().lower()) for name in listed]
    for name in activations:
        if sidecar.parse_activation(name) is None:
            raise UsageError(f"unknown activation {name!r}", hint=suggest_choice(name, ACTIVATIONS))
    if not activations:
        raise UsageError("no activation given", hint=f"choose from {', '.join(ACTIVATIONS)}")
    return activations


def _parse_head(name: str) -> str:
    from ckpttool.networks.build import HEADS

    head = name.strip().lower().replace("-", "_")
    head = _HEADS.get(head, head)
    if head not in HEADS:
        raise UsageError(f"unknown action map {name!r}", hint=suggest_choice(name, (*HEADS, *_HEADS)))
    return head


def _parse_bounds(
    low: float | Sequence[float] | None, high: float | Sequence[float] | None
) -> tuple[list[float] | None, list[float] | None]:
    if low is None and high is None:
        return None, None
    if low is None or high is None:
        raise UsageError("action bounds need a lower and an upper bound", hint=_BOUNDS)
    lows, highs = _as_floats(low), _as_floats(high)
    size = max(len(lows), len(highs))
    lows, highs = (values * size if len(values) == 1 else values for values in (lows, highs))
    if len(lows) != len(highs):
        raise UsageError(
            "the numbers of lower and upper action bounds differ",
            expected=f"{len(lows)} upper bounds",
            found=str(len(highs)),
        )
    if not lows or not all(math.isfinite(b) and abs(b) <= _MAX_FLOAT32 for b in (*lows, *highs)):
        raise UsageError("action bounds must be finite numbers", hint=_BOUNDS)
    if any(a >= b for a, b in zip(lows, highs, strict=True)):
        raise UsageError(
            "each lower action bound must be below its upper bound",
            found=f"{lows} to {highs}",
            hint="the lower bound comes first",
        )
    return lows, highs


def _as_floats(values: float | Sequence[float]) -> list[float]:
    if isinstance(values, int | float):
        return [float(values)]
    return [float(value) for value in values]


def parse_bounds(pair: tuple[str, str] | None) -> tuple[list[float], list[float]] | tuple[None, None]:
    """Return the bounds from two words of a command line: numbers, or comma-separated lists."""
    if pair is None:
        return None, None
    try:
        low, high = ([float(number) for number in word.split(",")] for word in pair)
    except ValueError:
        raise UsageError(
            "action bounds must be numbers",
            found=" ".join(pair),
            hint=_BOUNDS,
        ) from None
    return low, high


def _parse_statistics(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return observation statistics in sidecar form; raise UsageError for missing or invalid ones."""
    file = source if isinstance(source, str) else None
    statistics = _read_statistics_file(source) if isinstance(source, str) else _plain_statistics(source, None)
    names = ("mean", "var", "std", "epsilon", "clip")
    mean, var, std, epsilon, clip = (_read_numbers(statistics, name, file) for name in names)
    if mean is None or (var is None and std is None):
        raise UsageError("observation statistics need mean and var (or std)", file=file)
    var = std**2 if var is None else var
    epsilon = _EPSILON if epsilon is None else float(epsilon)
    if mean.ndim != 1 or mean.shape != var.shape or not len(mean):
        raise UsageError(
            "mean and variance of the observations must be vectors of equal length",
            file=file,
            found=f"{list(mean.shape)} and {list(var.shape)}",
        )
    numbers = np.concatenate([mean, var, [epsilon]])
    if not (np.abs(numbers) <= _MAX_FLOAT32).all() or (var < 0).any() or epsilon < 0:
        raise UsageError("observation statistics are not finite, or a variance is negative", file=file)
    if (var + epsilon == 0).any():
        raise UsageError("an observation variance and epsilon are both zero", file=file)
    if clip is not None and not 0 < float(clip) <= _MAX_FLOAT32:
        raise UsageError("the clip limit of normalised observations must be a positive number", file=file)
    parts = {"parts": dict(statistics["parts"])} if statistics.get("parts") else {}
    limit = clip and float(clip)
    return {"mean": mean.tolist(), "var": var.tolist(), "epsilon": epsilon, "clip": limit, **parts}


def _plain_statistics(record: Mapping[str, Any], file: str | None) -> dict[str, Any]:
    """Return statistics by their names here; raise UsageError for an entry that is none of them."""
    from ckpttool.libraries.schema import CLIP_NAMES, EPSILON_NAMES

    _require_known_settings({(name,): value for name, value in record.items() if name != "parts"}, (), file)
    spellings = {**dict.fromkeys(CLIP_NAMES, "clip"), **dict.fromkeys(EPSILON_NAMES, "epsilon")}
    return {spellings.get(name, name): value for name, value in record.items()}


def _read_numbers(statistics: Mapping[str, Any], name: str, file: str | None) -> Any:
    """Return an entry of statistics in float64, None without one; raise UsageError for anything else."""
    value = _as_array(statistics.get(name))
    try:
        numbers = None if value is None else np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise UsageError("observation statistics must be numbers", file=file, path=name) from None
    if numbers is not None and numbers.ndim and name in ("epsilon", "clip"):
        raise UsageError(f"{name} of observation statistics must be one number", file=file, path=name)
    return numbers


def _as_array(value: Any) -> np.ndarray | Any:
    return value.array() if isinstance(value, Leaf) else value


def _join_parts(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the statistics of a Dict observation's parts as one, with the size of each."""
    rows = {
        name: [_as_array(group.get(what)).reshape(-1) for what in ("mean", "var")]
        for name, group in groups.items()
    }
    mean, var = (np.concatenate(column) for column in zip(*rows.values(), strict=True))
    return {"mean": mean, "var": var, "parts": {name: row[0].size for name, row in rows.items()}}


def _read_statistics_file(file: str) -> dict[str, Any]:
    from ckpttool.formats.detect import open_checkpoint
    from ckpttool.libraries import schema
    from ckpttool.libraries.sb3 import read_default_clip

    if file.endswith(".json"):
        record = documents.load_json(file, "the statistics", "sidecar_bytes")
        return _plain_statistics(
            inner if isinstance(inner := record.get("obs_norm"), Mapping) else record, file
        )
    tree = open_checkpoint(file).tree
    named = {tuple(name.split("/")): leaf for name, leaf in tree.entries.items()}
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for segments, leaf in named.items():
        what = schema.STATISTIC_NAMES.get(segments[-1].lstrip("_")) if segments else None
        if what is not None and isinstance(leaf, Leaf):
            groups.setdefault(segments[:-1], {}).setdefault(what, leaf)
    at, group = _choose_group(groups, tree, file)
    _require_known_settings(named, at, file)
    settings = {"epsilon": schema.EPSILON_NAMES, "clip": schema.CLIP_NAMES}
    numbers = {}
    for setting, spellings in settings.items():
        values = (_scalar_value(named, (*prefix, name)) for prefix in (at, ()) for name in spellings)
        numbers[setting] = next((value for value in values if value is not None), None)
    formula = schema.choose_formula([segments[-1] for segments in named if segments[:-1] == at])
    if numbers["clip"] is None:
        numbers["clip"] = read_default_clip(tree) or formula.clip
    epsilon = formula.epsilon if numbers["epsilon"] is None else numbers["epsilon"]
    if formula.outside and isinstance(epsilon, int | float):
        std = _as_array(group["std"]) if "std" in group else np.sqrt(_as_array(group["var"]))
        return {"mean": group["mean"], "var": (std + epsilon) ** 2, **numbers, "epsilon": 0.0}
    if numbers["epsilon"] is None and not formula.std:
        numbers["epsilon"] = formula.epsilon
    return {**group, **numbers}


def _choose_group(
    groups: Mapping[tuple[str, ...], dict[str, Any]], tree: Tree, file: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the location and the rows of the only statistics of observations; UsageError without them."""
    whole = {at: g for at, g in groups.items() if "mean" in g and ("var" in g or "std" in g)}
    own_groups = {at: g for at, g in whole.items() if not at or at[-1] not in _OTHERS} or whole
    wrapped = any(str(container.name).endswith(".VecNormalize") for container in tree.containers.values())
    if (wrapped or len(own_groups) > 1) and {at[:-1] for at in own_groups} == {("obs_rms",)}:
        own_groups = {("obs_rms",): _join_parts({at[-1]: group for at, group in own_groups.items()})}
    if len(own_groups) != 1:
        raise UsageError(
            "the file contains no mean and var of observations"
            if not own_groups
            else "the file contains several sets of statistics",
            file=file,
            expected="entries `mean` and `var` (or `std`) side by side",
            found=abbreviate_list(
                ["/".join(at) or "the top" for at in own_groups] or list(tree.names.values()) or ["nothing"],
                4,
            ),
        )
    return next(iter(own_groups.items()))


def _require_known_settings(
    named: Mapping[tuple[str, ...], Any], at: tuple[str, ...], file: str | None
) -> None:
    """Raise UsageError if a switch is off, or if an entry beside the statistics at `at` is not understood."""
    from ckpttool.libraries import schema

    understood = {*schema.STATISTIC_NAMES, *schema.EPSILON_NAMES, *schema.CLIP_NAMES, *schema.IDLE_NAMES}
    for segments, value in named.items():
        if segments[:1] and segments[0] in _SWITCHES:
            leaf = value if isinstance(value, Leaf | ValueLeaf) else ValueLeaf(value)
            if len(segments) > 1 or not schema.read_switch(leaf, default=True):
                what = "the file does not record that observations were normalised"
                raise UsageError(what, file=file, path=segments[0], expected="true")
        elif segments[:-1] == at and segments[-1].lstrip("_").lower() not in understood:
            raise UsageError(
                "the statistics have a setting that is not understood",
                file=file,
                path="/".join(segments),
                expected="mean and var (or std), optional epsilon and clip",
                hint="write mean, var, epsilon and clip as applied to FILE.json: --obs-norm FILE.json",
            )


def _scalar_value(named: Mapping[tuple[str, ...], Leaf | ValueLeaf], at: tuple[str, ...]) -> Any:
    """Return the value, also that of a tensor with one element; other tensors, and a list for a container."""
    leaf = named.get(at)
    if isinstance(leaf, Leaf):
        return leaf.array().reshape(-1)[0].item() if math.prod(leaf.shape) == 1 else leaf
    within = [path for path in named if path[: len(at)] == at]
    return leaf.value if leaf is not None else within or None


NO_FACTS = AgentFacts()
