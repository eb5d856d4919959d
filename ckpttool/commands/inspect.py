"""Inspect a checkpoint: its modules, tensors, signatures and findings."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckpttool.core import checkpoint, deferred, limits, plugins, urls
from ckpttool.core.checkpoint import By, Checkpoint, CodeReference
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    LimitError,
    NotFoundError,
    UsageError,
    abbreviate_list,
    from_system_error,
    is_system_error,
    suggest_choice,
)
from ckpttool.core.text import clean, compile_glob, describe_record, format_count, suggest_glob
from ckpttool.core.tree import Leaf, Path, Record, Role, Tree, ValueLeaf, display, path_to_json
from ckpttool.formats.detect import open_checkpoint

if TYPE_CHECKING:
    from ckpttool.commands.restore import Agent
    from ckpttool.core.tree import Container
    from ckpttool.libraries.schema import RecognizedAgent


# The audit of a file that needs more than plain data: its sentence, its notes, its JSON object.

_LINES = 20
_NAMED = 3
# Why each verdict matters, by the loader that would act.
_WHY: dict[By, str] = {
    "pickle": "pickle.load runs it, torch.load(weights_only=True) refuses it",
    "keras": "Keras uses it to create the model; safe_mode refuses lambdas only",
    "torchscript": "torch.jit.load compiles it",
    "tensorflow": "TensorFlow runs it with the model",
    "onnx": "it is neither an operator of ONNX nor a file beside the model",
    "program": "it is a program or library, which loaders of the archive import or start",
}

_ELSEWHERE = "they belong to other packages"
_WHY_CLASSES: Mapping[By, str] = {
    "keras": "Keras loads them where they are registered",
    "onnx": "onnxruntime needs the library that defines them",
}


def audit_notes(references: Iterable[CodeReference]) -> tuple[str, ...]:
    """Return a line per name that unpickling would call or could have called; a count after 20."""
    acting = [each for each in checkpoint.unsafe_references(references) if each.by == "pickle"]
    lines = [_call_note(each) for each in acting[:_LINES]]
    if len(acting) > _LINES:
        lines.append(
            f"unpickling this file would call {len(acting) - _LINES:,} more; use --json to list them"
        )
    return tuple(lines)


def _call_note(each: CodeReference) -> str:
    if each.verdict == checkpoint.UNKNOWN:
        return f"unpickling this file would create an instance of {each.name}, which runs that class's code"
    if each.calls:
        return f"unpickling this file would call {each.name}; nothing was run, and it is shown as a record"
    return f"unpickling this file would import {each.name}, which can run code; nothing was run"


_ALLOWED_NAME = deferred.compile(r"[^\W\d]\w*(\.[\w<>]+)*")


def read_allowed_names(names: Sequence[str], file: str | None = None) -> frozenset[str]:
    """Return the names of `--allow`, and those that a TOML file lists under `allow`.

    The file has a list of names, or a table from each name to the reason. Raise NotFoundError, FormatError
    or UsageError for a missing file, another document, and a name that is not dotted identifiers.
    """
    listed = list(names)
    if file is not None:
        listed += _read_allow_file(file)
    for name in listed:
        if not _ALLOWED_NAME.fullmatch(name):
            raise UsageError(
                f"not the name of a module, class or function: {name!r}",
                hint="use --allow MODULE with the name of a Python module",
            )
    return frozenset(listed)


_ALLOW_BYTES = 1 << 20


def _read_allow_file(file: str) -> list[str]:
    import tomllib

    try:
        with open(file, "rb") as stream:
            data = stream.read(_ALLOW_BYTES + 1)
        if len(data) > _ALLOW_BYTES:
            raise FormatError("too large for a file of allowed names", file=file)
        allow = tomllib.loads(data.decode()).get("allow")
    except FileNotFoundError as error:
        raise NotFoundError("file of allowed names not found", file=file) from error
    except OSError as error:
        raise from_system_error(error) or error from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a TOML document: {error}", file=file) from error
    if isinstance(allow, dict) and any(isinstance(each, dict) for each in allow.values()):
        raise FormatError("quote the names: a dot without quotes begins another table", file=file)
    reasons = allow.values() if isinstance(allow, dict) else ()
    names = list(allow) if isinstance(allow, list | dict) else []
    texts = (*names, *reasons)
    if allow is None or not texts or not all(isinstance(each, str) and each.strip() for each in texts):
        raise FormatError(
            "the file does not list allowed names",
            file=file,
            expected='allow = ["my_project.networks"], or a table with a reason for each name',
            found="no such list" if allow is None else type(allow).__name__,
        )
    return names


def build_audit_document(references: Iterable[CodeReference]) -> dict[str, Any]:
    """Return the JSON object: the worst verdict, and the verdict of every name."""
    found = list(references)
    return {"verdict": checkpoint.worst_verdict(found), "names": [each.document() for each in found]}


LoadingLabel = Literal["SAFE to load", "NEEDS CLASSES", "RUNS CODE", "NOT CHECKED"]
SAFE: LoadingLabel = "SAFE to load"


class LoadingVerdict(NamedTuple):
    """The consequence of loading a file: `label`, what it is about, and whether `check` passes it."""

    label: LoadingLabel
    reason: str
    passes: bool

    @property
    def sentence(self) -> str:
        """The label with its reason."""
        return f"{self.label}: {self.reason}"


def judge_loading(opened: Checkpoint) -> LoadingVerdict:
    """Return the verdict on loading a checkpoint by its format's own library."""
    references = opened.code_references
    unsafe = checkpoint.worst_verdict(references) in checkpoint.UNSAFE
    if opened.unjudged and not unsafe:
        return LoadingVerdict("NOT CHECKED", next(unjudged_findings(opened.unjudged)).sentence, passes=False)
    if not references:
        return LoadingVerdict(SAFE, "plain data", passes=True)
    return summarize_audit(references)


