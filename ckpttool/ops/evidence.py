"""Finds what could change an agent's numbers and was not used: tensors, settings, classes, side files.

One table (`VOCABULARY`) lists the names that observation statistics, bounds, activations, distributions,
wrappers and custom code have in programs. A setting that states what is used anyway is no entry.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from ckpttool import documents, places
from ckpttool.agents.network import ActivationName
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats import settings, yaml_settings
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts.canonical import Binding
from ckpttool.leaf import Leaf, Path, Plain, Record, ValueLeaf
from ckpttool.ledger import Entry, Topic
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

_OBSERVED = r"obs|observations?|states?|inputs?"
_NOT_OBSERVED = (
    r"ret|returns?|rews?|rewards?|adv|advantages?|values?|critics?|images?|grads?|actions?|priv\w*"
)
VOCABULARY: Mapping[Topic, re.Pattern[str]] = {
    "reward statistics": re.compile(
        r"(ret|returns?|rews?|rewards?|values?)_(rms|norm(aliz\w*|alis\w*)?|mean_std|scal(e|er|ing)|mean|std|var"
        r"|filter)|norm(alize|alise)?_(rew|rewards?|returns?|values?)|popart"
    ),
    "observation statistics": re.compile(
        rf"({_OBSERVED})_?(rms|norm(aliz\w*|alis\w*)?|stat(istic)?s|filter|mean|std|var|variance|scaler|whiten\w*"
        rf"|preprocessor)|norm(alize|alise|alizer|aliser)?_?({_OBSERVED})"
        r"|(empirical_)?normali[sz](er|ation|e)|running_mean_std|running_(mean|var|variance|std|norm)|obs_filter"
        rf"|({_OBSERVED})_(low|high|min|max|lower|upper|bounds?|limits?|range|scales?|scaling|shift|offset|clip)"
        rf"|clip_({_OBSERVED})"
    ),
    "action bounds": re.compile(
        r"max_actions?|min_actions?|act(ion)?_(max|min|limits?|bounds?|scales?|bias|low|high|range)"
    ),
    "distribution": re.compile(
        r"(action_)?dist(ribution)?(_(type|class|cls|name))?|squash(ed)?(_(output|action|mean|gaussian))?"
        r"|tanh_(squash\w*|action|output)|use_tanh|bounded"
        r"|((policy|actor|pi|mu)_)?(out|output|final|last)_(act|activation|act_fn|activation_fn|nonlinearity)"
    ),
    "activation": re.compile(
        r"(\w+_)?activations?(_(fn|func|function|name|type|class))?|(\w+_)?non_?lin(earity)?"
        r"|(\w+_)?act(_(fn|func|fun|function|name|type))?"
    ),
    "architecture": re.compile(
        r"use_(layer|batch)_?norm|(layer|batch)_?norm|residual|skip_connections?|use_residual|dropout(_rate|_p)?"
        r"|spectral_norm"
    ),
    "wrapper": re.compile(
        r"(env_|gym_)?wrappers?|(env_)?wrapper_class|frame_?stack|n_stack|num_stack|stack_size"
    ),
    "custom code": re.compile(
        r"policy_class|features?_extractor(_class)?|custom_(model|policy|network|preprocessor)\w*|(model|actor|net"
        r"work)_class"
    ),
}
# Files beside a checkpoint that hold statistics, and those that hold settings.
_STATISTICS_FILE = re.compile(
    r"(vec_?normalize\w*|(obs_?|observation_?|state_?)?normali[sz]er\w*|(obs|observation|state)_?(rms|norm|stats?"
    r"|statistics|mean_?std|scaler)\w*|running_mean_std\w*|norm(alization)?_?(stats?|params)\w*|rms)"
    r"\.(pkl|pickle|pt|pth|npz|json|h5)"
)
_SETTINGS_FILE = re.compile(
    r"(config|params?|args|hparams|hyper_?param(eter)?s|settings|agent)\.(ya?ml|json)", re.IGNORECASE
)
# What a row of one number for each observation is called, whatever its group's name is.
_ROW = re.compile(r"(mean|avg|mu|loc|center|shift|offset|std|sigma|scale|var|variance|min|max|low|high)s?")
# A limit or a unit of the observations: a program may have it without using it.
_LIMIT = re.compile(
    rf"({_OBSERVED})_(low|high|min|max|lower|upper|bounds?|limits?|range|scales?|scaling|shift|offset|clip)"
    rf"|clip_({_OBSERVED})"
)
# Settings that are certainly about the hidden layers of the policy.
_HIDDEN = re.compile(
    r"((hidden|actor|policy|pi|mlp)_)?(activations?(_(fn|func|function|name))?|act(_(fn|func|fun|function))?"
    r"|non_?lin(earity)?)"
)
# Other names of the functions of agents.network.ActivationName.
_ACTIVATIONS = {"swish": "silu", "leakyrelu": "leaky_relu", "identity": "linear", "none": "linear"}
# Functions that no network here has: a setting that names one contradicts whatever is played.
_FOREIGN = re.compile(
    "selu|celu|mish|relu6|prelu|rrelu|crelu|hard_?(tanh|sigmoid|swish|shrink)|soft(sign|max|shrink)"
    "|log_?sigmoid|exponential|(swi|ge|re)?glu|squareplus|tanhshrink|threshold|sine"
)
# Settings of layers other than the hidden ones of the policy.
_ELSEWHERE = re.compile(r"out|final|last|critic|value|vf_|qf?_|q_model|conv|post_fc|lstm|encoder")
_NO_SQUASH = ("identity", "linear", "none", "null", "false")
_TANH = frozenset(("tanh", "affine", "unit_tanh", "tanh_clip_affine", "clip_tanh_affine"))
# Modules whose classes the layouts know; another one's is code that is not run.
_LIBRARIES = re.compile(
    "stable_baselines3?|sb3_contrib|torch|tensorflow|keras|tf_keras|numpy|gymnasium|gym|builtins|collections|ray"
    "|rllib|d3rlpy|tianshou|skrl|rsl_rl|acme|sonnet|tf_agents|typing|functools"
)
_MISSING = re.compile("(the|how) .*(statistics|normalised)")
_MOST_FILES, _LARGEST = 2_000, 1 << 20
_MOST = 12  # entries of one topic
_NOTHING = (None, False, "", 0, "none", "None", "NoFilter", "null", "{}", "[]", "identity")


class Evidence(NamedTuple):
    """One thing whose name is in the vocabulary: a tensor, or a plain value."""

    what: Topic
    name: str
    leaf: Leaf | ValueLeaf

    @property
    def plain(self) -> Plain:
        """The value, None for a tensor."""
        return self.leaf.value if isinstance(self.leaf, ValueLeaf) else None


def topic_of(name: str) -> Topic | None:
    """Return what a tensor or setting of that name is about, None for a name of another meaning.

    The last words decide: `ppo/obs_rms/mean` is about observations because of `obs_rms`.
    """
    segments = [each for each in re.split(r"[/.]", name.lower()) if each and not each.isdigit()]
    for segment in reversed(segments[-3:]):
        for what, pattern in VOCABULARY.items():
            if pattern.fullmatch(segment):
                other = what == "observation statistics" and any(
                    re.fullmatch(rf"(\w+_)?({_NOT_OBSERVED})(_\w+)?", each)
                    for each in segments
                    if each not in ("actor_critic", "ac")
                )
                return "reward statistics" if other else what
    return None


def unused(
    checkpoint: Checkpoint, binding: Binding, known: Sidecar, widths: tuple[int, int]
) -> Iterator[Entry]:
    """Yield an entry for each piece of evidence that no part of the restored agent uses.

    Args:
        checkpoint: what was opened; files beside it are read where they are small.
        binding: how a layout recognised the agent.
        known: the facts that the agent is played with.
        widths: the numbers of observations and actions of the policy.

    """
    facts = _Used(known, binding, widths)
    yield from _limited(_inside(checkpoint.tree, binding, facts))
    yield from _limited(_beside(checkpoint, facts))


def _limited(entries: Iterator[Entry]) -> Iterator[Entry]:
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.what] = counts.get(entry.what, 0) + 1
        if counts[entry.what] <= _MOST or entry.decides:
            yield entry


class _Used(NamedTuple):
    """What the agent is played with, to compare settings with."""

    known: Sidecar
    binding: Binding
    widths: tuple[int, int]

    @property
    def normalised(self) -> bool:
        """Whether a file or a person states how observations are normalised, or that they are not."""
        stated = "norm" in self.binding.facts.said or "obs_norm" in self.known.provenance
        # What a layout misses for certain is in the ledger already.
        missing = any(_MISSING.match(what) for what in self.binding.facts.lacks)
        return stated or missing or self.known.obs_norm is not None

    def entry(self, found: Evidence, where: str, file: str | None = None) -> Entry | None:
        """Return the entry of one piece of evidence, None where it changes nothing or is used."""
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
            return _entry(found, where) if isinstance(found.leaf, Leaf) else None
        return judge(found, where, file)

    def _statistics(self, found: Evidence, where: str, file: str | None) -> Entry | None:
        if isinstance(found.leaf, Leaf):
            if found.leaf.size < 2 or "int" in found.leaf.dtype:
                return None
            fits = found.leaf.size == self.widths[0] and not self._is_limit(found)
            return _entry(found, where, decides=fits and not self.normalised, hint=_norm_hint(file))
        value = found.plain
        if self._is_limit(found) and isinstance(value, int | float) and not isinstance(value, bool):
            norm = self.known.obs_norm or {}
            return None if value in (0, norm.get("clip")) else _entry(found, where)
        if self.normalised or _empty(value) or not isinstance(value, bool | str):
            return None
        # A truth value or a filter's name; other texts are names of files and columns.
        if isinstance(value, str) and not re.search(r"filter|norm|true", value, re.IGNORECASE):
            return None
        hint = "--obs-norm FILE gives the statistics; without normalisation in training this setting is wrong"
        return _entry(found, where, decides=True, hint=hint)

    @staticmethod
    def _is_limit(found: Evidence) -> bool:
        return any(map(_LIMIT.fullmatch, re.split(r"[/.]", found.name.lower())))

    def _bounds(self, found: Evidence, where: str, _: str | None) -> Entry | None:
        value = found.plain
        if isinstance(found.leaf, Leaf):
            # Buffers of an action's map are moved by layouts; others are of one number per action, or of one.
            return _entry(found, where) if found.leaf.size in (1, self.widths[1]) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or self.known.action_low is None:
            return None
        stated = [*(self.known.action_low or ()), *(self.known.action_high or ())]
        if any(abs(abs(value) - abs(each)) <= 1e-6 * max(1.0, abs(each)) for each in stated):
            return None
        # With a lower bound of another size the actions are others; an upper one may be a unit.
        lower = re.search(r"(^|_)(min|low)(_|$)", re.split(r"[/.]", found.name.lower())[-1])
        return _entry(found, where, decides=lower is not None)

    def _activation(self, found: Evidence, where: str, _: str | None) -> Entry | None:
        name = _activation_name(found.plain)
        used = set(self.known.activations or ())
        # What follows the last layer is the action's map; what belongs to other networks is not played.
        last = re.split(r"[/.]", found.name.lower())[-1]
        if name is None or not used or name in used:
            return None
        if _ELSEWHERE.search(found.name.lower()):
            return None
        return _entry(found, where, decides=_HIDDEN.fullmatch(last) is not None)

    def _distribution(self, found: Evidence, where: str, _: str | None) -> Entry | None:
        value, head = found.plain, self.known.head
        if not isinstance(value, bool | str | Record) or head is None:
            return None
        name = value.name if isinstance(value, Record) else str(value)
        text = name.rpartition(".")[2].lower()
        assumed = str(self.known.provenance.get("head", "")).startswith("assumed")
        if re.search(r"tanh|squash|bounded|^true$", text):
            return None if head in _TANH else _entry(found, where, decides=assumed)
        # A distribution has a name of its own; that nothing squashes is a word of these settings alone.
        squashing = re.search(r"squash|tanh|(out|output|final|last)_", found.name.lower())
        if not squashing or text not in _NO_SQUASH or head not in _TANH:
            return None
        return _entry(found, where, decides=assumed)

    def _architecture(self, found: Evidence, where: str, _: str | None) -> Entry | None:
        value = found.plain
        if _empty(value) or not isinstance(value, bool | int | float | str) or isinstance(found.leaf, Leaf):
            return None
        name = found.name.lower()
        kinds = {layer.kind for part in self.binding.parts for layer in part.layers}
        if "dropout" in name or ("norm" in name and ("layer_norm" in kinds or self.binding.fronts)):
            return None  # dropout does nothing when an agent is played
        return _entry(found, where)

    def _wrapper(self, found: Evidence, where: str, _: str | None) -> Entry | None:
        value = found.plain
        if _empty(value) or value == 1 or isinstance(found.leaf, Leaf):
            return None
        named = str(value.name if isinstance(value, Record) else value)
        stated = " ".join([*self.binding.facts.lacks, *(entry.value for entry in self.binding.ledger)])
        if named[:80] in stated or not re.search(r"[A-Za-z]", named):
            return None
        return _entry(found, where, decides=True)

    def _code(self, found: Evidence, where: str, _: str | None) -> Entry | None:
        value = found.plain
        name = value.name if isinstance(value, Record) else value
        if not isinstance(name, str) or _empty(name) or "." not in name:
            return None
        module = re.sub(r"^\W*(class|function)?\s*['\"]?", "", name).partition(".")[0]
        return None if _LIBRARIES.fullmatch(module) else _entry(found, where, decides=True)


def _entry(found: Evidence, where: str, *, decides: bool = False, hint: str | None = None) -> Entry:
    leaf = found.leaf
    if isinstance(leaf, Leaf):
        value = f"{leaf.dtype}{list(leaf.shape)}"
    else:
        value = leaf.value.name if isinstance(leaf.value, Record) else str(leaf.value)
        value = f"{re.split(r'[/.]', found.name)[-1]} = {value[:80]}"
    return Entry("not used", found.what, value, where, decides=decides, hint=hint)


def _norm_hint(file: str | None) -> str:
    return f"--obs-norm {shlex.quote(file)}" if file else "--obs-norm FILE with mean and var applies them"


def _empty(value: Plain) -> bool:
    return any(value is each or (type(value) is type(each) and value == each) for each in _NOTHING)


def _activation_name(value: Plain) -> str | None:
    """Return the activation that a setting names, None for anything else."""
    if not isinstance(value, str | Record):
        return None
    text = value.name if isinstance(value, Record) else value
    last = re.sub(r"\W+$", "", text.strip()).rpartition(".")[2].strip("'\">() ").lower()
    name = _ACTIVATIONS.get(last, last)
    return name if name in get_args(ActivationName) or _FOREIGN.fullmatch(name) else None


def _inside(tree: Tree, binding: Binding, facts: _Used) -> Iterator[Entry]:
    """Yield what the checkpoint itself holds: an entry for the tensors of one module, one for each value."""
    taken = {move.source for move in binding.moves.moves} | binding.consumed
    taken |= {move.source for front in binding.fronts.values() for move in front.moves}
    used = _used_tensors(binding)
    stated = tuple(place for place in binding.facts.said.values() if place)
    modules: set[Path] = set()
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
        what = topic_of(name) or _row_of_observations(name, leaf, facts.widths[0])
        if what is None or (path[:-1] in modules and isinstance(leaf, Leaf)):
            continue
        entry = facts.entry(Evidence(what, name, leaf), name)
        if entry is not None:
            modules.add(path[:-1])
            yield entry


def _row_of_observations(name: str, leaf: Leaf | ValueLeaf, width: int) -> Topic | None:
    """Return the topic of a tensor that has one number for each observation and the name of a statistic.

    Its group may have any name (`preproc/loc`), or that of a program's own class.
    """
    segments = name.lower().split("/")
    if not isinstance(leaf, Leaf) or width < 2 or not leaf.size == max(leaf.shape, default=0) == width:
        return None
    if any(re.fullmatch(rf"(\w+_)?({_NOT_OBSERVED})(_\w+)?", each) for each in segments[:-1]):
        return None
    return "observation statistics" if _ROW.fullmatch(segments[-1].strip("_")) else None


def _used_tensors(binding: Binding) -> Collection[str]:
    norm = binding.facts.norm
    return {leaf.key for leaf in norm if isinstance(leaf, Leaf)} if norm is not None else ()


def _beside(checkpoint: Checkpoint, facts: _Used) -> Iterator[Entry]:
    """Yield what files in the checkpoint's folder hold: statistics, and settings."""
    if places.store(checkpoint.path) is not None:
        return
    folder = os.path.dirname(places.abspath(checkpoint.path))
    own = {os.path.basename(file.path) for file in checkpoint.files} | {os.path.basename(checkpoint.path)}
    try:
        names = sorted(os.listdir(folder))[:_MOST_FILES]
    except OSError:
        return
    read = set(facts.binding.facts.said.values())
    for name in names:
        file = os.path.join(folder, name)
        if name in own or name in read or not os.path.isfile(file) or os.path.islink(file):
            continue
        if _STATISTICS_FILE.fullmatch(name.lower()):
            yield from _statistics_file(file, checkpoint, facts)
        elif _SETTINGS_FILE.fullmatch(name):
            yield from _settings_file(file, facts)


