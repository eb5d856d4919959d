"""Convert a checkpoint to another framework."""

from __future__ import annotations

import contextlib
import keyword
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from ckpttool.commands import evidence, load_into, options, plan, restore, save
from ckpttool.commands.digest import Digest, DigestRecorder
from ckpttool.commands.evidence import NO_FACTS, AgentFacts, add_environment
from ckpttool.commands.load_into import TargetModel, choose_model_form
from ckpttool.commands.network_outputs import (
    OutputMismatchError,
    OutputVerification,
    prepared_source_agent,
    verify_outputs,
)
from ckpttool.commands.options import (
    TARGETS,
    ConversionRequest,
    PreparationOptions,
    PreparedTree,
    TargetKind,
    parse_layer_options,
    parse_optimizer_options,
)
from ckpttool.commands.plan import ConversionPlan, plan_conversion
from ckpttool.commands.restore import (
    VerifiedSidecar,
    agent_ledger,
    build_agent,
    policy_sizes,
    read_verified_sidecar,
    recognize_playable_agent,
    select_network_leaves,
)
from ckpttool.commands.save import ReverseRecord, record_reverse
from ckpttool.core import plugins, sidecar, urls
from ckpttool.core.atomic_write import Output, Progress, WorkerThread, ignore_progress, require_new
from ckpttool.core.checkpoint import Checkpoint, keep_network_reads
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, Sidecar, merge_entries
from ckpttool.core.tree import Leaf, Path, Tree, display, key
from ckpttool.formats.common import Format
from ckpttool.formats.detect import note_other_shards, open_checkpoint
from ckpttool.formats.tf_object_graph import MARK
from ckpttool.mapping import user_rules
from ckpttool.mapping.layers import LayerOption
from ckpttool.mapping.rules import MappingReport
from ckpttool.mapping.solver import Ambiguity, LayerMatch
from ckpttool.mapping.user_rules import RuleFile
from ckpttool.networks.worker import ModelSpec