def summarize_audit(references: Sequence[CodeReference]) -> LoadingVerdict:
    """Return the verdict on loading a file that refers to these names."""
    worst = checkpoint.worst_verdict(references)
    if worst == checkpoint.PLAIN:
        return LoadingVerdict(SAFE, "plain data", passes=True)
    found = checkpoint.filter_verdict(references, worst)
    names = abbreviate_list([clean(each.name) for each in found], _NAMED)
    if worst == checkpoint.UNKNOWN:
        why = "unknown, and pickle.load runs their code; --allow NAME if they are yours"
        return LoadingVerdict("NEEDS CLASSES", f"{names} ({why})", passes=False)
    if worst == checkpoint.CODE:
        return LoadingVerdict("RUNS CODE", f"{names} ({_WHY[found[0].by]})", passes=False)
    why = _WHY_CLASSES.get(found[0].by, _ELSEWHERE)
    if found[0].by == "pickle":
        why = "pickle.load imports them, torch.load(weights_only=True) refuses them"
    return LoadingVerdict("NEEDS CLASSES", f"{names} ({why})", passes=True)


def format_audit(references: Sequence[CodeReference]) -> list[str]:
    """Return a line per name, worst first: verdict, calls, name and location."""
    order = [
        each
        for verdict in reversed(checkpoint.VERDICTS)
        for each in checkpoint.filter_verdict(references, verdict)
    ]
    width = max((len(f"{each.calls:,}") for each in order), default=0)
    return [
        f"{each.verdict:<14}  {_describe_calls(each, width)}  {clean(each.name)}{_format_location(each)}"
        for each in order
    ]


def _describe_calls(each: CodeReference, width: int) -> str:
    return f"called {each.calls:>{width},}" if each.calls else f"{'named':<{width + 7}}"


def _format_location(each: CodeReference) -> str:
    lines = [] if each.offset is None else [f"at byte {each.offset:,}"]
    lines += [f"in {clean(each.where)}"] if each.where else []
    return f"  ({', '.join(lines)})" if lines else ""


# Findings of `doctor` and `check`: a problem of a checkpoint, and its fix.

Topic = Literal["loading", "numbers", "optimizer", "agent", "environment", "layout", "model"]


# Entries whose names mark them as networks, besides those of the canonical agent.
_MODELS = ("policy", "model", "state_dict", "model_state_dict")


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem; `fix` is a command or advice, None if there is no known fix."""

    topic: Topic
    sentence: str
    fix: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"topic": self.topic, "sentence": self.sentence, "fix": self.fix}


def format_command(verb: str, path: str, *words: str) -> str:
    """Return a checkpoint's path as a single shell word, as a user types it."""
    return shlex.join(("ckpttool", verb, urls.display_url(path), *words))


def data_only_command(path: str) -> str:
    """Return the command that keeps a checkpoint's data when loading it does more than return data."""
    return format_command("convert", path, "safe.npz", "--allow-missing")


