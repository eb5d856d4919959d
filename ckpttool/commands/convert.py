"""Convert a checkpoint to another framework."""

from __future__ import annotations

import contextlib
import keyword
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, cast

from ckpttool.commands import evidence, load_into, plan, restore, save
from ckpttool.commands.digest import Digest, DigestRecorder
from ckpttool.commands.evidence import AgentFacts, add_environment
from ckpttool.commands.load_into import TargetModel, choose_model_form
from ckpttool.commands.network_outputs import (
    OutputMismatchError,
    OutputVerification,
    prepared_source_agent,
    verify_outputs,
)
from ckpttool.commands.options import (
    EXPORTS,
    TARGETS,
    ConversionOptions,
    ConversionRequest,
    PreparedTree,
    TargetKind,
    infer_target_word,
    parse_request,
    parse_target_kind,
    require_compatible,
    target_stem,
    with_keywords,
)
from ckpttool.commands.plan import ConversionPlan, ConversionResult, plan_conversion
from ckpttool.commands.restore import (
    VerifiedSidecar,
    agent_ledger,
    build_agent,
    policy_sizes,
    read_verified_sidecar,
    recognize_playable_agent,
    select_network_leaves,
)
from ckpttool.commands.save import ReverseRecord, WriteOptions, record_reverse
from ckpttool.core import plugins, sidecar, urls
from ckpttool.core.atomic_write import Output, Progress, WorkerThread, ignore_progress, require_new
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, Sidecar, merge_entries
from ckpttool.core.tree import Leaf, Path, Tree, display, key
from ckpttool.formats.common import Format
from ckpttool.formats.detect import note_other_shards, open_checkpoint
from ckpttool.formats.tf_object_graph import MARK
from ckpttool.mapping import user_rules
from ckpttool.mapping.fill_model import MatchOptions, Skeleton, fill
from ckpttool.mapping.solver import FillResult
from ckpttool.networks.worker import ModelSpec

# The Python lines that load what a conversion wrote, made from the tree that was written.

_MOST, _WIDTH = 8, 80
_GROUPS = "param_groups"
_ENDINGS = ("_state_dict", "_state", ".state_dict")
_WHOLE = frozenset(("state_dict", "model", "module", "net", "network", "params", "weights", "policy_dict"))
_WEIGHTS = ".weights.h5"
_TRAINED = ("parameter", "buffer")
# tf.train.Checkpoint makes this variable itself.
_SAVES = "save_counter"
# Edges between a Keras model and its layers (keras/src/models, tf_keras): above them stands a model.
_EDGE = re.compile(r"_functional|_layers|_operations|layers|layer_with_weights-\d+|layer-\d+")
_COUNTS = frozenset(("_iterations", "iterations", "iter"))
_MOST_NAMED = 4  # objects that are arguments of tf.train.Checkpoint


def format_loading_code(
    target: str, kind: TargetKind, tree: Tree, *, foreign: bool = False
) -> tuple[str, ...]:
    """Return at most eight lines that load the target, none for targets of an RL library's own form.

    `tree` is the one that was written to `target`, a file or a TensorFlow prefix. Names that are `foreign`,
    of another framework, may begin with objects that no PyTorch model has.
    """
    if kind is TARGETS["torch"]:
        return _torch(target, tree, foreign=foreign)
    if kind is TARGETS["tf"]:
        return _objects(target, tree)
    if kind is TARGETS["tf1"]:
        return (f"tf.compat.v1.train.Saver().restore(session, {_python_literal(target)})",)
    if kind is TARGETS["keras"]:
        return _keras(target, tree, str(kind.options.get("root", "")))
    return ()


def _python_literal(value: object) -> str:
    """Return a string or a number as Python spells it, in double quotes where that needs no escape."""
    if not isinstance(value, str):
        return repr(value)
    plain = value.isprintable() and '"' not in value and "\\" not in value
    return f'"{value}"' if plain else ascii(value)


