"""Evidence about an agent in the checkpoint and in files beside it."""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred, filesystem, sidecar
from ckpttool.core import text as documents
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, UsageError, abbreviate_list, suggest_choice
from ckpttool.core.kinds import ACTIVATION_SYNONYMS, ACTIVATIONS
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, NotUnderstood, Sidecar, Topic
from ckpttool.core.tree import Leaf, Path, Plain, Record, Tree, ValueLeaf

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.libraries.schema import AgentMetadata, RecognizedAgent


GIVEN = "given"
_HEADS = {"linear": "identity", "none": "identity", "squashed_gaussian": "affine"}
_BOUNDS = "use --bounds LOW HIGH with two numbers, or with a number for each action, separated by commas"
_SCALED_TANH = ("tanh", "affine", "tanh_clip_affine")
_MEAN = ("mean", "running_mean")
_VAR = ("var", "running_var", "variance")
_STD = ("std", "running_std")
# Names of statistics other than those of observations, in the files of Stable-Baselines3 and others.
_OTHERS = ("ret", "ret_rms", "return", "returns", "reward", "reward_rms", "rewards", "value", "critic")
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
        found = {
            "activations": _parse_activations(self.activations),
            "head": None if self.head is None else _parse_head(self.head),
            "action_low": low,
            "action_high": high,
            "obs_norm": None if self.obs_norm is None else _parse_statistics(self.obs_norm),
            "env": None if self.env is None else {"id": self.env},
        }
        object.__setattr__(self, "known", {k: value for k, value in found.items() if value is not None})

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
        for name, each in stated.items():
            if name in self.known:
                yield (
                    f"{name} given as {_describe_fact(name, self.known[name])} in place of {each.text}, "
                    f"which the checkpoint states ({each.source}) and which is not supported"
                )
        for name, value in self.known.items():
            theirs, origin = getattr(read, name), str(read.provenance.get(name, ""))
            if theirs is None or not origin or read.is_assumed(name):
                continue
            if name == "activations" and len(value) == 1:
                value = list(value) * len(theirs)
            if name == "head" and theirs == "unit_tanh" and value in _SCALED_TANH:
                continue  # the model ends in tanh, and the program scales its output
            if name == "env":
                value, theirs = value["id"], theirs.get("id")
            if value != theirs:
                what = "other values" if name == "obs_norm" else _format_fact(theirs)
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
    distinct = dict.fromkeys(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    return ", ".join(distinct) if len(distinct) == 1 else f"[{', '.join(map(str, value))}]"


def _parse_activations(names: str | Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    listed = names.split(",") if isinstance(names, str) else list(names)
    found = [ACTIVATION_SYNONYMS.get(name.strip().lower(), name.strip().lower()) for name in listed]
    for name in found:
        if sidecar.parse_activation(name) is None:
            raise UsageError(f"unknown activation {name!r}", hint=suggest_choice(name, ACTIVATIONS))
    if not found:
        raise UsageError("no activation given", hint=f"choose from {', '.join(ACTIVATIONS)}")
    return found


def _parse_head(name: str) -> str:
    from ckpttool.networks.build import HEADS

    found = name.strip().lower().replace("-", "_")
    found = _HEADS.get(found, found)
    if found not in HEADS:
        raise UsageError(f"unknown action map {name!r}", hint=suggest_choice(name, (*HEADS, *_HEADS)))
    return found


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
            hint="the lower bound comes first: --bounds LOW HIGH",
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


def _parse_statistics(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return observation statistics in sidecar form; raise UsageError for missing or invalid ones."""
    file = given if isinstance(given, str) else None
    found = _read_statistics_file(given) if isinstance(given, str) else dict(given)
    if found.get("mean") is None or (found.get("var") is None and found.get("std") is None):
        raise UsageError("observation statistics need mean and var (or std)", file=file)
    mean = np.asarray(_as_array(found["mean"]), np.float64)
    spread = found["std"] if found.get("var") is None else found["var"]
    var = np.asarray(_as_array(spread), np.float64) ** (2 if found.get("var") is None else 1)
    epsilon, clip = found.get("epsilon"), found.get("clip")
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
    limit = None if clip is None else float(clip)
    parts = {"parts": dict(found["parts"])} if found.get("parts") else {}
    return {"mean": mean.tolist(), "var": var.tolist(), "epsilon": epsilon, "clip": limit, **parts}


def _as_array(value: Any) -> np.ndarray | Any:
    return value.array() if isinstance(value, Leaf) else value


def _join_parts(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the statistics of a Dict observation's parts as one, with the size of each."""
    rows = {
        name: [_as_array(group.get(what)).reshape(-1) for what in ("mean", "var")]
        for name, group in groups.items()
    }
    mean, var = (np.concatenate(each) for each in zip(*rows.values(), strict=True))
    return {"mean": mean, "var": var, "parts": {name: row[0].size for name, row in rows.items()}}


def _read_statistics_file(file: str) -> dict[str, Any]:
    from ckpttool.formats.detect import open_checkpoint
    from ckpttool.libraries.sb3 import read_default_clip

    if file.endswith(".json"):
        return _read_statistics_json(file)
    tree = open_checkpoint(file).tree
    named = {tuple(shown.split("/")): tree[path] for path, shown in tree.names.items()}
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for segments, leaf in named.items():
        for what, names in (("mean", _MEAN), ("var", _VAR), ("std", _STD)):
            if segments[-1:] and segments[-1] in names and isinstance(leaf, Leaf):
                groups.setdefault(segments[:-1], {}).setdefault(what, leaf)
    whole = {at: g for at, g in groups.items() if "mean" in g and ("var" in g or "std" in g)}
    ours = {at: g for at, g in whole.items() if not at or at[-1] not in _OTHERS} or whole
    wrapped = any(str(each.name).endswith(".VecNormalize") for each in tree.containers.values())
    if (wrapped or len(ours) > 1) and {at[:-1] for at in ours} == {("obs_rms",)}:
        ours = {("obs_rms",): _join_parts({at[-1]: group for at, group in ours.items()})}
    if len(ours) != 1:
        raise UsageError(
            "the file contains no mean and var of observations"
            if not ours
            else "the file contains several sets of statistics",
            file=file,
            expected="entries `mean` and `var` (or `std`) side by side",
            found=abbreviate_list(
                ["/".join(at) or "the top" for at in ours] or ["/".join(s) for s in named] or ["nothing"], 4
            ),
        )
    ((at, group),) = ours.items()
    if _scalar_value(named, ("norm_obs",)) is False:
        raise UsageError("the file records that observations were not normalised", file=file, path="norm_obs")
    settings = {"epsilon": ["epsilon"], "clip": ["clip", "clip_obs"]}
    numbers = {}
    for setting, spellings in settings.items():
        values = (_scalar_value(named, (*place, name)) for place in (at, ()) for name in spellings)
        numbers[setting] = next((value for value in values if value is not None), None)
    if numbers["clip"] is None:
        numbers["clip"] = read_default_clip(tree)
    return {**group, **numbers}


def _read_statistics_json(file: str) -> dict[str, Any]:
    found = documents.load_json(file, "the statistics", "sidecar_bytes")
    inner = found.get("obs_norm")
    document = dict(inner if isinstance(inner, Mapping) else found)
    for name in ("mean", "var", "std"):
        value = document.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(v, int | float) for v in value)
        ):
            raise UsageError("observation statistics must be lists of numbers", file=file, path=name)
    return document


def _scalar_value(named: Mapping[tuple[str, ...], Leaf | ValueLeaf], at: tuple[str, ...]) -> Any:
    """Return a number or boolean, stored as a value or as a tensor with one element."""
    leaf = named.get(at)
    if isinstance(leaf, Leaf):
        return leaf.array().reshape(-1)[0].item() if math.prod(leaf.shape) == 1 else None
    value = leaf.value if leaf is not None else None
    return value if isinstance(value, int | float) else None


NO_FACTS = AgentFacts()


# Evidence that could change an agent's outputs but was not used: tensors, settings, classes, side files.
#
# One table (`VOCABULARY`) lists the names that programs use for observation statistics, bounds, activations,
# distributions, wrappers and custom code. A tensor that has one number per observation and belongs to no
# layer is evidence under any name. `apply_stored_settings` applies the checkpoint's settings that override a
# library's defaults. A setting that matches the value in use is not reported.

_OBSERVED = r"obs|observations?|states?|inputs?"
_OBSERVED_LIMITS = (
    rf"({_OBSERVED})_(low|high|min|max|lower|upper|bounds?|limits?|range|scales?|scaling|shift|offset|clip)"
    rf"|clip_({_OBSERVED})"
)
_NOT_OBSERVED = (
    r"ret|returns?|rews?|rewards?|adv|advantages?|values?|critics?|images?|grads?|actions?|priv\w*"
)
VOCABULARY: Mapping[Topic, re.Pattern[str]] = {
    "reward statistics": deferred.compile(
        r"(ret|returns?|rews?|rewards?|values?)_(rms|norm(aliz\w*|alis\w*)?|mean_std|scal(e|er|ing)|mean|std|var"
        r"|filter)|norm(alize|alise)?_(rew|rewards?|returns?|values?)|popart"
    ),
    "observation statistics": deferred.compile(
        rf"({_OBSERVED}|ob|o)_?(rms|norm(aliz\w*|alis\w*)?|stat(istic)?s|filter|mean|std|var|variance|scal(e|es|er|ing)"
        rf"|whiten\w*|preprocessor|clip(ping)?|clip_range|shift|offset|cent(er|re)|mu|sigma|loc)"
        rf"|(norm(alize|alise|alizer|aliser)?|clip|scale)_?({_OBSERVED}|ob)"
        r"|(empirical_)?normali[sz](er|ation|e)|running_mean_std|running_(mean|var|variance|std|norm)|obs_filter"
        rf"|{_OBSERVED_LIMITS}"
    ),
    "action bounds": deferred.compile(
        r"max_actions?|min_actions?|act(ion)?_(max|min|limits?|bounds?|scales?|bias|low|high|range)"
        r"|(low|high)_actions?"
    ),
    "distribution": deferred.compile(
        r"(action_)?dist(ribution)?(_(type|class|cls|name))?|squash(ed)?(_(output|action|mean|gaussian))?"
        r"|(use_)?tanh_(squash\w*|actions?|outputs?)|use_tanh|bounded"
        r"|((actor|policy|pi|mu|mean)_)?(out(put)?|final|last)_(layer_)?(act|activation|nonlinearity)(_fn)?"
        r"|((action|actor|policy)_)?head(_type)?"
    ),
    "activation": deferred.compile(
        r"(\w+_)?activ(ation)?s?(_(fn|func|function|name|type|class))?|(\w+_)?non_?lin(earity|earities)?"
        r"|(\w+_)?act(_(fn|func|fun|function|name|type|cls|class|layer))?"
    ),
    "architecture": deferred.compile(
        r"use_(layer|batch)_?norm|(layer|batch)_?norm|(use_)?(ln|bn)|(use_)?residual(s|_connections?)?"
        r"|(use_)?skip(_connections?)?|dropout(_rate|_p)?|spectral_norm"
    ),
    "wrapper": deferred.compile(
        r"(env_|gym_)?wrappers?|(env_)?wrapper_class|(n_|num_)?frame_?stacks?|n_stack|num_stack|stack_size"
        r"|action_repeats?|frame_?skip|action_delay"
    ),
    "custom code": deferred.compile(
        r"policy_class|features?_extractor(_class)?|custom_(model|policy|network|preprocessor)\w*"
        r"|(model|actor|network|policy|agent)(_(class|cls|type|name))?|_target_|class_path|class_name"
    ),
}
# Tensors beside a layer's weights that the layer's output depends on, or that replace the weights.
_WEIGHTS: Mapping[Topic, re.Pattern[str]] = {
    "low-rank weights": deferred.compile(r"lora\w*|dora\w*|lokr_\w+|hada_\w+|ia3_\w+|adapters?(_\w+)?"),
    "averaged weights": deferred.compile(
        r"(\w+_)?(ema|swa|shadow|polyak|averaged)(_\w+)?|ema\w*|exponentialmovingaverage"
    ),
    "quantisation scales": deferred.compile(
        r"((\w+_)?(weight|kernel|input|output|act(ivation)?)_(scales?|zero_?points?)(_inv)?)|zero_?points?|qzeros"
        r"|qweight|scb|(nested_)?absmax|(nested_)?quant_(map|state\w*)|g_idx|amax(_history)?|scales"
    ),
    "running statistics": deferred.compile(r"(running|moving)_(mean|var|variance|std)"),
}
# Words in the names of statistics files beside a checkpoint, and of settings files.
_STATISTICS_WORDS = deferred.compile(
    r"(vec_?)?norm(ali[sz](e|er|ation))?|vecnormali[sz]e|\w*rms|stats?|statistics|(z|mean_?std_?)?filter|scal(er|ing)"
    r"|whiten(ing)?|preproc(essor)?|running|mean|std|var|meanstd"
)
_NORMALISER_FILE = deferred.compile(
    r"^(vec_?normalize\w*|(obs_?|observation_?|state_?)?normali[sz]er\w*|(obs|observation|state)_?(rms|norm|stats?"
    r"|statistics|mean_?std|scaler)\w*|running_mean_std\w*|norm(alization)?_?(stats?|params)\w*|rms)\."
)
_RUN_PART = deferred.compile(
    r"(best|final|last|latest|check_?points?|ckpts?|models?|policy|policies|weights|saves?|saved|evals?|env(ironment)?s?)"
    r"(_(models?|policy|check_?points?|ckpts?|weights))?"
)
# Keras writes the weights of models only as `.weights.h5` (keras/src/saving/saving_api.py).
_STATISTICS_FILE = deferred.compile(
    r"(.+)(?<!\.weights)\.(pkl|pickle|pt|pth|npz|npy|json|h5|hdf5|safetensors|csv|txt)"
)
_SETTINGS_WORDS = deferred.compile(
    r"config(uration)?|conf|cfg|params?|args|flags|options?|opts|hparams|hyper|hyperparam(eter)?s?|settings|agent"
)
_SETTINGS_FILE = deferred.compile(r"(.+)\.(ya?ml|json|toml|txt|gin)", re.IGNORECASE)
_NAMESPACE = deferred.compile(r"""(\w+)=('[^']*'|"[^"]*"|[^,()\[\]]+)""")
_WORDS = deferred.compile(r"[^._\-\s]+")
# Functions that are not an ActivationName: a network with one of them computes something else.
_FOREIGN = frozenset(
    {"celu", "hardsigmoid", "softsign", "prelu", "rrelu"}
    | {"sin", "sine", "snake", "crelu", "glu", "geglu", "reglu", "swiglu", "simnorm", "logsigmoid", "softmax"}
    | {"hardshrink", "softshrink", "tanhshrink", "exponential", "squareplus", "threshold"}
)
# A limit or unit of the observations, which a program may contain without using it.
_LIMIT = deferred.compile(_OBSERVED_LIMITS)
# Settings of layers other than the policy's hidden layers.
_ELSEWHERE = deferred.compile(
    r"out|final|last|critic|value|vf_|qf?_|q_model|conv|post_fc|lstm|encoder|discrim|reward"
)
# Names of vectors with one number per observation that are not statistics.
_OBSERVATION = deferred.compile(
    r"space|last|next|init|reset|sample|dummy|example|mask|goal|buffer|memory|rollout|replay|dataset|batch|rng|seed"
    r"|optim|target|running_loss|history|log"
)
# Names of settings that are also common module names.
_MODULE = deferred.compile(
    r"model|actor|network|policy|agent|(\w+_)?act|(\w+_)?head|ln|bn|skip|residuals?|o_?norm"
)
_LAYER = frozenset(("weight", "bias", "kernel", "gamma", "beta", "w", "b", "weights", "biases"))
_TANH = frozenset(("tanh", "affine", "unit_tanh", "tanh_clip_affine", "clip_tanh_affine"))
# Modules whose classes the layouts recognize; a class of another module is custom code that is not run.
_LIBRARIES = deferred.compile(
    "stable_baselines3?|sb3_contrib|torch|tensorflow|keras|tf_keras|numpy|gymnasium|gym|builtins|collections|ray"
    "|rllib|d3rlpy|tianshou|skrl|rsl_rl|acme|sonnet|tf_agents|typing|functools"
)
# Words of class names that are plain chains of layers in every library; any other word means custom code.
_PLAIN_WORDS = deferred.compile(
    r"actor|critic|policy|net|network|model|agent|module|mlp|mlps|fc|cnn|lstm|gru|rnn|recurrent|multi"
    r"|input|linear|deterministic|squashed|tanh|gaussian|diag|independent|normal|stochastic|probabilistic"
    r"|prob|categorical|fully|connected|feed|forward|dense|vector|default|q|v|qf|vf|twin|double|clipped"
    r"|continuous|discrete|base|features|feature|extractor|flatten|combined|nature|torch|tf|keras|rl"
    r"|encoder|factory|value|function|distribution|mixin|ensemble|shared|separate|simple|basic|standard|on"
    r"|off|td3|td|sac|ddpg|dqn|qrdqn|tqc|ppo|a2c|a3c|trpo|ars|npg|redq|droq|crossq|cross|bc|cql|iql|awac"
    r"|fast|main|target|old|new|box|s|d|p|g|r|l|a|c|2|3"
)
_HUMPS = deferred.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
# Names of networks that add, gate or attend, in any spelling.
_JOINED = deferred.compile(
    r"(^|_)(res(idual|net|_?mlp|_?block)s?|simba|d2rl|gated|transformer|attention|gtrxl|siren)(_|$|\d)"
)
_ROLES = deferred.compile(
    r"(^|_)(actors?|polic(y|ies)|pi|networks?|net|mlp|models?|agents?|extractor|encoder|torso)(_|$)"
)
_NO_ROLE = deferred.compile(
    r"critic|value|optim|env|buffer|logger|wrapper|schedul|noise|replay|runner|trainer|callback"
)
_OF_OBSERVATIONS: Topic = "observation statistics"
_MOST_OPENED, _LARGEST = 40, 1 << 20
_MOST_NEIGHBOURS = 100
_SETTLED_NS = 2_000_000_000  # resolution of the times of FAT, the coarsest file system
_NUMBER = deferred.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_MOST = 12  # maximum number of entries per topic
_NO_FUNCTION = frozenset(("", "none", "null", "default", "auto"))
_NOTHING = (None, False, "", 0, "none", "None", "NoFilter", "null", "{}", "[]", "identity")


# Attributes of every module in a TorchScript archive, also of a normaliser that is an identity.
_OF_EVERY_MODULE = frozenset(("training", "_is_full_backward_hook"))


class AgentEvidence(NamedTuple):
    """One piece of evidence whose name is in the vocabulary: a tensor or a plain value.

    `file` is the file beside the checkpoint that contains it.
    """

    what: Topic
    name: str
    leaf: Leaf | ValueLeaf
    file: str | None = None

    @property
    def plain(self) -> Plain:
        """The value, None for a tensor."""
        return self.leaf.value if isinstance(self.leaf, ValueLeaf) else None


@functools.lru_cache(maxsize=4096)
def classify_topic(name: str) -> Topic | None:
    """Return the topic of a tensor or setting by its name, None for any other name.

    The last words decide: `ppo/obs_rms/mean` is about observations because of `obs_rms`. Several steps need
    the topic of a name, and the checkpoints of a run have the same names.
    """
    segments = [each for each in re.split(r"[/.]", name.lower()) if each and not each.isdigit()]
    if segments and segments[-1] in _OF_EVERY_MODULE:
        return None
    for back, segment in enumerate(reversed(segments[-3:])):
        for what, pattern in VOCABULARY.items():
            if pattern.fullmatch(segment) and not (back and _MODULE.fullmatch(segment)):
                other = what == "observation statistics" and any(
                    re.fullmatch(rf"(\w+_)?({_NOT_OBSERVED})(_\w+)?", each)
                    for each in segments
                    if each not in ("actor_critic", "ac")
                )
                return "reward statistics" if other else what
    return None


def unused_entries(
    checkpoint: Checkpoint, binding: RecognizedAgent, known: Sidecar, widths: tuple[int, int]
) -> Iterator[LedgerEntry]:
    """Yield an entry for each piece of evidence that no part of the restored agent uses.

    Args:
        checkpoint: the opened checkpoint; small files beside it are read.
        binding: the recognised agent.
        known: the facts that the agent is played with.
        widths: the numbers of observations and actions of the policy.

    """
    facts = _PolicyUsage(known, binding, widths)
    yield from _limit_per_topic(_checkpoint_evidence(checkpoint.tree, binding, facts))
    names = checkpoint.tree.names
    yield from _limit_per_topic(
        _module_evidence(checkpoint.tree, {names[path] for path in _agent_entries(binding)})
    )
    yield from _limit_per_topic(_folder_evidence(checkpoint, facts))


def unconverted_entries(
    checkpoint: Checkpoint, written: Collection[str], kept: Collection[str] = ()
) -> LedgerEntries:
    """Return an entry for each piece of evidence that the conversion of a model does not write.

    Args:
        checkpoint: the converted checkpoint; small files beside it are read.
        written: the names of its entries that the target contains.
        kept: the names of the entries that only the target's sidecar contains.

    """
    matrices = (
        leaf
        for path, leaf in checkpoint.tree.tensors()
        if checkpoint.tree.names[path] in written and len(leaf.shape) == 2 and "float" in leaf.dtype
    )
    extents = frozenset(extent for leaf in matrices for extent in leaf.shape)
    normalised = any(
        classify_topic(name) == _OF_OBSERVATIONS and not _is_of_layer(name, written) for name in written
    )
    use = _ConversionUsage(frozenset(written), extents, normalised)
    inside = _unconverted_evidence(checkpoint.tree, use, frozenset(kept))
    weights = _module_evidence(checkpoint.tree, use.written)
    return (
        *_limit_per_topic(inside),
        *_limit_per_topic(weights),
        *_limit_per_topic(_folder_evidence(checkpoint, use)),
    )


def _unconverted_evidence(tree: Tree, use: _ConversionUsage, kept: Collection[str]) -> Iterator[LedgerEntry]:
    """Yield evidence in a checkpoint outside its model: one entry per module of tensors, or per value."""
    modules: set[str] = set()
    names = tree.names.values()
    for path, leaf in tree.items():
        name = tree.names.get(path)
        if name is None or name in use.written or name in kept:
            continue
        above = name.rpartition("/")[0]
        seen = isinstance(leaf, Leaf) and (leaf.role == "slot" or (above and above in modules))
        what = None if seen or _is_of_layer(name, names) else classify_topic(name)
        entry = use.entry(AgentEvidence(what, name, leaf)) if what is not None else None
        if entry is not None:
            modules.add(above)
            yield entry


def _module_evidence(tree: Tree, written: Collection[str]) -> Iterator[LedgerEntry]:
    """Yield averages, low-rank weights, scales and running statistics that are not written, by module.

    They are decisive if the module that they belong to is written without them.
    """
    found: dict[tuple[Topic, str], dict[str, Leaf]] = {}
    split = [name.replace(".", "/").split("/") for name in written]
    modules = {"/".join(each[:depth]) for each in split for depth in range(len(each))}  # "" is the root
    for path, leaf in tree.tensors():
        name = tree.names.get(path)
        if name is None or name in written or leaf.role == "slot":
            continue
        kind = _find_weight_kind(name)
        if kind is not None:
            found.setdefault(kind, {})[name] = leaf
    for (what, module), leaves in found.items():
        owned = module in modules
        if what == "running statistics" and not owned:
            continue  # belongs to a separate normaliser
        name, leaf = next(iter(leaves.items()))
        value = f"{leaf.dtype}{list(leaf.shape)}" if len(leaves) == 1 else f"{len(leaves)} tensors"
        yield LedgerEntry("not used", what, value, name, decides=owned and what != "averaged weights")


def _find_weight_kind(name: str) -> tuple[Topic, str] | None:
    """Return the kind of special weights that a name shows, and the module that has them."""
    segments = re.split(r"[/.]", name)
    for number, segment in enumerate(segments):
        for what, pattern in _WEIGHTS.items():
            if pattern.fullmatch(segment.lower()):
                return what, "/".join(segments[:number])
    return None


def weight_kind(name: str) -> Topic | None:
    """Return what a tensor's name shows: averages, low-rank weights, scales or running statistics."""
    found = _find_weight_kind(name)
    return None if found is None else found[0]


def _is_of_layer(name: str, names: Collection[str]) -> bool:
    """Return whether a tensor is a running statistic of a layer (a batch norm) that also has weights."""
    module, _, last = name.replace(".", "/").rpartition("/")
    pattern = _WEIGHTS["running statistics"]
    if not pattern.fullmatch(last.lower()):
        return False
    start = f"{module}/" if module else ""
    beside = (
        each.replace(".", "/").removeprefix(start)
        for each in names
        if each.replace(".", "/").startswith(start)
    )
    return any("/" not in each and each.lower() in _LAYER for each in beside)


class _ConversionUsage(NamedTuple):
    """The entries that the conversion of a model writes, to compare evidence with.

    `observed` are the possible observation sizes: the dimensions of matrices; `normalised` is true if
    observation statistics are written. No file beside the checkpoint is used.
    """

    written: frozenset[str]
    observed: frozenset[int]
    normalised: bool
    files: Collection[str] = ()

    def hint(self, file: str | None) -> str:
        """Return the fix for unused statistics."""
        return f"apply {file or 'them'} to the inputs of the model; the target does not contain them"

    def entry(self, found: AgentEvidence) -> LedgerEntry | None:
        """Return the entry for one piece of evidence, None if the weights do not depend on it."""
        if found.what != _OF_OBSERVATIONS:
            return None
        if isinstance(found.leaf, Leaf):
            return _statistics_tensor(found, found.leaf, self.observed, self.normalised, self.hint(None))
        if isinstance(found.plain, bool | str) and not self.normalised:
            value = found.plain
            named = value is True or (isinstance(value, str) and re.search("filter|norm", value, re.I))
            certain = (
                value is True and re.search(rf"(^|_)({_OBSERVED})(_|$)", _last_word(found.name)) is not None
            )
            return _entry(found, decides=certain, hint=self.hint(None)) if named else None
        return None


def _limit_per_topic(entries: Iterator[LedgerEntry]) -> Iterator[LedgerEntry]:
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.what] = counts.get(entry.what, 0) + 1
        if counts[entry.what] <= _MOST or entry.decides:
            yield entry


