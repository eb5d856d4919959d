"""Shell completion: words offered for an option or an argument.

Each function receives the incomplete word. Ordinary commands import or run nothing here except these few
definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def complete_words(*words: str) -> Callable[[str], list[str]]:
    """Return a completion function for these words."""

    def offered(incomplete: str) -> list[str]:
        return _filter_by_prefix(words, incomplete)

    return offered


def _complete_plugins(kind: Kind, incomplete: str) -> list[str]:
    from ckpttool.core import plugins

    return _filter_by_prefix((plugin.name for plugin in plugins.installed(kind)), incomplete)


def _filter_by_prefix(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


# The functions that complete the options of these fields, in whatever command.
BY_FIELD = {
    "activation": complete_activations,
    "backend": complete_backends,
    "env": complete_environments,
    "layout": complete_layouts,
    "to": complete_targets,
}