def unjudged_findings(sentences: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each part that may contain code and cannot be judged."""
    for sentence in sentences:
        yield Finding("loading", f"cannot determine whether loading runs code: {sentence}")


def weightless_findings(checkpoint: Checkpoint, *, values: bool) -> Iterator[Finding]:
    """Yield a finding for a checkpoint without weights, and for each network without weights.

    Without `values`, a file of plain values is not reported: many programs store settings in one.
    """
    tree = checkpoint.tree
    fix = f"run {format_command('inspect', checkpoint.path)} to list its contents"
    if not any(leaf.size for _, leaf in tree.tensors()):
        if values or not any(True for _ in tree.plain()):
            yield Finding("model", "the checkpoint contains no weights", fix)
        return
    from ckpttool.libraries.schema import NETWORKS, VALUES

    held = {path[:1] for path in tree}
    named = {*NETWORKS, *VALUES, *_MODELS}
    for path in tree.containers:
        if len(path) == 1 and path not in held and str(path[0].value) in named:
            yield Finding("model", f"{path[0].value} contains no weights", fix)


# `formats`, `layouts`, `backends`: installed plugins, their capabilities, missing dependencies.


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One plugin; `reads` and `writes` are None where they do not apply (a backend)."""

    name: str
    title: str
    available: bool
    extra: str | None
    reads: bool | None = None
    writes: bool | None = None
    seen: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def list_plugins(kind: plugins.Kind) -> tuple[PluginRow, ...]:
    """Return a row for every plugin of the kind, including those of other packages."""
    return tuple(_ROWS[kind](plugin) for plugin in plugins.installed(kind))


def _format_row(plugin: plugins.Plugin) -> PluginRow:
    module = plugin.load()
    return PluginRow(plugin.name, module.TITLE, True, plugin.extra, reads=True, writes=module.WRITES)


def _layout_row(plugin: plugins.Plugin) -> PluginRow:
    from ckpttool.libraries import recognize

    module = plugin.load()
    table = module.TABLE
    writes, seen = recognize.can_write(module), table.seen or None
    return PluginRow(plugin.name, table.title, True, plugin.extra, reads=True, writes=writes, seen=seen)


def _backend_row(plugin: plugins.Plugin) -> PluginRow:
    there = plugin.available()
    # The module is not imported: that would load its framework only for its name.
    return PluginRow(plugin.name, _BACKENDS.get(plugin.name, plugin.module), there, plugin.extra)


_BACKENDS = {
    "numpy": "NumPy on the CPU; no extra dependencies",
    "torch": "PyTorch on the CPU or a CUDA device",
    "tensorflow": "TensorFlow on the CPU or a GPU",
    "onnxruntime": "onnxruntime on the CPU; fastest for images and batches",
}
_ROWS = {"formats": _format_row, "layouts": _layout_row, "backends": _backend_row}


# Training progress: environment steps, gradient updates and saves, and the number in a checkpoint's name.
#
# `inspect`, `eval`, learning curves and reports all use this definition. A count of saves orders checkpoints
# of one run, and is never a step.

NAME, SAVES, OPTIMIZER = "name", "save_counter", "optimizer"
# The x axis of a curve: environment steps take precedence over updates, both over other counts.
SOURCES = ("num_timesteps", "global_step", "total_it", NAME, "iter")
COUNTERS = (*SOURCES, SAVES)
# Columns of tables and documents, each with its counters: the first one present is used.
COLUMNS = {
    "environment_steps": ("num_timesteps", "global_step"),
    "updates": ("total_it", OPTIMIZER),
    "saves": (SAVES,),
    "in_name": (NAME,),
}
# The label of a curve's x axis, by the source of its steps.
UNITS = {
    "num_timesteps": "environment steps",
    "global_step": "environment steps",
    "total_it": "updates",
    NAME: "numbers in file names",
    "iter": "iterations",
}
ANY_UNIT = "training steps"
TITLES = {"in_name": "step", "environment_steps": "env steps", "updates": "updates", "saves": "save"}

_LARGEST = 2**63
_FORMS = {"int32": "<i", "int64": "<q", "uint32": "<I", "uint64": "<Q", "float32": "<f", "float64": "<d"}
_WORD = r"(?:step|iter|itr|ckpt|checkpoint|epoch|model|agent|policy)s?"
_NUMBERS = (
    deferred.compile(r"([0-9]+)[-_]?(?:time)?steps?(?![a-z])", re.IGNORECASE),
    deferred.compile(rf"(?<![a-z]){_WORD}[-_=]?([0-9]+)(?![0-9])", re.IGNORECASE),
    deferred.compile(r"-([0-9]+)(?:\.[A-Za-z]\w*)*\Z"),
)


def steps_by_source(agent: Agent) -> dict[str, int]:
    """Return the count of each source that has one."""
    return count_training(agent.checkpoint, agent.binding)


def count_training(checkpoint: Checkpoint, binding: RecognizedAgent | None) -> dict[str, int]:
    """Return a checkpoint's counters by source, and the number in its name.

    Without an agent, the plain counters at the top of the checkpoint count. The updates of an optimizer
    are used where the agent itself has no count.
    """
    found: dict[str, int] = {}
    if binding is not None:
        from ckpttool.libraries.schema import ALL_OPTIMIZED, JOINT, canonical_setting_path

        places = {move.target: move for move in reversed(binding.moves.moves)}
        for target, move in places.items():
            if len(target) == 1 and (name := str(target[0].value)) in COUNTERS:
                _add_count(found, name, move.rule.leaf(checkpoint.tree[move.source]))
        for optimizer in (JOINT, *ALL_OPTIMIZED):
            if (own := places.get(canonical_setting_path(optimizer, "step"))) is not None:
                _add_count(found, OPTIMIZER, own.rule.leaf(checkpoint.tree[own.source]))
    else:
        for path, name in checkpoint.tree.names.items():
            if name in COUNTERS and name != NAME:
                _add_count(found, name, checkpoint.tree[path])
    if (number := step_in_name(os.path.basename(checkpoint.path))) is not None:
        found[NAME] = number
    return found


def _add_count(found: dict[str, int], name: str, leaf: Leaf | ValueLeaf) -> None:
    plain = read_number(leaf) if isinstance(leaf, Leaf) else leaf.value
    if isinstance(plain, int | float) and not isinstance(plain, bool) and 0 <= plain < _LARGEST:
        found[name] = max(found.get(name, 0), int(plain))


def read_number(leaf: Leaf) -> int | float | None:
    """Return a one-element tensor as a number, read without NumPy; None if it is larger or damaged."""
    form = _FORMS.get(leaf.dtype)
    if form is None or leaf.size != 1:
        return None
    try:
        number: int | float = struct.unpack(form, leaf.read())[0]
    except struct.error:
        return None
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return None  # its own reader reports the error where the value is needed
    return number


def step_columns(steps: Mapping[str, int]) -> dict[str, int | None]:
    """Return environment steps, updates, saves and the number in the name; None for missing counts."""
    return {
        title: next((steps[source] for source in sources if source in steps), None)
        for title, sources in COLUMNS.items()
    }


def step_in_name(name: str) -> int | None:
    """Return the step in a file name (`ckpt-2500`, `rl_model_10000_steps.zip`), if there is one."""
    for pattern in _NUMBERS:
        if found := pattern.search(name):
            return int(found[1])
    return None


def most_common_source(steps_by_checkpoint: Sequence[Mapping[str, int]]) -> str | None:
    """Return the source that most checkpoints share, so that all steps are comparable; None without any.

    Of several, a source whose value differs between checkpoints comes first. A count of saves is not
    a step.
    """
    having = Counter(source for each in steps_by_checkpoint for source in each if source in SOURCES)
    there = [source for source in SOURCES if having[source]]
    telling = [source for source in there if len({each.get(source) for each in steps_by_checkpoint}) > 1]
    return max(telling or there, key=lambda source: having[source], default=None)


# Entries of listings: a tensor, a plain value, a checkpoint of a folder.


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor; `of` is the display path of the parameter that a slot belongs to."""

    path: str
    keys: Path
    leaf: Leaf
    of: str | None
    aliases: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "keys": path_to_json(self.keys),
            "key": self.leaf.key,
            "dtype": self.leaf.dtype,
            "shape": list(self.leaf.shape),
            "nbytes": self.leaf.nbytes,
            "role": self.leaf.role,
            "of": self.of,
            "slot": self.leaf.slot,
            "aliases": list(self.aliases),
            "trainable": self.leaf.trainable,
        }


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One plain value."""

    path: str
    keys: Path
    leaf: ValueLeaf

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": self.path, "keys": path_to_json(self.keys), **json_value(self.leaf)}


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint of a folder.

    `path` is the path to inspect, `format` the format that reads it (None where a file needed to
    decide is missing). `step` is the number after the last `-` of its name, `counts` the counters
    stored in the latest checkpoints of a folder (count_training). `nbytes` is the size of its files,
    `time` seconds since 1970 from the state file, else the last change of the files. `complete` is
    false when files implied by the names are missing; no file is read to determine that.
    """

    path: str
    format: str | None
    step: int | None
    nbytes: int
    complete: bool
    time: float
    latest: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def when(self) -> datetime:
        """The UTC time in whole seconds."""
        return datetime.fromtimestamp(int(self.time), UTC)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": urls.display_url(self.path),
            "format": self.format,
            "step": self.step,
            **step_columns(self.counts),
            "latest": self.latest,
            "nbytes": self.nbytes,
            "complete": self.complete,
            "time": f"{self.when:%Y-%m-%dT%H:%M:%SZ}",
        }


def json_value(leaf: ValueLeaf) -> dict[str, Any]:
    """Return a plain value as JSON: bytes by their length, records by their class."""
    value = leaf.value
    if isinstance(value, Record):
        return {"type": value.name, "value": value.summary}
    if isinstance(value, bytes):
        return {"type": "bytes", "value": format_count(len(value), "byte")}
    if isinstance(value, complex):
        return {"type": "complex", "value": str(value)}
    return {"type": type(value).__name__, "value": value}


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sorting key that puts l10 after l2, and ckpt-15000 after ckpt-7500."""
    parts = re.split(r"([0-9]+)", name)
    return [_digits_key(part) if number % 2 else (0, part) for number, part in enumerate(parts)]


def _digits_key(digits: str) -> tuple[int, str]:
    # Not int(): it accepts at most 4,300 digits, and a name in a file may have any number.
    number = digits.lstrip("0")
    return len(number), number + digits


# The modules of a listing: the entries of each, and the sums below it.

# Path steps of Keras's own lists of layers and variables, beside user-given names
# (keras/src/saving/legacy/saved_model and keras/src/models/functional.py of Keras 2: `_trackable_children`).
_OWN_LISTS = deferred.compile(
    r"(?:^|/)(?:_[^/]*|(?:non_)?(?:trainable_)?variables|regularization_losses|keras_api|layers/[0-9]+"
    r"|layer(?:_with_weights)?-[0-9]+)(?:/|$)"
)
Sort = Literal["file", "size", "name"]

_DIGIT = deferred.compile("[0-9]")
_Entry = TypeVar("_Entry", bound="TensorRow | ValueRow | ModuleSummary")
_NUMBERED = deferred.compile(r"(?:layer(?:_with_weights)?-)?[0-9]+")
# A configuration may be nested to any depth; the displayed part is limited.
_DEEPEST_FACT = 6


@dataclass(slots=True, eq=False)
class ModuleSummary:
    """One path component: its own entries and all below it, in file order.

    `name` is the last part of `path`. `kind` is the class recorded in the file, `facts` its recorded
    properties ("activation", "units"); `built` is false for an object that is listed but not built.
    Sums cover everything at and below the module; `parameters` counts the elements of trained
    tensors.
    """

    path: str
    name: str
    parent: ModuleSummary | None
    kind: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    built: bool = True
    rows: list[tuple[str, TensorRow | ValueRow]] = field(default_factory=list)
    below: dict[str, ModuleSummary] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0

    @property
    def step(self) -> bool:
        """Return whether the module contains only one other module, so that display can skip it."""
        return not self.rows and self.kind is None and len(self.below) == 1

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "class": self.kind,
            "facts": _json_fact(self.facts, _DEEPEST_FACT),
            "tensors": self.tensors,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
        }