class _PolicyUsage(NamedTuple):
    """The facts that the agent is played with, to compare settings with."""

    known: Sidecar
    binding: RecognizedAgent
    widths: tuple[int, int]

    @property
    def normalised(self) -> bool:
        """Whether a file or a person specifies how observations are normalised, or that they are not."""
        stated = "norm" in self.binding.facts.origins or "obs_norm" in self.known.provenance
        return stated or self.known.obs_norm is not None

    @property
    def settled(self) -> bool:
        """Whether settings and tensors decide nothing more: the ledger has the statistics already."""
        lacks = self.binding.facts.lacks
        return self.normalised or any(each.decides and each.what == _OF_OBSERVATIONS for each in lacks)

    @property
    def observed(self) -> Collection[int]:
        """The size of the policy's observation, and those of its parts."""
        streams = (stream for front in self.binding.fronts.values() for stream in front.streams)
        return (self.widths[0], *(stream.size for stream in streams))

    @property
    def files(self) -> Collection[str]:
        """The names of files beside the checkpoint that are used."""
        return {origin.partition(" (")[0] for origin in self.binding.facts.origins.values()}

    def hint(self, file: str | None) -> str:
        """Return the fix for unused statistics."""
        return (
            f"--obs-norm {shlex.quote(file)}"
            if file
            else "use --obs-norm FILE (with mean and var) to apply them"
        )

    def uses(self, fact: str) -> bool:
        """Return whether the agent is played with the value of a fact from its files."""
        name = {"norm": "obs_norm", "hidden": "activations", "action_high": "action_low"}.get(fact, fact)
        return name not in ("activations", "action_low") or self.known.is_read(name)

    def entry(self, found: AgentEvidence) -> LedgerEntry | None:
        """Return the entry for one piece of evidence, None if it has no effect or is used."""
        judge = {
            "observation statistics": self._statistics,
            "action bounds": self._bounds,
            "activation": self._activation,
            "distribution": self._distribution,
            "architecture": self._architecture,
            "wrapper": self._wrapper,
            "custom code": self._code,
        }.get(found.what)
        if judge is None:
            return _entry(found) if isinstance(found.leaf, Leaf) else None
        return judge(found)

    def _statistics(self, found: AgentEvidence) -> LedgerEntry | None:
        if isinstance(found.leaf, Leaf):
            return _statistics_tensor(found, found.leaf, self.widths[:1], self.settled, self.hint(None))
        value = found.plain
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._scale(found, float(value))
        if self.settled or _is_empty(value) or not isinstance(value, bool | str):
            return None
        # A boolean or a filter's name; other texts are names of files and columns.
        if isinstance(value, str) and not re.search(r"filter|norm|true", value, re.IGNORECASE):
            return None
        hint = (
            "use --obs-norm FILE to supply the statistics; if training did not normalise, this "
            "setting is wrong"
        )
        return _entry(found, decides=True, hint=hint)

    def _scale(self, found: AgentEvidence, value: float) -> LedgerEntry | None:
        """Return the entry for a number that scales or limits observations."""
        last = _last_word(found.name)
        norm = self.known.obs_norm
        if "clip" in last:
            if not math.isfinite(value) or value <= 0 or (norm is not None and norm.get("clip") == value):
                return None
            own = self.binding.facts.norm
            return _entry(found, decides=norm is not None and own is not None and bool(own.assumed))
        if re.search("scal(e|es|ing)", last):
            return None if value in (0.0, 1.0) else _entry(found, decides=norm is None)
        return _entry(found) if _is_limit(found) and value != 0 else None

    def _bounds(self, found: AgentEvidence) -> LedgerEntry | None:
        value = found.plain
        if isinstance(found.leaf, Leaf):
            # Layouts move the buffers of an action map; other buffers have one number per action, or one in
            # total.
            if found.leaf.size not in (1, self.widths[1]):
                return None
            return _entry(found, decides=self.known.action_low is None and self._is_assumed("head"))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.known.action_low is None:
            return _entry(found) if math.isfinite(value) else None
        stated = [*(self.known.action_low or ()), *(self.known.action_high or ())]
        if any(abs(abs(value) - abs(each)) <= 1e-6 * max(1.0, abs(each)) for each in stated):
            return None
        # A different lower bound changes the actions; a different upper one may be a unit.
        lower = re.search(r"(^|_)(min|low)(_|$)", re.split(r"[/.]", found.name.lower())[-1])
        return _entry(found, decides=lower is not None)

    def _is_assumed(self, fact: str) -> bool:
        return fact not in self.known.provenance or self.known.is_assumed(fact)

    def _activation(self, found: AgentEvidence) -> LedgerEntry | None:
        name, used = _activation_name(found.plain), set(self.known.activations or ())
        # A function after the last layer is the action map; settings of other networks are not played.
        if name is None or not used or name in used or _ELSEWHERE.search(found.name.lower()):
            return None
        hint = f"--activation {name}" if name in ACTIVATIONS else None
        return _entry(found, decides=True, hint=hint)

    def _distribution(self, found: AgentEvidence) -> LedgerEntry | None:
        head, name = self.known.head, found.name.lower()
        if head is None or isinstance(found.leaf, Leaf) or re.search("critic|value|vf_|qf?_", name):
            return None
        squashes = _squashes(found.plain, _last_word(name))
        if squashes is None or squashes == ("tanh" if head in _TANH else "linear"):
            return None
        return _entry(found, decides=self._is_assumed("head"))

    def _architecture(self, found: AgentEvidence) -> LedgerEntry | None:
        value = found.plain
        if (
            _is_empty(value)
            or not isinstance(value, bool | int | float | str)
            or isinstance(found.leaf, Leaf)
        ):
            return None
        name = found.name.lower()
        normed = "norm" in name or _last_word(name).removeprefix("use_") in ("ln", "bn")
        if "dropout" in name or (normed and (self.binding.norm_kind or self.binding.fronts)):
            return None  # dropout is inactive when an agent is played
        return _entry(found, decides=value is True and "critic" not in name)

    def _wrapper(self, found: AgentEvidence) -> LedgerEntry | None:
        value = found.plain
        if (
            _is_empty(value)
            or isinstance(found.leaf, Leaf)
            or (value == 1 and "delay" not in _last_word(found.name))
        ):
            return None
        named = str(value.name if isinstance(value, Record) else value)
        if re.search("repeat|skip|delay", _last_word(found.name)):
            # A simulator's own frame skip is part of the environment.
            certain = not re.search("frame_?skip", _last_word(found.name))
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return _entry(found, decides=certain) if is_number else None
        own = {str(each.get("name")) for each in (self.known.env or {}).get("wrappers") or ()}
        if {named, named.rpartition(".")[2]} & own or not re.search(r"[A-Za-z]", named):
            return None
        return _entry(found, decides=True)

    def _code(self, found: AgentEvidence) -> LedgerEntry | None:
        value = found.plain
        name = value.name if isinstance(value, Record) else value
        if not isinstance(name, str) or _is_empty(name):
            return None
        last = _last_word(found.name)
        if last in ("_target_", "class_path", "class_name") and not _has_role(found.name, name):
            return None
        if "." not in name:
            return _entry(found, decides=True) if _is_own_class(last, name.strip("'\"")) else None
        if re.search(r"[/\\\s]", name) or not re.fullmatch(r"\W*(class\s|function\s)?.*\.[A-Z]\w*\W*", name):
            return None  # a file name or a version
        module = re.sub(r"^\W*(class|function)?\s*['\"]?", "", name).partition(".")[0]
        if _LIBRARIES.fullmatch(module):
            return None
        # Configurations create all objects by such names, also a program's own plain agent.
        plain = last in ("_target_", "class_path") and _is_plain(_HUMPS.findall(name.rpartition(".")[2]))
        return _entry(found, decides=not plain)


