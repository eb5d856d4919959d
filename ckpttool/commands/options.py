"""Options of conversions: parts, averages, names, targets, layers, optimizers."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from ckpttool.commands.evidence import NO_FACTS, AgentFacts, add_environment
from ckpttool.core import deferred, plugins
from ckpttool.core.activations import NO_IMAGE, AxisOrder
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import UsageError, abbreviate_list, suggest_choice
from ckpttool.core.optimizers import ADAMW, FAMILIES, FLAGS, find_family, list_torch_settings
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.text import compile_glob, format_count
from ckpttool.core.tree import Alias, Leaf, Path, PathStep, Tree, ValueLeaf, display, key
from ckpttool.formats.probe import Format
from ckpttool.libraries.optimizers_read import keras_class
from ckpttool.libraries.schema import (
    JOINT,
    OPTIMIZED,
    OPTIMIZERS,
    SLOTS,
    RecognizedAgent,
    canonical_setting_path,
    get_optimizer_key,
    is_trained_by,
)
from ckpttool.mapping import user_rules, wrappers
from ckpttool.mapping.layer_kinds import LayerFacts
from ckpttool.mapping.layers import KINDS, LayerOption
from ckpttool.mapping.rules import Move, Settings

if TYPE_CHECKING:
    from ckpttool.mapping.user_rules import RuleFile
    from ckpttool.networks.worker import ModelSpec


# Averaged weights (EMA, SWA) beside a network in a PyTorch checkpoint: detection and selection.

EMA, RAW = "ema", "raw"
# Words in the names under which programs store averaged weights (timm, YOLO, k-diffusion,
# torch.optim.swa_utils).
_WORDS = frozenset(("ema", "swa", "average", "averaged", "shadow"))


class _AveragedNetwork(NamedTuple):
    """A network entry: its first step, its tensors' shapes by plain name, and whether it is an average."""

    top: PathStep
    shapes: dict[str, tuple[int, ...]]
    averaged: bool


def choose_weights(tree: Tree, which: str) -> tuple[Tree, tuple[str, ...]]:
    """Return the tree with averaged weights replacing the trained ones, or without them, and notes.

    With "ema" the optimizer state is left out, because it belongs to the trained weights. Raise
    UsageError unless the checkpoint has exactly one average of one network.
    """
    if which not in (EMA, RAW):
        raise UsageError(f"unknown --weights '{which}'", hint=suggest_choice(which, (EMA, RAW)))
    raw, average = _find_averaged_pair(tree)
    if which == RAW:
        kept = {path: leaf for path, leaf in tree.items() if path[0] != average.top}
        return select_entries(tree, kept), (f"left out: {display((average.top,))} (averaged weights)",)
    owners = {path for path, leaf in tree.tensors() if leaf.slot is not None}
    states = {path[0] for path in owners if path[0] != raw.top}
    found: dict[Path, Leaf | ValueLeaf] = {
        path: leaf for path, leaf in tree.items() if path[0] not in (raw.top, *states)
    }
    gone = ", ".join(display((top,)) for top in (raw.top, *sorted(states, key=str)))
    return select_entries(tree, found), (
        f"left out: {gone}; {display((average.top,))} contains the averaged weights",
    )


def select_entries(tree: Tree, leaves: dict[Path, Leaf | ValueLeaf]) -> Tree:
    """Return the tree with only these entries."""
    owned = {
        # Other leaves keep their identity, by which the orders of a computation are found.
        path: replace(leaf, of=None)
        if isinstance(leaf, Leaf) and leaf.of is not None and leaf.of not in leaves
        else leaf
        for path, leaf in leaves.items()
    }
    aliases = {path: others for path, others in tree.aliases.items() if path in leaves}
    return Tree(owned, aliases, tree.containers)


def _find_averaged_pair(tree: Tree) -> tuple[_AveragedNetwork, _AveragedNetwork]:
    """Return the only network that has an average with the same tensors, and that average."""
    networks = _find_networks(tree)
    pairs = [
        (raw, average)
        for raw in networks
        for average in networks
        # AveragedModel adds its own counter.
        if not raw.averaged and average.averaged and raw.shapes.items() <= average.shapes.items()
    ]
    if len(pairs) == 1:
        return pairs[0]
    names = sorted({display((each.top,)) for each in networks})
    if not pairs:
        raise UsageError(
            "no averaged weights found beside a network",
            found=", ".join(names[:6]) or "no network",
            hint="leave out --weights, or choose one entry with --part PATH",
        )
    raise UsageError("several networks have averaged weights", hint="choose one entry with --part PATH")


def _find_networks(tree: Tree) -> list[_AveragedNetwork]:
    bare = wrappers.strip_prefixes(tree)
    plain = tree if bare is None else bare.tree
    tops: dict[PathStep, dict[str, tuple[int, ...]]] = {}
    for path, leaf in plain.tensors():
        if leaf.role in ("parameter", "buffer") and len(path) > 1:
            tops.setdefault(path[0], {})[display(path[1:])] = leaf.shape
    return [_AveragedNetwork(top, shapes, _is_average(top)) for top, shapes in tops.items()]


def _is_average(top: PathStep) -> bool:
    return bool(_WORDS & set(str(top.value).lower().replace("-", "_").replace(".", "_").split("_")))


# Layer options of the command line: `--kind PATTERN=KIND`, `--flatten` and `--unflatten PATTERN=H,W,C`.
#
# For a vector beside an image, parts are joined by `+`: `--flatten 'dense=7,7,64+5'`.

_SHAPE = deferred.compile(r"[1-9]\d{0,8}(?:,[1-9]\d{0,8})+", re.ASCII)
_PARTS = deferred.compile(r"[1-9]\d{0,8}(?:[,+][1-9]\d{0,8})*", re.ASCII)
_KIND = deferred.compile(r"(?P<name>\w+)(?::(?P<number>\d{1,9}))?", re.ASCII)
_NO = "no"


