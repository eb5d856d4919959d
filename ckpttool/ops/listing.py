"""`formats`, `layouts`, `backends`: what is installed, what each can do, what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpttool import plugins
from ckpttool.layouts import plan


@dataclass(frozen=True, slots=True)
class Row:
    """One plugin; `reads` and `writes` are None where the words mean nothing (a backend)."""

    name: str
    title: str
    available: bool
    extra: str | None
    reads: bool | None = None
    writes: bool | None = None
    seen: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "name": self.name,
            "title": self.title,
            "available": self.available,
            "extra": self.extra,
            "reads": self.reads,
            "writes": self.writes,
            "seen": self.seen,
        }


def listing(kind: plugins.Kind) -> tuple[Row, ...]:
    """Return a row for every plugin of the kind, other packages' included."""
    return tuple(_ROWS[kind](plugin) for plugin in plugins.installed(kind))


def _format(plugin: plugins.Plugin) -> Row:
    module = plugin.load()
    return Row(plugin.name, module.TITLE, True, plugin.extra, reads=True, writes=module.WRITES)


def _layout(plugin: plugins.Plugin) -> Row:
    module = plugin.load()
    table = module.TABLE
    writes, seen = plan.writes(module), table.seen or None
    return Row(plugin.name, table.title, True, plugin.extra, reads=True, writes=writes, seen=seen)


def _backend(plugin: plugins.Plugin) -> Row:
    there = plugin.available()
    # The module is not imported: it would load its framework only to say its name.
    return Row(plugin.name, _BACKENDS.get(plugin.name, plugin.module), there, plugin.extra)


_BACKENDS = {
    "numpy": "NumPy on the CPU; needs nothing else",
    "torch": "PyTorch on the CPU or a CUDA device",
    "tensorflow": "TensorFlow on the CPU or a GPU",
    "onnxruntime": "onnxruntime on the CPU; fastest for images and batches",
}
_ROWS = {"formats": _format, "layouts": _layout, "backends": _backend}
