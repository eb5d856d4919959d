"""Several PyTorch files that are one agent: PREFIX_actor, PREFIX_critic and their optimizers.

Source of the names: github.com/sfujim/TD3, TD3.py, `TD3.save`.
"""

from __future__ import annotations

import os

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats import pytorch
from ckpttool.formats.listed import joined
from ckpttool.formats.probe import Probe
from ckpttool.leaf import key
from ckpttool.tree import Container

NAME = "pytorch_set"
TITLE = "PyTorch files of one agent with a common prefix"
WRITES = False
FRAMEWORK = "torch"

_MEMBERS = ("actor", "actor_target", "actor_optimizer", "critic", "critic_target", "critic_optimizer")
_SUFFIXES = ("", ".pth", ".pt")


def claims(probe: Probe) -> str | None:
    """Return the prefix if no file has that name but `PREFIX_actor` and `PREFIX_critic` exist."""
    if probe.kind != "missing":
        return None
    files = _files(probe.path, probe.names)
    return probe.path if {"actor", "critic"} <= files.keys() else None


def read(location: str) -> Checkpoint:
    """List all files of the set as one tree: each file's entries under its member's name.

    Native keys are `actor:l1.weight`.
    """
    folder = os.path.dirname(location) or "."
    read_files = {
        member: pytorch.read(file) for member, file in _files(location, frozenset(os.listdir(folder))).items()
    }
    tree = joined(
        {key(member): one.tree for member, one in read_files.items()},
        lambda member, name: f"{member.value}:{name}",
        Container("dict"),
    )
    parts = tuple(read_files.values())
    return Checkpoint(
        path=location,
        format=NAME,
        tree=tree,
        files=tuple(file for one in parts for file in one.files),
        writer=parts[0].writer,
        integrity="crc32" if all(one.integrity == "crc32" for one in parts) else "none",
        notes=tuple(note for one in parts for note in one.notes),
    )


def _files(prefix: str, names: frozenset[str]) -> dict[str, str]:
    folder, stem = os.path.split(prefix)
    return {
        member: os.path.join(folder, f"{stem}_{member}{suffix}")
        for suffix in reversed(_SUFFIXES)
        for member in _MEMBERS
        if f"{stem}_{member}{suffix}" in names
    }