def _torch(target: str, tree: Tree, *, foreign: bool) -> tuple[str, ...]:
    states, optimizers = _find_state_dicts(tree)
    source = f"torch.load({_python_literal(target)}, weights_only=True)"
    if not states:
        return (f"tensors = {source}",)
    if len(states) == 1 and not optimizers:
        (at,) = states
        modules = _modules(at, tree)
        above = _shared_prefixes(modules) if foreign else ""
        about = _format_names("# modules of model: ", [name.removeprefix(above) for name in modules])
        if not above:
            return (
                _load_state(_variable_name(at), at, f"{source}{_items(at)}", tree),
                *((about,) if foreign else ()),
            )
        shorter = f"{{k.removeprefix({_python_literal(above)}): v for k, v in state.items()}}"
        load = _load_state(_variable_name(at), at, "state", tree)
        return (f"state = {source}{_items(at)}", f"state = {shorter}", load, about)
    lines = [f"checkpoint = {source}"]
    names = _variable_names((*states, *optimizers))
    each = [_load_state(names[at], at, f"checkpoint{_items(at)}", tree) for at in names]
    room = _MOST - 1
    if len(each) <= room:
        return (*lines, *each)
    rest = [names[at] for at in (*states, *optimizers)[room - 1 :]]
    return (*lines, *each[: room - 1], _format_names("# likewise ", rest))


def _modules(at: Path, tree: Tree) -> list[str]:
    """Return the modules' names in the keys of a state_dict."""
    names = [
        str(path[-1].value) for path, leaf in tree.tensors() if path[:-1] == at and leaf.role in _TRAINED
    ]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _shared_prefixes(modules: list[str]) -> str:
    """Return the objects above all modules, with the dot behind them: `model.` for model.fc1, model.fc2."""
    split = [name.split(".") for name in modules]
    depth = 0
    while all(len(each) > depth + 1 and each[depth] == split[0][depth] for each in split):
        depth += 1
    return "".join(f"{segment}." for segment in split[0][:depth])


def _find_state_dicts(tree: Tree) -> tuple[list[Path], list[Path]]:
    """Return where the written dict has state_dicts of modules, and of optimizers."""
    groups = [path[: _index(path)] for path in tree if _GROUPS in [step.value for step in path]]
    optimizers = list(dict.fromkeys(groups))
    states = dict.fromkeys(
        path[:-1]
        for path, leaf in tree.tensors()
        if leaf.role in _TRAINED and isinstance(path[-1].value, str) and "." in path[-1].value
    )
    inside = [at for at in states if not any(at[: len(o)] == o for o in optimizers)]
    return inside, optimizers


def _index(path: Path) -> int:
    return [step.value for step in path].index(_GROUPS)


def _load_state(name: str, at: Path, source: str, tree: Tree) -> str:
    children = [(path, leaf) for path, leaf in tree.items() if path[: len(at)] == at and path]
    others = [p for p, leaf in children if not isinstance(leaf, Leaf) or len(p) > len(at) + 1]
    optimizer = any(step.value == _GROUPS for path, _ in children for step in path[len(at) : len(at) + 1])
    strict = ", strict=False" if others and not optimizer else ""
    return f"{name}.load_state_dict({source}{strict})"


def _items(at: Path) -> str:
    return "".join(f"[{_python_literal(step.value)}]" for step in at)


def _variable_names(places: Collection[Path]) -> dict[Path, str]:
    """Return a variable's name for each place: longer ones, or numbers, where several would have one."""
    names = {at: _variable_name(at) for at in places}
    longer = Counter(map(_join_path, places))
    several = {name for name, count in Counter(names.values()).items() if count > 1}
    for number, (at, name) in enumerate(names.items()):
        if name in several:
            whole = _join_path(at)
            names[at] = whole if longer[whole] == 1 and whole.isidentifier() else f"{name}_{number}"
    return names


def _join_path(at: Path) -> str:
    return "_".join(re.sub(r"\W", "_", str(step.value), flags=re.ASCII) for step in at)


def _variable_name(at: Path) -> str:
    """Return a variable's name for what lies at a path: `actor` for checkpoint["actor_state_dict"]."""
    for step in reversed(at):
        name = _shorten_names(str(step.value).replace("-", "_").replace(".", "_"))
        if name in _WHOLE:
            return "model"
        if name.isidentifier() and not keyword.iskeyword(name) and name.isascii():
            return name
    return "model"


