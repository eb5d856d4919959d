"""What `--to` names: the format that writes it, the layout that an agent gets there, how it is spelled."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.errors import UsageError


class TargetKind(NamedTuple):
    """What `--to` names: the format that writes it, and the layout that an agent gets there.

    `options` are what the format's `pieces` is told besides the tree. `prefix` says that the target is no
    file itself but what the names of several begin with, `state` that its folder has a state file, as
    TensorFlow's do. `agent` says that nothing but an agent can be written so: the layout is the point. An
    `ending` is that of a name which stands for several files (`NAME.h5f`), and not before what they add.
    `plan` is the layout's function, of which a library with several forms of file has several.
    """

    format: str
    layout: str
    options: Mapping[str, Any] = MappingProxyType({})
    prefix: bool = False
    state: bool = False
    agent: bool = False
    ending: str = ""
    plan: str = "plan"


TARGETS: dict[str, TargetKind] = {
    "torch": TargetKind("pytorch", "td3_torch"),
    "tf": TargetKind("tensor_bundle", "td3_tf", MappingProxyType({"graph": True}), prefix=True, state=True),
    "tf1": TargetKind("tensor_bundle", "td3_tf", MappingProxyType({"graph": False}), prefix=True, state=True),
    "fujimoto": TargetKind("pytorch_set", "fujimoto", prefix=True, agent=True),
    "cleanrl": TargetKind("pytorch", "cleanrl", agent=True),
    "tianshou": TargetKind("pytorch", "tianshou", agent=True),
    "spinningup": TargetKind("pytorch", "spinningup", agent=True),
    "rsl_rl": TargetKind("pytorch", "rsl_rl", agent=True),
    "fasttd3": TargetKind("pytorch", "fasttd3", agent=True),
    "skrl": TargetKind("pytorch", "skrl", agent=True),
    "elegantrl": TargetKind("pytorch", "elegantrl", agent=True),
    "d3rlpy": TargetKind("d3rlpy", "d3rlpy", agent=True, plan="plan_d3"),
    "d3rlpy_model": TargetKind("pytorch", "d3rlpy", agent=True),
    "keras": TargetKind("keras_h5", "td3_tf", MappingProxyType({"root": "policy"})),
    "sb3": TargetKind("stable_baselines3", "stable_baselines3", agent=True),
    "tf2rl": TargetKind(
        "tensor_bundle", "tf2rl", MappingProxyType({"graph": True}), prefix=True, state=True, agent=True
    ),
    "tf_agents": TargetKind(
        "tensor_bundle", "tf_agents", MappingProxyType({"graph": True}), prefix=True, state=True, agent=True
    ),
    "acme": TargetKind(
        "tensor_bundle", "acme", MappingProxyType({"graph": True}), prefix=True, state=True, agent=True
    ),
    "keras_rl": TargetKind("keras_rl", "keras_rl", prefix=True, agent=True, ending=".h5f"),
    "rllib": TargetKind("rllib", "rllib", agent=True),
    "sb2": TargetKind("stable_baselines2", "stable_baselines2", agent=True),
    "safetensors": TargetKind("safetensors", "td3_torch"),
    "npz": TargetKind("npz", "td3_torch"),
}
# What is made to run and holds no tree that could be read back (ops/export.py).
EXPORTS = ("onnx",)
_SUFFIXES = {
    ".pt": "torch",
    ".pth": "torch",
    ".index": "tf",
    ".h5": "keras",
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".cleanrl_model": "cleanrl",
    ".d3": "d3rlpy",
    ".onnx": "onnx",
}
_INDEX = ".index"
# What people call a target besides its own word, in lower case without separators.
_MEANT = {
    "tensorflow": "tf",
    "tf2": "tf",
    "ckpt": "tf",
    "checkpoint": "tf",
    "tensorflow1": "tf1",
    "savedmodel": "tf",
    "pytorch": "torch",
    "pt": "torch",
    "pth": "torch",
    "h5": "keras",
    "hdf5": "keras",
    "weightsh5": "keras",
    "keras2": "keras",
    "keras3": "keras",
    "numpy": "npz",
    "np": "npz",
    "st": "safetensors",
    "stablebaselines": "sb2",
    "stablebaselines2": "sb2",
    "stablebaselines3": "sb3",
    "td3": "fujimoto",
}
_COMMON = "torch, tf, keras, safetensors, npz, onnx"
_ALL = "ckpttool convert --help lists all targets"


def _unknown(chosen: str, known: Collection[str]) -> UsageError:
    """Return the error for a target that does not exist, with the one that was probably meant."""
    plain = re.sub(r"[^a-z0-9]", "", chosen.lower())
    names = {re.sub("_", "", name): name for name in known}
    close = difflib.get_close_matches(plain, [*names, *_MEANT], 1)
    meant = names.get(plain) or _MEANT.get(plain)
    if meant is None and close:
        meant = names.get(close[0]) or _MEANT.get(close[0])
    suggested = f"; did you mean {meant!r}?" if meant is not None else ""
    hint = f"--to {meant}" if meant is not None else f"--to takes {_COMMON} or a library; {_ALL}"
    return UsageError(f"unknown target {chosen!r}{suggested}", hint=hint)


def word(target: str, to: str | None) -> str:
    """Return the word for what to write: `to`, else what the target's suffix means."""
    chosen, known = to or _SUFFIXES.get(os.path.splitext(target)[1]), (*TARGETS, *EXPORTS)
    if chosen is None:
        stem, suffix = os.path.splitext(target)
        hint = f"--to takes {_COMMON} or a library; {_ALL}"
        if suffix == ".keras":
            hint = f"name it {stem}.weights.h5: a .keras file holds the program's layers as well"
        raise UsageError("cannot infer the output format from the target's name", file=target, hint=hint)
    if chosen not in known:
        raise _unknown(chosen, known)
    return chosen


def target_kind(target: str, to: str | None) -> TargetKind:
    """Return what to write: what `to` names, else what the target's suffix means."""
    chosen = word(target, to)
    if chosen in EXPORTS:
        raise UsageError(f"{chosen} holds a network that runs, not a tree", hint="ckpttool convert makes one")
    return TARGETS[chosen]


def stem(target: str, kind: TargetKind) -> str:
    """Return what the names of the target's files begin with: a prefix may be named by its index."""
    return target.removesuffix(_INDEX) if kind.state else target.removesuffix(kind.ending) + kind.ending


def options(target: str, kind: TargetKind) -> dict[str, Any]:
    """Return the options of the format; TensorFlow counts saves, and a prefix ends with that count."""
    told = dict(kind.options)
    if told.get("graph"):
        number = re.search(r"-(\d{1,18})$", target, re.ASCII)
        told["counter"] = int(number[1]) if number else 1
    return told