def group_by_module(
    rows: Iterable[tuple[str, TensorRow | ValueRow]], containers: Mapping[Path, Container]
) -> tuple[ModuleSummary, ...]:
    """Return the modules of rows with display paths: the root first, each before its children.

    Raise LimitError where a path has more steps than limits.path_depth.
    """
    root = ModuleSummary("", "", None)
    known = {"": root}
    deepest = limits.current().path_depth
    for path, row in rows:
        at, _, name = path.rpartition("/")
        holder = known.get(at) or _make_module(known, at, deepest)
        holder.rows.append((name, row))
        leaf = row.leaf
        if not isinstance(leaf, ValueLeaf):
            holder.tensors += 1
            holder.nbytes += leaf.nbytes
            if leaf.role == "parameter":
                holder.parameters += leaf.size
    # Children come after their parents in `known`.
    for module in reversed(known.values()):
        if module.parent is not None:
            module.parent.tensors += module.tensors
            module.parent.parameters += module.parameters
            module.parent.nbytes += module.nbytes
    for keys, container in containers.items():
        if container.kind in ("module", "record") and (named := known.get(display(keys))) is not None:
            named.kind = container.name or None
            named.built = container.kind == "module"
            if isinstance(container.state, Mapping):
                named.facts = container.state
    return tuple(known.values())


