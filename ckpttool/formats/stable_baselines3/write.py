"""Writes an agent's tree by the library itself, which runs in a process of its own (child.py).

The process gets a folder with `request.json` (what to build, and where each tensor's bytes lie) and
`tensors.bin`, and leaves `agent.zip` there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path as Folder
from typing import IO, Any

from ckpttool import search_paths
from ckpttool.errors import MissingExtraError, UnsupportedError, WorkerError
from ckpttool.formats.probe import Piece
from ckpttool.leaf import Key, Leaf, Path, Record, ValueLeaf, attr, index, key
from ckpttool.tree import Tree

_DATA = attr("data")
_KINDS = {
    "stable_baselines3.sac.policies.SACPolicy": "SAC",
    "stable_baselines3.td3.policies.TD3Policy": "TD3",
}
_COUNTERS = ("_n_updates", "num_timesteps")
_SECONDS = 600
_LAST = 400
# The child sees what this process sees, and nothing that its environment adds.
_START = """
import json, sys
sys.path += [path for path in json.loads(sys.argv[1]) if path not in sys.path]
from ckpttool.formats.stable_baselines3.child import main
main(sys.argv[2])
"""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file; raise MissingExtraError without the library, UnsupportedError for another tree."""
    if importlib.util.find_spec("stable_baselines3") is None:
        raise MissingExtraError(
            "writing a file of Stable-Baselines3 needs stable_baselines3, which is not installed",
            hint="pip install 'ckpttool[sb3]'",
        )
    asked = request(tree)
    return (Piece("", lambda stream: _write(tree, asked, stream)),)


def request(tree: Tree) -> dict[str, Any]:
    """Return what to build: algorithm, sizes, bounds (the two small tensors are read), counters.

    Raise UnsupportedError for a tree that is no agent of the library.
    """
    policy = tree.get((_DATA, key("policy_class")))
    name = policy.value.name if isinstance(policy, ValueLeaf) and isinstance(policy.value, Record) else None
    if name not in _KINDS:
        raise UnsupportedError("only an agent can be written as a file of Stable-Baselines3", found=name)
    n_critics = _value(tree, "policy_kwargs", key("n_critics"))
    activation = _value(tree, "policy_kwargs", key("activation_fn"))
    kind = _KINDS[name]
    return {
        "algorithm": "DDPG" if (kind, n_critics) == ("TD3", 1) else kind,
        "obs_dim": _value(tree, "observation_space", attr("_shape"), index(0)),
        "observation_space": [_bounds(tree, end) for end in ("low", "high")],
        "low": _numbers(tree, "low"),
        "high": _numbers(tree, "high"),
        "net_arch": {each: _widths(tree, each) for each in ("pi", "qf")},
        "activation": activation.name.rpartition(".")[2] if isinstance(activation, Record) else "ReLU",
        "n_critics": n_critics,
        "counters": {
            each: found
            for each in ("_n_updates", "num_timesteps")
            if (found := _value(tree, each)) is not None
        },
    }


def _value(tree: Tree, name: str, *steps: Key) -> Any:
    leaf = tree.get((_DATA, key(name), *steps))
    return leaf.value if isinstance(leaf, ValueLeaf) else None


def _numbers(tree: Tree, end: str) -> list[float]:
    leaf = tree[_DATA, key("action_space"), attr(end)]
    return leaf.array().tolist() if isinstance(leaf, Leaf) else []


def _bounds(tree: Tree, end: str) -> list[Any]:
    """Return the type and the numbers of one end of the observation space, nothing without them."""
    leaf = tree.get((_DATA, key("observation_space"), attr(end)))
    return [leaf.dtype, [repr(n) for n in leaf.array().tolist()]] if isinstance(leaf, Leaf) else []


def _widths(tree: Tree, name: str) -> list[Any]:
    place = (_DATA, key("policy_kwargs"), key("net_arch"), key(name))
    return [leaf.value for path, leaf in tree.plain() if path[:-1] == place]


def _entries(tree: Tree) -> Iterator[tuple[Path, Leaf | ValueLeaf]]:
    """Go through all that belongs to a state_dict, tensors of several names under each."""
    for path, leaf in tree.items():
        if path[0] != _DATA:
            yield path, leaf
            yield from ((alias.path, leaf) for alias in tree.aliases.get(path, ()))


def _write(tree: Tree, asked: dict[str, Any], stream: IO[bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix="ckpttool-") as name:
        folder = Folder(name)
        entries = []
        with open(folder / "tensors.bin", "wb") as tensors:
            for path, leaf in _entries(tree):
                what: dict[str, Any] = {"path": [[step.kind, step.value] for step in path]}
                if isinstance(leaf, Leaf):
                    what |= {"dtype": leaf.dtype, "shape": list(leaf.shape), "offset": tensors.tell()}
                    tensors.write(leaf.read())
                else:
                    what["value"] = leaf.value
                entries.append(what)
        (folder / "request.json").write_text(json.dumps({**asked, "entries": entries}))
        _run(name)
        with open(folder / "agent.zip", "rb") as made:
            shutil.copyfileobj(made, stream)


def _run(folder: str) -> None:
    """Let the library do its part; raise WorkerError with its last words if it fails."""
    paths = [_PACKAGE, *(path for path in sys.path if os.path.isabs(path))]
    command = [sys.executable, "-I", "-c", _START, json.dumps(paths), folder]
    try:
        done = subprocess.run(  # noqa: S603  # our own module, run by our own interpreter
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            cwd=folder,  # the library imports matplotlib, which reads ./matplotlibrc
            env={**search_paths.environment(), "OMP_NUM_THREADS": "1"},  # nothing is computed
        )
    except subprocess.TimeoutExpired:
        raise WorkerError(f"Stable-Baselines3 did not write the agent within {_SECONDS} s") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        words = "".join(letter for letter in " ".join(said) if letter.isprintable())[:_LAST]
        raise WorkerError(f"Stable-Baselines3 did not write the agent; it last said: {words}")