def _has_role(setting: str, class_: str) -> bool:
    """Return whether a class is a policy or a part of one, by its own name or by its setting's name."""
    words = _HUMPS.findall(class_.rpartition(".")[2])
    owners = [each for each in re.split(r"[/.]", setting.lower())[:-1] if not each.isdigit()][-2:]
    if any(map(_NO_ROLE.search, owners)) or _NO_ROLE.search(class_.lower()):
        return False
    return any(map(_ROLES.search, owners)) or bool(words and _ROLES.fullmatch(words[-1].lower()))


def _is_plain(words: Sequence[str]) -> bool:
    return all(_PLAIN_WORDS.fullmatch(word.lower()) for word in words)


def _is_own_class(setting: str, name: str) -> bool:
    """Return whether a name without a module is a class or kind of network that no library contains."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return False
    if _JOINED.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()):
        return True
    words = _HUMPS.findall(name)
    if not name[0].isupper() or len(words) < 2 or name.isupper():
        return False  # an algorithm, or a word of the program itself
    foreign = not _is_plain(words)
    # model_name may be the name of a run.
    role = _ROLES.fullmatch(words[-1].lower()) is not None
    return foreign and (role or not re.fullmatch("(model|agent)(_.*)?|.*_(name|type)", setting))


def _entry(found: AgentEvidence, *, decides: bool = False, hint: str | None = None) -> LedgerEntry:
    leaf = found.leaf
    if isinstance(leaf, Leaf):
        value = f"{leaf.dtype}{list(leaf.shape)}"
    else:
        value = leaf.value.name if isinstance(leaf.value, Record) else str(leaf.value)
        value = f"{re.split(r'[/.]', found.name)[-1]} = {value[:80]}"
    where = found.name if found.file is None else f"{found.file}: {found.name}"
    return LedgerEntry("not used", found.what, value, where, decides=decides, hint=hint)


def _statistics_tensor(
    found: AgentEvidence, leaf: Leaf, observed: Collection[int], settled: bool, hint: str
) -> LedgerEntry | None:
    """Return the entry for a tensor of statistics; it decides if it has the size of an observation."""
    if leaf.size < 2 or "int" in leaf.dtype:
        return None
    fits = not {*observed}.isdisjoint((leaf.size, *leaf.shape)) and not _is_limit(found)
    return _entry(found, decides=fits and not settled, hint=hint)


def _is_empty(value: Plain) -> bool:
    return any(value is each or (type(value) is type(each) and value == each) for each in _NOTHING)


def _activation_name(value: Plain) -> str | None:
    """Return the activation named by a setting, None for anything else."""
    if not isinstance(value, str | Record):
        return None
    text = value.name if isinstance(value, Record) else value
    last = re.sub(r"\W+$", "", text.strip()).rpartition(".")[2].strip("'\">() ").lower()
    name = ACTIVATION_SYNONYMS.get(last, last)
    return name if name in ACTIVATIONS or name.replace("_", "") in _FOREIGN else None


def _squashes(value: Plain, last: str) -> str | None:
    """Return the function after a policy's last layer as named by a setting, None if it names none."""
    if isinstance(value, bool):
        return ("tanh" if value else "linear") if re.search("squash|tanh", last) or value else None
    if not isinstance(value, str | Record):
        return None
    text = str(value.name if isinstance(value, Record) else value).lower()
    if re.search("tanh|squash|bounded", text):
        return "tanh"
    return _activation_name(value) if re.search("act|head|lin", last) else None


