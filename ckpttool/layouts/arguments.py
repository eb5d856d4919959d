"""The arguments of a run of tf2rl, `args.txt` beside its checkpoints: of them only the environment is used.

Source: github.com/keiohta/tf2rl, tf2rl/misc/prepare_output_dir.py: the command's arguments as JSON. Its
examples call the environment `env_name`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from ckpttool.layouts.canonical import Binding
from ckpttool.leaf import ValueLeaf, key
from ckpttool.tree import Tree

_NAME = "args.txt"
_KEYS = ("env_name", "env_id", "env")
# A plain id of an environment: what stands before a colon would be imported.
_ENV = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+")


def companions(location: str) -> Sequence[str]:
    """Return the file of arguments in the checkpoint's folder."""
    return (os.path.join(os.path.dirname(location), _NAME),)


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with the environment that the arguments name, the same one if they name none."""
    for name in _KEYS:
        leaf = tree.get((key(name),))
        env = plain_id(leaf.value) if isinstance(leaf, ValueLeaf) else None
        if env is not None:
            return replace(binding, facts=binding.facts.read(os.path.basename(file), env=env))
    return binding


def plain_id(value: object) -> str | None:
    """Return the value if it is the plain id of an environment, None for anything else."""
    return value if isinstance(value, str) and _ENV.fullmatch(value) else None