if TYPE_CHECKING:
    from ckpttool.commands.export_onnx import ExportResult
    from ckpttool.commands.network_outputs import Parity


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


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What a conversion did; `digest` is the target's (None for a dry run or a refusal).

    `written` says whether the target is there now, `parity` how the networks that were written compared,
    `model` what became of the user's own model, `load` the Python lines that load the target.
    """

    source: str
    target: str
    report: MappingReport
    digest: str | None
    written: bool
    parity: tuple[Parity, ...] = ()
    model: ModelFillResult | None = None
    load: tuple[str, ...] = ()
    ledger: LedgerEntries = ()

    @property
    def within(self) -> bool:
        """Say whether what was compared is within its bound."""
        return all(network.within for network in self.parity)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "source": self.source,
            "target": self.target,
            "mapped": [each.document() for each in self.report.mapped],
            "unused": list(self.report.unused),
            "missing": list(self.report.missing),
            "assumed": list(self.report.assumed),
            "ledger": sidecar.entries_to_json(self.ledger),
            "notes": list(self.report.notes),
            "parity": [network.document() for network in self.parity],
            "digest": self.digest,
            "written": self.written,
            "load": list(self.load),
            **({} if self.model is None else self.model.document()),
        }


def convert(
    source: str,
    target: str,
    *,
    to: str | None = None,
    layout: str | None = None,
    part: str | None = None,
    strip: bool = False,
    restore: bool = False,
    fold_weight_norm: bool = False,
    fold_normalizer: bool = False,
    weights: str | None = None,
    rules: str | None = None,
    l2: Sequence[str] = (),
    optimizer: Sequence[str] = (),
    kinds: Sequence[str] = (),
    flatten: Sequence[str] = (),
    unflatten: Sequence[str] = (),
    network: str | None = None,
    env: str | None = None,
    facts: AgentFacts = NO_FACTS,
    like: ModelSpec | str | None = None,
    match: Sequence[str] = (),
    accept_order: bool = False,
    from_: str | None = None,
    cast: bool = False,
    allow_missing: bool = False,
    dry_run: bool = False,
    force: bool = False,
    sync: bool = True,
    verify: bool = True,
    progress: Progress = ignore_progress,
) -> ConversionResult:
    """Convert the checkpoint at `source` into a new one at `target`, with its sidecar beside it.

    `part` names a path: only what lies below it is converted. `weights` is "ema" for the averaged weights
    alone, "raw" for the trained ones without them. First, `strip` takes out of names what wrappers
    put into them, `restore` puts it back as the source's sidecar says, `fold_weight_norm` makes one weight of
    a direction and a length. `fold_normalizer` makes statistics of observations part of an agent's first
    layers, for libraries that keep none. `l2` and `optimizer` say what no file does of optimizers
    (commands/options.py; "none" leaves out their state), `kinds`, `flatten` and `unflatten` what none
    does of layers (commands/options.py). `rules` is a TOML file of the user's own rules. Nothing
    is written when something is unmapped (unless `allow_missing`) or on `dry_run`. The target is written
    beside, read back, compared and then renamed; the same conversion gives the same bytes. To onnx goes one
    network, the policy unless `network` names
    another. `facts` and `env`, the environment, are what no file holds of an agent: they go into the
    sidecar. `like` names the user's own model, which is the target then, and `match` pairs layers or
    modules of the two (commands/convert.py); with `accept_order`, order pairs what nothing else tells apart,
    and `cast` rounds numbers to the model's type.
    `from_` ("torch" or "tf") states whose orientation the arrays have where the file has no evidence. With
    `verify` an agent's networks are compared with what was read back, and nothing is written if one computes
    something else.
    """
    given_facts = add_environment(facts, env)
    if options.infer_target_word(target, to) in options.EXPORTS:
        # Playing and comparing networks takes modules that no other conversion needs.
        from ckpttool.commands.export_onnx import export_network

        _reject_options("is not for onnx", weights=weights)
        _reject_options("is not for onnx", part=part, strip=strip, restore=restore, map=rules, like=like)
        _reject_options("is not for onnx", fold_weight_norm=fold_weight_norm, fold_normalizer=fold_normalizer)
        _reject_options("is not for onnx", l2=l2, optimizer=optimizer)
        _reject_options(
            "is not for onnx", kind=kinds, flatten=flatten, match=match, accept_order=accept_order
        )
        _reject_options("is not for onnx", unflatten=unflatten, no_verify=not verify)
        title = network or "actor"
        made = export_network(
            source,
            target,
            title,
            env,
            layout=layout,
            facts=given_facts,
            dry_run=dry_run,
            force=force,
            sync=sync,
        )
        return _from_export_result(made, target)
    _reject_options("is for --to onnx alone", network=network)
    if like is not None:
        _reject_options("is not for --like", weights=weights)
        _reject_options("is not for --like", layout=layout, restore=restore)
        _reject_options("is not for --like", **{name: [1] for name in given_facts.known})
        _reject_options("is not for --like", l2=l2, optimizer=optimizer, fold_normalizer=fold_normalizer)
        wanted, said = (
            PreparationOptions(strip, False, fold_weight_norm),
            parse_layer_options(kinds, flatten, unflatten),
        )
        model = ModelFillOptions(
            part,
            wanted,
            said,
            parse_match_options(match),
            allow_missing=allow_missing,
            accept_order=accept_order,
            source=from_,
            cast=cast,
            rules=user_rules.load_rules(rules) if rules is not None else None,
            dry_run=dry_run,
            force=force,
            sync=sync,
            prove=verify,
        )
        return _from_fill_result(convert_for_model(source, target, to, like, model, progress), target)
    _reject_options("is for --like alone", match=match, accept_order=accept_order, cast=cast)
    rule_set = user_rules.load_rules(rules) if rules is not None else None
    no_optimizers, stated = parse_optimizer_options(l2, optimizer)
    request = ConversionRequest(
        options.parse_target_kind(target, to),
        layout,
        part,
        PreparationOptions(strip, restore, fold_weight_norm),
        rule_set,
        stated,
        parse_layer_options(kinds, flatten, unflatten),
        weights,
        fold_normalizer,
        from_,
        no_optimizers,
    )
    how = _TargetOptions(allow_missing, dry_run, force, sync, verify, progress, target, to, given_facts)
    return _convert_to_format(source, options.target_stem(target, request.kind), request, how)


class _TargetOptions(NamedTuple):
    """How a target is written."""

    allow_missing: bool
    dry_run: bool
    force: bool
    sync: bool
    verify: bool
    progress: Progress
    target: str
    to: str | None
    facts: AgentFacts = NO_FACTS

    @property
    def words(self) -> str:
        """The target as it stands on the command line."""
        return f" {shlex.quote(self.target)}" + (f" --to {self.to}" if self.to is not None else "")


def _convert_to_format(
    source: str, target: str, request: ConversionRequest, how: _TargetOptions
) -> ConversionResult:
    checkpoint = open_checkpoint(source)
    if request.plain and request.part is None and request.kind.format not in _ARRAYS:
        refused = restore.no_network_error(checkpoint, rest=how.words)
        if refused is not None:
            raise refused
    if request.part is None:
        restore.require_shards(checkpoint.tree)
    if not how.dry_run:
        save.require_writable_target(target, request.kind, checkpoint.files, force=how.force)
        require_new(sidecar.sidecar_path(target), checkpoint.files, force=how.force)
    checkpoint = keep_network_reads(checkpoint)
    given = read_verified_sidecar(checkpoint)
    own, said = _apply_facts(given, checkpoint, request, how.facts)
    shards = note_other_shards(checkpoint)
    said = said if shards is None else (shards, *said)
    with WorkerThread() as aside:
        # The receipt, written last, tells the source's digest: it is taken of what is read on the way.
        heard = DigestRecorder(checkpoint, aside) if own.sha256 is None and not how.dry_run else None
        checkpoint = checkpoint if heard is None else heard.checkpoint
        try:
            way = plan_conversion(checkpoint, request, own.sidecar)
        except CkpttoolError:
            restore.require_shards(checkpoint.tree)
            raise
        restore.require_shards(way.source)
        way = replace(way, report=replace(way.report, notes=(*said, *way.report.notes)))
        if how.dry_run or not (way.report.complete or how.allow_missing):
            entries = _ledger(checkpoint, way, given, request, how.facts)
            return ConversionResult(
                urls.display_url(checkpoint.path), target, way.report, None, written=False, ledger=entries
            )

        def digested() -> VerifiedSidecar:
            return own if heard is None else replace(own, sha256=heard.digest().sha256)

        written, proof, back = _write_target(checkpoint, way, target, request, digested, how, own.sidecar)
    sha256 = None if written is None else written.sha256
    lost = () if back.note is None or sha256 is None else (back.note,)
    notes = (*way.report.notes, *proof.notes, *_digest_notes(way, sha256), *lost)
    report = replace(way.report, notes=notes)
    return ConversionResult(
        urls.display_url(checkpoint.path),
        target,
        report,
        sha256,
        written=written is not None,
        parity=proof.networks,
        load=() if written is None else _loading_code(target, request, way, checkpoint),
        ledger=_ledger(checkpoint, way, given, request, how.facts),
    )


def _ledger(
    checkpoint: Checkpoint,
    way: ConversionPlan,
    own: VerifiedSidecar,
    request: ConversionRequest,
    facts: AgentFacts,
) -> LedgerEntries:
    """Return the ledger of what is converted: that of the agent that every command prints, or of a model.

    `own` is the source's sidecar, `facts` are those that were given.
    """
    assumed = sidecar.assumption_entries("architecture", way.report.assumed)
    if request.part is None:
        with contextlib.suppress(CkpttoolError):
            binding = recognize_playable_agent(checkpoint, request.layout)
            if binding is not None:
                agent = build_agent(checkpoint, binding, own, facts)
                return sidecar.merge_entries(agent.ledger, assumed)
    if way.binding is not None:
        tree = select_network_leaves(way.source, way.binding)
        known = restore.merge_metadata(own.sidecar, restore.read_metadata(way.binding, tree))
        return sidecar.merge_entries(agent_ledger(checkpoint, way.binding, own.sidecar, known, tree), assumed)
    written = {way.names[move.source] for move in way.moves if move.source in way.names}
    return sidecar.merge_entries(evidence.unconverted_entries(checkpoint, written, way.kept), assumed)


def _apply_facts(
    own: VerifiedSidecar, checkpoint: Checkpoint, request: ConversionRequest, facts: AgentFacts
) -> tuple[VerifiedSidecar, tuple[str, ...]]:
    """Return what the source's sidecar holds with the facts that were given, and notes on these."""
    if not facts:
        return own, ()
    binding = None
    if request.part is None:
        with contextlib.suppress(UnsupportedError, UsageError):
            binding = recognize_playable_agent(checkpoint, request.layout)
    notes: tuple[str, ...] = (f"given: {facts.described()}",)
    if binding is not None:
        tree = select_network_leaves(checkpoint.tree, binding)
        facts = facts.sized(*policy_sizes(binding, tree))
        known = restore.merge_metadata(own.sidecar, restore.read_metadata(binding, tree))
        notes = (*notes, *facts.contradictions(known))
    return replace(own, sidecar=facts.over(own.sidecar)), notes


