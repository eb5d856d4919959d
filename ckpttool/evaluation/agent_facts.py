"""Facts about an agent that its files do not contain, given by its user."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from ckpttool.core import sidecar
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import UsageError, suggest_choice
from ckpttool.core.kinds import ACTIVATION_SYNONYMS, ACTIVATIONS
from ckpttool.core.sidecar import NotUnderstood, Sidecar

GIVEN = "given"
_HEADS = {"linear": "identity", "none": "identity", "squashed_gaussian": "affine"}
_BOUNDS = "bounds are LOW and HIGH: two numbers, or a number for each action, separated by commas"
_SCALED_TANH = ("tanh", "affine", "tanh_clip_affine")
# Networks compute in float32.
MAX_FLOAT32 = 3.4e38


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
        statistics = None
        if self.obs_norm is not None:
            from ckpttool.evaluation.statistics_file import parse_statistics

            statistics = parse_statistics(self.obs_norm)
        parsed = {
            "activations": _parse_activations(self.activations),
            "head": None if self.head is None else _parse_head(self.head),
            "action_low": low,
            "action_high": high,
            "obs_norm": statistics,
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
    if not lows or not all(math.isfinite(b) and abs(b) <= MAX_FLOAT32 for b in (*lows, *highs)):
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


NO_FACTS = AgentFacts()
