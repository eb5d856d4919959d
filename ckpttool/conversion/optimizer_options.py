"""Optimizer facts given by the user where no file has them: `convert --l2` and `--optimizer`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

from ckpttool.conversion.options import OptimizerOptions
from ckpttool.core.errors import UsageError, abbreviate_list, suggest_choice
from ckpttool.core.optimizers import ADAMW, FAMILIES, FLAGS, find_family, list_slots, list_torch_settings
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.text import compile_glob, format_count
from ckpttool.core.tree import Tree, display
from ckpttool.libraries.optimizer_settings import layout_framework
from ckpttool.libraries.schema import (
    JOINT,
    OPTIMIZERS,
    RecognizedAgent,
    canonical_setting_path,
    get_optimizer_key,
    is_trained_by,
)
from ckpttool.mapping.rules import Move

_COUNT = "step"
_SETTINGS = sorted(list_torch_settings() | {_COUNT})
# Settings by PyTorch's names: "lr", "eps", "alpha".
_TORCH = {name: setting for family in FAMILIES for name, setting in family.torch_settings.items()}
_L2 = "--l2 'critic/**/kernel=0.01'"
_OPTIMIZER = "--optimizer NAME/SETTING=VALUE, or --optimizer none to convert without optimizers"


def add_stated_settings(
    options: OptimizerOptions, known: Sidecar | None, binding: RecognizedAgent | None, tree: Tree
) -> Sidecar | None:
    """Return the sidecar extended by the options.

    Raise UsageError for options that are invalid, match no weight, or contradict the checkpoint.
    """
    known = _add_configured_penalties(known, binding, tree)
    if not any(options):
        return known
    base = known or Sidecar("")
    if binding is None:
        return _add_general_settings(options, base)
    optimizers = {name: dict(settings) for name, settings in (base.optimizers or {}).items()}
    once: set[tuple[str, str]] = set()
    for text in options.optimizer:
        name, key_, value = _parse_setting(text, binding)
        if (name, key_) in once:
            raise UsageError(f"--optimizer {text}: {name}/{key_} is set twice")
        once.add((name, key_))
        optimizers.setdefault(name, {})[key_] = value
    for text in options.l2:
        for name, key_, value in _penalties(text, binding, tree):
            # An explicit 0 for weights without a penalty, so that no default is assumed.
            own = optimizers.setdefault(name, {})
            own.setdefault("weight_decay", 0.0)
            own[key_] = value
    recorded = {"l2": options.l2, "optimizer": options.optimizer}
    provenance = {name: f"given: {', '.join(texts)}" for name, texts in recorded.items() if texts}
    return replace(base, optimizers=optimizers, provenance={**base.provenance, **provenance})


def _add_general_settings(options: OptimizerOptions, base: Sidecar) -> Sidecar:
    """Return the sidecar with the options for optimizers that no layout recognises."""
    if options.l2:
        raise UsageError("--l2 needs a checkpoint that a layout recognises", hint="leave it out")
    optimizers = {name: dict(settings) for name, settings in (base.optimizers or {}).items()}
    for text, (name, key_) in zip(options.optimizer, options.settings(), strict=True):
        if not name or key_ not in _SETTINGS:
            raise UsageError(
                f"--optimizer {text}: unknown setting '{key_}'",
                hint=suggest_choice(_TORCH.get(key_, key_), _SETTINGS) if name else _OPTIMIZER,
            )
        optimizers.setdefault(name, {})[key_] = _parse_setting_value(text, key_)
    if len(set(options.settings())) < len(options.optimizer):
        raise UsageError("--optimizer sets the same setting twice")
    provenance = {**base.provenance, "optimizer": f"given: {', '.join(options.optimizer)}"}
    return replace(base, optimizers=optimizers, provenance=provenance)


def penalty_notes(known: Sidecar | None) -> Iterator[str]:
    """Yield the report lines on penalties that were given, or that the file's layers have."""
    recorded = known is not None and "l2" in known.provenance
    for name, settings in (known.optimizers or {}).items() if known is not None and recorded else ():
        decays = [key for key, value in settings.items() if key.startswith("weight_decay/") and value]
        if decays:
            rates = sorted({settings[key] or 0.0 for key in decays})
            shown = ", ".join(str(rate) for rate in rates)
            weights = format_count(len(decays), "weight")
            yield f"{name}: weight decay {shown} for {weights}, twice the l2 factor"


