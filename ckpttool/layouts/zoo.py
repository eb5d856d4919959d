"""What RL-Zoo, Stable-Baselines' callbacks and the hub put beside an agent: statistics, arguments, settings.

Sources in github.com/DLR-RM/rl-baselines3-zoo: rl_zoo3/exp_manager.py (`_save_config`, `save_trained_model`:
`<folder>/<env>/vecnormalize.pkl`, `config.yml`, `args.yml`), rl_zoo3/utils.py (`get_saved_hyperparams`: what
`normalize` means). stable_baselines3/common/callbacks.py, CheckpointCallback (`_checkpoint_path`);
common/vec_env/vec_normalize.py for how statistics are used. On the hub the file is called vec_normalize.pkl.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool import places
from ckpttool.formats.pickled import making
from ckpttool.layouts import arguments
from ckpttool.layouts.canonical import Binding, Facts, Norm
from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.tree import Tree
from ckpttool.wire import pickle_numpy
from ckpttool.wire.pickle_values import Global, Object
from ckpttool.wire.pickle_writer import dumps

_STATISTICS = ("vecnormalize.pkl", "vec_normalize.pkl", "obs_rms.pkl")
STATISTICS_FILE = _STATISTICS[0]
_VEC_ENV = "stable_baselines3.common.vec_env.vec_normalize"
_MEAN_STD = Global("stable_baselines3.common.running_mean_std", "RunningMeanStd")
_UNLIMITED = 1e30  # what VecNormalize limits to where nothing is limited
_SETTINGS = ("config.yml", "args.yml")
_STEPS = re.compile(r"(.*)_(\d+_steps)")
_RUN = re.compile(r"(.+)_\d+")
UNTOLD = "whether training normalised observations (VecNormalize keeps statistics in a file of its own)"
"""What an agent lacks until a file beside it says otherwise."""
_MISSING = "the observation statistics that training used (config.yml says normalize)"


def companions(location: str) -> list[str]:
    """Return the files that may tell more, the nearest first; statistics before what asks for them."""
    folder, name = os.path.split(os.path.normpath(location))
    stem = os.path.splitext(name)[0]
    steps = _STEPS.fullmatch(stem)
    own = [os.path.join(folder, f"{steps[1]}_vecnormalize_{steps[2]}.pkl")] if steps else []
    folders = list(_folders(folder, stem))
    names = (*_STATISTICS, *_SETTINGS)
    return [*own, *(os.path.join(each, file) for file in names for each in folders)]


def _folders(folder: str, stem: str) -> Iterator[str]:
    yield os.path.join(folder, stem)
    # logs/td3/Pendulum-v1_3/best_model.zip: statistics lie in .../Pendulum-v1_3/Pendulum-v1.
    run = _RUN.fullmatch(os.path.basename(places.abspath(folder)))
    if run is not None and run[1] != stem:
        yield os.path.join(folder, run[1])
    yield folder


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with what one of the files says; the same object when it says nothing new."""
    name = os.path.basename(file)
    if name == _SETTINGS[0]:
        return _configured(binding, tree)
    if name == _SETTINGS[1]:
        return _arguments(binding, tree)
    return _normalised(binding, tree, name)


def _normalised(binding: Binding, tree: Tree, name: str) -> Binding:
    """Take the running statistics; `norm_obs` may say that observations were left as they are."""
    if "norm" in binding.facts.said:
        return binding
    found = {shown: tree[path] for path, shown in tree.names.items()}
    mean, var = (found.get(f"{at}{n}") for at, n in (("obs_rms/", "mean"), ("obs_rms/", "var")))
    if mean is None and not any(shown.startswith(("obs_rms", "ret_rms")) for shown in found):
        mean, var = found.get("mean"), found.get("var")
    if _plain(found, "norm_obs") is False:
        return _with(binding, _told(binding.facts.read(name, norm=None)))
    if not isinstance(mean, Leaf) or not isinstance(var, Leaf):
        if any(shown.startswith("obs_rms/") for shown in found):
            lacks = "how the parts of a Dict observation are normalised"
            return _with(binding, _told(binding.facts).lacking(lacks))
        return binding
    epsilon, clip = _plain(found, "epsilon"), _plain(found, "clip_obs")
    norm = Norm(
        mean,
        var,
        epsilon=float(epsilon) if isinstance(epsilon, int | float) else 1e-8,
        clip=_limit(clip),
    )
    return _with(binding, _told(binding.facts.read(name, norm=norm)))


def _limit(clip: object) -> float | None:
    if not isinstance(clip, int | float):
        return 10.0
    return None if clip >= _UNLIMITED else float(clip)


