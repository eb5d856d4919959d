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
from ckpttool.errors import some
from ckpttool.formats.pickled import making
from ckpttool.layouts import arguments
from ckpttool.layouts.canonical import Binding, Facts, Norm
from ckpttool.layouts.statistics import DICT_UNKNOWN
from ckpttool.leaf import Leaf, ValueLeaf, key
from ckpttool.ledger import unknown
from ckpttool.sidecar import are_arguments
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
UNTOLD = unknown(
    "observation statistics",
    "whether training normalised observations (VecNormalize keeps statistics in a file of its own)",
)
"""What an agent lacks until a file beside it says otherwise."""
# Arguments of an environment that say how it is drawn.
_DRAWN = ("render_mode", "width", "height", "camera_id", "camera_name", "default_camera_config")
_MISSING = unknown(
    "observation statistics",
    "the observation statistics that training used (config.yml says normalize)",
    decides=True,
)


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
            return _with(binding, _told(binding.facts).lacking(DICT_UNKNOWN))
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
    named = {shown.partition("/")[0] for shown in found}
    facts = _told(binding.facts) if named & {"policy", "normalize"} else binding.facts
    if _asks_for_statistics(found) and "norm" not in binding.facts.said:
        facts = facts.lacking(_MISSING)
    wrappers = tuple(
        named for group in ("env_wrapper", "vec_env_wrapper") for named in _wrappers(_nested(tree, group))
    )
    stack = _plain(found, "frame_stack")
    if isinstance(stack, int) and not isinstance(stack, bool) and stack > 1:
        facts = facts.read(_SETTINGS[0], stacked=stack)
    if wrappers or facts.stacked > 1:
        facts = facts.read(_SETTINGS[0], wrappers=wrappers)
    facts = _with_arguments(facts, _SETTINGS[0], _nested(tree, "env_kwargs"))
    return binding if facts == binding.facts else _with(binding, facts)


def _nested(tree: Tree, group: str) -> Any:
    """Return what the settings hold below a name as lists, mappings and plain values."""
    found: dict[Any, Any] = {}
    for path, leaf in tree.plain():
        if path[:1] != (key(group),):
            continue
        place = found
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = leaf.value
    return _plainly(found.get(key(group)))


def _plainly(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if all(step.kind == "index" for step in node):
        return [_plainly(each) for each in node.values()]
    return {str(step.value): _plainly(each) for step, each in node.items()}


def _wrappers(node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the wrappers of a name, a mapping of one name to its arguments, or a list of those."""
    for each in node if isinstance(node, list) else [node]:
        if isinstance(each, str):
            yield each, {}
        elif isinstance(each, dict):
            for name, arguments in each.items():
                yield name, arguments if isinstance(arguments, dict) else {}


def _with_arguments(facts: Facts, file: str, arguments: Any) -> Facts:
    """Return the facts with the environment's arguments; none is taken that may name a file, or is large."""
    if not isinstance(arguments, dict) or not arguments:
        return facts
    taken = {name: value for name, value in arguments.items() if name not in _DRAWN}
    plain = {name: value for name, value in taken.items() if are_arguments({name: value})}
    all_of_them = {**facts.env_arguments, **plain}
    if not are_arguments(all_of_them):
        plain = {}
    left = sorted(taken.keys() - plain.keys())
    if left:
        what = f"arguments of the environment in {file} ({some(left, 3)}): only a few numbers are taken"
        facts = facts.lacking(unknown("environment", what, decides=True))
    return facts.read(file, env_arguments=all_of_them) if plain else facts


def _asks_for_statistics(found: dict[str, Leaf | ValueLeaf]) -> bool:
    # `normalize` is a truth value, or the text of a dict of VecNormalize's arguments.
    told = _plain(found, "normalize")
    if isinstance(told, str):
        return re.search(r"norm_obs['\"]?\s*[:=]\s*False", told) is None
    # A mapping of arguments asks for it as well; norm_obs is true unless it is said to be false.
    groups = ("normalize", "normalize_kwargs")
    quiet = any(_plain(found, f"{group}/norm_obs") is False for group in groups)
    return (bool(told) or any(shown.startswith("normalize/") for shown in found)) and not quiet


def _arguments(binding: Binding, tree: Tree) -> Binding:
    """Take the environment's plain id and its arguments; an id that asks for an import is not used."""
    found = {shown: tree[path] for path, shown in tree.names.items()}
    env = arguments.plain_id(_plain(found, "env"))
    facts = binding.facts if env is None else binding.facts.read(_SETTINGS[1], env=env)
    facts = _with_arguments(facts, _SETTINGS[1], _nested(tree, "env_kwargs"))
    return binding if facts is binding.facts else _with(binding, facts)


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
