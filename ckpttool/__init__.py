"""Read, convert, check and play reinforcement-learning checkpoints, without the program that wrote them.

>>> import ckpttool
>>> checkpoint = ckpttool.open("sample_ckpts/td3_pendulum_tf/ckpt-15000")
>>> checkpoint["policy/actor/l1/kernel"]
<Handle policy/actor/l1/kernel float32[3, 64] parameter>
>>> checkpoint["policy/actor/l1/kernel"].numpy().shape
(3, 64)

Importing the package loads no framework and not even numpy; names arrive when they are first used.
"""

# ruff: noqa: E402  # Ctrl-C and the search path come before other imports

import os
import sys


def exit_interrupted(signum: int, frame: object) -> None:  # noqa: ARG001
    """End the process on Ctrl-C without a traceback, until the command handles it: nothing to clean up."""
    os._exit(128 + signum)


# `python -m ckpttool` puts the working directory first on the path, and `import __future__` would be the
# first module to come from there. While Python looks for the module to run, the first argument is "-m".
_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] in (["ckpttool"], ["-mckpttool"])
if _module or "".join(sys.argv[:1]).endswith(("/ckpttool", "\\ckpttool", "\\ckpttool.exe")):
    import _signal  # type: ignore[import-not-found]  # built in: `signal` would come from that folder

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, exit_interrupted)
if _module:
    from ckpttool.core import search_paths

    search_paths.leave_working_directory(first=True)

import importlib
from typing import TYPE_CHECKING, Any

from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool import graphs
    from ckpttool.commands.convert import convert
    from ckpttool.commands.diff import diff
    from ckpttool.commands.digest import digest
    from ckpttool.commands.doctor import diagnose
    from ckpttool.commands.evaluate import Protocol, evaluate
    from ckpttool.commands.evidence import AgentFacts
    from ckpttool.commands.export_onnx import ExportOptions, export
    from ckpttool.commands.inspect import schema, summary
    from ckpttool.commands.load_agent import LoadedAgent, load_agent
    from ckpttool.commands.load_into import FillOptions, load_into
    from ckpttool.commands.options import ConversionOptions
    from ckpttool.commands.save import save
    from ckpttool.commands.stats import stats
    from ckpttool.commands.sweep import sweep
    from ckpttool.commands.verify import VerificationOptions, verify
    from ckpttool.core import errors
    from ckpttool.core.checkpoint import Branch, Checkpoint, Handle
    from ckpttool.core.errors import CkpttoolError
    from ckpttool.core.sidecar import Sidecar
    from ckpttool.core.tree import Leaf, Tree, ValueLeaf, display
    from ckpttool.formats.detect import open_checkpoint as open  # noqa: A004  # ckpttool.open(path)
    from ckpttool.networks.live_trees import flatten_with_path

__all__ = [
    "AgentFacts",
    "Branch",
    "Checkpoint",
    "CkpttoolError",
    "ConversionOptions",
    "ExportOptions",
    "FillOptions",
    "Handle",
    "Leaf",
    "LoadedAgent",
    "Protocol",
    "Sidecar",
    "Tree",
    "ValueLeaf",
    "VerificationOptions",
    "__version__",
    "convert",
    "diagnose",
    "diff",
    "digest",
    "display",
    "errors",
    "evaluate",
    "export",
    "flatten_with_path",
    "graphs",
    "load_agent",
    "load_into",
    "open",
    "save",
    "schema",
    "stats",
    "summary",
    "sweep",
    "verify",
]

_HOMES = {
    "AgentFacts": "commands.evidence",
    "Branch": "core.checkpoint",
    "Checkpoint": "core.checkpoint",
    "CkpttoolError": "core.errors",
    "ConversionOptions": "commands.options",
    "ExportOptions": "commands.export_onnx",
    "FillOptions": "commands.load_into",
    "Handle": "core.checkpoint",
    "Leaf": "core.tree",
    "LoadedAgent": "commands.load_agent",
    "Protocol": "commands.evaluate",
    "Sidecar": "core.sidecar",
    "Tree": "core.tree",
    "ValueLeaf": "core.tree",
    "VerificationOptions": "commands.verify",
    "convert": "commands.convert",
    "diagnose": "commands.doctor",
    "diff": "commands.diff",
    "digest": "commands.digest",
    "display": "core.tree",
    "evaluate": "commands.evaluate",
    "export": "commands.export_onnx",
    "flatten_with_path": "networks.live_trees",
    "load_agent": "commands.load_agent",
    "load_into": "commands.load_into",
    "open": "formats.detect",
    "save": "commands.save",
    "schema": "commands.inspect",
    "stats": "commands.stats",
    "summary": "commands.inspect",
    "sweep": "commands.sweep",
    "verify": "commands.verify",
}
_MODULES = {"errors": "core.errors", "graphs": "graphs"}


def __getattr__(name: str) -> Any:
    """Import a public name's home when the name is first used."""
    if name in _MODULES:
        return importlib.import_module(f"ckpttool.{_MODULES[name]}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckpttool' has no attribute {name!r}")
    stored = "open_checkpoint" if name == "open" else name
    value = getattr(importlib.import_module(f"ckpttool.{home}"), stored)
    globals()[name] = value
    return value


def __dir__() -> "list[str]":
    """List the public names."""
    return sorted(__all__)
