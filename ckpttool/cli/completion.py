"""Shell completion: words offered for an option or an argument.

Each function receives the incomplete word. The module is loaded when a shell completes a word
(`panels.complete_field`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ckpttool.core.errors import MissingExtraError

if TYPE_CHECKING:
    from ckpttool.core.plugins import Kind


def complete_layouts(incomplete: str) -> list[str]:
    """Return the layout names."""
    return _complete_plugins("layouts", incomplete)


def complete_backends(incomplete: str) -> list[str]:
    """Return the backend names."""
    return _complete_plugins("backends", incomplete)


def complete_targets(incomplete: str) -> list[str]:
    """Return the targets of `convert --to`."""
    from ckpttool.conversion.targets import target_words

    return _filter_by_prefix(target_words(), incomplete)


def complete_schemas(incomplete: str) -> list[str]:
    """Return the names of the JSON Schemas."""
    from ckpttool.commands.schemas import schema_names

    return _filter_by_prefix(schema_names(), incomplete)


def complete_environments(incomplete: str) -> list[str]:
    """Return the environments registered by Gymnasium itself; none if it is not installed."""
    from ckpttool.evaluation.environments import import_gymnasium

    try:
        return _filter_by_prefix(import_gymnasium().registry, incomplete)
    except MissingExtraError:
        return []


def complete_activations(incomplete: str) -> list[str]:
    """Return the names of activations."""
    from ckpttool.core.kinds import ACTIVATIONS

    return _filter_by_prefix(ACTIVATIONS, incomplete)


def complete(field: str | None, words: Sequence[str], incomplete: str) -> list[str]:
    """Return the words that complete a field: these, or what `BY_FIELD` offers; none for other fields."""
    if words or field not in BY_FIELD:
        return _filter_by_prefix(words, incomplete)
    return BY_FIELD[field](incomplete)


def _complete_plugins(kind: Kind, incomplete: str) -> list[str]:
    from ckpttool.core import plugins

    return _filter_by_prefix((plugin.name for plugin in plugins.installed(kind)), incomplete)


def _filter_by_prefix(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


# The functions that complete the options of these fields, in whatever command.
BY_FIELD: dict[str | None, Callable[[str], list[str]]] = {
    "activation": complete_activations,
    "backend": complete_backends,
    "env": complete_environments,
    "layout": complete_layouts,
    "schema": complete_schemas,
    "to": complete_targets,
}