def _shorten_names(name: str) -> str:
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _objects(target: str, tree: Tree) -> tuple[str, ...]:
    """Return how `tf.train.Checkpoint` restores the objects: one at the root, or several by their names."""
    weights = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    tops = list(dict.fromkeys(str(path[0].value) for path in weights))
    optimizers = _keras_optimizers(tree)
    every = list(dict.fromkeys((*tops, *(str(top[0].value) for top in optimizers if top))))
    inside = {str(p[0].value) for p in tree if len(p) > 1}
    others = list(dict.fromkeys(name for p in tree if (name := str(p[0].value)) not in {*every, _SAVES}))
    others += [name for name in every if name not in inside]
    every = [name for name in every if name in inside]
    if _is_model(weights):
        others = [name for name in others if name not in tops]
    # A file of `write` or `save_weights` has no count of saves, which `restore` expects.
    kept = any(MARK in leaf.key for _, leaf in tree.tensors())
    read = "read" if kept and not any(str(path[0].value) == _SAVES for path in tree) else "restore"
    # `assert_consumed` would ask for a variable for every counter, too.
    check = "assert_existing_objects_matched" if others else "assert_consumed"
    restore = f".{read}({_python_literal(target)}).{check}()"
    if _is_model(weights):
        lines = [f"tf.train.Checkpoint(model){restore}", _format_names("# attributes of model: ", tops)]
        return (*lines, *_other_content_lines(others))
    if not every:
        return (f"reader = tf.train.load_checkpoint({_python_literal(target)})",)
    short = {name: _variable_name((key(name),)) for name in every}
    named = short if len({*short.values()}) == len(short) else {name: name for name in every}
    if all(map(_is_word, every)) and len(every) <= _MOST_NAMED:
        values = ", ".join(
            f"{name}={_object_expression(name, variable, tree)}" for name, variable in named.items()
        )
        lines = [f"tf.train.Checkpoint({values}){restore}"]
    else:
        named = {name: name for name in every}
        lines = [_format_names("# objects is a dict of ", [_python_literal(name) for name in every])]
        lines.append(f"tf.train.Checkpoint(**objects){restore}")
    for name in [name for name in every if name in tops][:_MOST_NAMED]:
        below = dict.fromkeys(str(path[1].value) for path in weights if str(path[0].value) == name)
        inner = [step for step in below if not _EDGE.fullmatch(step)]
        if inner:
            lines.append(_format_names(f"# attributes of {named[name]}: ", inner))
    lines += _other_content_lines(others) or ["# with fewer objects: .assert_existing_objects_matched()"]
    return tuple(lines)


def _other_content_lines(others: Collection[str]) -> list[str]:
    return [_format_names("# the file also holds ", others)] if others else []


def _is_model(weights: Iterable[Path]) -> bool:
    """Whether the root is a model, whose layers its attributes are, and not a dict of objects."""
    deepest: dict[str, int] = {}
    for path in weights:
        top = str(path[0].value)
        deepest[top] = max(deepest.get(top, 0), len(path))
    if any(map(_EDGE.fullmatch, deepest)):
        return True
    # Variables of the root itself stand beside objects as well as beside layers.
    modules = [depth for depth in deepest.values() if depth > 1]
    return bool(deepest) and (not modules or (len(modules) > 1 and min(modules) == 2))


def _keras_optimizers(tree: Tree) -> list[Path]:
    """Return where optimizers stand: above a count of updates, or at the top with slots alone."""
    counted = dict.fromkeys(path[:-1] for path in tree if str(path[-1].value) in _COUNTS)
    with_slots = (path[:1] for path, leaf in tree.tensors() if leaf.role == "slot")
    return [*counted, *(top for top in dict.fromkeys(with_slots) if all(at[:1] != top for at in counted))]


def _object_expression(name: str, variable: str, tree: Tree) -> str:
    """Return the expression for an object: a list where the file has optimizers by number."""
    numbers = [top[1].value for top in _keras_optimizers(tree) if str(top[0].value) == name and len(top) == 2]
    if not numbers or not all(str(number).isdecimal() for number in numbers):
        return variable
    if len(numbers) == 1:
        return "[optimizer]"
    return f"[{', '.join(f'optimizer_{number}' for number in range(len(numbers)))}]"