def parse_layer_options(
    kinds: Sequence[str], flatten: Sequence[str], unflatten: Sequence[str] = ()
) -> tuple[LayerOption, ...]:
    """Return the parsed layer options; raise UsageError for invalid ones."""
    shapes = (*_parse_shapes(flatten, "--flatten"), *_parse_shapes(unflatten, "--unflatten"))
    return (*_parse_kinds(kinds), *shapes)


def format_layer_options(given: Sequence[LayerOption]) -> tuple[list[str], list[str], list[str]]:
    """Return the values of --kind, --flatten and --unflatten that express these choices."""
    kinds, flatten, unflatten = [], [], []
    for choice_ in given:
        facts = choice_.facts
        if choice_.kind is not None:
            number = "" if facts.number is None else f":{facts.number}"
            kinds.append(f"{choice_.pattern}={choice_.kind}{number}")
        elif facts.flatten is not None:
            flatten.append(f"{choice_.pattern}={','.join(map(str, facts.flatten)) or _NO}")
        elif facts.takes is not None:
            flatten.append(f"{choice_.pattern}={_format_order(facts.takes)}")
        elif facts.makes is not None:
            unflatten.append(f"{choice_.pattern}={_format_order(facts.makes)}")
    return kinds, flatten, unflatten


def describe_layer_options(seen: Sequence[LayerOption]) -> Iterator[str]:
    """Yield the note on the options that a call of the source's model stands for."""
    words = ("--kind", "--flatten", "--unflatten")
    texts = [
        f"{word} {value!r}"
        for word, values in zip(words, format_layer_options(seen), strict=True)
        for value in values
    ]
    if texts:
        yield f"as a call of the source's model shows: {' '.join(texts)}"


def _format_order(order: AxisOrder) -> str:
    """Return the shape that `_order` parses as this order."""
    parts = (f"{places},{channels}" if places > 1 else str(channels) for places, channels in order.parts)
    return _NO if order == NO_IMAGE else "+".join(parts)


def _parse_kinds(lines: Sequence[str]) -> Iterator[LayerOption]:
    known = list(dict.fromkeys(kind.option for kind in KINDS if kind.refused is None))
    for text in lines:
        pattern, wanted = _split_option(text, "--kind", "PATTERN=KIND")
        match = _KIND.fullmatch(wanted)
        if match is None or match["name"] not in known:
            raise UsageError(f"unknown layer kind '{wanted}'", hint=suggest_choice(wanted, known))
        number = int(match["number"]) if match["number"] else None
        yield LayerOption(pattern, compile_glob(pattern), match["name"], LayerFacts(number))


def _parse_shapes(lines: Sequence[str], option: str) -> Iterator[LayerOption]:
    for text in lines:
        pattern, wanted = _split_option(text, option, "PATTERN=H,W,C")
        if option == "--unflatten":
            facts = LayerFacts(makes=NO_IMAGE if wanted == _NO else _parse_order(wanted, option))
        elif wanted == _NO or _SHAPE.fullmatch(wanted):
            shape = () if wanted == _NO else tuple(int(extent) for extent in wanted.split(","))
            facts = LayerFacts(flatten=shape)
        else:
            facts = LayerFacts(takes=_parse_order(wanted, option))
        yield LayerOption(pattern, compile_glob(pattern), None, facts)


def _parse_order(wanted: str, option: str) -> AxisOrder:
    """Return the parts of a shape like `7,7,64+5`, in the source's own order."""
    if not _PARTS.fullmatch(wanted):
        raise UsageError(
            f"invalid image shape '{wanted}'",
            hint=f"use {option} 'PATTERN=H,W,C', or 'PATTERN=no' if it is not an image",
        )
    shapes = [tuple(int(extent) for extent in part.split(",")) for part in wanted.split("+")]
    return AxisOrder(tuple((prod(shape[:-1]), shape[-1]) for shape in shapes), ())


def _split_option(text: str, option: str, form: str) -> tuple[str, str]:
    pattern, sign, wanted = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(f"invalid {option} '{text}'; use {form}")
    return pattern, wanted


# Optimizer settings of a sidecar, and where their epsilon is added.

# Adam's epsilon is added to the root of the bias-corrected second moment (torch/optim/adam.py), or to that of
# the moment as it is (keras/src/optimizers/adam.py, tensorflow/python/training/adam.py).
CORRECTED, UNCORRECTED = "corrected", "uncorrected"


def sidecar_settings(known: Sidecar | None) -> Settings:
    """Return a sidecar's optimizer settings, by optimizer and setting."""
    if known is None:
        return {}
    epsilon = {"epsilon": known.epsilon["adam"]} if known.epsilon and "adam" in known.epsilon else {}
    stated = known.optimizers or {}
    return {name: {**epsilon, **stated.get(name, {})} for name in (*OPTIMIZED, JOINT, *stated)}


def epsilon_placement(known: Sidecar | None, layout: str | None) -> str:
    """Return where the program that trained the agent adds Adam's epsilon.

    A conversion copies the number without changing its meaning: the receipt records where it is added
    (`source.epsilon`); without it, the receipt names the source's layout.
    """
    origin = known.source if known is not None and known.source is not None else {}
    if origin.get("epsilon") in (CORRECTED, UNCORRECTED):
        return cast(str, origin["epsilon"])
    try:
        framework = layout_framework(str(origin.get("layout") or layout))
    except UsageError:
        return UNCORRECTED  # a receipt may name a layout that is not installed here
    return CORRECTED if framework == "torch" else UNCORRECTED


def layout_framework(layout: str) -> str:
    """Return the framework of the programs that use the layout."""
    return cast(str, plugins.find("layouts", layout).load().TABLE.framework)


def format_framework(name: str) -> str:
    """Return the framework whose names and orientation a format's tensors use."""
    return cast(Format, plugins.find("formats", name).load()).FRAMEWORK


# Optimizer facts given by the user where no file has them: `convert --l2` and `--optimizer`.

_COUNT = "step"
NONE = "none"  # the value of --optimizer that leaves out every optimizer
_SETTINGS = sorted(list_torch_settings() | {_COUNT})
# Settings by PyTorch's names: "lr", "eps", "alpha".
_TORCH = {theirs: ours for family in FAMILIES for theirs, ours in family.torch_settings.items()}
_L2 = "--l2 'critic/**/kernel=0.01'"
_OPTIMIZER = "--optimizer critic_optimizer/momentum=0.9"