def _is_limit(found: AgentEvidence) -> bool:
    return any(map(_LIMIT.fullmatch, re.split(r"[/.]", found.name.lower())))


def _last_word(name: str) -> str:
    """Return the last non-numeric segment of a name, in lower case."""
    return [each for each in re.split(r"[/.]", name.lower()) if each and not each.isdigit()][-1]


def _checkpoint_evidence(tree: Tree, binding: RecognizedAgent, facts: _PolicyUsage) -> Iterator[LedgerEntry]:
    """Yield evidence in the checkpoint itself: one entry per module of tensors, one per value."""
    taken = _agent_entries(binding)
    used = {leaf.key for leaf in binding.facts.norm or () if isinstance(leaf, Leaf)}
    stated = tuple(place for fact, place in binding.facts.origins.items() if place and facts.uses(fact))
    modules: set[Path] = set()
    seen: set[Path] = set()
    for path, leaf in tree.items():
        name = tree.names.get(path)
        if (
            name is None
            or path in taken
            or (isinstance(leaf, Leaf) and (leaf.role == "slot" or leaf.key in used))
        ):
            continue
        if any(name == place or name.startswith(f"{place}/") for place in stated):
            continue
        what = classify_topic(name)
        if what is None or (path[:-1] in modules and isinstance(leaf, Leaf)):
            continue
        seen.add(path)
        entry = facts.entry(AgentEvidence(what, name, leaf))
        if entry is not None:
            modules.add(path[:-1])
            yield entry
    if not facts.settled:
        yield from _per_observation(tree, taken | seen, stated, facts.widths)


