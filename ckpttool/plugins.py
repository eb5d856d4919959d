"""The registry: our formats, layouts and backends in plain sight, other people's by entry point."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpttool.errors import MissingExtraError, UsageError, choice

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["formats", "layouts", "backends"]

# What importlib.metadata takes for a package without entry points.
_UNREADABLE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


class Plugin(NamedTuple):
    """A name, the module behind it, and the libraries (of the extra) that it needs to work."""

    name: str
    module: str
    extra: str | None = None
    requires: tuple[str, ...] = ()
    owner: str = "ckpttool"

    def available(self) -> bool:
        """Say whether everything that the plugin needs is installed."""
        return all(importlib.util.find_spec(name) is not None for name in self.requires)

    def load(self) -> ModuleType:
        """Import the module; raise MissingExtraError when a library that it needs is not installed."""
        if not self.available():
            missing = [n for n in self.requires if importlib.util.find_spec(n) is None]
            raise MissingExtraError(
                f"{self.name} needs {', '.join(missing)}, which is not installed",
                hint=f"pip install 'ckpttool[{self.extra}]'" if self.extra else None,
            )
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            if self.owner == "ckpttool":
                raise
            raise UsageError(
                f"{self.name} of package {self.owner} cannot be loaded: {error}",
                hint=f"pip uninstall {self.owner}, or install what it needs",
            ) from error


BUILT_IN: dict[Kind, tuple[Plugin, ...]] = {
    "formats": (
        Plugin("tensor_bundle", "ckpttool.formats.tensor_bundle"),
        Plugin("tensorflow_v1", "ckpttool.formats.tensorflow_v1"),
        Plugin("saved_model", "ckpttool.formats.saved_model"),
        Plugin("keras_h5", "ckpttool.formats.keras_h5"),
        Plugin("keras_zip", "ckpttool.formats.keras_zip"),
        Plugin("keras_rl", "ckpttool.formats.keras_rl"),
        Plugin("pytorch", "ckpttool.formats.pytorch"),
        Plugin("pytorch_legacy", "ckpttool.formats.pytorch_legacy"),
        Plugin("pytorch_tar", "ckpttool.formats.pytorch_tar"),
        Plugin("pytorch_set", "ckpttool.formats.pytorch_set"),
        Plugin("pytorch_dcp", "ckpttool.formats.pytorch_dcp"),
        Plugin("stable_baselines2", "ckpttool.formats.stable_baselines2"),
        Plugin("stable_baselines3", "ckpttool.formats.stable_baselines3"),
        Plugin("rllib", "ckpttool.formats.rllib"),
        Plugin("d3rlpy", "ckpttool.formats.d3rlpy"),
        Plugin("safetensors", "ckpttool.formats.safetensors"),
        Plugin("npz", "ckpttool.formats.npz"),
        Plugin("onnx", "ckpttool.formats.onnx"),
        Plugin("sharded", "ckpttool.formats.sharded"),
        Plugin("pickle", "ckpttool.formats.pickle_file"),
    ),
    "layouts": (
        Plugin("td3_torch", "ckpttool.layouts.td3_torch"),
        Plugin("td3_tf", "ckpttool.layouts.td3_tf"),
        Plugin("tf2rl", "ckpttool.layouts.tf2rl"),
        Plugin("fujimoto", "ckpttool.layouts.fujimoto"),
        Plugin("stable_baselines2", "ckpttool.layouts.stable_baselines2"),
        Plugin("stable_baselines3", "ckpttool.layouts.stable_baselines3"),
        Plugin("cleanrl", "ckpttool.layouts.cleanrl"),
        Plugin("tianshou", "ckpttool.layouts.tianshou"),
        Plugin("spinningup", "ckpttool.layouts.spinningup"),
        Plugin("d3rlpy", "ckpttool.layouts.d3rlpy"),
        Plugin("rsl_rl", "ckpttool.layouts.rsl_rl"),
        Plugin("rl_games", "ckpttool.layouts.rl_games"),
        Plugin("fasttd3", "ckpttool.layouts.fasttd3"),
        Plugin("elegantrl", "ckpttool.layouts.elegantrl"),
        Plugin("skrl", "ckpttool.layouts.skrl"),
        Plugin("tf_agents", "ckpttool.layouts.tf_agents"),
        Plugin("acme", "ckpttool.layouts.acme"),
        Plugin("keras_rl", "ckpttool.layouts.keras_rl"),
        Plugin("rlgraph", "ckpttool.layouts.rlgraph"),
        Plugin("rllib", "ckpttool.layouts.rllib"),
        Plugin("rllib_policy", "ckpttool.layouts.rllib_policy"),
    ),
    "backends": (
        Plugin("numpy", "ckpttool.agents.backends.numpy"),
        Plugin("torch", "ckpttool.agents.backends.torch", "torch", ("torch",)),
        Plugin("tensorflow", "ckpttool.agents.backends.tensorflow", "tensorflow", ("tensorflow",)),
        Plugin("onnxruntime", "ckpttool.agents.backends.onnxruntime", "onnx", ("onnx", "onnxruntime")),
    ),
}


def installed(kind: Kind) -> tuple[Plugin, ...]:
    """Return ours and the entry points of group `ckpttool.<kind>`; a name claimed twice is an error."""
    found = {plugin.name: plugin for plugin in BUILT_IN[kind]}
    for point in _points(tuple(sys.path))[kind]:
        owner = point.dist.name if point.dist is not None else point.value
        if point.name in found:
            raise UsageError(
                f"two packages offer {kind[:-1]} {point.name!r}: {found[point.name].owner} and {owner}",
                hint="uninstall one of them",
            )
        found[point.name] = Plugin(point.name, point.value, owner=owner)
    return tuple(found.values())


@functools.lru_cache(maxsize=4)
def _points(folders: tuple[str, ...]) -> Mapping[Kind, Iterable[EntryPoint]]:
    if not _may_have_points(folders):
        return dict.fromkeys(BUILT_IN, ())
    from importlib.metadata import entry_points

    found = entry_points()
    return {kind: found.select(group=f"ckpttool.{kind}") for kind in BUILT_IN}


def _may_have_points(folders: tuple[str, ...]) -> bool:
    """Return whether an installed package may have entry points in our groups.

    Importing importlib.metadata and parsing the metadata of every package takes longer than a small
    conversion. This looks into the same files (importlib/metadata/__init__.py, FastPath.search) and returns
    True for what it does not read: archives, eggs, finders other than Python's own.
    """
    if any(hasattr(each, "find_distributions") and each is not PathFinder for each in sys.meta_path):
        return True
    for folder in map(os.fsdecode, folders):  # programs put Path objects there
        if folder.lower().endswith(".egg") or os.path.isfile(folder):
            return True
        with contextlib.suppress(*_UNREADABLE), os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                if entry.name.lower().endswith((".dist-info", ".egg-info")) and _has_points(entry.path):
                    return True
    return False


def _has_points(metadata: str) -> bool:
    with contextlib.suppress(*_UNREADABLE), open(os.path.join(metadata, "entry_points.txt"), "rb") as file:
        return b"[ckpttool." in file.read()
    return False


def find(kind: Kind, name: str) -> Plugin:
    """Return the plugin of that name; raise UsageError with the known names when there is none."""
    for plugin in BUILT_IN[kind]:
        if plugin.name == name:
            return plugin
    known = installed(kind)
    for plugin in known:
        if plugin.name == name:
            return plugin
    raise UsageError(
        f"no {kind[:-1]} is called {name!r}",
        hint=choice(name, (plugin.name for plugin in known)),
    )