class OptimizerOptions(NamedTuple):
    """Optimizer options: `l2` are weight patterns with a penalty factor, `optimizer` single settings."""

    l2: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()

    def into(self, known: Sidecar | None, binding: RecognizedAgent | None, tree: Tree) -> Sidecar | None:
        """Return the sidecar extended by the options.

        Raise UsageError for options that are invalid, match no weight, or contradict the checkpoint.
        """
        known = _add_configured_penalties(known, binding, tree)
        if not any(self):
            return known
        base = known or Sidecar("")
        if binding is None:
            return self._general(base)
        found = {name: dict(settings) for name, settings in (base.optimizers or {}).items()}
        once: set[tuple[str, str]] = set()
        for text in self.optimizer:
            name, key_, value = _parse_setting(text, binding)
            if (name, key_) in once:
                raise UsageError(f"--optimizer {text}: {name}/{key_} is set twice")
            once.add((name, key_))
            found.setdefault(name, {})[key_] = value
        for text in self.l2:
            for name, key_, value in _penalties(text, binding, tree):
                # An explicit 0 for weights without a penalty, so that no default is assumed.
                own = found.setdefault(name, {})
                own.setdefault("weight_decay", 0.0)
                own[key_] = value
        recorded = {"l2": self.l2, "optimizer": self.optimizer}
        provenance = {name: f"given: {', '.join(texts)}" for name, texts in recorded.items() if texts}
        return replace(base, optimizers=found, provenance={**base.provenance, **provenance})

    def settings(self) -> tuple[tuple[str, str], ...]:
        """Return the optimizers and settings of `--optimizer NAME/SETTING=VALUE`, without their values."""
        places = (text.partition("=")[0].strip().rpartition("/") for text in self.optimizer)
        return tuple((name, key) for name, _, key in places)

    def _general(self, base: Sidecar) -> Sidecar:
        """Return the sidecar with the options for optimizers that no layout recognises."""
        if self.l2:
            raise UsageError("--l2 needs a checkpoint that a layout recognises", hint="leave it out")
        found = {name: dict(settings) for name, settings in (base.optimizers or {}).items()}
        for text, (name, key_) in zip(self.optimizer, self.settings(), strict=True):
            if not name or key_ not in _SETTINGS:
                raise UsageError(
                    f"--optimizer {text}: unknown setting '{key_}'",
                    hint=suggest_choice(_TORCH.get(key_, key_), _SETTINGS) if name else _OPTIMIZER,
                )
            found.setdefault(name, {})[key_] = _parse_setting_value(text, key_)
        if len(set(self.settings())) < len(self.optimizer):
            raise UsageError("--optimizer sets the same setting twice")
        provenance = {**base.provenance, "optimizer": f"given: {', '.join(self.optimizer)}"}
        return replace(base, optimizers=found, provenance=provenance)

    def notes(self, known: Sidecar | None) -> Iterator[str]:
        """Yield the report lines on penalties that were given, or that the file's layers have."""
        recorded = known is not None and "l2" in known.provenance
        for name, settings in (known.optimizers or {}).items() if known is not None and recorded else ():
            decays = [key for key, value in settings.items() if key.startswith("weight_decay/") and value]
            if decays:
                rates = sorted({settings[key] or 0.0 for key in decays})
                shown = ", ".join(str(rate) for rate in rates)
                weights = format_count(len(decays), "weight")
                yield f"{name}: weight decay {shown} for {weights}, twice the l2 factor"


NO_OPTIMIZER_OPTIONS = OptimizerOptions()


def parse_optimizer_options(l2: Sequence[str], optimizer: Sequence[str]) -> tuple[bool, OptimizerOptions]:
    """Return whether optimizers are left out (`--optimizer none`), and the settings stated otherwise."""
    if NONE not in optimizer:
        return False, OptimizerOptions(tuple(l2), tuple(optimizer))
    if len(optimizer) > 1 or l2:
        raise UsageError("--optimizer none leaves out every optimizer", hint="leave out --l2 and --optimizer")
    return True, NO_OPTIMIZER_OPTIONS


def read_optimizer_options(receipt: Sidecar) -> OptimizerOptions:
    """Return the options recorded in the receipt, as `Stated.into` stored them."""
    texts = (
        str(receipt.provenance.get(name, "")).removeprefix("given: ") for name in OptimizerOptions._fields
    )
    return OptimizerOptions(*(tuple(filter(None, text.split(", "))) for text in texts))


def _add_configured_penalties(
    known: Sidecar | None, binding: RecognizedAgent | None, tree: Tree
) -> Sidecar | None:
    """Return the sidecar with the penalties in the configurations of the file's layers."""
    found: dict[str, dict[str, float | bool | str | None]] = {}
    for move in binding.moves.moves if binding is not None else ():
        name = _find_owner(binding, move) if binding is not None else None
        held = tree.containers.get(move.source[:-1]) if name is not None else None
        state = held.state if held is not None and held.kind == "module" else None
        factor = state.get(f"{move.target[-1].value}_regularizer_l2") if isinstance(state, dict) else None
        if (
            name is not None
            and isinstance(factor, float)
            and binding is not None
            and _optimizer_moves(binding, name)
        ):
            own = found.setdefault(name, {"weight_decay": 0.0})
            own[f"weight_decay/{display(get_optimizer_key(name, move.target))}"] = 2 * factor
    if not found:
        return known
    base = known or Sidecar("")
    before = base.optimizers or {}
    fields = {name: {**found.get(name, {}), **before.get(name, {})} for name in (*found, *before)}
    recorded = {"l2": "read from the file's configurations", **base.provenance}
    return replace(base, optimizers=fields, provenance=recorded)


