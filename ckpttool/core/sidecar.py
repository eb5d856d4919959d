"""Sidecar files and the provenance of facts.

A sidecar is data: no part of it makes code run. Its digest binds it to the weights, and a sidecar of other
weights is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from ckpttool.core import atomic_write, deferred, filesystem, text
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError, FormatError
from ckpttool.core.kinds import ACTIVATION_KINDS, ACTIVATIONS, ActivationName
from ckpttool.core.source import File
from ckpttool.version import __version__

SUFFIX = ".ckpttool.json"
# Of the file with the entries for which a converted checkpoint has no place.
RESIDUE_SUFFIX = ".ckpttool.residue.pt"
_INDEX = ".index.json"
SCHEMA = 1
_LARGEST = 3.4e38
DEFAULT_SLOPE: float = ACTIVATION_KINDS["leaky_relu"].arguments["negative_slope"]
_SLOPED = deferred.compile(r"leaky_relu\((-?[\d.]+(?:e[-+]?\d+)?)\)")
# Prefixes of a fact's provenance; otherwise it is "given ...".
_READ, _ASSUMED = "read from", "assumed"
# A default that is assumed although users of the library write or set the fact: no answer in any target.
LEFT_OPEN = "assumed, left open"


def parse_activation(text: str) -> tuple[ActivationName, float] | None:
    """Return the activation and its slope below zero; None for an unknown one.

    Only `leaky_relu` has a slope, in brackets unless it is PyTorch's default: `leaky_relu(0.1)`.
    """
    sloped = _SLOPED.fullmatch(text)
    if sloped is not None:
        with contextlib.suppress(ValueError):
            return "leaky_relu", float(sloped[1])
    return (text, DEFAULT_SLOPE) if text in ACTIVATIONS else None


def format_activation(name: str, slope: float) -> str:
    """Return the text of an activation with this slope, as `parse_activation` reads it."""
    return name if name != "leaky_relu" or slope == DEFAULT_SLOPE else f"{name}({slope!r})"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Facts about an agent, each with its provenance: "read from ...", "given" or "assumed".

    `env` has `id`, `gymnasium`, the `arguments` of its creation and the `wrappers` of training;
    `action_low` and `action_high` are per dimension, `choices` are discrete actions
    (libraries/schema.py, Choices), `distribution` is how training drew actions (ActionDistribution there);
    `observation_space` has the `library` of the space in training, and in
    `parts` the `low` and `high` of each input; `head` turns the policy's last layer into an action;
    `activations` follow the hidden layers, and `network_activations` those of networks (by component) with
    other ones than the policy; `obs_norm` has `mean`, `var`, `epsilon`, `clip`, and with several
    inputs the sizes of the normalised ones by name in `parts`;
    `epsilon` has `layer_norm`, `batch_norm` and `adam` where they are known; `optimizers` has settings by
    optimizer that the checkpoint's format does not store; `objects` the objects whose variables the
    checkpoint identifies by name alone (libraries/tf_names.py); `stripped` the parts removed from
    names (mapping/wrappers.py); `computation` the computation where the source records one that is
    more than a chain of these weights (libraries/single_networks.py); `parity` how each network
    compared when it was written (verification/output_comparison.py), `verification` whether a user's model
    computes what the source computes (verification/proof.py); `residue` what the target could not
    store, `undo` the properties of the source (conversion/write.py).
    """

    __repr__ = text.describe_record

    target_sha256: str
    source: Mapping[str, Any] | None = None
    rules: Sequence[Mapping[str, Any]] = ()
    assumed: Sequence[str] = ()
    env: Mapping[str, Any] | None = None
    obs_dim: int | None = None
    action_low: Sequence[float] | None = None
    action_high: Sequence[float] | None = None
    choices: Mapping[str, Any] | None = None
    distribution: Mapping[str, Any] | None = None
    observation_space: Mapping[str, Any] | None = None
    head: str | None = None
    activations: Sequence[str] | None = None
    network_activations: Mapping[str, Sequence[str]] | None = None
    obs_norm: Mapping[str, Any] | None = None
    epsilon: Mapping[str, float] | None = None
    optimizers: Mapping[str, Mapping[str, float | bool | str | None]] | None = None
    objects: Mapping[str, Any] | None = None
    stripped: Sequence[Mapping[str, Any]] | None = None
    computation: Mapping[str, Any] | None = None
    parity: Sequence[Mapping[str, Any]] | None = None
    verification: Mapping[str, Any] | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    residue: Sequence[Mapping[str, Any]] = ()
    undo: Mapping[str, str | None] | None = None

    def is_assumed(self, name: str) -> bool:
        """Return whether a fact is a default of a library or framework."""
        return str(self.provenance.get(name, "")).startswith(_ASSUMED)

    def is_left_open(self, name: str) -> bool:
        """Return whether the source's files decide nothing about a fact, not even by their library."""
        return str(self.provenance.get(name, "")).startswith(LEFT_OPEN)

    def is_read(self, name: str) -> bool:
        """Return whether a fact was read from a file."""
        return str(self.provenance.get(name, "")).startswith(_READ)

    def is_given(self, name: str) -> bool:
        """Return whether a user gave a fact."""
        return getattr(self, name) is not None and self.provenance.get(name) == "given"

    def norm_epsilon(self, kind: str | None, default: float) -> float:
        """Return the epsilon of the norms of a kind (`layer_norm`), or the default if it is not known."""
        return float((self.epsilon or {}).get(kind or "layer_norm", default))

    def origin(self, name: str) -> str:
        """Return the origin of a fact: the file or the default; empty if the sidecar records none."""
        text = str(self.provenance.get(name, ""))
        for prefix in (f"{_READ} ", f"{_ASSUMED}: ", f"{LEFT_OPEN}: "):
            text = text.removeprefix(prefix)
        return text.removeprefix("the ")

    def document(self) -> dict[str, Any]:
        """Return the JSON document, in the order of docs/sidecar.md."""
        facts = {row.name: getattr(self, row.name) for row in dataclasses.fields(self)}
        head = {"schema": SCHEMA, "tool": f"ckpttool {__version__}", "source": facts.pop("source")}
        shown = {name: value for name, value in facts.items() if value is not None or name not in _OMITTED}
        return head | {name: _json_form(value) for name, value in shown.items()}

    def encode(self) -> bytes:
        """Return the file's bytes, which are the same for equal sidecars."""
        return (json.dumps(self.document(), indent=1, allow_nan=False) + "\n").encode()