def _loading_code(
    target: str, request: ConversionRequest, way: ConversionPlan, checkpoint: Checkpoint
) -> tuple[str, ...]:
    """Return the lines that load the target; its names are the source's unless a layout gave them."""
    source = cast(Format, plugins.find("formats", checkpoint.format).load()).FRAMEWORK
    foreign = way.binding is None and source == "tensorflow"
    return format_loading_code(target, request.kind, way.tree, foreign=foreign)


def _digest_notes(way: ConversionPlan, sha256: str | None) -> tuple[str, ...]:
    """Return whether what was undone has the digest that its source had."""
    if way.before is None or sha256 is None:
        return ()
    if way.before == sha256:
        return ("the digest is that of the source again",)
    return ("the digest is another than the source had: its format kept something that this one does not",)


def _write_target(
    checkpoint: Checkpoint,
    way: ConversionPlan,
    target: str,
    request: ConversionRequest,
    digested: Callable[[], VerifiedSidecar],
    how: _TargetOptions,
    known: Sidecar | None,
) -> tuple[Digest | None, OutputVerification, ReverseRecord]:
    """Write the target with all that lies beside it; no digest if a network of it computes something else."""
    back, proof = ReverseRecord(why=request.no_way_back), OutputVerification()
    statistics = _statistics_output(checkpoint, way, target, request, known, how)

    def beside(places: Mapping[Path, Path], lane: WorkerThread) -> list[Output]:
        nonlocal back
        back = record_reverse(way.source, way.moves, places) if way.whole else back
        if back.tree is None:
            back.kept = way.kept_tensors()
        kept = back.outputs(target, lane)
        for output in kept:
            require_new(output.file, checkpoint.files, force=how.force)
        return [*kept, *statistics]

    def told(written: Digest, found: Checkpoint) -> Sidecar:
        nonlocal proof
        own = digested()
        if way.binding is None:
            own = plan.with_policy_facts(checkpoint, found, own, part=request.part)
            proof = OutputVerification(notes=plan.unplayable_note(own))
        made = plan.receipt(checkpoint, way, own, written, back, request.part, request.options)
        if request.fold_normalizer:
            said = {**made.provenance, "obs_norm": "given: folded into the first layers"}
            made = replace(made, obs_norm=None, provenance=said)
        if not how.verify or way.binding is None:
            return made
        proof = verify_outputs(
            prepared_source_agent(checkpoint, way.source, way.binding, own), found, target, made
        )
        return replace(made, parity=proof.entry())

    try:
        written = save.write_checkpoint(
            way.tree,
            target,
            request.kind,
            receipt=told,
            others=beside,
            sources=checkpoint.files,
            force=how.force,
            sync=how.sync,
            progress=how.progress,
        )
    except OutputMismatchError as error:
        return None, error.proof, back
    return written, proof, back


