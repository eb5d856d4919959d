"""What an agent of Stable-Baselines3 holds: state_dicts by member, settings, a text about its machine.

Sources in github.com/DLR-RM/stable-baselines3: stable_baselines3/common/save_util.py (`save_to_zip_file`),
stable_baselines3/common/utils.py (`get_system_info`), the `_get_torch_save_params` of every algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool import limits
from ckpttool.checkpoint import Integrity
from ckpttool.errors import CkpttoolError, UnsupportedError, some
from ckpttool.formats.listed import Listed, joined
from ckpttool.formats.pickled.load import Pickled
from ckpttool.formats.pickled.settings import settings
from ckpttool.formats.pickled.walk import Use, Walk
from ckpttool.formats.stable_baselines3 import owners
from ckpttool.formats.stable_baselines3.members import Members
from ckpttool.formats.torch_pickle import embedded
from ckpttool.leaf import Key, Leaf, Path, ValueLeaf, attr, key
from ckpttool.source import Covered, File, Shape, Span, Storage
from ckpttool.tree import Container, Tree
from ckpttool.wire.asked import Asked, merged, standing
from ckpttool.wire.pickle_reader import Global, Object

DATA, SYSTEM = attr("data"), attr("system_info")
_DATA, _VERSION, _SYSTEM, _STATE = "data", "_stable_baselines3_version", "system_info.txt", ".pth"
# What the library's other algorithms are, by the module of their policy's class (class names are users' own).
_KINDS = {
    "dqn": "a Q-network for discrete actions (DQN)",
    "qrdqn": "a quantile network for discrete actions (QR-DQN)",
    "ppo_mask": "a policy with masked actions",
    "maskable": "a policy with masked actions",
    "ars": "a policy without a critic (ARS)",
}
_DISCRETE = "a policy for discrete actions"


class Found(NamedTuple):
    """A file's tree and what is said of it; the fields are those of Checkpoint."""

    tree: Tree
    files: tuple[File, ...]
    writer: str
    integrity: Integrity
    notes: tuple[str, ...]
    asks: tuple[Asked, ...]


def listed(members: Members) -> Found:
    """Return what the members hold."""
    states = {name: _state(name, source) for name, source in members.sources.items() if _is_state(name)}
    told: list[Asked] = []
    data = _settings(members, told)
    walk = Walk(_use)
    if data is not None:
        walk.add(Pickled(data, members.sources[_DATA].length, None, 0, tuple(told)), (DATA,))
    system = _system(members)
    stems = {key(name.removesuffix(_STATE)): found.tree for name, found in states.items()}
    tree = owners.joined(_all(joined(stems, _native, Container("dict")), walk, system))
    named = [_DATA, _VERSION, _SYSTEM, *states]
    others = [name for name in members.sources if name not in named]
    notes = (
        *_policy(data or {}),
        *((f"members that are not listed: {some(others, 5)}",) if others else ()),
        *(f"{name}: {note}" for name, found in states.items() for note in found.notes),
    )
    return Found(
        tree,
        members.files,
        _writer(members),
        "crc32"
        if all(found.integrity == "crc32" for found in states.values()) and members.packed
        else "none",
        notes,
        merged(walk.asks, *(standing(found.asks, name) for name, found in states.items())),
    )


def _is_state(name: str) -> bool:
    # save_util.py, load_from_zip_file: every .pth is a state_dict, or the variables that are in none.
    return name.endswith(_STATE) and "/" not in name


def _state(name: str, source: Storage) -> Listed:
    if not isinstance(source, Span):
        raise UnsupportedError(
            f"member {name!r} is compressed, and is an archive itself",
            hint="unpack the file and name the folder, or pack it again without compression (zip -0)",
        )
    try:
        found = embedded.listed(source.file, source.offset, source.length)
    except CkpttoolError as error:
        raise error.located(path=name) from error.__cause__
    # zipfile, by which the library opens the member, compares the checksum of all of it.
    tree = found.tree
    leaves = {
        path: replace(leaf, source=Covered(leaf.source, source)) if isinstance(leaf, Leaf) else leaf
        for path, leaf in tree.leaves.items()
    }
    if not any(isinstance(leaf, Leaf) for leaf in leaves.values()):
        source.read()
    return replace(found, tree=Tree(leaves, tree.aliases, tree.containers))


def _native(step: Key, name: str) -> str:
    return f"{step.value}{_STATE}.{name}"


def _settings(members: Members, told: list[Asked]) -> dict[str, Any] | None:
    if _DATA not in members.sources:
        return None
    return settings(members.sources[_DATA], _DATA, members.files[0].path, told)


def _all(states: Tree, walk: Walk, system: Mapping[Path, ValueLeaf]) -> Tree:
    return Tree(
        {**states.leaves, **walk.leaves, **system},
        {**states.aliases, **walk.aliases},
        {**states.containers, **walk.containers},
    )


def _use(path: Path, dtype: str, shape: Shape) -> Use:  # noqa: ARG001 - the contract's
    # sbx keeps whole networks among the settings (flax/training/train_state.py, TrainState).
    names = [step.value for step in path]
    trained = "params" in names or "target_params" in names
    return Use("parameter" if dtype and trained and "opt_state" not in names else "other")


def _text(members: Members, name: str) -> str | None:
    source = members.sources.get(name)
    if source is None:
        return None
    if source.length > limits.current().text_bytes:
        raise limits.exceeded("text_bytes", f"member {name!r} is too long", source.length)
    return bytes(source.read()).decode("utf-8", "replace").strip()


def _writer(members: Members) -> str:
    version = _text(members, _VERSION)
    return f"Stable-Baselines3 {version[:40]}" if version else "Stable-Baselines3"


def _system(members: Members) -> dict[Path, ValueLeaf]:
    """Return the lines `- NAME: VALUE` of the text about the writer's machine (utils.py, get_system_info)."""
    lines = (line.removeprefix("- ").partition(": ") for line in (_text(members, _SYSTEM) or "").splitlines())
    return {(SYSTEM, key(name)): ValueLeaf(value) for name, colon, value in lines if colon}


def _policy(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the policy's class and, where this tool cannot play such an agent, what it is."""
    policy = data.get("policy_class")
    if not isinstance(policy, Global):
        return ()
    steps = policy.full.split(".")
    if steps[0] == "sbx":
        return (f"policy {policy.full}: an agent of sbx (JAX), whose networks lie pickled in its settings",)
    space = data.get("action_space")
    discrete = isinstance(space, Object) and not space.name.endswith(".Box")
    kind = next((_KINDS[step] for step in steps if step in _KINDS), _DISCRETE if discrete else None)
    return (f"policy {policy.full}" + (f": {kind}" if kind else ""),)