# Facts that a sidecar lists only where they are known.
_OMITTED = ("choices", "distribution", "network_activations", "observation_space", "verification")


def _json_form(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value if value is None or isinstance(value, str | int) else list(value)


def sidecar_path(path: str) -> str:
    """Return the path of the sidecar of the checkpoint at `path` (a file, a prefix, or a folder).

    A folder of Hugging Face's shards stands for the index in it.
    """
    names = os.listdir(path) if os.path.isdir(path) else ()
    recorded = [name for name in names if name.endswith(_INDEX + SUFFIX)]
    return os.path.join(path, recorded[0]) if len(recorded) == 1 else path + SUFFIX


def load_sidecar(path: str) -> Sidecar | None:
    """Return the sidecar of the checkpoint at `path`, or None; raise FormatError if it is damaged."""
    file = sidecar_path(path)
    if not filesystem.isfile(file):
        return None
    File.beside(file, path)
    return read_sidecar(file)


def find_pending_sidecars(path: str) -> dict[str, Sidecar]:
    """Return sidecars that an interrupted conversion left under temporary names, by file.

    Only `target_sha256` binds any of them to the checkpoint; files that are not sidecars are left
    out.
    """
    sidecars = {}
    for file in (
        atomic_write.find_pending_files(sidecar_path(path)) if filesystem.find_store(path) is None else ()
    ):
        with contextlib.suppress(CkpttoolError):
            File.beside(file, path)
            sidecars[file] = read_sidecar(file)
    return sidecars


def read_sidecar(file: str) -> Sidecar:
    """Return the sidecar in a file of any name; raise FormatError if it is damaged or not a sidecar."""
    return _parse_sidecar(text.load_json(file, "the sidecar", "sidecar_bytes"), file)


def _parse_sidecar(record: Mapping[str, Any], file: str) -> Sidecar:
    if record.get("schema") != SCHEMA:
        shown = str(record.get("schema"))[:40]
        raise FormatError("unsupported sidecar schema", file=file, expected=str(SCHEMA), found=shown)
    for name, allowed in _TYPES.items():
        if record.get(name) is not None and not allowed(record[name]):
            raise FormatError(f"the sidecar's {name} has an invalid value", file=file, path=name)
    low, high = record.get("action_low") or (), record.get("action_high") or ()
    if len(low) != len(high) or any(a > b for a, b in zip(low, high, strict=True)):
        raise FormatError("the sidecar's action bounds are inconsistent", file=file, path="action_low")
    if not isinstance(record.get("target_sha256"), str):
        raise FormatError("the sidecar has no target_sha256", file=file)
    known = {name: record[name] for name in Sidecar.__dataclass_fields__ if record.get(name) is not None}
    return Sidecar(**known)


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(_is_number(item) for item in value)


def _is_number(value: object) -> bool:
    # Networks compute in float32: a value outside its range is not a valid bound or statistic.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_settings(value: object) -> bool:
    if not isinstance(value, dict) or not all(isinstance(settings, dict) for settings in value.values()):
        return False
    return all(
        v is None or isinstance(v, bool | str) or _is_number(v)
        for settings in value.values()
        for v in settings.values()
    )


def _is_objects(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("graph"), str):
        return False
    keys = value.get("keys")
    texts = isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values())
    return texts and isinstance(value.get("read"), bool)


