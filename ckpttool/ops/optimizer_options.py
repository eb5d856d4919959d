"""What a person says of an agent's optimizers where no file does: `convert --l2` and `--optimizer`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpttool import plugins
from ckpttool.errors import UsageError, choice, some
from ckpttool.globs import matcher
from ckpttool.layouts.canonical import JOINT, OPTIMIZERS, SLOTS, Binding, owned, setting, trains
from ckpttool.layouts.optimizers.families import ADAMW, FAMILIES, FLAGS, of_slots
from ckpttool.layouts.optimizers.keras_read import keras_class
from ckpttool.leaf import display
from ckpttool.mapping.report import Move
from ckpttool.shown import count
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

_COUNT = "step"
NONE = "none"  # what --optimizer takes to leave out every optimizer
_SETTINGS = sorted({ours for family in FAMILIES for ours in family.torch_settings.values()} | {_COUNT})
# What torch's own word for a setting means: "lr", "eps", "alpha".
_TORCH = {theirs: ours for family in FAMILIES for theirs, ours in family.torch_settings.items()}
_L2 = "--l2 'critic/**/kernel=0.01'"
_OPTIMIZER = "--optimizer critic_optimizer/momentum=0.9"


class Stated(NamedTuple):
    """What was said: `l2` are patterns of weights with a penalty's factor, `optimizer` single settings."""

    l2: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()

    def into(self, known: Sidecar | None, binding: Binding | None, tree: Tree) -> Sidecar | None:
        """Return the sidecar with what was said, as if it had said so.

        Raise UsageError for what makes no sense, fits no weight, or contradicts the checkpoint.
        """
        known = _configured(known, binding, tree)
        if not any(self):
            return known
        base = known or Sidecar("")
        if binding is None:
            return self._general(base)
        found = {name: dict(settings) for name, settings in (base.optimizers or {}).items()}
        once: set[tuple[str, str]] = set()
        for text in self.optimizer:
            name, key, value = _setting(text, binding)
            if (name, key) in once:
                raise UsageError(f"--optimizer {text}: {name}/{key} is said twice")
            once.add((name, key))
            found.setdefault(name, {})[key] = value
        for text in self.l2:
            for name, key, value in _penalties(text, binding, tree):
                # What has no penalty is told so: no default is assumed for it.
                own = found.setdefault(name, {})
                own.setdefault("weight_decay", 0.0)
                own[key] = value
        said = {"l2": self.l2, "optimizer": self.optimizer}
        provenance = {name: f"given: {', '.join(texts)}" for name, texts in said.items() if texts}
        return replace(base, optimizers=found, provenance={**base.provenance, **provenance})

    def settings(self) -> tuple[tuple[str, str], ...]:
        """Return the optimizers and settings of `--optimizer NAME/SETTING=VALUE`, without their values."""
        places = (text.partition("=")[0].strip().rpartition("/") for text in self.optimizer)
        return tuple((name, key) for name, _, key in places)

    def _general(self, base: Sidecar) -> Sidecar:
        """Return the sidecar with what was said of optimizers that no layout knows."""
        if self.l2:
            raise UsageError("--l2 needs a checkpoint that a layout recognises", hint="leave it out")
        found = {name: dict(settings) for name, settings in (base.optimizers or {}).items()}
        for text, (name, key) in zip(self.optimizer, self.settings(), strict=True):
            if not name or key not in _SETTINGS:
                raise UsageError(
                    f"--optimizer {text}: unknown setting '{key}'",
                    hint=choice(_TORCH.get(key, key), _SETTINGS) if name else _OPTIMIZER,
                )
            found.setdefault(name, {})[key] = _value(text, key)
        if len(set(self.settings())) < len(self.optimizer):
            raise UsageError("--optimizer gives a setting twice")
        provenance = {**base.provenance, "optimizer": f"given: {', '.join(self.optimizer)}"}
        return replace(base, optimizers=found, provenance=provenance)

    def notes(self, known: Sidecar | None) -> Iterator[str]:
        """Go through what a report says of the penalties that were given, or that the file's layers have."""
        said = known is not None and "l2" in known.provenance
        for name, settings in (known.optimizers or {}).items() if known is not None and said else ():
            decays = [key for key, value in settings.items() if key.startswith("weight_decay/") and value]
            if decays:
                rates = sorted({settings[key] or 0.0 for key in decays})
                shown = ", ".join(str(rate) for rate in rates)
                weights = count(len(decays), "weight")
                yield f"{name}: weight decay {shown} for {weights}, twice the factor of l2"


NOTHING_STATED = Stated()


def statements(l2: Sequence[str], optimizer: Sequence[str]) -> tuple[bool, Stated]:
    """Return whether optimizers are left out (`--optimizer none`), and what is stated of them otherwise."""
    if NONE not in optimizer:
        return False, Stated(tuple(l2), tuple(optimizer))
    if len(optimizer) > 1 or l2:
        raise UsageError("--optimizer none leaves out every optimizer", hint="leave out --l2 and --optimizer")
    return True, NOTHING_STATED


def stated_in(receipt: Sidecar) -> Stated:
    """Return what was said when the receipt was written, as `Stated.into` left it there."""
    texts = (str(receipt.provenance.get(name, "")).removeprefix("given: ") for name in Stated._fields)
    return Stated(*(tuple(filter(None, text.split(", "))) for text in texts))