def _statistics_output(
    checkpoint: Checkpoint,
    way: ConversionPlan,
    target: str,
    request: ConversionRequest,
    known: Sidecar | None,
    how: _TargetOptions,
) -> list[Output]:
    """Return the file of statistics that the target's library reads beside its own, if the agent has any."""
    layout = plugins.find("layouts", request.kind.layout).load()
    if way.binding is None or request.fold_normalizer or not hasattr(layout, "statistics_beside"):
        return []
    facts = restore.merge_metadata(
        known, restore.read_metadata(way.binding, select_network_leaves(way.source, way.binding))
    )
    if facts.obs_norm is None:
        return []
    name, data = layout.statistics_beside(facts.obs_norm, facts.action_low, facts.action_high)
    file = os.path.join(os.path.dirname(target), name)
    require_new(file, checkpoint.files, force=how.force)

    def put(stream: IO[bytes]) -> None:
        stream.write(data)

    return [Output(file, put)]


def _reject_options(why: str, **options: object) -> None:
    """Raise UsageError for an option that was given and that means nothing for such a target."""
    for name, value in options.items():
        if value:
            raise UsageError(f"--{name.replace('_', '-')} {why}", hint="leave it out")


def _from_fill_result(made: ModelFillResult, target: str) -> ConversionResult:
    """Return what became of the user's own model as the record of a conversion."""
    written = made.sha256 is not None
    return ConversionResult(
        made.path,
        target,
        made.report,
        made.sha256,
        written=written,
        model=made,
        load=made.load,
        ledger=made.ledger,
    )


def _from_export_result(made: ExportResult, target: str) -> ConversionResult:
    """Return an export as the record of a conversion."""
    networks = () if made.parity is None else (made.parity,)
    return ConversionResult(
        made.source,
        target,
        made.report,
        made.sha256,
        written=made.sha256 is not None,
        parity=networks,
        ledger=made.ledger,
    )


# `convert --like`: fill the user's own model from a checkpoint, write what it loads, and have it loaded.