def _is_env(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(
        are_arguments(part)
        if name == "arguments"
        else _is_wrappers(part)
        if name == "wrappers"
        else part is None or isinstance(part, str)
        for name, part in value.items()
    )


def _is_wrappers(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(wrapper, dict)
        and isinstance(wrapper.get("name"), str)
        and _is_plain_mapping(wrapper.get("arguments", {}))
        for wrapper in value
    )


# Environment arguments that a file may set: numbers, and lists of numbers.
_MOST_ARGUMENTS, _MOST_NUMBERS, _DEEPEST = 32, 1_000, 4
_LARGEST_INTEGER = 1_000_000
_ARGUMENT = deferred.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)


def is_argument(value: object) -> bool:
    """Return whether a file may set this environment argument: None, numbers, short nested lists.

    A string may name a file, and a large integer may be a count of steps or bytes.
    """
    numbers = _count_plain_values(value)
    return numbers is not None and numbers <= _MOST_NUMBERS


def are_arguments(value: object) -> bool:
    """Return whether a file may set these arguments of an environment."""
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_ARGUMENTS
        and all(isinstance(name, str) and _ARGUMENT.fullmatch(name) for name in value)
        and all(map(is_argument, value.values()))
    )


def _count_plain_values(value: object, depth: int = 0) -> int | None:
    """Return the number of plain values, or None if any other value is among them."""
    if isinstance(value, list | tuple):
        if depth == _DEEPEST or len(value) > _MOST_NUMBERS:
            return None
        counts = [_count_plain_values(item, depth + 1) for item in value]
        return None if None in counts else 1 + sum(count for count in counts if count is not None)
    if value is None or isinstance(value, bool):
        return 1
    whole = isinstance(value, int) and abs(value) <= _LARGEST_INTEGER
    return 1 if whole or (isinstance(value, float) and math.isfinite(value)) else None


def _is_plain_mapping(value: object) -> bool:
    def plain(item: object) -> bool:
        return item is None or isinstance(item, bool | str) or _is_number(item) or _is_numbers(item)

    return isinstance(value, dict) and all(map(plain, value.values()))