def _agent_entries(binding: RecognizedAgent) -> set[Path]:
    """Return the checkpoint entries that the agent consists of."""
    fronts = {move.source for front in binding.fronts.values() for move in front.moves}
    return {move.source for move in binding.moves.moves} | binding.consumed | fronts


def _per_observation(
    tree: Tree, taken: Collection[Path], stated: Collection[str], widths: tuple[int, int]
) -> Iterator[LedgerEntry]:
    """Yield an entry for each tensor outside layers that has one number per observation."""
    from ckpttool.libraries import schema

    obs, actions = widths
    if obs < 2:
        return
    rows = schema.list_rows(tree, taken)
    layers = {names[:-1] for names, _, _ in rows if names[-1].removesuffix(":0").lower() in _LAYER}
    for names, leaf, _ in rows:
        name = "/".join(names)
        if not isinstance(leaf, Leaf) or "float" not in leaf.dtype or names[:-1] in layers:
            continue
        if leaf.shape not in ((obs,), (1, obs), (obs, 1), (2, obs)) or _OBSERVATION.search(name.lower()):
            continue
        if any(name == place or name.startswith(f"{place}/") for place in stated):
            continue
        numbers = leaf.array()
        first = numbers.reshape(-1)[0]
        if (numbers == first).all() and float(abs(first)) in (0, 1, math.inf):
            continue  # zero means, unit deviations or infinite limits have no effect
        hint = "if these are observation statistics, use --obs-norm FILE (with mean and var) to apply them"
        found = AgentEvidence("observation statistics", name, leaf)
        yield _entry(found, decides=obs != actions, hint=hint)