def read_optimizer_options(receipt: Sidecar) -> OptimizerOptions:
    """Return the options recorded in the receipt, as `add_stated_settings` stored them."""
    texts = (
        str(receipt.provenance.get(name, "")).removeprefix("given: ") for name in OptimizerOptions._fields
    )
    return OptimizerOptions(*(tuple(filter(None, text.split(", "))) for text in texts))


def _add_configured_penalties(
    known: Sidecar | None, binding: RecognizedAgent | None, tree: Tree
) -> Sidecar | None:
    """Return the sidecar with the penalties in the configurations of the file's layers."""
    penalties: dict[str, dict[str, float | bool | str | None]] = {}
    for move in binding.moves.moves if binding is not None else ():
        name = _find_owner(binding, move) if binding is not None else None
        container = tree.containers.get(move.source[:-1]) if name is not None else None
        state = container.state if container is not None and container.kind == "module" else None
        factor = state.get(f"{move.target[-1].value}_regularizer_l2") if isinstance(state, dict) else None
        if (
            name is not None
            and isinstance(factor, float)
            and binding is not None
            and _optimizer_moves(binding, name)
        ):
            own = penalties.setdefault(name, {"weight_decay": 0.0})
            own[f"weight_decay/{display(get_optimizer_key(name, move.target))}"] = 2 * factor
    if not penalties:
        return known
    base = known or Sidecar("")
    before = base.optimizers or {}
    fields = {name: {**penalties.get(name, {}), **before.get(name, {})} for name in (*penalties, *before)}
    recorded = {"l2": "read from the file's configurations", **base.provenance}
    return replace(base, optimizers=fields, provenance=recorded)


def _parse_setting(text: str, binding: RecognizedAgent) -> tuple[str, str, float | bool | None]:
    """Return the optimizer, the setting and the value of `NAME/SETTING=VALUE`."""
    name, _, key = text.partition("=")[0].strip().partition("/")
    present = [optimizer for optimizer in OPTIMIZERS if _optimizer_moves(binding, optimizer)]
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
    setting, _, text_value = text.partition("=")
    hint = f"--optimizer {setting}=VALUE"
    try:
        value: object = json.loads(text_value)
    except json.JSONDecodeError:
        value = text_value
    if value is not None and not isinstance(value, bool | int | float):
        raise UsageError(
            f"--optimizer {text}: {text_value!r} is not a number, true, false or null", hint=hint
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--optimizer {text}: {text_value} is not a finite number", hint=hint)
    if value is not None and isinstance(value, bool) != (key in FLAGS):
        meant = "true, false or null" if key in FLAGS else "a number"
        raise UsageError(f"--optimizer {text}: {key} must be {meant}")
    return value


def _require_setting(text: str, name: str, key: str, binding: RecognizedAgent) -> None:
    """Raise UsageError for a setting that no optimizer has, or not the optimizer with these slots."""
    if key not in _SETTINGS:
        meant = suggest_choice(_TORCH.get(key, key), _SETTINGS)
        raise UsageError(f"--optimizer {text}: unknown optimizer setting {key!r}", hint=meant)
    slots = {str(move.target[1].value) for move in _optimizer_moves(binding, name)} & list_slots()
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
    moves = [move for move in weights if fits(tree.names[move.source]) or fits(display(move.target))]
    if not moves:
        names = [tree.names[move.source] for move in weights]
        raise UsageError(f"--l2 {text} matches no trained weight", found=abbreviate_list(names, 3), hint=_L2)
    for move in moves:
        name = _find_owner(binding, move) or JOINT
        _require_plain(name, text, binding, tree)
        # keras/src/regularizers/regularizers.py: the loss has factor * sum(w^2), its gradient 2 * factor * w.
        yield name, f"weight_decay/{display(get_optimizer_key(name, move.target))}", 2 * factor


def _require_plain(name: str, text: str, binding: RecognizedAgent, tree: Tree) -> None:
    from ckpttool.libraries.optimizers_read import keras_class

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