Scores = Literal[
    "values",
    "quantiles",
    "quantiles_last",
    "atoms",
    "dueling",
    "dueling_quantiles",
    "dueling_atoms",
    "dueling_limited_atoms",
    "branches",
    "mean",
    "mean_quantiles",
    "value_first",
    "proposed_fractions",
    "drawn_fractions",
    "bernoulli",
]
"""What discrete actions are chosen by (libraries/schema.py, Choices)."""


def _is_choices(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"counts", "starts", "scores", "support", "single"}:
        return False
    counts, starts = value["counts"], value["starts"]
    whole = all(
        isinstance(numbers, list) and all(type(n) is int and abs(n) <= _LARGEST_INTEGER for n in numbers)
        for numbers in (counts, starts)
    )
    return (
        whole
        and 0 < len(counts) == len(starts) <= _MOST_NUMBERS
        and min(counts) > 0
        and value["scores"] in get_args(Scores)
        and _is_numbers(value["support"])
        and value["scores"].endswith("atoms") == bool(value["support"])
        and (value["single"] is False or (value["single"] is True and len(counts) == 1))
    )


_DISTRIBUTION = {
    "kind": ("categorical", "gaussian", "gsde"),
    "limited": ("clip", "tanh", "sigmoid"),
    "place": ("mean", "action", "unit"),
}


def _is_distribution(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {*_DISTRIBUTION, "limits", "assumed"}:
        return False
    limits = value["limits"]
    ordered = limits is None or (_is_numbers(limits) and len(limits) == 2 and limits[0] < limits[1])
    known = all(value[name] in allowed for name, allowed in _DISTRIBUTION.items())
    return ordered and known and isinstance(value["assumed"], str)


def _is_space(value: object) -> bool:
    parts = value.get("parts") if isinstance(value, dict) and isinstance(value.get("library"), str) else None
    return isinstance(parts, dict) and all(
        isinstance(part, dict)
        and {*part} == {"low", "high"}
        and all(
            isinstance(row, list) and row and all(bound is None or _is_number(bound) for bound in row)
            for row in part.values()
        )
        for part in parts.values()
    )


def _is_norm(value: object) -> bool:
    if not isinstance(value, dict) or not _is_numbers(value.get("mean")) or not _is_numbers(value.get("var")):
        return False
    if any(variance < 0 for variance in value["var"]) or len(value["mean"]) != len(value["var"]):
        return False
    parts = value.get("parts", {})
    if not isinstance(parts, dict) or not all(type(size) is int and size > 0 for size in parts.values()):
        return False
    if parts and sum(parts.values()) != len(value["mean"]):
        return False
    if value.get("clip") is not None and not (_is_number(value["clip"]) and value["clip"] > 0):
        return False
    return value.get("epsilon") is None or (_is_number(value["epsilon"]) and value["epsilon"] >= 0)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "source": lambda v: isinstance(v, dict),
    "rules": lambda v: isinstance(v, list),
    "assumed": _is_texts,
    "env": _is_env,
    "obs_dim": lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0,
    "action_low": _is_numbers,
    "action_high": _is_numbers,
    "choices": _is_choices,
    "distribution": _is_distribution,
    "observation_space": _is_space,
    "head": lambda v: isinstance(v, str),
    "activations": _is_texts,
    "network_activations": lambda v: isinstance(v, dict) and all(n and _is_texts(n) for n in v.values()),
    "obs_norm": _is_norm,
    "epsilon": lambda v: isinstance(v, dict) and all(map(_is_number, v.values())),
    "optimizers": _is_settings,
    "objects": _is_objects,
    "stripped": lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v),
    "computation": lambda v: isinstance(v, dict) and {*map(type, v.values())} <= {str} and "origin" in v,
    "parity": lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v),
    "verification": lambda v: isinstance(v, dict) and isinstance(v.get("verified"), bool),
    "provenance": lambda v: isinstance(v, dict),
    "residue": lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v),
    "undo": lambda v: isinstance(v, dict),
}