def _make_module(known: dict[str, ModuleSummary], path: str, deepest: int) -> ModuleSummary:
    """Create the module and any missing ancestors."""
    # Each is stored under its full path, so the total size grows with the square of the depth.
    if (depth := path.count("/") + 2) > deepest:
        raise limits.limit_error("path_depth", "a tensor path has too many levels", depth)
    missing = []
    at = path
    while at not in known:
        missing.append(at)
        at = at.rpartition("/")[0]
    module = known[at]
    for at in reversed(missing):
        name = at.rpartition("/")[2]
        module.below[name] = ModuleSummary(at, name, module)
        module = known[at] = module.below[name]
    return module


def user_given_names(names: Iterable[str]) -> list[str]:
    """Return user-given names, without those of a framework's own lists.

    A name spelled exactly (leaf.exact) equals that of a tensor and adds no information.
    """
    return [name for name in names if not name.startswith((".", "[")) and not _OWN_LISTS.search(name)]


def module_entries(
    module: ModuleSummary, sort: Sort
) -> list[tuple[str, TensorRow | ValueRow | ModuleSummary]]:
    """Return the module's contents by name: its own entries before modules, or in another order.

    Where a file lists names alphabetically, numbers are in natural order (2 before 10).
    """
    if sort == "file":
        return [*_in_natural_order(module.rows), *_in_natural_order([*module.below.items()])]
    found: list[tuple[str, TensorRow | ValueRow | ModuleSummary]] = [*module.rows, *module.below.items()]
    if sort == "name":
        found.sort(key=lambda entry: natural_sort_key(entry[0]))
    elif sort == "size":
        found.sort(key=lambda entry: -_nbytes(entry[1]))
    return found


def _in_natural_order(entries: list[tuple[str, _Entry]]) -> list[tuple[str, _Entry]]:
    """Return entries in alphabetical order in natural order; others as they are."""
    names = [name for name, _ in entries]
    if len(names) < 2 or not any(map(_DIGIT.search, names)) or names != sorted(names):
        return entries
    return sorted(entries, key=lambda entry: natural_sort_key(entry[0]))


