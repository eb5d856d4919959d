"""A Keras model's configuration as data: which layers it has, and plain facts of each. No class is looked up.

Sources: keras/src/saving/serialization_lib.py (Keras 3: `module`, `class_name`, `config`),
keras/src/legacy/saving/serialization.py (Keras 1 and 2: `class_name`, `config`; a Keras 1 Sequential's config
is a list).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool import documents
from ckpttool.errors import FormatError, LimitError
from ckpttool.formats.keras_facts import MAX_TEXT, class_of, facts
from ckpttool.formats.keras_tree.classes import ATTENTION, CELLS, snake

_NOTES = 64


class Config(NamedTuple):
    """One object's class and settings; an unknown object has neither."""

    cls: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str | None:
        """The user's name of the layer."""
        found = self.settings.get("name")
        return found if isinstance(found, str) else None

    @property
    def trainable(self) -> bool | None:
        """Whether the layer is trained; None if it does not say."""
        found = self.settings.get("trainable")
        return found if isinstance(found, bool) else None

    def layers(self) -> list[Config]:
        """Return the layers of a Sequential or functional model in their order."""
        found = self.settings.get("layers")
        return [config_of(each) for each in found] if isinstance(found, list) else []

    def facts(self) -> dict[str, Any]:
        """Return what is plain (see keras_facts)."""
        return facts(self.settings)


NOTHING = Config()


def parse(data: bytes | str | None, what: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the JSON object, or nothing and a note that says why there is none: weights do without it.

    Raise LimitError for one that asks for more than a reader gives: it is no damage.
    """
    if data is None:
        return {}, ()
    try:
        return documents.parse(data.encode() if isinstance(data, str) else data, what), ()
    except LimitError:
        raise
    except FormatError as error:
        return {}, (f"{error.message}: nothing is said about layers",)


def config_of(found: Any) -> Config:
    """Return class and settings of a serialized object, nothing of anything else."""
    if not isinstance(found, dict):
        return NOTHING
    cls, settings = found.get("class_name"), found.get("config")
    if isinstance(settings, list):  # a Keras 1 or early Keras 2 Sequential
        settings = {"layers": settings}
    if not isinstance(cls, str) or not isinstance(settings, dict):
        return NOTHING
    return Config(class_of(cls[:MAX_TEXT]), settings)


def lambdas(root: Config) -> tuple[str, ...]:
    """Return a note for each Lambda layer: its code is data here."""
    notes: list[str] = []
    stack = [root]
    while stack and len(notes) < _NOTES:
        config = stack.pop()
        if config.cls == "Lambda":
            notes.append(f"layer {config.name or '?'} is a Lambda: its code is not run")
        stack += reversed(config.layers())
        stack += [child for key in ("layer", "cell") if (child := config_of(config.settings.get(key))).cls]
    return tuple(notes)


def child(config: Config, edge: str) -> Config:
    """Return what a layer's own configuration says of the part under an attribute."""
    cls = config.cls
    if cls in CELLS and edge == "cell":
        return Config(CELLS[cls], {k: v for k, v in config.settings.items() if k != "name"})
    if cls in ATTENTION and edge.endswith("_dense"):
        return Config("EinsumDense", {"use_bias": config.settings.get("use_bias")})
    if edge in ("cell", "layer", "backward_layer"):
        found = config_of(config.settings.get(edge))
        if found.cls is None and edge == "backward_layer":
            return Config(config_of(config.settings.get("layer")).cls, {})
        return found
    return config_of(config.settings.get("layer")) if edge == "forward_layer" else NOTHING


def stored_names(layers: Sequence[Config]) -> dict[str, Config]:
    """Return the layers by the group that each is stored in: class in snake case, numbered from the second.

    Source: keras/src/saving/saving_lib.py, _save_container_state.
    """
    counts: dict[str, int] = {}
    found: dict[str, Config] = {}
    for layer in layers:
        if layer.cls is None:
            continue
        stem = snake(layer.cls)
        number = counts.get(stem, 0)
        counts[stem] = number + 1
        found[f"{stem}_{number}" if number else stem] = layer
    return found