Use = Literal["used", "assumed", "not used", "cannot be known"]
Concern = Literal["conversion", "playing"]
Topic = Literal[
    "observation statistics",
    "reward statistics",
    "action bounds",
    "action map",
    "discrete actions",
    "activation",
    "distribution",
    "architecture",
    "wrapper",
    "custom code",
    "environment",
    "weights",
    "averaged weights",
    "low-rank weights",
    "quantisation scales",
    "running statistics",
    "optimizer",
    "setting",
]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One fact that could change an agent's outputs.

    Every command that restores an agent builds one list of entries, prints it in the same words and puts it
    into its JSON document under `ledger`. Layouts add entries to `Binding.ledger`; evaluation/evidence.py
    finds what no layout reads.

    Args:
        use: whether it is part of what is played, exported or written.
        what: the kind of fact.
        value: a short description ("hidden activations relu", "mean and variance of 17 values").
        where: path in the checkpoint, or name of the file beside it, that contains it; empty if none.
        origin: origin if no file contains it: "default of layout fujimoto", "given", an action space.
        decides: whether leaving it out certainly changes the outputs; the exit status is 1 then.
        hint: what to do about it.
        beside: whether it is in another file than the checkpoint's: no conversion takes that.
    """

    use: Use
    what: Topic
    value: str
    where: str = ""
    origin: str = ""
    decides: bool = False
    hint: str | None = None
    beside: bool = False

    @property
    def sentence(self) -> str:
        """Text of the entry for people, without the label."""
        if self.use in ("assumed", "cannot be known"):
            return f"{self.value}: {self.origin}" if self.origin else self.value
        return f"{self.what} {self.value}" + (f" ({self.source})" if self.source else "")

    @property
    def source(self) -> str:
        """Source of the fact: the file, and the origin that the file records."""
        where = "sidecar" if self.where.endswith(SUFFIX) else self.where
        return ": ".join(filter(None, (where, self.origin)))

    @property
    def open(self) -> bool:
        """Whether the outputs certainly differ from those of the trained agent."""
        return self.decides and self.use in ("not used", "cannot be known")

    @property
    def concerns(self) -> Concern:
        """What the fact is for: a conversion needs none that no file contains, playing and exports do."""
        return "playing" if self.use == "cannot be known" or self.beside else "conversion"

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        document = {**dataclasses.asdict(self), "concerns": self.concerns}
        del document["beside"]
        return document


LedgerEntries = tuple[LedgerEntry, ...]


@dataclass(frozen=True, slots=True)
class OmittedTensor:
    """A tensor of a source that fills nothing of a user's model, and why that is no error."""

    path: str
    reason: str

    def document(self) -> dict[str, str]:
        """Return the JSON object."""
        return dataclasses.asdict(self)


def unknown_fact(what: Topic, value: str, *, decides: bool = False, hint: str | None = None) -> LedgerEntry:
    """Return the entry of a fact in no file; with `decides`, it was certainly part of training."""
    return LedgerEntry("cannot be known", what, value, decides=decides, hint=hint)


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """A fact that a file states in a form that is not understood: `text` in `source`.

    It is neither known nor missing: no default and no other file may stand for it. Only a value given for
    it replaces it, and the report names both.
    """

    text: str
    source: str

    def entry(self, what: Topic) -> LedgerEntry:
        """Return the ledger entry."""
        return LedgerEntry(
            "cannot be known",
            what,
            f"the {what} {self.text} (not supported)",
            origin=self.source,
            decides=True,
        )


