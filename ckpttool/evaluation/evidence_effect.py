"""Whether evidence changes the outputs of a played agent, or of a converted model."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ckpttool.core import deferred
from ckpttool.core.deferred import DeferredModule, NamedTuple
from ckpttool.core.kinds import ACTIVATIONS
from ckpttool.core.sidecar import LedgerEntry, Sidecar
from ckpttool.core.tree import Leaf, Record

if TYPE_CHECKING:
    from ckpttool.evaluation import vocabulary
    from ckpttool.evaluation.vocabulary import AgentEvidence
    from ckpttool.libraries.schema import RecognizedAgent
else:
    # Most checkpoints contain nothing but the agent.
    vocabulary = DeferredModule("ckpttool.evaluation.vocabulary")


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


class ConversionUsage(NamedTuple):
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

    def entry(self, fact: AgentEvidence) -> LedgerEntry | None:
        """Return the entry for one piece of evidence, None if the weights do not depend on it."""
        if fact.what != vocabulary.OBSERVATION_STATISTICS:
            return None
        if isinstance(fact.leaf, Leaf):
            return _statistics_tensor(fact, fact.leaf, self.observed, self.normalised, self.hint(None))
        if isinstance(fact.plain, bool | str) and not self.normalised:
            value = fact.plain
            named = value is True or (isinstance(value, str) and re.search("filter|norm", value, re.I))
            certain = (
                value is True
                and re.search(rf"(^|_)({vocabulary.OBSERVED})(_|$)", vocabulary.last_word(fact.name))
                is not None
            )
            return make_entry(fact, decides=certain, hint=self.hint(None)) if named else None
        return None


class PolicyUsage(NamedTuple):
    """The facts that the agent is played with, to compare settings with."""

    known: Sidecar
    binding: RecognizedAgent
    widths: tuple[int, int]

    @property
    def normalised(self) -> bool:
        """Whether a file or a person specifies how observations are normalised, or that they are not."""
        facts = self.binding.facts
        stated = "norm" in facts.origins or "obs_norm" in {**facts.stated, **self.known.provenance}
        return stated or self.known.obs_norm is not None

    @property
    def settled(self) -> bool:
        """Whether settings and tensors decide nothing more: the ledger has the statistics already."""
        lacks = self.binding.facts.lacks
        return self.normalised or any(
            row.decides and row.what == vocabulary.OBSERVATION_STATISTICS for row in lacks
        )

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

    def entry(self, evidence: AgentEvidence) -> LedgerEntry | None:
        """Return the entry for one piece of evidence, None if it has no effect or is used."""
        judge = {
            "observation statistics": self._statistics,
            "action bounds": self._bounds,
            "activation": self._activation,
            "distribution": self._distribution,
            "architecture": self._architecture,
            "wrapper": self._wrapper,
            "custom code": self._code,
        }.get(evidence.what)
        if judge is None:
            return make_entry(evidence) if isinstance(evidence.leaf, Leaf) else None
        return judge(evidence)

    def _statistics(self, evidence: AgentEvidence) -> LedgerEntry | None:
        if isinstance(evidence.leaf, Leaf):
            return _statistics_tensor(evidence, evidence.leaf, self.widths[:1], self.settled, self.hint(None))
        value = evidence.plain
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._scale(evidence, float(value))
        if self.settled or vocabulary.is_empty(value) or not isinstance(value, bool | str):
            return None
        # A boolean or a filter's name; other texts are names of files and columns.
        if isinstance(value, str) and not re.search(r"filter|norm|true", value, re.IGNORECASE):
            return None
        hint = (
            "use --obs-norm FILE to supply the statistics; if training did not normalise, this "
            "setting is wrong"
        )
        return make_entry(evidence, decides=True, hint=hint)

    def _scale(self, evidence: AgentEvidence, value: float) -> LedgerEntry | None:
        """Return the entry for a number that scales or limits observations."""
        last = vocabulary.last_word(evidence.name)
        norm = self.known.obs_norm
        if "clip" in last:
            if not math.isfinite(value) or value <= 0 or (norm is not None and norm.get("clip") == value):
                return None
            own = self.binding.facts.norm
            return make_entry(evidence, decides=norm is not None and own is not None and bool(own.assumed))
        if re.search("scal(e|es|ing)", last):
            return None if value in (0.0, 1.0) else make_entry(evidence, decides=norm is None)
        return make_entry(evidence) if vocabulary.is_limit(evidence) and value != 0 else None

    def _bounds(self, evidence: AgentEvidence) -> LedgerEntry | None:
        value = evidence.plain
        if isinstance(evidence.leaf, Leaf):
            # Layouts move the buffers of an action map; other buffers have one number per action, or one in
            # total.
            if evidence.leaf.size not in (1, self.widths[1]):
                return None
            return make_entry(evidence, decides=self.known.action_low is None and self._is_assumed("head"))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.known.action_low is None:
            return make_entry(evidence) if math.isfinite(value) else None
        stated = [*(self.known.action_low or ()), *(self.known.action_high or ())]
        if any(abs(abs(value) - abs(bound)) <= 1e-6 * max(1.0, abs(bound)) for bound in stated):
            return None
        # A different lower bound changes the actions; a different upper one may be a unit.
        lower = re.search(r"(^|_)(min|low)(_|$)", re.split(r"[/.]", evidence.name.lower())[-1])
        return make_entry(evidence, decides=lower is not None)

    def _is_assumed(self, fact: str) -> bool:
        return fact not in self.known.provenance or self.known.is_assumed(fact)

    def _activation(self, evidence: AgentEvidence) -> LedgerEntry | None:
        name, used = vocabulary.activation_name(evidence.plain), set(self.known.activations or ())
        # A function after the last layer is the action map; settings of other networks are not played.
        if (
            name is None
            or not used
            or name in used
            or vocabulary.OTHER_NETWORKS.search(evidence.name.lower())
        ):
            return None
        hint = f"--activation {name}" if name in ACTIVATIONS else None
        return make_entry(evidence, decides=True, hint=hint)

    def _distribution(self, evidence: AgentEvidence) -> LedgerEntry | None:
        head, name = self.known.head, evidence.name.lower()
        if head is None or isinstance(evidence.leaf, Leaf) or re.search("critic|value|vf_|qf?_", name):
            return None
        squashes = vocabulary.output_function(evidence.plain, vocabulary.last_word(name))
        if squashes is None or squashes == ("tanh" if head in _TANH else "linear"):
            return None
        return make_entry(evidence, decides=self._is_assumed("head"))

    def _architecture(self, fact: AgentEvidence) -> LedgerEntry | None:
        value = fact.plain
        if (
            vocabulary.is_empty(value)
            or not isinstance(value, bool | int | float | str)
            or isinstance(fact.leaf, Leaf)
        ):
            return None
        name = fact.name.lower()
        normed = "norm" in name or vocabulary.last_word(name).removeprefix("use_") in ("ln", "bn")
        if "dropout" in name or (normed and (self.binding.norm_kind or self.binding.fronts)):
            return None  # dropout is inactive when an agent is played
        return make_entry(fact, decides=value is True and "critic" not in name)

    def _wrapper(self, evidence: AgentEvidence) -> LedgerEntry | None:
        value = evidence.plain
        if (
            vocabulary.is_empty(value)
            or isinstance(evidence.leaf, Leaf)
            or (value == 1 and "delay" not in vocabulary.last_word(evidence.name))
        ):
            return None
        named = str(value.name if isinstance(value, Record) else value)
        if re.search("repeat|skip|delay", vocabulary.last_word(evidence.name)):
            # A simulator's own frame skip is part of the environment.
            certain = not re.search("frame_?skip", vocabulary.last_word(evidence.name))
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return make_entry(evidence, decides=certain) if is_number else None
        own = {str(wrapper.get("name")) for wrapper in (self.known.env or {}).get("wrappers") or ()}
        if {named, named.rpartition(".")[2]} & own or not re.search(r"[A-Za-z]", named):
            return None
        return make_entry(evidence, decides=True)

    def _code(self, evidence: AgentEvidence) -> LedgerEntry | None:
        value = evidence.plain
        name = value.name if isinstance(value, Record) else value
        if not isinstance(name, str) or vocabulary.is_empty(name):
            return None
        last = vocabulary.last_word(evidence.name)
        if last in ("_target_", "class_path", "class_name") and not _has_role(evidence.name, name):
            return None
        if "." not in name:
            return make_entry(evidence, decides=True) if _is_own_class(last, name.strip("'\"")) else None
        if re.search(r"[/\\\s]", name) or not re.fullmatch(r"\W*(class\s|function\s)?.*\.[A-Z]\w*\W*", name):
            return None  # a file name or a version
        module = re.sub(r"^\W*(class|function)?\s*['\"]?", "", name).partition(".")[0]
        if _LIBRARIES.fullmatch(module):
            return None
        # Configurations create all objects by such names, also a program's own plain agent.
        plain = last in ("_target_", "class_path") and _is_plain(_HUMPS.findall(name.rpartition(".")[2]))
        return make_entry(evidence, decides=not plain)


def _has_role(setting: str, class_: str) -> bool:
    """Return whether a class is a policy or a part of one, by its own name or by its setting's name."""
    words = _HUMPS.findall(class_.rpartition(".")[2])
    owners = [part for part in re.split(r"[/.]", setting.lower())[:-1] if not part.isdigit()][-2:]
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


def make_entry(evidence: AgentEvidence, *, decides: bool = False, hint: str | None = None) -> LedgerEntry:
    """Return the entry for evidence that is not used; one that decides changes the outputs."""
    leaf = evidence.leaf
    if isinstance(leaf, Leaf):
        value = f"{leaf.dtype}{list(leaf.shape)}"
    else:
        value = leaf.value.name if isinstance(leaf.value, Record) else str(leaf.value)
        value = f"{re.split(r'[/.]', evidence.name)[-1]} = {value[:80]}"
    where = evidence.name if evidence.file is None else f"{evidence.file}: {evidence.name}"
    return LedgerEntry("not used", evidence.what, value, where, decides=decides, hint=hint)


def _statistics_tensor(
    evidence: AgentEvidence, leaf: Leaf, observed: Collection[int], settled: bool, hint: str
) -> LedgerEntry | None:
    """Return the entry for a tensor of statistics; it decides if it has the size of an observation."""
    if leaf.size < 2 or "int" in leaf.dtype:
        return None
    fits = not {*observed}.isdisjoint((leaf.size, *leaf.shape)) and not vocabulary.is_limit(evidence)
    return make_entry(evidence, decides=fits and not settled, hint=hint)