def apply_stored_settings(binding: RecognizedAgent, tree: Tree, actions: int) -> RecognizedAgent:
    """Return the binding with the activation and action bounds from the checkpoint's own settings.

    They override a library's defaults, but not facts that the layout itself reads. Contradictory
    settings are left for the ledger.
    """
    from ckpttool.libraries.schema import NO_LAYOUT

    if binding.layout == NO_LAYOUT:
        return binding
    functions: dict[str, list[str]] = {}
    bounds: dict[str, list[float]] = {}
    for path, leaf in tree.items():
        name = tree.names.get(path)
        what = None if name is None or path in binding.consumed else classify_topic(name)
        if name is None or what not in ("activation", "action bounds"):
            continue
        above, _, last = name.rpartition("/")
        at = above if last.isdigit() else name
        if what == "action bounds":
            bounds.setdefault(at, []).extend(_small_numbers(leaf, actions))
            continue
        function = _stated_function(leaf.value) if isinstance(leaf, ValueLeaf) else None
        if function is not None and not _ELSEWHERE.search(name.lower()):
            functions.setdefault(at, []).append(function)
    facts = binding.facts
    if functions and not {"hidden", "activations"} & facts.origins.keys() and not facts.stated:
        facts = _with_functions(facts, binding, functions)
    if facts.action_low is None and "action_low" not in facts.origins:
        facts = _with_bounds(facts, bounds, actions)
    return binding if facts is binding.facts else replace(binding, facts=facts)


