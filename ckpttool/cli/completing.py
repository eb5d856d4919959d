"""What a shell offers where TAB is pressed: words that an option or an argument takes.

Each function gets what has been typed of the word. Nothing of this is imported or run by an ordinary command
but these few definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpttool.plugins import Kind


def layouts(incomplete: str) -> list[str]:
    """Return the layouts that can be named."""
    return _installed("layouts", incomplete)


def backends(incomplete: str) -> list[str]:
    """Return the backends."""
    return _installed("backends", incomplete)


def targets(incomplete: str) -> list[str]:
    """Return what `convert --to` takes."""
    from ckpttool.ops.targets import EXPORTS, TARGETS

    return _beginning((*TARGETS, *EXPORTS), incomplete)


def schemas(incomplete: str) -> list[str]:
    """Return the names of our JSON Schemas."""
    from ckpttool.ops.schemas import names

    return _beginning(names(), incomplete)


def environments(incomplete: str) -> list[str]:
    """Return the environments that Gymnasium itself registers; none where it is not installed."""
    from ckpttool.agents.envs.registry import gymnasium
    from ckpttool.errors import MissingExtraError

    try:
        return _beginning(gymnasium().registry, incomplete)
    except MissingExtraError:
        return []


def among(*words: str) -> Callable[[str], list[str]]:
    """Return the function that offers these words."""

    def offered(incomplete: str) -> list[str]:
        return _beginning(words, incomplete)

    return offered


def _installed(kind: Kind, incomplete: str) -> list[str]:
    from ckpttool import plugins

    return _beginning((plugin.name for plugin in plugins.installed(kind)), incomplete)


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