def _configured(binding: Binding, tree: Tree) -> Binding:
    """Take from the hyperparameters whether statistics are needed, and what wraps the environment."""
    found = {shown: tree[path] for path, shown in tree.names.items()}
    # Another program's config.yml says nothing by its silence; the zoo's always names the policy.
    lacks = list((_told(binding.facts) if "policy" in found or "normalize" in found else binding.facts).lacks)
    if _asks_for_statistics(found) and "norm" not in binding.facts.said:
        lacks.append(_MISSING)
    wrappers = [
        leaf.value
        for shown, leaf in found.items()
        if shown.split("/")[0] == "env_wrapper" and isinstance(leaf, ValueLeaf) and leaf.value is not None
    ]
    lacks += [f"what training's wrapper {str(wrapper)[:80]} does to the environment" for wrapper in wrappers]
    if lacks == list(binding.facts.lacks):
        return binding
    return _with(binding, binding.facts._replace(lacks=tuple(lacks)))


def _asks_for_statistics(found: dict[str, Leaf | ValueLeaf]) -> bool:
    # `normalize` is a truth value, or the text of a dict of VecNormalize's arguments.
    told = _plain(found, "normalize")
    if isinstance(told, str):
        return re.search(r"norm_obs['\"]?\s*[:=]\s*False", told) is None
    quiet = _plain(found, "normalize_kwargs/norm_obs") is False
    return bool(told) and not quiet


def _arguments(binding: Binding, tree: Tree) -> Binding:
    """Take the environment's plain id; one that asks for an import, or for arguments, is not used."""
    found = {shown: tree[path] for path, shown in tree.names.items()}
    env = arguments.plain_id(_plain(found, "env"))
    more = any(
        shown.split("/")[0] == "env_kwargs" and isinstance(leaf, ValueLeaf) and leaf.value is not None
        for shown, leaf in found.items()
    )
    if env is None:
        return binding
    if more:
        lacks = f"the environment: args.yml gives {env} arguments, which are not taken from a file"
        return _with(binding, binding.facts.lacking(lacks))
    return _with(binding, binding.facts.read("args.yml", env=env))


def _plain(found: dict[str, Leaf | ValueLeaf], name: str) -> object:
    leaf = found.get(name)
    return leaf.value if isinstance(leaf, ValueLeaf) else None


def _told(facts: Facts) -> Facts:
    return facts._replace(lacks=tuple(what for what in facts.lacks if what != UNTOLD))


def _with(binding: Binding, facts: Facts) -> Binding:
    return replace(binding, facts=facts)


def statistics_file(norm: Mapping[str, Any], low: Sequence[float], high: Sequence[float]) -> bytes:
    """Return the file that `VecNormalize.load` of Stable-Baselines3 reads: statistics that change no more.

    `norm` holds mean, var, epsilon and clip as a sidecar does, `low` and `high` are the action bounds.
    Rewards are left as they are, because their statistics are not known.
    """
    size = len(norm["mean"])
    clip = norm.get("clip")
    free = [float("inf")] * size
    box = Global("gymnasium.spaces.box", "Box")
    state = {
        "num_envs": 1,
        "observation_space": making.box(box, _row([-each for each in free], "f4"), _row(free, "f4")),
        "action_space": making.box(box, _row(low, "f4"), _row(high, "f4")),
        "render_mode": None,
        "reset_infos": [{}],
        "norm_obs": True,
        "norm_obs_keys": None,
        "obs_rms": _running(_row(norm["mean"]), _row(norm["var"])),
        "ret_rms": _running(_row(0.0), _row(1.0)),
        "clip_obs": _UNLIMITED if clip is None else float(clip),
        "clip_reward": 10.0,
        "gamma": 0.99,
        "epsilon": float(norm.get("epsilon", 1e-8)),
        "training": False,
        "norm_reward": False,
        "old_reward": _row([]),
    }
    return dumps(_made(Global(_VEC_ENV, "VecNormalize"), state), making.PROTOCOL)


def _running(mean: Object, var: Object) -> Object:
    return _made(_MEAN_STD, {"mean": mean, "var": var, "count": 1e4})


def _made(name: Global, state: Mapping[str, Any]) -> Object:
    """Return an object of that class without a call of its own code, as pickle makes one."""
    return Object(Global("copyreg", "__newobj__"), (name,), 0, state=dict(state))


def _row(numbers: Sequence[float] | float, dtype: str = "f8") -> Object:
    """Return an array [n], or [] of one number."""
    shape = () if isinstance(numbers, float) else (len(numbers),)
    values = [numbers] if isinstance(numbers, float) else numbers
    code = {"f4": "f", "f8": "d"}[dtype]
    return pickle_numpy.stored(dtype, shape, struct.pack(f"<{len(values)}{code}", *values))
