"""What is known of a canonical optimizer's settings: from the agent, a sidecar, its state, a default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Default
from ckpttool.layouts.optimizers.families import (
    ADADELTA,
    ADAGRAD,
    ADAM,
    ADAMW,
    ADAMW_DEFAULTS,
    BUFFER,
    CLASSES,
    FAMILIES,
    RMSPROP,
    SGD,
    VELOCITY,
    Family,
    of_slots,
)
from ckpttool.layouts.optimizers.keras_read import settled
from ckpttool.leaf import Path, ValueLeaf, attr, display
from ckpttool.mapping.rules import ToValue
from ckpttool.tree import Tree

Setting = float | bool | str | None
# What says which weight is where, and is no setting of the updates.
PLACES = (canonical.GROUP, canonical.NUMBER, canonical.NAMES)
_SLOTS = frozenset(slot for family in FAMILIES for slot in family.torch_slots)


class Known:
    """The settings of the canonical optimizer `name` of `agent`, each for all weights or for one.

    `told` are those that a sidecar or a person gives, by name, or by name and weight
    (`weight_decay/q1/0/kernel`); the agent's own go before them, `defaults` after.
    """

    def __init__(
        self, name: str, agent: Tree, told: Mapping[str, Setting], defaults: Mapping[str, Default]
    ) -> None:
        """Look at what the agent has of the optimizer."""
        self.name, self.agent, self.told = name, agent, told
        self._values: dict[Path, Setting] = {}
        own = [path for path in agent if path[0] == attr(name) and len(path) > 1]
        self.slots = frozenset(
            str(path[1].value) for path in own if len(path) > 2 and path[1].value in canonical.SLOTS
        )
        names = [str(path[1].value) for path in own if path[1].value not in canonical.SLOTS]
        self.settings = tuple(dict.fromkeys((*names, *(each.partition("/")[0] for each in told))))
        cls = settled(agent, name)
        self.family = of_slots(self.slots) or CLASSES.get(cls or "") or _by_settings(self.settings)
        inferred = ADAMW_DEFAULTS if cls == ADAMW else {}
        self.defaults = {
            **self.family.keras_defaults,
            **self.family.torch_defaults,
            **inferred,
            **defaults,
        }
        self.certain = {"amsgrad": "vhat" in self.slots, "centered": "mg" in self.slots}

    def source(self, setting: str, weight: Path | None = None) -> Path | None:
        """Return where the agent has a setting: the weight's own place, or that of all."""
        own = canonical.slot(self.name, setting, weight) if weight is not None else None
        shared = canonical.setting(self.name, setting)
        return next((path for path in (own, shared) if path is not None and path in self.agent), None)

    def has(self, setting: str, weight: Path | None = None) -> bool:
        """Say whether somebody says the setting: the agent, a sidecar, a person."""
        return self.source(setting, weight) is not None or self._told(setting, weight) is not None

    def value(self, setting: str, weight: Path | None = None) -> Setting:
        """Return a setting, its default if nobody says it; this may read a scalar."""
        source = self.source(setting, weight)
        if source is not None:
            return self._read(source)
        told = self._told(setting, weight)
        if told is not None:
            return self.told[told]
        if self.certain.get(setting):
            return True
        default = self.defaults.get(setting)
        return default.value if default is not None else None

    def exact(self, setting: str, weight: Path | None = None) -> float | bool | None:
        """Return what is told of a setting whatever the agent has: it may be the number before rounding."""
        told = self._told(setting, weight)
        value = self.told[told] if told is not None else None
        return value if isinstance(value, int | float) else None

    def number(self, setting: str, weight: Path | None = None) -> float | None:
        """Return a setting that is a number, None if it is none."""
        value = self.value(setting, weight)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def assumed(self, setting: str) -> str:
        """Return the sentence that a default was taken."""
        default = self.defaults[setting]
        sentence = f"{self.name} {setting} = {default.value} (default of {default.whose}; "
        return f"{sentence}the checkpoint does not hold it)"

    def flat(self) -> Iterator[tuple[str, Path]]:
        """Go through the agent's settings by the names that a sidecar gives them, step and slots left out."""
        for path in self.agent:
            name = str(path[1].value) if path[0] == attr(self.name) and len(path) > 1 else "step"
            if name != "step" and name not in canonical.SLOTS:
                yield display(path[1:]), path

    @property
    def momentum_unknown(self) -> bool:
        """Say whether there are sums of gradients and nobody says how fast they fade."""
        if not self.slots & {BUFFER, VELOCITY} or self.has("momentum"):
            return False
        default = self.defaults.get("momentum")
        return self.family is SGD or default is None or default.whose == "Keras"

    def idle(self, weight: Path | None = None) -> bool:
        """Say whether it is known that nothing reads the sums of gradients: there is no momentum."""
        return not self.momentum_unknown and not self.number("momentum", weight)

    def _read(self, source: Path) -> Setting:
        if source not in self._values:
            leaf = ToValue().leaf(self.agent[source])
            value = leaf.value if isinstance(leaf, ValueLeaf) else None
            self._values[source] = value if isinstance(value, int | float | str) else None
        return self._values[source]

    def _told(self, setting: str, weight: Path | None) -> str | None:
        own = f"{setting}/{display(canonical.owned(self.name, weight))}" if weight is not None else ""
        return next((name for name in (own, setting) if name in self.told), None)


def _by_settings(names: tuple[str, ...]) -> Family:
    # Of torch's optimizers with a rho, RMSprop alone has these; Keras's are told apart by their class.
    if {"rho", "weight_decay"} <= set(names) and not {"centered", "momentum"} & set(names):
        return ADADELTA
    if {"rho", "centered"} & set(names):
        return RMSPROP
    if {"lr_decay", "initial_accumulator_value"} & set(names):
        return ADAGRAD
    return SGD if {"nesterov", "dampening"} & set(names) else ADAM


def is_state(setting: str) -> bool:
    """Say whether a setting is an entry of torch's `state` that holds no tensor."""
    return setting in _SLOTS
