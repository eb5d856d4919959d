"""`formats`, `layouts`, `backends`: installed plug-ins, their capabilities, missing dependencies."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ckpttool.core import plugins
from ckpttool.core.deferred import dataclass


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One plugin; `reads` and `writes` are None where they do not apply (a backend)."""

    name: str
    title: str
    available: bool
    extra: str | None
    reads: bool | None = None
    writes: bool | None = None
    seen: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def list_plugins(kind: plugins.Kind) -> tuple[PluginRow, ...]:
    """Return a row for every plugin of the kind, including those of other packages."""
    return tuple(_ROWS[kind](plugin) for plugin in plugins.installed(kind))


def _format_row(plugin: plugins.Plugin) -> PluginRow:
    module = plugin.load()
    return PluginRow(plugin.name, module.TITLE, True, plugin.extra, reads=True, writes=module.WRITES)


def _layout_row(plugin: plugins.Plugin) -> PluginRow:
    from ckpttool.libraries import recognize

    module = plugin.load()
    table = module.TABLE
    writes, version = recognize.can_write(module), table.seen or None
    return PluginRow(plugin.name, table.title, True, plugin.extra, reads=True, writes=writes, seen=version)


def _backend_row(plugin: plugins.Plugin) -> PluginRow:
    there = plugin.available()
    # The module is not imported: that would load its framework only for its name.
    return PluginRow(plugin.name, _BACKENDS.get(plugin.name, plugin.module), there, plugin.extra)


_BACKENDS = {
    "numpy": "NumPy on the CPU; no extra dependencies",
    "torch": "PyTorch on the CPU or a CUDA device",
    "tensorflow": "TensorFlow on the CPU or a GPU",
    "onnxruntime": "onnxruntime on the CPU; fastest for images and batches",
}
_ROWS = {"formats": _format_row, "layouts": _layout_row, "backends": _backend_row}