@dataclass(frozen=True, slots=True)
class ModelFillResult:
    """What became of the model: `matched` layer by layer, what is ambiguous, whether it loaded the target.

    `sha256` is the target's digest; without it nothing was written. The `ledger` has an optimizer whose state
    the model's file has no place for.
    """

    path: str
    report: MappingReport
    sha256: str | None = None
    matched: tuple[LayerMatch, ...] = ()
    ambiguous: tuple[Ambiguity, ...] = ()
    loaded: bool = False
    load: tuple[str, ...] = ()
    ledger: LedgerEntries = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON document's keys."""
        return {
            "matched": [each.document() for each in self.matched],
            "ambiguous": [each.document() for each in self.ambiguous],
            "loaded": self.loaded,
        }


@dataclass(frozen=True, slots=True)
class ModelFillOptions:
    """What is done to the source first, what was said of its layers, and how the target is written."""

    part: str | None = None
    wanted: PreparationOptions = field(default_factory=PreparationOptions)
    choices: tuple[LayerOption, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    allow_missing: bool = False
    accept_order: bool = False
    source: str | None = None
    cast: bool = False
    rules: RuleFile | None = None
    dry_run: bool = False
    force: bool = False
    sync: bool = True
    prove: bool = True


def parse_match_options(said: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return what `--match SOURCE=TARGET` says; raise UsageError for what says no pair."""
    found = []
    for text in said:
        source, sign, target = text.partition("=")
        if not (source and sign and target):
            raise UsageError("--match takes SOURCE=TARGET, two names of layers or modules", found=text)
        found.append((source, target))
    return tuple(found)


def convert_for_model(
    source: str,
    target: str,
    to: str | None,
    wanted: ModelSpec | str,
    how: ModelFillOptions,
    progress: Progress = ignore_progress,
) -> ModelFillResult:
    """Write the checkpoint that the wanted model loads, filled from the one at `source`.

    A text is the factory's name alone. Nothing is written when a weight of the model is left open (unless
    `how.allow_missing`) or on a dry run.
    """
    model = ModelSpec(wanted) if isinstance(wanted, str) else wanted
    kind = options.parse_target_kind(target, to)
    form = choose_model_form(kind)
    target = options.target_stem(target, kind)
    checkpoint = open_checkpoint(source)
    if not how.dry_run:
        save.require_writable_target(target, kind, checkpoint.files, force=how.force)
        require_new(sidecar.sidecar_path(target), checkpoint.files, force=how.force)
    own = read_verified_sidecar(checkpoint)
    # Rules for every tensor say all of their axes.
    axes = how.source or ("torch" if how.rules is not None and how.rules.rest != "kinds" else None)
    given = load_into.model_source(checkpoint, how.part, how.wanted, own.sidecar, axes, model.shapes)
    ready = given.ready
    with TargetModel(model, form) as beside:
        skeleton = beside.skeleton(given.guessed())
        try:
            filling = given.fill(
                skeleton,
                how.choices,
                how.pairs,
                accept_order=how.accept_order,
                cast=how.cast,
                rules=how.rules,
            )
        except CkpttoolError as error:
            raise error.located(file=error.file or checkpoint.path) from error.__cause__
        report = load_into.build_fill_report(ready, skeleton, filling)
        done = ModelFillResult(
            urls.display_url(checkpoint.path), report, None, filling.matched, filling.ambiguous
        )
        left = evidence.unconverted_entries(checkpoint, load_into.source_names(ready, filling))
        done = replace(done, ledger=merge_entries((*_optimizer_entries(ready), *left)))
        if how.dry_run or not (report.complete or how.allow_missing):
            return done
        said = [f"{model.factory} loads what was written, strictly, and holds the same values then"]
        back = ReverseRecord(why="the target is a model of your own")
        report = replace(report, notes=(*report.notes, *(said if how.prove else ()), str(back.note)))
        names, moves = ready.names, filling.moves
        way = ConversionPlan(ready.tree, filling.tree, report, None, None, None, names, ready.stripped, moves)

        def told(written: Digest, found: Checkpoint) -> Sidecar:
            if how.prove:  # before anything has its name
                beside.prove(found)
            known = plan.with_policy_facts(checkpoint, found, own, part=how.part, model=True)
            return plan.receipt(
                checkpoint, way, known, written, back, how.part, {"cast": True} if how.cast else {}
            )

        put = save.write_checkpoint(
            way.tree,
            target,
            kind,
            receipt=told,
            sources=checkpoint.files,
            force=how.force,
            sync=how.sync,
            progress=progress,
        )
        load = format_loading_code(target, kind, way.tree)
        return replace(done, report=report, sha256=put.sha256, loaded=how.prove, load=load)


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