def _nbytes(entry: TensorRow | ValueRow | ModuleSummary) -> int:
    if isinstance(entry, ModuleSummary):
        return entry.nbytes
    return entry.leaf.nbytes if isinstance(entry.leaf, Leaf) else 0


def skip_wrapping_modules(name: str, module: ModuleSummary) -> tuple[str, ModuleSummary]:
    """Return the module displayed under the name, skipping those that only contain another one."""
    while module.step:
        (module,) = module.below.values()
        name = f"{name}/{module.name}"
    return name, module


def describe_module_kind(module: ModuleSummary) -> str:
    """Return a module's class and activation, `Dense relu`, as far as the file records them.

    Where Keras numbers its layers (`layer-3`, `_operations/3`), the layer's own name comes first.
    """
    what = " ".join(clean(word) for word in (module.kind or "", module_activation(module.facts)) if word)
    return ": ".join(word for word in (clean(_layer_name(module)), what) if word)


def _layer_name(module: ModuleSummary) -> str:
    """Return the name of a layer whose path has only its number: from the file or from its variables."""
    if not _NUMBERED.fullmatch(module.name):
        return ""
    named = module.facts.get("layer")
    if isinstance(named, str):
        return named
    stored = {
        row.leaf.name.rpartition("/")[0]
        for _, row in module.rows
        if isinstance(row.leaf, Leaf) and row.leaf.name
    }
    return stored.pop().rpartition("/")[2] if len(stored) == 1 else ""


def module_activation(facts: Mapping[str, Any]) -> str:
    """Return the activation in a module's facts; "linear" is omitted, because it is no activation."""
    named = facts.get("activation")
    return named if isinstance(named, str) and named != "linear" else ""


def walk_modules(module: ModuleSummary) -> Iterator[ModuleSummary]:
    """Yield the module and all below it, parents first."""
    waiting = [module]
    while waiting:
        here = waiting.pop()
        yield here
        waiting += reversed(here.below.values())