def _is_word(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _keras(target: str, tree: Tree, root: str) -> tuple[str, ...]:
    load = target if target.endswith(_WEIGHTS) else f"{os.path.splitext(target)[0]}{_WEIGHTS}"
    # Keras asks for this ending.
    copied = (
        () if load == target else (f"shutil.copyfile({_python_literal(target)}, {_python_literal(load)})",)
    )
    paths = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    cut = int(bool(root) and all(str(path[0].value) == root and len(path) > 2 for path in paths))
    tops = dict.fromkeys(str(path[cut].value) for path in paths)
    about = [_format_names("# attributes of model: ", tops)]
    if all(top.isdigit() or _EDGE.fullmatch(top) for top in tops):
        about = ["# model: a Sequential or functional model of the same layers"]
    elif any(len(path) - cut > 3 and not _EDGE.fullmatch(str(path[cut].value)) for path in paths):
        # Keras looks for what a model holds below `layers` first, and gives up on models inside of models.
        about.append("# make objects between model and its layers keras.layers.Layer, not keras.Model")
    return (*copied, f"model.load_weights({_python_literal(load)})", *about)


def _format_names(before: str, names: Iterable[str]) -> str:
    """Return names in one line, cut after the last one that fits."""
    shown = [name if name.isprintable() else ascii(name) for name in names]
    line = before + ", ".join(shown)
    while len(line) > _WIDTH and len(shown) > 1:
        shown.pop()
        line = f"{before}{', '.join(shown)}, ..."
    return line


# `convert`: map a checkpoint to another framework, write it, read it back, and leave a receipt.

# Formats that hold arrays of any kind: what is no network is as well kept there.
_ARRAYS = frozenset(("npz", "safetensors"))


def convert(
    source: str,
    target: str,
    options: ConversionOptions | None = None,
    *,
    progress: Progress = ignore_progress,
    **keywords: Any,
) -> ConversionResult:
    """Convert the checkpoint at `source` into a new one at `target`, with its sidecar beside it.

    `keywords` are fields of ConversionOptions, in the place of those of `options`: `convert(source, target,
    to="tf", dry_run=True)`. Nothing is written when something is unmapped (unless `allow_missing`) or on
    `dry_run`. The target is written beside, read back, compared and then renamed; the same conversion gives
    the same bytes. Raise UsageError for options that exclude each other.
    """
    options = with_keywords(options or ConversionOptions(), keywords, "convert")
    exported = infer_target_word(target, options.to) in EXPORTS
    require_compatible(options, exported=exported)
    facts = add_environment(options.facts, options.env)
    if exported:
        # Playing and comparing networks takes modules that no other conversion needs.
        from ckpttool.commands.export_onnx import ExportOptions, export

        network, env, layout = options.network or "actor", options.env, options.layout
        how = ExportOptions(network, env, layout, facts, options.dry_run, options.force, options.sync)
        return export(source, target, how)
    if options.like is not None:
        return _convert_into_model(source, target, options.like, options, progress)
    request = parse_request(parse_target_kind(target, options.to), options)
    return _convert_to_format(source, target, request, facts, progress)


def _convert_to_format(
    source: str, target: str, request: ConversionRequest, facts: AgentFacts, progress: Progress
) -> ConversionResult:
    options = request.options
    checkpoint = open_checkpoint(source)
    _require_convertible(checkpoint, target, request)
    target = target_stem(target, request.kind)
    if not options.dry_run:
        _require_new_target(target, request.kind, checkpoint, force=options.force)
    given = read_verified_sidecar(checkpoint)
    own, notes = _apply_facts(given, checkpoint, request, facts)
    shards = note_other_shards(checkpoint)
    notes = notes if shards is None else (shards, *notes)
    with WorkerThread() as aside:
        # The receipt, written last, tells the source's digest: it is taken of what is read on the way.
        heard = DigestRecorder(checkpoint, aside) if own.sha256 is None and not options.dry_run else None
        checkpoint = checkpoint if heard is None else heard.checkpoint
        made = _plan(checkpoint, request, own.sidecar, notes)
        done = ConversionResult(urls.display_url(checkpoint.path), target, made.report)
        if options.dry_run or not (made.report.complete or options.allow_missing):
            return replace(done, ledger=_ledger(checkpoint, made, given, request, facts))
        writer = _TargetWriter(checkpoint, made, target, request, own, heard, progress)
        written = writer.write()
    report = replace(made.report, notes=(*made.report.notes, *writer.notes(written)))
    return replace(
        done,
        report=report,
        digest=None if written is None else written.sha256,
        written=written is not None,
        parity=writer.proof.networks,
        load=() if written is None else _loading_code(target, request, made, checkpoint),
        ledger=_ledger(checkpoint, made, given, request, facts),
    )


def _require_convertible(checkpoint: Checkpoint, target: str, request: ConversionRequest) -> None:
    """Raise for a checkpoint without a network, and for a shard that is missing."""
    if request.options.part is not None:
        return
    if request.plain and request.kind.format not in _ARRAYS:
        to = request.options.to
        words = f" {shlex.quote(target)}" + (f" --to {to}" if to is not None else "")
        refused = restore.no_network_error(checkpoint, rest=words)
        if refused is not None:
            raise refused
    restore.require_shards(checkpoint.tree)


def _require_new_target(target: str, kind: TargetKind, checkpoint: Checkpoint, *, force: bool) -> None:
    save.require_writable_target(target, kind, checkpoint.files, force=force)
    require_new(sidecar.sidecar_path(target), checkpoint.files, force=force)


def _plan(
    checkpoint: Checkpoint, request: ConversionRequest, known: Sidecar | None, notes: tuple[str, ...]
) -> ConversionPlan:
    """Return the plan, whose report begins with the notes; raise for shards that are missing."""
    try:
        made = plan_conversion(checkpoint, request, known)
    except CkpttoolError:
        restore.require_shards(checkpoint.tree)
        raise
    restore.require_shards(made.source)
    return replace(made, report=replace(made.report, notes=(*notes, *made.report.notes)))


def _ledger(
    checkpoint: Checkpoint,
    made: ConversionPlan,
    own: VerifiedSidecar,
    request: ConversionRequest,
    facts: AgentFacts,
) -> LedgerEntries:
    """Return the ledger of what is converted: that of the agent that every command prints, or of a model.

    `own` is the source's sidecar, `facts` are those that were given.
    """
    assumed = sidecar.assumption_entries("architecture", made.report.assumed)
    if request.options.part is None:
        with contextlib.suppress(CkpttoolError):
            binding = recognize_playable_agent(checkpoint, request.options.layout)
            if binding is not None:
                agent = build_agent(checkpoint, binding, own, facts)
                return sidecar.merge_entries(agent.ledger, assumed)
    if made.binding is not None:
        tree = select_network_leaves(made.source, made.binding)
        known = restore.merge_metadata(own.sidecar, restore.read_metadata(made.binding, tree))
        entries = agent_ledger(checkpoint, made.binding, own.sidecar, known, tree)
        return sidecar.merge_entries(entries, assumed)
    written = {made.names[move.source] for move in made.moves if move.source in made.names}
    return sidecar.merge_entries(evidence.unconverted_entries(checkpoint, written, made.kept), assumed)


def _apply_facts(
    own: VerifiedSidecar, checkpoint: Checkpoint, request: ConversionRequest, facts: AgentFacts
) -> tuple[VerifiedSidecar, tuple[str, ...]]:
    """Return what the source's sidecar holds with the facts that were given, and notes on these."""
    if not facts:
        return own, ()
    binding = None
    if request.options.part is None:
        with contextlib.suppress(UnsupportedError, UsageError):
            binding = recognize_playable_agent(checkpoint, request.options.layout)
    notes: tuple[str, ...] = (f"given: {facts.described()}",)
    if binding is not None:
        tree = select_network_leaves(checkpoint.tree, binding)
        facts = facts.sized(*policy_sizes(binding, tree))
        known = restore.merge_metadata(own.sidecar, restore.read_metadata(binding, tree))
        notes = (*notes, *facts.contradictions(known))
    return replace(own, sidecar=facts.over(own.sidecar)), notes


def _loading_code(
    target: str, request: ConversionRequest, made: ConversionPlan, checkpoint: Checkpoint
) -> tuple[str, ...]:
    """Return the lines that load the target; its names are the source's unless a layout gave them."""
    source = cast(Format, plugins.find("formats", checkpoint.format).load()).FRAMEWORK
    foreign = made.binding is None and source == "tensorflow"
    return format_loading_code(target, request.kind, made.tree, foreign=foreign)


@dataclass(slots=True)
class _TargetWriter:
    """Writes the target with all that lies beside it.

    Afterwards `back` says whether the source could be restored from it, and `proof` how the networks that
    were written compare with the source's.
    """

    checkpoint: Checkpoint
    plan: ConversionPlan
    target: str
    request: ConversionRequest
    own: VerifiedSidecar
    heard: DigestRecorder | None
    progress: Progress
    back: ReverseRecord = field(init=False)
    proof: OutputVerification = field(default_factory=OutputVerification)

    def __post_init__(self) -> None:
        """Begin with nothing recorded."""
        self.back = ReverseRecord(why=self.request.no_way_back)

    def write(self) -> Digest | None:
        """Return the target's digest, None if a network of it computes something else."""
        options, statistics = self.request.options, self._statistics()

        def beside(places: Mapping[Path, Path], lane: WorkerThread) -> list[Output]:
            return [*self._kept(places, lane), *statistics]

        try:
            return save.write_checkpoint(
                self.plan.tree,
                self.target,
                self.request.kind,
                how=WriteOptions(self.checkpoint.files, options.force, options.sync, self.progress),
                receipt=self._receipt,
                others=beside,
            )
        except OutputMismatchError as error:
            self.proof = error.proof
            return None

    def notes(self, written: Digest | None) -> tuple[str, ...]:
        """Return what the report says of the target that was written, or was not."""
        lost = () if self.back.note is None or written is None else (self.back.note,)
        return (*self.proof.notes, *self._digest_notes(written), *lost)

    def _digest_notes(self, written: Digest | None) -> tuple[str, ...]:
        """Return whether what was undone has the digest that its source had."""
        if self.plan.before is None or written is None:
            return ()
        if self.plan.before == written.sha256:
            return ("the digest is that of the source again",)
        return (
            "the digest is another than the source had: its format kept something that this one does not",
        )

    def _kept(self, places: Mapping[Path, Path], lane: WorkerThread) -> list[Output]:
        """Return the file of what the target has no place for, if any."""
        if self.plan.whole:
            self.back = record_reverse(self.plan.source, self.plan.moves, places)
        if self.back.tree is None:
            self.back.kept = self.plan.kept_tensors()
        outputs = self.back.outputs(self.target, lane)
        for output in outputs:
            require_new(output.file, self.checkpoint.files, force=self.request.options.force)
        return outputs

    def _receipt(self, written: Digest, found: Checkpoint) -> Sidecar:
        """Return the target's sidecar; raise OutputMismatchError if a network of it differs."""
        options, binding, own = self.request.options, self.plan.binding, self.own
        if self.heard is not None:
            own = replace(own, sha256=self.heard.digest().sha256)
        if binding is None:
            own = plan.with_policy_facts(self.checkpoint, found, own, part=options.part)
            self.proof = OutputVerification(notes=plan.unplayable_note(own))
        made = plan.receipt(
            self.checkpoint, self.plan, own, written, self.back, options.part, self.request.receipt()
        )
        if options.fold_normalizer:
            said = {**made.provenance, "obs_norm": "given: folded into the first layers"}
            made = replace(made, obs_norm=None, provenance=said)
        if not options.verify or binding is None:
            return made
        before = prepared_source_agent(self.checkpoint, self.plan.source, binding, own)
        self.proof = verify_outputs(before, found, self.target, made)
        return replace(made, parity=self.proof.entry())

    def _statistics(self) -> list[Output]:
        """Return the file of statistics that the target's library reads beside its own, if any."""
        layout, binding = plugins.find("layouts", self.request.kind.layout).load(), self.plan.binding
        options = self.request.options
        if binding is None or options.fold_normalizer or not hasattr(layout, "statistics_beside"):
            return []
        read = restore.read_metadata(binding, select_network_leaves(self.plan.source, binding))
        facts = restore.merge_metadata(self.own.sidecar, read)
        if facts.obs_norm is None:
            return []
        name, data = layout.statistics_beside(facts.obs_norm, facts.action_low, facts.action_high)
        file = os.path.join(os.path.dirname(self.target), name)
        require_new(file, self.checkpoint.files, force=options.force)

        def put(stream: IO[bytes]) -> None:
            stream.write(data)

        return [Output(file, put)]


# `convert --like`: fill the user's own model from a checkpoint, write what it loads, and have it loaded.


def parse_match_options(said: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return what `--match SOURCE=TARGET` says; raise UsageError for what says no pair."""
    found = []
    for text in said:
        source, sign, target = text.partition("=")
        if not (source and sign and target):
            raise UsageError("--match takes SOURCE=TARGET, two names of layers or modules", found=text)
        found.append((source, target))
    return tuple(found)


def _convert_into_model(
    source: str, target: str, like: ModelSpec | str, options: ConversionOptions, progress: Progress
) -> ConversionResult:
    """Write the checkpoint that the user's model loads, filled from the one at `source`.

    A text is the factory's name alone. Nothing is written when a weight of the model is left open (unless
    `allow_missing`) or on a dry run.
    """
    matching = _match_options(options)
    model = ModelSpec(like) if isinstance(like, str) else like
    kind = parse_target_kind(target, options.to)
    form, stem = choose_model_form(kind), target_stem(target, kind)
    checkpoint = open_checkpoint(source)
    if not options.dry_run:
        _require_new_target(stem, kind, checkpoint, force=options.force)
    own = read_verified_sidecar(checkpoint)
    # Rules for every tensor say all of their axes.
    every = matching.rules is not None and matching.rules.rest != "kinds"
    axes = options.from_ or ("torch" if every else None)
    given = load_into.model_source(
        checkpoint, options.part, options.preparation, own.sidecar, axes, model.shapes
    )
    with TargetModel(model, form) as beside:
        made, filling = _plan_for_model(checkpoint, given, beside.skeleton(given.guessed()), matching)
        left = evidence.unconverted_entries(checkpoint, load_into.source_names(given.ready, filling))
        done = ConversionResult(
            urls.display_url(checkpoint.path),
            target,
            made.report,
            matched=filling.matched,
            ambiguous=filling.ambiguous,
            loaded=False,
            ledger=merge_entries((*_optimizer_entries(given.ready), *left)),
        )
        if options.dry_run or not (made.report.complete or options.allow_missing):
            return done
        back = ReverseRecord(why="the target is a model of your own")
        said = f"{model.factory} loads what was written, strictly, and holds the same values then"
        notes = (*made.report.notes, *((said,) if options.verify else ()), str(back.note))
        made = replace(made, report=replace(made.report, notes=notes))

        def receipt(written: Digest, found: Checkpoint) -> Sidecar:
            if options.verify:  # before anything has its name
                beside.prove(found)
            known = plan.with_policy_facts(checkpoint, found, own, part=options.part, model=True)
            more = {"cast": True} if options.cast else {}
            return plan.receipt(checkpoint, made, known, written, back, options.part, more)

        how = WriteOptions(checkpoint.files, options.force, options.sync, progress)
        put = save.write_checkpoint(made.tree, stem, kind, how=how, receipt=receipt)
        return replace(
            done,
            report=made.report,
            digest=put.sha256,
            written=True,
            loaded=options.verify,
            load=format_loading_code(stem, kind, made.tree),
        )


def _match_options(options: ConversionOptions) -> MatchOptions:
    return MatchOptions(
        options.layers,
        parse_match_options(options.match),
        user_rules.load_rules(options.rules) if options.rules is not None else None,
        accept_order=options.accept_order,
        cast=options.cast,
    )


def _plan_for_model(
    checkpoint: Checkpoint, given: load_into.ModelSource, skeleton: Skeleton, matching: MatchOptions
) -> tuple[ConversionPlan, FillResult]:
    """Return how the source fills a model, as the plan of a conversion and with what was matched."""
    try:
        filling = fill(given.fills, skeleton, matching)
    except CkpttoolError as error:
        raise error.located(file=error.file or checkpoint.path) from error.__cause__
    ready, report = given.ready, load_into.build_fill_report(given.ready, skeleton, filling)
    made = ConversionPlan(
        ready.tree,
        filling.tree,
        report,
        names=ready.names,
        stripped=ready.stripped,
        moves=filling.moves,
    )
    return made, filling


def _optimizer_entries(ready: PreparedTree) -> Iterator[LedgerEntry]:
    """Return an entry for the state of optimizers, which a file that fills a model does not have."""
    tree = ready.tree
    slots = [path for path, leaf in tree.tensors() if leaf.role == "slot"]
    if not slots:
        return
    weights = [path for path, leaf in tree.tensors() if leaf.role in ("parameter", "buffer")]
    heads = {display(path[:1]) for path in weights if len(path) > 1}
    alone = len(heads) == 1 and all(len(path) > 1 for path in weights)
    apart = alone and not any(display(path[:1]) in heads for path in slots)
    head = ready.names[weights[0]].partition("/")[0] if apart else ""
    hint = f"--part {head} converts the network alone" if apart else "--allow-missing leaves it out"
    what = f"state of {len(slots):,} {'tensor' if len(slots) == 1 else 'tensors'}: {hint}"
    yield LedgerEntry("not used", "optimizer", what, ready.names[slots[0]], decides=True, hint=hint)