def _statistics_file(file: str, checkpoint: Checkpoint, facts: _Used) -> Iterator[Entry]:
    """Yield the entry of a file of statistics; one that is of this very policy has its number of values."""
    name = os.path.basename(file)
    sizes = _sizes(file)
    if facts.normalised or sizes is None:
        return  # those that are used are another file's, or the command line's
    fits = facts.widths[0] in sizes
    other = sizes and not fits
    value = (
        "of another size than the policy's observations" if other else "of the policy's size" if fits else ""
    )
    hint = f"--obs-norm {shlex.quote(os.path.join(os.path.dirname(checkpoint.path), name))}"
    yield Entry("not used", "observation statistics", value, name, decides=fits, hint=None if other else hint)


def _sizes(file: str) -> Sequence[int] | None:
    """Return the sizes of a file's rows of numbers, none if it cannot be read; None for a network."""
    try:
        if os.path.getsize(file) > _LARGEST:
            return ()
        if file.endswith(".json"):
            found = documents.load(file, "the statistics", "sidecar_bytes")
            rows = [found, *(each for each in found.values() if isinstance(each, dict))]
            return [len(row) for each in rows for row in each.values() if isinstance(row, list)]
        tree = open_checkpoint(file).tree
        stated = {path[-1].value: leaf.value for path, leaf in tree.plain()}
        if stated.get("norm_obs") is False:
            return ()
        tensors = [leaf for _, leaf in tree.tensors()]
        if any(sum(extent > 1 for extent in leaf.shape) > 1 for leaf in tensors):
            return None  # a matrix: another checkpoint
        return [leaf.size for leaf in tensors if leaf.size > 1]
    except (CkpttoolError, OSError):
        return ()


def _settings_file(file: str, facts: _Used) -> Iterator[Entry]:
    """Yield the settings of a file beside the checkpoint that state something else than what is used."""
    name = os.path.basename(file)
    try:
        if os.path.getsize(file) > _LARGEST:
            return
        if name.lower().endswith(".json"):
            tree = settings.tree(documents.load(file, "settings"), "the file")
        else:
            tree = yaml_settings.read(file)
    except (CkpttoolError, OSError):
        return  # the name is anybody's
    for path, leaf in tree.items():
        shown = "/".join(str(step.value) for step in path)
        what = topic_of(shown)
        if what is None:
            continue
        entry = facts.entry(Evidence(what, shown, leaf), f"{name}: {shown}")
        if entry is not None:
            yield entry