def _stated_function(value: Plain) -> str | None:
    """Return the function that a setting of activations names, of any library."""
    if isinstance(value, Record):
        return _activation_name(value) or value.name
    if not isinstance(value, str):
        return None
    return _activation_name(value) or (None if value.strip().lower() in _NO_FUNCTION else value)


def _small_numbers(leaf: Leaf | ValueLeaf, most: int) -> list[float]:
    """Return a single number, or the numbers of a small tensor."""
    if isinstance(leaf, Leaf):
        is_small = leaf.size <= most and leaf.dtype.startswith(("float", "int"))
        return [float(each) for each in leaf.array().reshape(-1)] if is_small else []
    value = leaf.value
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _with_functions(
    facts: AgentMetadata, binding: RecognizedAgent, functions: Mapping[str, list[str]]
) -> AgentMetadata:
    hidden = [
        max(sum(layer.kind == "dense" for layer in part.layers) - 1, 0) for part in binding.parts if part.acts
    ]
    alternatives = {tuple(names) if len(set(names)) > 1 else names[:1][0] for names in functions.values()}
    chosen = next(iter(alternatives))
    if len(alternatives) != 1 or (isinstance(chosen, tuple) and [len(chosen)] != hidden):
        return facts
    facts = facts.without_lack("activation")
    where = next(iter(functions))
    if any(name not in ACTIVATIONS for names in functions.values() for name in names):
        return facts.not_understood("activations", abbreviate_list(functions[where], 3), where)
    if isinstance(chosen, tuple):
        return facts.read(where, activations=chosen)
    return facts._replace(activations=None).read(where, hidden=chosen)


def _with_bounds(facts: AgentMetadata, bounds: Mapping[str, Sequence[float]], actions: int) -> AgentMetadata:
    rows = {at: row for at, row in bounds.items() if len(row) == actions and all(map(math.isfinite, row))}
    lows = [at for at in rows if re.search("low|min", _last_word(at))]
    highs = [at for at in rows if re.search("high|max", _last_word(at))]
    limits = {
        row[0]: at
        for at, row in bounds.items()
        if len(row) == 1 and math.isfinite(row[0]) and re.search("max|limit|bound|high", _last_word(at))
    }
    open_map = any(each.what == "action map" for each in facts.lacks)
    found: AgentMetadata | None = None
    if len(lows) == len(highs) == 1:
        low, high = rows[lows[0]], rows[highs[0]]
        if all(one < other for one, other in zip(low, high, strict=True)):
            found = facts.bounded(lows[0], low, high)
    elif facts.head == "tanh" and len(limits) == 1 and not lows and not open_map:
        ((limit, where),) = limits.items()
        found = facts.bounded(where, [-limit] * actions, [limit] * actions) if limit > 0 else None
    return facts if found is None else found.without_lack("action bounds")


def _folder_evidence(checkpoint: Checkpoint, facts: _PolicyUsage | _ConversionUsage) -> Iterator[LedgerEntry]:
    """Yield evidence in files of the checkpoint's run: statistics, and settings in its folder."""
    if filesystem.find_store(checkpoint.path) is not None:
        return
    folder = os.path.dirname(filesystem.abspath(checkpoint.path))
    own = {os.path.basename(file.path) for file in checkpoint.files} | {os.path.basename(checkpoint.path)}
    own |= set(facts.files)
    unread: list[str] = []
    beside, subfolders = _list_side_files(folder, "", unread)
    below = [
        each
        for name in subfolders
        if os.path.isdir(os.path.join(folder, name))
        for each in _list_side_files(folder, name, unread)[0]
    ]
    stem = tuple(_WORDS.findall(os.path.basename(checkpoint.path).lower()))
    # Settings of no particular name belong to the checkpoint whose name has the same words.
    found = [
        each
        for each in (*beside, *below)
        if each.name not in own
        and (each.is_statistics or each.is_settings or each.words[:-1] == stem[: len(each.words) - 1])
    ]
    found += _list_run_statistics(folder, unread)
    for problem in unread:
        yield LedgerEntry(
            "cannot be known", "observation statistics", "files in folders that were not listed", problem
        )
    paths = ((each, os.path.join(folder, each.name)) for each in found)
    files = [each for each, file in paths if os.path.isfile(file) and not os.path.islink(file)]
    # Statistics change the observations: they are read first.
    files.sort(key=lambda each: not each.is_statistics)
    for each in files[:_MOST_OPENED]:
        file = os.path.join(folder, each.name)
        entries = (
            _statistics_file(file, each.name, checkpoint, facts)
            if each.is_statistics
            else _settings_file(file, each.name, facts)
        )
        yield from (replace(entry, beside=True) for entry in entries)
    if left := files[_MOST_OPENED:]:
        what: Topic = "observation statistics" if left[0].is_statistics else "architecture"
        value = f"{len(left):,} more files of statistics or settings, which were not read"
        yield LedgerEntry("cannot be known", what, value, folder)


class _SideFile(NamedTuple):
    """A file whose name is that of statistics or settings; `words` are those of the name, in lower case."""

    name: str
    words: tuple[str, ...]
    is_statistics: bool
    is_settings: bool  # of every checkpoint in the folder


def _list_run_statistics(folder: str, unread: list[str]) -> Iterator[_SideFile]:
    """Yield files of normalisers in the folder above a checkpoint's, and in the folders beside it.

    Other runs may be in those: a folder belongs to the same run if its name or the checkpoint's is one of a
    run's parts (`best`, `checkpoints`, `stats`).
    """
    part = _RUN_PART.fullmatch(os.path.basename(folder).lower())
    above, _ = _list_side_files(folder, os.pardir, unread)
    try:
        with os.scandir(os.path.dirname(folder)) as listed:
            names = sorted(each.name for each in listed if each.is_dir(follow_symlinks=False))
    except OSError:
        names = []  # `unread` has the folder
    words = ((name, name.lower()) for name in names if name != os.path.basename(folder))
    run = [
        name for name, low in words if part or _RUN_PART.fullmatch(low) or _STATISTICS_WORDS.fullmatch(low)
    ]
    if left := len(run[_MOST_NEIGHBOURS:]):
        unread.append(f"{os.path.dirname(folder)}: {left:,} more folders of the run")
    for name in run[:_MOST_NEIGHBOURS]:
        above = (*above, *_list_side_files(folder, os.path.join(os.pardir, name), unread)[0])
    for each in above:
        if each.is_statistics and _NORMALISER_FILE.search(os.path.basename(each.name).lower()):
            yield each