def _json_fact(value: object, deepest: int) -> Any:
    """Return a fact as JSON; a value that JSON cannot represent becomes its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if deepest and isinstance(value, Mapping):
        return {str(name): _json_fact(item, deepest - 1) for name, item in value.items()}
    if deepest and isinstance(value, list | tuple):
        return [_json_fact(item, deepest - 1) for item in value]
    return f"({type(value).__name__})"


# `schema`: the JSON Schemas (draft 2020-12) of `--json` output and of files beside checkpoints.
#
# Each is a file of `ckpttool/schemas/`; shared definitions are in `common.json` there.

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "schemas")
_SHARED, _SUFFIX = "common", ".json"


@dataclass(frozen=True, slots=True)
class SchemaRow:
    """One schema: its name in the command; `id` contains the version of the document."""

    name: str
    id: str
    title: str

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"name": self.name, "id": self.id, "title": self.title}


def schema_names() -> tuple[str, ...]:
    """Return the names of all schemas."""
    found = (name.removesuffix(_SUFFIX) for name in os.listdir(_FOLDER) if name.endswith(_SUFFIX))
    return tuple(sorted(name for name in found if name != _SHARED))


def list_schemas() -> tuple[SchemaRow, ...]:
    """Return what can be printed, in the order of names."""
    return tuple(
        SchemaRow(name, (found := _load_schema(name))["$id"], found["title"]) for name in schema_names()
    )


def schema(name: str) -> dict[str, Any]:
    """Return the self-contained JSON Schema of that name; raise UsageError for an unknown one.

    Referenced schemas are in its `$defs` with their own `$id`, as draft 2020-12 bundles them
    (JSON Schema Core, section 9.3.1).
    """
    known = schema_names()
    if name not in known:
        raise UsageError(f"unknown schema {name!r}", hint=suggest_choice(name, known))
    whole = _load_schema(name)
    beside = {other: _load_schema(other) for other in _collect_references(name) if other != name}
    return {**whole, "$defs": {**whole.get("$defs", {}), **beside}} if beside else whole


def _collect_references(name: str) -> list[str]:
    """Return the schema and all schemas that it references, directly or indirectly."""
    found = [name]
    for each in found:
        text = _read_schema(each)
        found += [
            other
            for other in (_SHARED, *schema_names())
            if other not in found and f'"{_load_schema(other)["$id"]}#' in text
        ]
    return found


def _load_schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_read_schema(name))
    return found


@functools.cache
def _read_schema(name: str) -> str:
    with open(os.path.join(_FOLDER, name + _SUFFIX), encoding="utf-8") as file:
        return file.read()


# Lines on a SavedModel's signatures and an ONNX model's graph: inputs and outputs with shapes.

_SHOWN = 12


def signature_lines(details: Mapping[str, Any], width: int) -> list[str]:
    """Return a few lines of details of a SavedModel or ONNX model; none for other formats."""
    lines = _onnx_lines(details, width)
    tags = details.get("tags")
    if isinstance(tags, list | tuple) and tags:
        # One list per graph.
        sets = [", ".join(map(str, each)) if isinstance(each, list | tuple) else str(each) for each in tags]
        lines.append(clean(f"tags {'; '.join(sets)}"))
    found = details.get("signatures")
    if not isinstance(found, Mapping):
        return lines
    import textwrap

    for name, signature in list(found.items())[:_SHOWN]:
        text = f"{_tensors(signature, 'inputs')} -> {_tensors(signature, 'outputs')}"
        lines += [
            clean(f"signature {name}"),
            *textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    "),
        ]
    if len(found) > _SHOWN:
        lines.append(f"and {format_count(len(found) - _SHOWN, 'more signature')}")
    return lines


def _onnx_lines(details: Mapping[str, Any], width: int) -> list[str]:
    """Return the lines of an ONNX model: operator set versions, inputs and outputs, operator counts."""
    opsets, operators = details.get("opsets"), details.get("operators")
    if not isinstance(opsets, Mapping) or not isinstance(operators, Mapping):
        return []
    import textwrap

    versions = ", ".join(f"{domain} {version}" for domain, version in list(opsets.items())[:_SHOWN])
    counted = [f"{name} {number}" for name, number in list(operators.items())[:_SHOWN]]
    more = ["..."] if len(operators) > _SHOWN else []
    text = f"{_tensors(details, 'inputs')} -> {_tensors(details, 'outputs')}"
    return [
        clean(f"graph {details.get('name') or ''}".rstrip() + f", opset {versions}"),
        *textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    "),
        *textwrap.wrap(
            clean(", ".join((*counted, *more))), width, initial_indent="  ", subsequent_indent="    "
        ),
    ]


def _tensors(signature: object, which: str) -> str:
    found = signature.get(which) if isinstance(signature, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        return "nothing"
    return ", ".join(clean(f"{name} {_format_signature(tensor)}".strip()) for name, tensor in found.items())


def _format_signature(tensor: object) -> str:
    if not isinstance(tensor, Mapping):
        return ""
    shape = tensor.get("shape")
    extents = "[...]" if shape is None else "[" + ", ".join(_extent(e) for e in shape) + "]"
    return f"{tensor.get('dtype') or ''}{extents}"


def _extent(extent: object) -> str:
    # TensorFlow writes -1 for an unknown extent (tensorflow/core/framework/tensor_shape.proto).
    return "?" if extent in (None, -1) else str(extent)


# How often TensorFlow 1's Adam optimizers were applied, from the powers of beta that they store.


def update_count_notes(tree: Tree) -> tuple[str, ...]:
    """Yield a sentence for each Adam whose two beta powers imply a count under common betas.

    These scalars are read; an unreadable one is skipped here, because its own reader reports the error.
    """
    return tuple(_find_update_counts(tree))


def _find_update_counts(tree: Tree) -> Iterator[str]:
    from ckpttool.libraries.optimizers_read import POWERS, infer_step_count

    for path, leaf in tree.tensors():
        last = str(path[-1].value) if path else ""
        if not last.startswith(POWERS[0]) or leaf.role != "other" or leaf.shape:
            continue
        other: Path = (*path[:-1], path[-1]._replace(value=POWERS[1] + last.removeprefix(POWERS[0])))
        second = tree.get(other)
        scalar = isinstance(second, Leaf) and not second.shape
        if scalar and (inferred := infer_step_count(tree, (path, other))) is not None:
            steps, betas = inferred
            made = format_count(steps, "update")
            yield f"{tree.names[path]}: Adam has made {made} (assuming betas {betas[0]} and {betas[1]})"


# `inspect`: the contents of a checkpoint, without reading a tensor.

_ROLES: tuple[Role, ...] = ("parameter", "buffer", "slot", "counter", "replay", "other")


class RoleTotals(NamedTuple):
    """Sums over the tensors of one role."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the listed tensors: `parameters` counts the elements of trained tensors only.

    Optimizer state, counters and replayed experience are in `roles`, each separately.
    """

    tensors: int
    parameters: int
    nbytes: int
    stored_nbytes: int
    roles: Mapping[Role, RoleTotals] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "tensors": self.tensors,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "stored_nbytes": self.stored_nbytes,
            "roles": {role: sums._asdict() for role, sums in self.roles.items()},
        }


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """Everything that `inspect` prints.

    `binding` is the agent that a layout recognises. `modules` begins with the root, parents first.
    `checkpoints` are those of the folder, if the path is one and its latest checkpoint is used.
    """

    __repr__ = describe_record

    checkpoint: Checkpoint
    binding: RecognizedAgent | None
    tensors: tuple[TensorRow, ...]
    values: tuple[ValueRow, ...]
    totals: Totals
    notes: tuple[str, ...]
    modules: tuple[ModuleSummary, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()

    @property
    def layout(self) -> str | None:
        """The layout that recognises an agent; None if none does."""
        return None if self.binding is None else self.binding.layout

    @property
    def verdict(self) -> LoadingVerdict:
        """The consequence of loading the file by its own library: SAFE to load, NEEDS CLASSES, ..."""
        return judge_loading(self.checkpoint)

    @property
    def evidence(self) -> str:
        """The evidence by which the layout recognised it; empty without one."""
        return "" if self.binding is None else self.binding.evidence

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "path": urls.display_url(self.checkpoint.path),
            "format": self.checkpoint.format,
            "writer": self.checkpoint.writer,
            "layout": self.layout,
            "tensors": [row.document() for row in self.tensors],
            "values": [row.document() for row in self.values],
            "totals": self.totals.document(),
            "modules": [module.document() for module in self.modules if module.path or module.kind],
            "notes": list(self.notes),
            "asks": build_audit_document(self.checkpoint.code_references),
            "details": {**self.checkpoint.details, **self._calls()},
            "checkpoints": [listed.document() for listed in self.checkpoints],
        }

    def _calls(self) -> dict[str, Any]:
        # The short audit text of each verdict.
        names = checkpoint.dangerous_calls(self.checkpoint.code_references)
        return {"calls": names} if names else {}


def summary(path: str, glob: str | None = None, layout: str | None = None) -> CheckpointSummary:
    """List the checkpoint at the path; `glob` selects tensors and values by path.

    `layout` names the layout that recognises it; without it, all are tried.
    """
    return summarize_checkpoint(open_checkpoint(path), glob, layout)


def summarize_checkpoint(
    checkpoint: Checkpoint, glob: str | None = None, layout: str | None = None
) -> CheckpointSummary:
    """Return the listing of an open checkpoint."""
    from ckpttool.libraries.recognize import recognize_checkpoint

    return summarize_recognized(checkpoint, recognize_checkpoint(checkpoint, layout), glob)


def summarize_recognized(
    checkpoint: Checkpoint, binding: RecognizedAgent | None, glob: str | None = None
) -> CheckpointSummary:
    """Return the listing of an open checkpoint, whose agent is known."""
    from ckpttool.mapping.wrappers import list_wrapper_notes

    tree = checkpoint.tree
    owners: Mapping[Path, Path] = binding.of if binding is not None else {}
    keep = compile_glob(glob)
    rows = []
    for at, leaf in tree.tensors():
        if keep(tree.names[at]):
            owner = leaf.of or owners.get(at)
            aliases = tuple(tree.alias_name(alias) for alias in tree.aliases.get(at, ()))
            of = tree.names.get(owner) if owner is not None else None
            rows.append(TensorRow(tree.names[at], at, leaf, of, aliases))
    values = tuple(ValueRow(tree.names[at], at, leaf) for at, leaf in tree.plain() if keep(tree.names[at]))
    totals = _totals(rows, checkpoint.stored_nbytes)
    audit = audit_notes(checkpoint.code_references)
    notes = (
        *audit,
        *(each.sentence for each in unjudged_findings(checkpoint.unjudged)),
        *checkpoint.notes,
        *list_wrapper_notes(tree, agent=binding is not None),
        *update_count_notes(tree),
    )
    if glob is not None and not rows and not values:
        meant = suggest_glob(glob, list(tree.names.values()))
        notes = (*notes, "; ".join(filter(None, (f"no path matches the pattern '{glob}'", meant))))
    entries: list[TensorRow | ValueRow] = [*rows, *values]
    try:
        modules = group_by_module(((entry.path, entry) for entry in entries), tree.containers)
    except LimitError as error:
        raise error.located(file=checkpoint.path) from None
    return CheckpointSummary(checkpoint, binding, tuple(rows), values, totals, notes, modules)


# Formats that list the layers of a model besides its weights; PyTorch files do where they contain modules.
_DESCRIBING = frozenset(("keras_zip", "keras_h5", "onnx"))


def may_describe_layers(checkpoint: Checkpoint) -> bool:
    """Return whether the file may list the layers of a model, and not only weights."""
    if checkpoint.format in _DESCRIBING or is_script(checkpoint):
        return True
    return any(path and path[-1].value == "_modules" for path in checkpoint.tree.containers)


def is_script(checkpoint: Checkpoint) -> bool:
    """Return whether the file is a TorchScript archive."""
    root = checkpoint.tree.containers.get(())
    return root is not None and (root.name or "").startswith("__torch__.")


def _totals(rows: list[TensorRow], stored_nbytes: int) -> Totals:
    found: dict[Role, list[int]] = {}
    for row in rows:
        leaf = row.leaf
        sums = found.setdefault(leaf.role, [0, 0, 0])
        sums[0] += 1
        sums[1] += leaf.size
        sums[2] += leaf.nbytes
    roles = {role: RoleTotals(*found[role]) for role in _ROLES if role in found}
    trained = roles["parameter"].elements if "parameter" in roles else 0
    return Totals(len(rows), trained, sum(r.nbytes for r in roles.values()), stored_nbytes, roles)
