"""Read, convert, check and play reinforcement-learning checkpoints, without the program that wrote them.

>>> import ckpttool
>>> checkpoint = ckpttool.open("sample_ckpts/td3_pendulum_tf/ckpt-15000")
>>> checkpoint["policy/actor/l1/kernel"]
<Handle policy/actor/l1/kernel float32[3, 64] parameter>
>>> checkpoint["policy/actor/l1/kernel"].numpy().shape
(3, 64)

Importing the package loads no framework and not even numpy; names arrive when they are first used.
"""

import sys

# `python -m ckpttool` puts the working directory first on the path, and `import __future__` would be the
# first module to come from there. While Python looks for the module to run, the first argument is "-m".
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] in (["ckpttool"], ["-mckpttool"]):
    from ckpttool import search_paths

    search_paths.leave_working_directory(first=True)

import importlib
from typing import TYPE_CHECKING, Any

from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool import errors
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.errors import CkpttoolError
    from ckpttool.face.branch import Branch
    from ckpttool.face.handle import Handle
    from ckpttool.formats.resolve import open_checkpoint as open  # noqa: A004  # ckpttool.open(path)
    from ckpttool.leaf import Leaf, ValueLeaf, display
    from ckpttool.live.flatten import flatten_with_path
    from ckpttool.ops.agent_facts import AgentFacts
    from ckpttool.ops.convert import convert
    from ckpttool.ops.diff import diff
    from ckpttool.ops.digest import digest
    from ckpttool.ops.doctor import diagnose
    from ckpttool.ops.evaluate import evaluate
    from ckpttool.ops.evaluation import Protocol
    from ckpttool.ops.load_into import load_into
    from ckpttool.ops.save import save
    from ckpttool.ops.schemas import schema
    from ckpttool.ops.stats import stats
    from ckpttool.ops.summary import summary
    from ckpttool.ops.sweep import sweep
    from ckpttool.ops.verify import verify
    from ckpttool.sidecar import Sidecar
    from ckpttool.tree import Tree

__all__ = [
    "AgentFacts",
    "Branch",
    "Checkpoint",
    "CkpttoolError",
    "Handle",
    "Leaf",
    "Protocol",
    "Sidecar",
    "Tree",
    "ValueLeaf",
    "__version__",
    "convert",
    "diagnose",
    "diff",
    "digest",
    "display",
    "errors",
    "evaluate",
    "flatten_with_path",
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
    "AgentFacts": "ops.agent_facts",
    "Branch": "face.branch",
    "Checkpoint": "checkpoint",
    "CkpttoolError": "errors",
    "Handle": "face.handle",
    "Leaf": "leaf",
    "Protocol": "ops.evaluation",
    "Sidecar": "sidecar",
    "Tree": "tree",
    "ValueLeaf": "leaf",
    "convert": "ops.convert",
    "diagnose": "ops.doctor",
    "diff": "ops.diff",
    "digest": "ops.digest",
    "display": "leaf",
    "evaluate": "ops.evaluate",
    "flatten_with_path": "live.flatten",
    "load_into": "ops.load_into",
    "open": "formats.resolve",
    "save": "ops.save",
    "schema": "ops.schemas",
    "stats": "ops.stats",
    "summary": "ops.summary",
    "sweep": "ops.sweep",
    "verify": "ops.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name's home when the name is first used."""
    if name == "errors":
        return importlib.import_module("ckpttool.errors")
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