def _list_side_files(folder: str, below: str, unread: list[str]) -> tuple[Sequence[_SideFile], Sequence[str]]:
    """Return the files of statistics and settings in a folder, and the subfolders that may contain some.

    With `below`, list that subfolder. A folder that cannot be listed is added to `unread`.
    """
    listed = os.path.join(folder, below) if below else folder
    try:
        found = os.stat(listed)
        # Two changes within the resolution of the clock of a file system have one time.
        settled = time.time_ns() - found.st_mtime_ns > _SETTLED_NS
        list_files = _side_files if settled else _side_files.__wrapped__
        return list_files(folder, below, found.st_ino, found.st_mtime_ns)
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        unread.append(f"{listed}: {error.strerror}")
        return (), ()


@functools.lru_cache(maxsize=256)
def _side_files(
    folder: str,
    below: str,
    inode: int,  # noqa: ARG001  # it and the time are the folder's state
    changed_ns: int,  # noqa: ARG001
) -> tuple[Sequence[_SideFile], Sequence[str]]:
    """List a folder once for all checkpoints in it, while it does not change."""
    files, subfolders = [], []
    for name in sorted(os.listdir(os.path.join(folder, below) if below else folder)):
        lower = name.lower()
        if name == ".hydra" or _STATISTICS_WORDS.fullmatch(lower):
            subfolders.append(name)
        if name.startswith(".") or name.endswith(sidecar.SUFFIX):
            continue  # a sidecar records the conversion of another checkpoint, or other weights
        words = (*_WORDS.findall(lower), *_WORDS.findall(below))
        statistics = _STATISTICS_FILE.fullmatch(lower) and any(map(_STATISTICS_WORDS.fullmatch, words))
        settings = _SETTINGS_FILE.fullmatch(name)
        if statistics or settings:
            general = settings is not None and any(map(_SETTINGS_WORDS.fullmatch, words))
            files.append(_SideFile(os.path.join(below, name), words, bool(statistics), general))
    return files, subfolders


def _statistics_file(
    file: str, name: str, checkpoint: Checkpoint, facts: _PolicyUsage | _ConversionUsage
) -> Iterator[LedgerEntry]:
    """Yield the entry for a statistics file; one that belongs to this policy has its number of values."""
    sizes = None if facts.normalised else _statistics_sizes(file)
    if sizes is None:
        return  # the statistics in use come from another file or from the command line
    observed = set(facts.observed)
    fits = not observed.isdisjoint(sizes)
    base = os.path.basename(name).lower()
    if _NORMALISER_FILE.search(base) is None:
        # A `stats.json` of any program counts only if it has a mean and a deviation of each observation.
        fits = fits and (
            any(sizes.count(width) > 1 for width in observed) or base.endswith((".npy", ".csv", ".txt"))
        )
        if not fits:
            return
    other = sizes and not fits
    value = (
        "whose size differs from that of an observation"
        if other
        else "whose size matches that of an observation"
        if fits
        else ""
    )
    hint = facts.hint(os.path.normpath(os.path.join(os.path.dirname(checkpoint.path), name)))
    yield LedgerEntry(
        "not used", "observation statistics", value, name, decides=fits, hint=None if other else hint
    )


def _statistics_sizes(file: str) -> Sequence[int] | None:
    """Return the lengths of a file's number rows, empty if it cannot be read; None for a network."""
    from ckpttool.formats.detect import open_checkpoint

    try:
        if os.path.getsize(file) > _LARGEST:
            return ()
        if file.endswith((".csv", ".txt")):
            return _text_sizes(file)
        if file.endswith(".json"):
            found = documents.load_json(file, "the statistics", "sidecar_bytes")
            rows = [found, *(each for each in found.values() if isinstance(each, dict))]
            return [len(row) for each in rows for row in each.values() if isinstance(row, list)]
        tree = open_checkpoint(file).tree
        stated = {path[-1].value: leaf.value for path, leaf in tree.plain()}
        if stated.get("norm_obs") is False:
            return None
        tensors = [leaf for _, leaf in tree.tensors()]
        if any(sum(extent > 1 for extent in leaf.shape) > 1 for leaf in tensors):
            return None  # a matrix means another checkpoint
        return [leaf.size for leaf in tensors if leaf.size > 1]
    except (CkpttoolError, OSError):
        return ()


def _text_sizes(file: str) -> Sequence[int] | None:
    """Return the row lengths and the row count of a small table of numbers, None for any other text."""
    with open(file, encoding="utf-8", errors="replace") as source:
        lines = source.read(1 << 16).splitlines()
    rows = [line.replace(",", " ").replace(";", " ").split() for line in lines if line.strip()]
    words = [word for row in rows for word in row]
    if not words or len(rows) > 4 < len(words) / len(rows) or not all(map(_NUMBER.fullmatch, words)):
        return None
    return (*map(len, rows), len(rows))


def _namespace(file: str) -> dict[str, str] | None:
    """Return the arguments in a text file with the repr of a Namespace, None for any other text."""
    with open(file, encoding="utf-8", errors="replace") as source:
        text = source.read(1 << 16).strip()
    if not re.match(r"\w*(Namespace|Args|Config)\(", text):
        return None
    return {name: value.strip().strip("'\"") for name, value in _NAMESPACE.findall(text)}


def _settings_file(file: str, name: str, facts: _PolicyUsage | _ConversionUsage) -> Iterator[LedgerEntry]:
    """Yield the settings in a file beside the checkpoint that differ from the values used."""
    from ckpttool.formats import settings

    try:
        if os.path.getsize(file) > _LARGEST:
            return
        if name.lower().endswith(".json"):
            tree = settings.tree_from_json(documents.load_json(file, "settings"), "the file")
        elif name.lower().endswith(".toml"):
            import tomllib

            with open(file, "rb") as source:
                tree = settings.tree_from_json(tomllib.load(source), "the file")
        elif name.lower().endswith(".gin"):
            with open(file, encoding="utf-8") as text:
                tree = settings.tree_from_json(settings.parse_gin(text.read()), "the file")
        elif name.lower().endswith(".txt") and (found := _namespace(file)) is not None:
            tree = settings.tree_from_json(found, "the file")
        else:
            tree = settings.read_yaml(file)
    except (CkpttoolError, OSError, ValueError, TypeError, RecursionError):
        return  # any program may use this file name
    for path, leaf in tree.items():
        shown = "/".join(str(step.value) for step in path)
        what = classify_topic(shown)
        if what is None:
            continue
        entry = facts.entry(AgentEvidence(what, shown, leaf, name))
        if entry is not None:
            yield entry
