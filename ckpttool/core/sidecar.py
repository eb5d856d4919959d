"""Sidecar files and the provenance of facts.

A sidecar is data: no part of it makes code run. Its digest binds it to the weights, and a sidecar of other
weights is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ckpttool.core import atomic_write, deferred, filesystem, text
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.kinds import ACTIVATION_KINDS, ACTIVATIONS, ActivationName
from ckpttool.core.source import File
from ckpttool.version import __version__

SUFFIX = ".ckpttool.json"
# Of the file with the entries for which a converted checkpoint has no place.
RESIDUE_SUFFIX = ".ckpttool.residue.pt"
_INDEX = ".index.json"
SCHEMA = 1
LARGEST = 3.4e38
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
    from ckpttool.core.sidecar_parsing import read_sidecar  # most checkpoints have no sidecar

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
        from ckpttool.core.sidecar_parsing import read_sidecar

        with contextlib.suppress(CkpttoolError):
            File.beside(file, path)
            sidecars[file] = read_sidecar(file)
    return sidecars


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
