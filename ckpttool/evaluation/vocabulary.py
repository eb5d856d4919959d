"""Names that programs use for what changes an agent's outputs.

One table (`VOCABULARY`) lists those of observation statistics, bounds, activations, distributions, wrappers
and custom code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.kinds import ACTIVATION_SYNONYMS, ACTIVATIONS
from ckpttool.core.sidecar import Topic
from ckpttool.core.tree import Leaf, Plain, Record, ValueLeaf

OBSERVED = r"obs|observations?|states?|inputs?"
_OBSERVED_LIMITS = (
    rf"({OBSERVED})_(low|high|min|max|lower|upper|bounds?|limits?|range|scales?|scaling|shift|offset|clip)"
    rf"|clip_({OBSERVED})"
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
        rf"({OBSERVED}|ob|o)_?(rms|norm(aliz\w*|alis\w*)?|stat(istic)?s|filter|mean|std|var|variance|scal(e|es|er|ing)"
        rf"|whiten\w*|preprocessor|clip(ping)?|clip_range|shift|offset|cent(er|re)|mu|sigma|loc)"
        rf"|(norm(alize|alise|alizer|aliser)?|clip|scale)_?({OBSERVED}|ob)"
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
SPECIAL_WEIGHTS: Mapping[Topic, re.Pattern[str]] = {
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
# Functions that are not an ActivationName: a network with one of them computes something else.
_FOREIGN = frozenset(
    {"celu", "hardsigmoid", "softsign", "prelu", "rrelu"}
    | {"sin", "sine", "snake", "crelu", "glu", "geglu", "reglu", "swiglu", "simnorm", "logsigmoid", "softmax"}
    | {"hardshrink", "softshrink", "tanhshrink", "exponential", "squareplus", "threshold"}
)
# A limit or unit of the observations, which a program may contain without using it.
_LIMIT = deferred.compile(_OBSERVED_LIMITS)
# Settings of layers other than the policy's hidden layers.
OTHER_NETWORKS = deferred.compile(
    r"out|final|last|critic|value|vf_|qf?_|q_model|conv|post_fc|lstm|encoder|discrim|reward"
)
# Names of settings that are also common module names.
_MODULE = deferred.compile(
    r"model|actor|network|policy|agent|(\w+_)?act|(\w+_)?head|ln|bn|skip|residuals?|o_?norm"
)
OBSERVATION_STATISTICS: Topic = "observation statistics"
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
    segments = [part for part in re.split(r"[/.]", name.lower()) if part and not part.isdigit()]
    if segments and segments[-1] in _OF_EVERY_MODULE:
        return None
    for back, segment in enumerate(reversed(segments[-3:])):
        for what, pattern in VOCABULARY.items():
            if pattern.fullmatch(segment) and not (back and _MODULE.fullmatch(segment)):
                other = what == "observation statistics" and any(
                    re.fullmatch(rf"(\w+_)?({_NOT_OBSERVED})(_\w+)?", segment)
                    for segment in segments
                    if segment not in ("actor_critic", "ac")
                )
                return "reward statistics" if other else what
    return None


def find_weight_kind(name: str) -> tuple[Topic, str] | None:
    """Return the kind of special weights that a name shows, and the module that has them."""
    segments = re.split(r"[/.]", name)
    for number, segment in enumerate(segments):
        for what, pattern in SPECIAL_WEIGHTS.items():
            if pattern.fullmatch(segment.lower()):
                return what, "/".join(segments[:number])
    return None


def weight_kind(name: str) -> Topic | None:
    """Return what a tensor's name shows: averages, low-rank weights, scales or running statistics."""
    kind = find_weight_kind(name)
    return None if kind is None else kind[0]


def is_empty(value: Plain) -> bool:
    """Return whether a setting has a value that turns it off."""
    return any(
        value is nothing or (type(value) is type(nothing) and value == nothing) for nothing in _NOTHING
    )


def activation_name(value: Plain) -> str | None:
    """Return the activation named by a setting, None for anything else."""
    if not isinstance(value, str | Record):
        return None
    text = value.name if isinstance(value, Record) else value
    last = re.sub(r"\W+$", "", text.strip()).rpartition(".")[2].strip("'\">() ").lower()
    name = ACTIVATION_SYNONYMS.get(last, last)
    return name if name in ACTIVATIONS or name.replace("_", "") in _FOREIGN else None


def output_function(value: Plain, last: str) -> str | None:
    """Return the function after a policy's last layer as named by a setting, None if it names none."""
    if isinstance(value, bool):
        return ("tanh" if value else "linear") if re.search("squash|tanh", last) or value else None
    if not isinstance(value, str | Record):
        return None
    text = str(value.name if isinstance(value, Record) else value).lower()
    if re.search("tanh|squash|bounded", text):
        return "tanh"
    return activation_name(value) if re.search("act|head|lin", last) else None


def is_limit(evidence: AgentEvidence) -> bool:
    """Return whether the name is that of a limit or unit of observations."""
    return any(map(_LIMIT.fullmatch, re.split(r"[/.]", evidence.name.lower())))


def last_word(name: str) -> str:
    """Return the last non-numeric segment of a name, in lower case."""
    return [part for part in re.split(r"[/.]", name.lower()) if part and not part.isdigit()][-1]