def _configured(known: Sidecar | None, binding: Binding | None, tree: Tree) -> Sidecar | None:
    """Return the sidecar with the penalties that the configurations of the file's layers tell."""
    found: dict[str, dict[str, float | bool | str | None]] = {}
    for move in binding.moves.moves if binding is not None else ():
        name = _owner(binding, move) if binding is not None else None
        held = tree.containers.get(move.source[:-1]) if name is not None else None
        state = held.state if held is not None and held.kind == "module" else None
        factor = state.get(f"{move.target[-1].value}_regularizer_l2") if isinstance(state, dict) else None
        if name is not None and isinstance(factor, float) and binding is not None and _moves(binding, name):
            own = found.setdefault(name, {"weight_decay": 0.0})
            own[f"weight_decay/{display(owned(name, move.target))}"] = 2 * factor
    if not found:
        return known
    base = known or Sidecar("")
    before = base.optimizers or {}
    told = {name: {**found.get(name, {}), **before.get(name, {})} for name in (*found, *before)}
    said = {"l2": "read from the file's configurations", **base.provenance}
    return replace(base, optimizers=told, provenance=said)


def _setting(text: str, binding: Binding) -> tuple[str, str, float | bool | None]:
    """Return the optimizer, the setting and the value of `NAME/SETTING=VALUE`."""
    name, _, key = text.partition("=")[0].strip().partition("/")
    present = [each for each in OPTIMIZERS if _moves(binding, each)]
    if name not in present:
        raise UsageError(
            f"--optimizer {text}: the agent has no {name or 'such optimizer'}",
            hint=choice(name, present) if present else _OPTIMIZER,
        )
    _require_setting(text, name, key, binding)
    if any(move.target == setting(name, key) for move in binding.moves.moves):
        raise UsageError(f"--optimizer {text}: the checkpoint itself says its {key}")
    return name, key, _value(text, key)


def _value(text: str, key: str) -> float | bool | None:
    """Return the value of `NAME/SETTING=VALUE`; raise UsageError for one that the setting cannot have."""
    said: str = text.partition("=")[2]
    try:
        value: object = json.loads(said)
    except json.JSONDecodeError:
        value = said
    if value is not None and not isinstance(value, bool | int | float):
        raise UsageError(f"--optimizer {text}: {said!r} is no number, true, false or null", hint=_OPTIMIZER)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--optimizer {text}: {said} is no number", hint=_OPTIMIZER)
    if value is not None and isinstance(value, bool) != (key in FLAGS):
        meant = "true, false or null" if key in FLAGS else "a number"
        raise UsageError(f"--optimizer {text}: {key} is {meant}")
    return value


def _require_setting(text: str, name: str, key: str, binding: Binding) -> None:
    """Raise UsageError for a setting that no optimizer has, or not the one whose slots are there."""
    if key not in _SETTINGS:
        meant = choice(_TORCH.get(key, key), _SETTINGS)
        raise UsageError(f"--optimizer {text}: no optimizer has a {key or 'setting'}", hint=meant)
    slots = {str(move.target[1].value) for move in _moves(binding, name)} & {*SLOTS}
    family = of_slots(frozenset(slots))
    if family is not None and key not in (known := {*family.torch_settings.values(), _COUNT}):
        raise UsageError(
            f"--optimizer {text}: {name} is {family.name}, which has no {key}",
            hint=choice(key, sorted(known)),
        )


def _penalties(text: str, binding: Binding, tree: Tree) -> Iterator[tuple[str, str, float]]:
    """Go through the weights of `PATTERN=FACTOR`: each one's optimizer, its setting there, its decay."""
    pattern, _, said = text.rpartition("=")
    try:
        factor = float(said)
    except ValueError:
        factor = math.nan
    if not pattern or not math.isfinite(factor) or factor < 0:
        raise UsageError(f"--l2 {text} is no pattern and factor", hint=_L2)
    if plugins.find("layouts", binding.layout).load().TABLE.framework == "torch":
        raise UsageError("--l2 is for networks of Keras: torch's own optimizer holds its weight decay")
    fits = matcher(pattern)
    weights = [move for move in binding.moves.moves if _owner(binding, move) is not None]
    found = [move for move in weights if fits(tree.names[move.source]) or fits(display(move.target))]
    if not found:
        names = [tree.names[move.source] for move in weights]
        raise UsageError(f"--l2 {text} fits no weight that is trained", found=some(names, 3), hint=_L2)
    for move in found:
        name = _owner(binding, move) or JOINT
        _require_plain(name, text, binding, tree)
        # keras/src/regularizers/regularizers.py: the loss has factor * sum(w^2), its gradient 2 * factor * w.
        yield name, f"weight_decay/{display(owned(name, move.target))}", 2 * factor


def _require_plain(name: str, text: str, binding: Binding, tree: Tree) -> None:
    mine = _moves(binding, name)
    if not mine:
        raise UsageError(f"--l2 {text}: the checkpoint has no {name} to hold a weight decay")
    if keras_class(tree[move.source] for move in mine) == ADAMW:
        raise UsageError(f"--l2 {text}: {name} is AdamW, whose own decay torch keeps in the same place")


def _owner(binding: Binding, weight: Move) -> str | None:
    """Return the optimizer that updates a weight: that of all networks if the agent has it."""
    names = [name for name in OPTIMIZERS if trains(name, weight.target)]
    if JOINT in names and _moves(binding, JOINT):
        return JOINT
    return names[0] if names else None


def _moves(binding: Binding, name: str) -> list[Move]:
    return [move for move in binding.moves.moves if move.target[0].value == name]