def _parse_setting(text: str, binding: RecognizedAgent) -> tuple[str, str, float | bool | None]:
    """Return the optimizer, the setting and the value of `NAME/SETTING=VALUE`."""
    name, _, key = text.partition("=")[0].strip().partition("/")
    present = [each for each in OPTIMIZERS if _optimizer_moves(binding, each)]
    if name not in present:
        raise UsageError(
            f"--optimizer {text}: the agent has no {name or 'such optimizer'}",
            hint=suggest_choice(name, present) if present else _OPTIMIZER,
        )
    _require_setting(text, name, key, binding)
    if any(move.target == canonical_setting_path(name, key) for move in binding.moves.moves):
        raise UsageError(f"--optimizer {text}: the checkpoint already contains its {key}")
    return name, key, _parse_setting_value(text, key)


def _parse_setting_value(text: str, key: str) -> float | bool | None:
    """Return the value of `NAME/SETTING=VALUE`; raise UsageError if the setting cannot have it."""
    text_value: str = text.partition("=")[2]
    try:
        value: object = json.loads(text_value)
    except json.JSONDecodeError:
        value = text_value
    if value is not None and not isinstance(value, bool | int | float):
        raise UsageError(
            f"--optimizer {text}: {text_value!r} is not a number, true, false or null", hint=_OPTIMIZER
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--optimizer {text}: {text_value} is not a finite number", hint=_OPTIMIZER)
    if value is not None and isinstance(value, bool) != (key in FLAGS):
        meant = "true, false or null" if key in FLAGS else "a number"
        raise UsageError(f"--optimizer {text}: {key} must be {meant}")
    return value


def _require_setting(text: str, name: str, key: str, binding: RecognizedAgent) -> None:
    """Raise UsageError for a setting that no optimizer has, or not the optimizer with these slots."""
    if key not in _SETTINGS:
        meant = suggest_choice(_TORCH.get(key, key), _SETTINGS)
        raise UsageError(f"--optimizer {text}: unknown optimizer setting {key!r}", hint=meant)
    slots = {str(move.target[1].value) for move in _optimizer_moves(binding, name)} & {*SLOTS}
    family = find_family(slots)
    if family is not None and key not in (known := {*family.torch_settings.values(), _COUNT}):
        raise UsageError(
            f"--optimizer {text}: {name} is {family.name}, which has no {key}",
            hint=suggest_choice(key, sorted(known)),
        )


def _penalties(text: str, binding: RecognizedAgent, tree: Tree) -> Iterator[tuple[str, str, float]]:
    """Yield the weights of `PATTERN=FACTOR`: the optimizer of each, its setting there, its decay."""
    pattern, _, number = text.rpartition("=")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if not pattern or not math.isfinite(factor) or factor < 0:
        raise UsageError(f"invalid --l2 {text}; use PATTERN=FACTOR", hint=_L2)
    if layout_framework(binding.layout) == "torch":
        raise UsageError(
            "--l2 applies only to Keras networks: PyTorch's optimizer stores its weight decay itself"
        )
    fits = compile_glob(pattern)
    weights = [move for move in binding.moves.moves if _find_owner(binding, move) is not None]
    found = [move for move in weights if fits(tree.names[move.source]) or fits(display(move.target))]
    if not found:
        names = [tree.names[move.source] for move in weights]
        raise UsageError(f"--l2 {text} matches no trained weight", found=abbreviate_list(names, 3), hint=_L2)
    for move in found:
        name = _find_owner(binding, move) or JOINT
        _require_plain(name, text, binding, tree)
        # keras/src/regularizers/regularizers.py: the loss has factor * sum(w^2), its gradient 2 * factor * w.
        yield name, f"weight_decay/{display(get_optimizer_key(name, move.target))}", 2 * factor


def _require_plain(name: str, text: str, binding: RecognizedAgent, tree: Tree) -> None:
    mine = _optimizer_moves(binding, name)
    if not mine:
        raise UsageError(f"--l2 {text}: the checkpoint has no {name} to store a weight decay")
    if keras_class(tree[move.source] for move in mine) == ADAMW:
        raise UsageError(f"--l2 {text}: {name} is AdamW, whose own decay PyTorch stores in the same place")


def _find_owner(binding: RecognizedAgent, weight: Move) -> str | None:
    """Return the optimizer that updates a weight: the joint one if the agent has it."""
    names = [name for name in OPTIMIZERS if is_trained_by(name, weight.target)]
    if JOINT in names and _optimizer_moves(binding, JOINT):
        return JOINT
    return names[0] if names else None


def _optimizer_moves(binding: RecognizedAgent, name: str) -> list[Move]:
    return [move for move in binding.moves.moves if move.target[0].value == name]


# A part of a checkpoint: the subtree under one path.


def select_part(tree: Tree, part: str) -> tuple[Tree, tuple[str, ...]]:
    """Return the subtree under the display path `part`, and the names of entries that cannot be included.

    Aliases from outside are left out; an optimizer's slot whose parameter is outside is meaningless
    alone and is named instead, unless it belongs to a whole torch optimizer. Raise UsageError when
    nothing is under the path.
    """
    part = part.strip("/")
    paths = {path: rest for path in tree if (rest := _path_below(path, part)) is not None}
    if not paths:
        raise _unknown_part_error(tree, part)
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    lost: list[str] = []
    for path, rest in paths.items():
        leaf = tree[path]
        if isinstance(leaf, Leaf) and leaf.of is not None:
            if leaf.of not in paths and not _is_numbered_slot(path, rest):
                lost.append(tree.names[path])
                continue
            leaf = replace(leaf, of=paths.get(leaf.of))
        leaves[rest] = leaf
    aliases = {
        rest: tuple(
            Alias(inside, alias.key)
            for alias in tree.aliases.get(path, ())
            if (inside := _path_below(alias.path, part)) is not None
        )
        for path, rest in paths.items()
    }
    containers = {
        rest: container
        for path, container in tree.containers.items()
        if (rest := () if display(path) == part else _path_below(path, part)) is not None
    }
    return Tree(leaves, {path: others for path, others in aliases.items() if others}, containers), tuple(lost)


def _unknown_part_error(tree: Tree, part: str) -> UsageError:
    """Return the error for a path with nothing under it, with similar paths."""
    names = list(tree.names.values())
    folders: dict[str, int] = {}
    for name in names:
        steps = name.split("/")
        for depth in range(1, len(steps)):
            folders.setdefault("/".join(steps[:depth]), depth)
    if part in names:
        above = part.rpartition("/")[0]
        hint = f"--part {above}" if above else "leave out --part"
        return UsageError("the path is a single entry with nothing under it", path=part, hint=hint)
    plain = part.replace(".", "/")
    close = [plain] if plain in folders else difflib.get_close_matches(part, folders, 1)
    top = [name for name, depth in folders.items() if depth == 1]
    hint = f"--part {close[0]}" if close else "run ckpttool inspect to list the checkpoint's paths"
    return UsageError(
        "the checkpoint has nothing under this path",
        path=part,
        found=abbreviate_list(top, 6) or None,
        hint=hint,
    )


def _path_below(path: Path, part: str) -> Path | None:
    """Return what follows `part` in the path, None if it is elsewhere; a dotted key may be split."""
    left = part
    for number, step in enumerate(path):
        shown = display((step,))
        if left == shown:
            return path[number + 1 :] or None
        if left.startswith(f"{shown}/"):
            left = left[len(shown) + 1 :]
            continue
        if step.kind == "key" and shown.startswith(f"{left}/"):
            return (_cut_key(step, len(left) + 1), *path[number + 1 :])
        return None
    return None


def _is_numbered_slot(path: Path, rest: Path) -> bool:
    """Return whether a slot belongs to a whole torch optimizer, with parameters by number or name."""
    return len(rest) > 2 and len(path) > 2 and rest[-3] == path[-3] == key("state")


def _cut_key(step: PathStep, at: int) -> PathStep:
    return key(str(step.value)[at:])


def full_names(tree: Tree, part: str | None) -> Mapping[Path, str]:
    """Return every leaf's name in the whole checkpoint, of which the tree is a part."""
    if part is None:
        return tree.names
    return {path: f"{part.strip('/')}/{name}" for path, name in tree.names.items()}


# Changes before the mapping: `convert` strips or restores wrapper prefixes and folds weight norm.


class PreparationOptions(NamedTuple):
    """Changes to names and weights before the mapping."""

    strip: bool = False
    restore: bool = False
    fold: bool = False


NO_PREPARATION = PreparationOptions()


class PreparedTree(NamedTuple):
    """A prepared tree.

    `names` are the leaves' names in the checkpoint, `rules` the changes made, `lost` the names of
    entries left out. `stripped` is the sidecar record that `--restore` needs; None if nothing was
    removed.
    """

    tree: Tree
    names: Mapping[Path, str]
    rules: Mapping[Path, str]
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stripped: tuple[Mapping[str, object], ...] | None = None


def prepare_tree(
    whole: Tree, tree: Tree, part: str | None, wanted: PreparationOptions, known: Sidecar | None
) -> PreparedTree:
    """Return the tree, a part of the whole one, prepared for mapping.

    Raise UsageError when names cannot be restored.
    """
    names = full_names(tree, part)
    done = PreparedTree(tree, names, {}, stripped=_recorded_wrappers(known) if part is None else None)
    if wanted.restore:
        done = _restore_wrappers(done, part, known)
    if wanted.strip:
        done = _strip_wrappers(done, lightning=part is not None and wrappers.is_lightning_state(whole, part))
    return _fold_weight_norm(done) if wanted.fold else done


def _recorded_wrappers(known: Sidecar | None) -> tuple[Mapping[str, object], ...] | None:
    # Prefixes removed once stay removed in a copy.
    return tuple(known.stripped) if known is not None and known.stripped else None


def _strip_wrappers(done: PreparedTree, *, lightning: bool) -> PreparedTree:
    found = wrappers.strip_prefixes(done.tree, lightning=lightning)
    if found is None:
        return done._replace(notes=(*done.notes, "no names have a wrapper prefix"))
    rules = {new: "strip" for new, old in found.moves.items() if new != old}
    removed = tuple(f"removed: {line}" for line in wrappers.describe_prefixes(found.decorations))
    averaged = any(wrapped.averaged is not None for each in found.decorations for wrapped in each.wrapped)
    own = ("n_averaged is AveragedModel's own counter; it is kept, but a plain module has no such entry",)
    return PreparedTree(
        found.tree,
        {new: done.names[old] for new, old in found.moves.items()},
        rules,
        done.lost,
        (*done.notes, *removed, *(own if averaged else ())),
        wrappers.prefix_documents(found.decorations),
    )


def _restore_wrappers(done: PreparedTree, part: str | None, known: Sidecar | None) -> PreparedTree:
    if part is not None:
        raise UsageError(
            "--restore needs the whole checkpoint, because its sidecar records the original names"
        )
    if known is None or not known.stripped:
        raise UsageError(
            "no sidecar beside the checkpoint records the prefixes removed from its names",
            hint="use the output of convert --strip, which has such a sidecar",
        )
    tree, moves = wrappers.restore_prefixes(done.tree, wrappers.parse_prefixes(known.stripped))
    rules = {new: "restore" for new, old in moves.items() if new != old}
    names = {new: done.names[old] for new, old in moves.items()}
    return PreparedTree(tree, names, rules, done.lost, done.notes)


def _fold_weight_norm(done: PreparedTree) -> PreparedTree:
    found = wrappers.merge_weight_norm(done.tree)
    lost = tuple(done.names[path] for path in found.lost)
    names = {path: done.names[path] for path in found.tree if path in done.names}
    for weight, (length, direction) in found.made.items():
        names[weight] = f"{done.names[direction]} and {done.names[length]}"
    rules = {**done.rules, **dict.fromkeys(found.made, "fold weight norm")}
    lines = [] if found.made else ["no weight norm pairs found"]
    if lost:
        lines.append(
            "optimizers that trained folded weights, or may have, are left out because they number "
            "parameters; use --optimizer none to convert without them"
        )
    if found.spectral:
        lines.append(
            f"spectral norm is not folded: {abbreviate_list([display(p) for p in found.spectral], 3)}"
        )
    return PreparedTree(found.tree, names, rules, (*done.lost, *lost), (*done.notes, *lines), done.stripped)


# Targets of `--to`: the writing format, the layout of an agent in it, and the name.


class TargetKind(NamedTuple):
    """A target of `--to`: the format that writes it, and the layout of an agent in it.

    `options` are passed to the format's `pieces` besides the tree. `prefix` means that the target is
    not a file but the common prefix of several, `state` that its folder has a state file, as
    TensorFlow's do. `agent` means that only an agent can be written so: the layout is the point. An
    `ending` belongs to a name that stands for several files (`NAME.h5f`), before what they append.
    `plan` is the layout's function; a library with several file forms has several.
    """

    format: str
    layout: str
    options: Mapping[str, Any] = MappingProxyType({})
    prefix: bool = False
    state: bool = False
    agent: bool = False
    ending: str = ""
    plan: str = "plan"


_BUNDLE = TargetKind("tensor_bundle", "td3_tf", MappingProxyType({"graph": True}), prefix=True, state=True)
# Libraries whose agents are files of torch.save.
_SAVED = ("cleanrl", "tianshou", "spinningup", "rsl_rl", "fasttd3", "skrl", "rl_games", "elegantrl")
TARGETS: dict[str, TargetKind] = {
    "torch": TargetKind("pytorch", "td3_torch"),
    "tf": _BUNDLE,
    "tf1": _BUNDLE._replace(options=MappingProxyType({"graph": False})),
    "fujimoto": TargetKind("pytorch_set", "fujimoto", prefix=True, agent=True),
    **{name: TargetKind("pytorch", name, agent=True) for name in _SAVED},
    "d3rlpy": TargetKind("d3rlpy", "d3rlpy", agent=True, plan="plan_d3"),
    "d3rlpy_model": TargetKind("pytorch", "d3rlpy", agent=True),
    "keras": TargetKind("keras_h5", "td3_tf", MappingProxyType({"root": "policy"})),
    "sb3": TargetKind("stable_baselines3", "stable_baselines3", agent=True),
    **{name: _BUNDLE._replace(layout=name, agent=True) for name in ("tf2rl", "tf_agents", "acme")},
    "keras_rl": TargetKind("keras_rl", "keras_rl", prefix=True, agent=True, ending=".h5f"),
    "rllib": TargetKind("rllib", "rllib", agent=True),
    "sb2": TargetKind("stable_baselines2", "stable_baselines2", agent=True),
    "safetensors": TargetKind("safetensors", "td3_torch"),
    "npz": TargetKind("npz", "td3_torch"),
}
# Exports for running, without a tree that could be read back (commands/export_onnx.py).
ONNX = "onnx"
EXPORTS = (ONNX,)
_SUFFIXES = {
    ".pt": "torch",
    ".pth": "torch",
    ".index": "tf",
    ".h5": "keras",
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".cleanrl_model": "cleanrl",
    ".d3": "d3rlpy",
    ".onnx": "onnx",
}
_INDEX = ".index"
# Other names of targets, accepted as they are.
_ALIASES = {
    "pytorch": "torch",
    "tensorflow": "tf",
    "tf2": "tf",
    "hf": "safetensors",
    "huggingface": "safetensors",
    "onnxruntime": "onnx",
}
# What users may mean by other words, in lower case without separators.
_MEANT = {
    **_ALIASES,
    "ckpt": "tf",
    "checkpoint": "tf",
    "tensorflow1": "tf1",
    "savedmodel": "tf",
    "pt": "torch",
    "pth": "torch",
    "h5": "keras",
    "hdf5": "keras",
    "weightsh5": "keras",
    "keras2": "keras",
    "keras3": "keras",
    "numpy": "npz",
    "np": "npz",
    "st": "safetensors",
    "stablebaselines": "sb2",
    "stablebaselines2": "sb2",
    "stablebaselines3": "sb3",
    "td3": "fujimoto",
}
_COMMON = "torch, tf, keras, safetensors, npz, onnx"
_ALL = "run ckpttool convert --help for all targets"


def _unknown_target_error(chosen: str, known: Collection[str]) -> UsageError:
    """Return the error for an unknown target, with the most similar one."""
    plain = re.sub(r"[^a-z0-9]", "", chosen.lower())
    names = {re.sub("_", "", name): name for name in known}
    close = difflib.get_close_matches(plain, [*names, *_MEANT], 1)
    meant = names.get(plain) or _MEANT.get(plain)
    if meant is None and close:
        meant = names.get(close[0]) or _MEANT.get(close[0])
    suggested = f"; did you mean {meant!r}?" if meant is not None else ""
    hint = f"--to {meant}" if meant is not None else f"use --to with {_COMMON} or a library name; {_ALL}"
    return UsageError(f"unknown target {chosen!r}{suggested}", hint=hint)


def infer_target_word(target: str, to: str | None) -> str:
    """Return the target's name: `to`, else the one implied by the target's suffix."""
    chosen, known = to or _SUFFIXES.get(os.path.splitext(target)[1]), (*TARGETS, *EXPORTS)
    chosen = _ALIASES.get(chosen, chosen) if chosen is not None else None
    if chosen is None:
        stem, suffix = os.path.splitext(target)
        hint = f"use --to with {_COMMON} or a library name; {_ALL}"
        if suffix == ".keras":
            hint = f"use {stem}.weights.h5: a .keras file also contains the program's layers"
        raise UsageError("cannot infer the output format from the target's name", file=target, hint=hint)
    if chosen not in known:
        raise _unknown_target_error(chosen, known)
    _require_suffix(target, chosen)
    return chosen


def _require_suffix(target: str, chosen: str) -> None:
    """Raise UsageError for a target whose suffix is that of another format."""
    suffix = os.path.splitext(target)[1]
    implied = _SUFFIXES.get(suffix)
    formats = {word: TARGETS[word].format if word in TARGETS else word for word in (chosen, implied) if word}
    if implied is None or formats[chosen] == formats[implied]:
        return
    raise UsageError(
        f"the suffix {suffix} is that of --to {implied}, not of --to {chosen}",
        file=target,
        hint=f"leave out --to, or name the target {_rename_target(target, chosen)}",
    )


def _rename_target(target: str, chosen: str) -> str:
    """Return the target's name with the suffix of another format."""
    stem = os.path.splitext(target)[0]
    own = next((each for each, word in _SUFFIXES.items() if word == chosen and word in (*TARGETS, ONNX)), "")
    return stem if chosen in TARGETS and TARGETS[chosen].prefix else stem + own


def suggest_targets(target: str | None, words: Sequence[str]) -> str:
    """Return the hint that writes one of the formats: an option, or a name if the target's is another's."""
    if target is None or os.path.splitext(target)[1] not in _SUFFIXES:
        return " or ".join(f"--to {word}" for word in words)
    names = {word: _rename_target(target, word) for word in words}
    return " or ".join(
        f"name the target {name}" + ("" if os.path.splitext(name)[1] in _SUFFIXES else f" with --to {word}")
        for word, name in names.items()
    )


def parse_target_kind(target: str, to: str | None) -> TargetKind:
    """Return the target's kind: that of `to`, else the one implied by the target's suffix."""
    chosen = infer_target_word(target, to)
    if chosen in EXPORTS:
        raise UsageError(
            f"{chosen} stores a runnable network, not a tree", hint="use ckpttool convert to write one"
        )
    return TARGETS[chosen]


def target_stem(target: str, kind: TargetKind) -> str:
    """Return the common prefix of the target's files; a prefix may be given by its index file."""
    return target.removesuffix(_INDEX) if kind.state else target.removesuffix(kind.ending) + kind.ending


def writer_options(target: str, kind: TargetKind) -> dict[str, Any]:
    """Return the format's options; TensorFlow counts saves, and a prefix ends with that count."""
    fields = dict(kind.options)
    if fields.get("graph"):
        number = re.search(r"-(\d{1,18})$", target, re.ASCII)
        fields["counter"] = int(number[1]) if number else 1
    return fields


# The options of a conversion: the record, parsed option texts, and mutually exclusive options.


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """The options of `convert`, named as on the command line (`rules` is `--map`, `from_` `--from`).

    Args:
        to: target to write (`torch`, `tf`, `onnx`, `sb3`, ...); default: from the target's suffix.
        layout: read the source as this layout; "none": by its layers alone.
        part: convert only what lies under this path.
        weights: "ema" for averaged weights alone, "raw" for the trained ones without them.
        strip: strip wrapper prefixes (`module.`, `_orig_mod.`) from names.
        restore: put back the prefixes that `strip` removed, as the source's sidecar lists them.
        fold_weight_norm: fold direction and length of weight norm into a single weight.
        fold_normalizer: fold observation statistics into the first layers, for libraries that keep
            none.
        rules: TOML file of mapping rules (docs/mapping.md).
        kinds: `PATTERN=KIND` for layers that could be of several kinds.
        flatten: `PATTERN=H,W,C`, the shape of the image that a layer receives flattened;
            `PATTERN=no`.
        unflatten: `PATTERN=H,W,C`, the shape of the image that a dense layer's output becomes.
        from_: orientation of the source's matrices ("torch" or "tf") where no name or shape shows it.
        l2: `PATTERN=FACTOR`, weights that a Keras program penalized with `l2(FACTOR)`.
        optimizer: `NAME/SETTING=VALUE`, hyperparameters missing from the checkpoint; "none" leaves
            out the state of optimizers.
        network: network to export to onnx; default: the actor.
        env: Gymnasium id of the agent's environment, for the sidecar.
        facts: facts about the agent that its files do not contain, for the sidecar.
        like: fill this model (`package.module:factory` or a ModelSpec) and write what it loads.
        match: `SOURCE=TARGET`, for `like`: two layers or modules that belong together.
        accept_order: for `like`: pair layers by order where no other evidence decides.
        cast: for `like`: round numbers to the types of the model.
        like_source: the code that builds the source's model; a call of it shows the order of flattened
            images, and for `like` it runs beside the filled model.
        run_code: for `like`: run a source whose file contains code (SavedModel, TorchScript, Lambda layers).
        allow_unused: for `like`: patterns of the source's tensors that may be left out.
        allow_missing: write even if something is unmapped.
        dry_run: plan and report; write nothing.
        force: replace the target if it exists.
        sync: flush to disk before the rename.
        verify: compare the networks before and after; write nothing if an output differs.
        code: Python file to write beside the target: the networks' modules, `load` and `act`; "-" writes
            none. The result has the text as `code`.

    """

    to: str | None = None
    layout: str | None = None
    part: str | None = None
    weights: str | None = None
    strip: bool = False
    restore: bool = False
    fold_weight_norm: bool = False
    fold_normalizer: bool = False
    rules: str | None = None
    kinds: Sequence[str] = ()
    flatten: Sequence[str] = ()
    unflatten: Sequence[str] = ()
    from_: str | None = None
    l2: Sequence[str] = ()
    optimizer: Sequence[str] = ()
    network: str | None = None
    env: str | None = None
    facts: AgentFacts = NO_FACTS
    like: ModelSpec | str | None = None
    match: Sequence[str] = ()
    accept_order: bool = False
    cast: bool = False
    like_source: ModelSpec | str | None = None
    run_code: bool = False
    allow_unused: Sequence[str] = ()
    allow_missing: bool = False
    dry_run: bool = False
    force: bool = False
    sync: bool = True
    verify: bool = True
    code: str | None = None

    @property
    def preparation(self) -> PreparationOptions:
        """The changes to names and weights before the mapping."""
        return PreparationOptions(self.strip, self.restore, self.fold_weight_norm)

    @property
    def layers(self) -> tuple[LayerOption, ...]:
        """The parsed `kinds`, `flatten` and `unflatten`; UsageError for invalid ones."""
        return parse_layer_options(self.kinds, self.flatten, self.unflatten)


class ConversionKeywords(TypedDict, total=False):
    """Fields of ConversionOptions as keywords, for type checkers and editors."""

    to: str | None
    layout: str | None
    part: str | None
    weights: str | None
    strip: bool
    restore: bool
    fold_weight_norm: bool
    fold_normalizer: bool
    rules: str | None
    kinds: Sequence[str]
    flatten: Sequence[str]
    unflatten: Sequence[str]
    from_: str | None
    l2: Sequence[str]
    optimizer: Sequence[str]
    network: str | None
    env: str | None
    facts: AgentFacts
    like: ModelSpec | str | None
    match: Sequence[str]
    accept_order: bool
    cast: bool
    like_source: ModelSpec | str | None
    run_code: bool
    allow_unused: Sequence[str]
    allow_missing: bool
    dry_run: bool
    force: bool
    sync: bool
    verify: bool
    code: str | None


class Exclusion(NamedTuple):
    """Options (fields of ConversionOptions) rejected when a condition holds, and the error's text."""

    holds: Callable[[ConversionOptions, bool], bool]
    options: tuple[str, ...]
    why: str
    hint: str | None = "leave it out"


# Conditions depend on the options and on whether the target is an export; the first match is the error.
# `verify` is rejected if it is false.
EXCLUSIONS = (
    Exclusion(
        lambda _, exported: exported,
        (
            *("weights", "part", "strip", "restore", "rules", "like", "fold_weight_norm", "fold_normalizer"),
            *("l2", "optimizer", "kinds", "flatten", "match", "accept_order", "unflatten", "like_source"),
            *("verify", "code"),
        ),
        "does not apply to onnx",
    ),
    Exclusion(lambda _, exported: not exported, ("network",), "applies only to --to onnx"),
    Exclusion(
        lambda options, _: options.like is not None,
        ("weights", "layout", "restore", "facts", "l2", "fold_normalizer", "code"),
        "cannot be used with --like",
    ),
    Exclusion(
        lambda options, exported: options.like is None and not exported,
        ("match", "accept_order", "cast", "run_code"),
        "applies only to --like",
    ),
    Exclusion(
        lambda options, exported: options.like is None and not exported,
        ("allow_unused",),
        "applies only to --like",
        "use --allow-missing to write the target without the unmapped tensors",
    ),
    Exclusion(lambda options, _: options.restore, ("strip",), "and --restore undo each other", None),
)
_SPELLINGS = {"rules": "map", "kinds": "kind", "verify": "no-verify"}


def require_compatible(options: ConversionOptions, *, exported: bool) -> None:
    """Raise UsageError if two options exclude each other, or one does not apply to the kind of target."""
    for rule in EXCLUSIONS:
        if rule.holds(options, exported):
            for name in rule.options:
                for given in _given_options(options, name):
                    raise UsageError(f"--{given} {rule.why}", hint=rule.hint)


def _given_options(options: ConversionOptions, name: str) -> Iterator[str]:
    """Yield the command-line options, without dashes, that set a field."""
    if name == "facts":
        known = add_environment(options.facts, options.env).known
        yield from (fact.replace("_", "-") for fact in known)
    elif getattr(options, name) if name != "verify" else not options.verify:
        yield _SPELLINGS.get(name, name.replace("_", "-"))


_Options = TypeVar("_Options")


def with_keywords(options: _Options, keywords: Mapping[str, Any], function: str) -> _Options:
    """Return the options record with the keywords as its fields.

    Raise TypeError for an unknown keyword, with the most similar field.
    """
    known = [each.name for each in fields(cast(Any, options)) if each.init]
    for name in keywords:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")
    return cast(_Options, replace(cast(Any, options), **keywords)) if keywords else options


class ConversionRequest(NamedTuple):
    """Target kind and options of a conversion, with option texts parsed.

    `rules` are the user's own, `stated` and `given` the settings stated for optimizers and layers. With
    `no_optimizers` the state of optimizers is left out.
    """

    kind: TargetKind
    options: ConversionOptions = ConversionOptions()
    rules: RuleFile | None = None
    stated: OptimizerOptions = NO_OPTIMIZER_OPTIONS
    given: Sequence[LayerOption] = ()
    no_optimizers: bool = False

    @property
    def whole(self) -> bool:
        """Return whether the whole checkpoint is converted under its own names."""
        return self.options.part is None and self._change is None

    @property
    def no_way_back(self) -> str | None:
        """Return why the conversion cannot be reversed, None if it can."""
        return self._change if self.options.part is None else "--part was used"

    @property
    def _change(self) -> str | None:
        """The option that changes what is converted, as a reason."""
        if self.options.weights is not None:
            return "--weights was used"
        if self.options.fold_normalizer:
            return "--fold-normalizer was used"
        if self.no_optimizers:
            return "--optimizer none was used"
        if self.options.preparation != NO_PREPARATION:
            return "names or weights were changed before mapping (--strip, --restore, --fold-weight-norm)"
        return None

    @property
    def plain(self) -> bool:
        """Return whether no option controls the mapping."""
        return not (self.options.layout or self.rules or any(self.stated) or self.given)

    def receipt(self) -> dict[str, str | bool | list[str]]:
        """Return the options that determine the target's contents; `part` and stated facts are separate."""
        kinds, flatten, unflatten = format_layer_options(self.given)
        found = {
            "layout": self.options.layout,
            "weights": self.options.weights,
            "kind": kinds,
            "flatten": flatten,
            "unflatten": unflatten,
            "from": self.options.from_,
            "strip": self.options.strip,
            "restore": self.options.restore,
            "fold_weight_norm": self.options.fold_weight_norm,
            "fold_normalizer": self.options.fold_normalizer,
            "no_optimizers": self.no_optimizers,
        }
        return {name: value for name, value in found.items() if value}

    @property
    def by_name(self) -> bool:
        """Return whether the target identifies variables by name only, as TensorFlow 1 does."""
        return self.kind.options.get("graph") is False


def parse_request(kind: TargetKind, options: ConversionOptions) -> ConversionRequest:
    """Return the options with texts parsed; raise UsageError for invalid ones."""
    rules = user_rules.load_rules(options.rules) if options.rules is not None else None
    no_optimizers, stated = parse_optimizer_options(options.l2, options.optimizer)
    return ConversionRequest(kind, options, rules, stated, options.layers, no_optimizers)