# Facts that no file of an agent contains. One rule holds for all libraries; libraries/schema.py, LEFT_OPEN,
# lists what each of them leaves open (docs/evaluation.md).
#
# fact                     evidence                                              consequence
# action bounds            the environment has them                              they are used
# activations, action map  the library's code and its examples have one          the default is assumed
#                          users write it, or set it for each run                NO_ACTIVATIONS, ... (decides)
# observation statistics   a file of the run has them, or a setting states that  NO_STATISTICS, or the file as
#                          training normalised                                   evidence not used (decides)
#                          none, and training often keeps them in another file   STATISTICS_UNKNOWN
#                          none, and the library's file would contain them       nothing
NO_BOUNDS = unknown_fact("action bounds", "the action bounds")
NO_ENVIRONMENT = unknown_fact("environment", "the environment")
NO_ACTIVATIONS = unknown_fact("activation", "the activations", decides=True)
NO_ACTION_MAP = unknown_fact("action map", "how the policy maps its last layer to actions", decides=True)
STATISTICS_UNKNOWN = unknown_fact(
    "observation statistics",
    "whether observations were normalised in training (no file of the run has statistics)",
)
NO_STATISTICS = unknown_fact("observation statistics", "the observation statistics", decides=True)


# Ending of the origin of action bounds that are no space's: an environment's own may differ.
OUTPUT_RANGE = "(range of the policy's outputs)"

# Parts of assumptions on the position of layers; a wrong one changes every action.
NORMS_BEFORE = "norms before the activations"
NO_RESIDUALS = "no residual sums"


def assumption_entries(what: Topic, sentences: Iterable[str]) -> LedgerEntries:
    """Return an entry for each assumption, given as a whole sentence."""
    return tuple(LedgerEntry("assumed", what, sentence) for sentence in sentences)


def assumption_sentences(entries: Iterable[LedgerEntry]) -> tuple[str, ...]:
    """Return the sentences of the assumptions."""
    return tuple(dict.fromkeys(entry.sentence for entry in entries if entry.use == "assumed"))


def merge_entries(*lists: Iterable[LedgerEntry]) -> LedgerEntries:
    """Return all entries in order, without duplicates."""
    return tuple(dict.fromkeys(entry for entries in lists for entry in entries))


def drop_known_bounds(entries: Iterable[LedgerEntry]) -> LedgerEntries:
    """Return the entries without unknown action bounds if an environment provides the bounds."""
    entries = tuple(entries)
    known_bounds = any(
        entry.what == "action bounds" and entry.use in ("used", "assumed") for entry in entries
    )
    return tuple(entry for entry in entries if not (known_bounds and entry == NO_BOUNDS))


def describe_decisions(entries: Iterable[LedgerEntry]) -> Iterator[str]:
    """Yield a line for each fact that is used, assumed, or not used although it changes the outputs."""
    for entry in entries:
        if entry.open or entry.use in ("used", "assumed"):
            yield f"{entry.use}: {entry.sentence}"


def has_open_entries(entries: Iterable[LedgerEntry]) -> bool:
    """Return whether a fact that certainly changes the outputs is not used."""
    return any(entry.open for entry in entries)


def entries_to_json(entries: Iterable[LedgerEntry]) -> list[dict[str, Any]]:
    """Return the JSON array."""
    return [entry.document() for entry in entries]


def parse_entries(documents: Iterable[Mapping[str, Any]]) -> LedgerEntries:
    """Return the entries of a JSON array made by `entries_to_json`."""
    names = [field.name for field in dataclasses.fields(LedgerEntry) if field.name != "beside"]

    def parse(row: Any) -> LedgerEntry:
        beside = row["concerns"] == "playing" and row["use"] != "cannot be known"
        return LedgerEntry(**{name: row[name] for name in names}, beside=beside)

    return tuple(parse(row) for row in documents)


def describe_entries(entries: Iterable[LedgerEntry]) -> list[str]:
    """Return the lines for people: one line for all used facts, one labelled line per other entry.

    Assumptions are left out: commands print those with their other assumptions.
    """
    entries = tuple(entries)
    sources: dict[str, dict[str, None]] = {}
    for entry in entries:
        if entry.use == "used":
            sources.setdefault(entry.source, {})[f"{entry.what} {entry.value}"] = None
    used = [", ".join(facts) + (f" ({source})" if source else "") for source, facts in sources.items()]
    lines = [f"used: {'; '.join(used)}"] if used else []
    for use in ("not used", "cannot be known"):
        lines += dict.fromkeys(f"{use}: {entry.sentence}" for entry in entries if entry.use == use)
    return lines
