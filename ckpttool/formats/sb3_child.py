"""Build an agent with Stable-Baselines3 and let it save itself, in a separate process (see sb3.py).

Source: github.com/DLR-RM/stable-baselines3, stable_baselines3/common/base_class.py,
`BaseAlgorithm.load`: a model is created without an environment, gets its spaces, is set up, and
loads its state_dicts.
"""

from __future__ import annotations

import json
import os
import zipfile
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred

if TYPE_CHECKING:
    from typing import NotRequired, TypedDict

    class AgentRequest(TypedDict):
        """The agent to build; `action_space` has the arguments of a Box, a Discrete or a MultiDiscrete."""

        package: str
        algorithm: str
        obs_dim: int
        observation_space: list[list[Any]]
        action_space: dict[str, list[Any]]
        policy_kwargs: dict[str, Any]
        activation: str | None
        counters: dict[str, Any]
        entries: NotRequired[list[StateEntry]]

    class StateEntry(TypedDict, total=False):
        """An entry of the state_dicts: a plain value, or a tensor at an offset in bytes of `tensors.bin`."""

        path: list[list[Any]]
        value: Any
        dtype: str
        shape: list[int]
        offset: int


# zipfile's value for a file without a date, so that the same agent gives the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)
_ADDRESS = deferred.compile(rb" at 0x[0-9a-f]+")
_BUFFER = 1_000_000  # default in off_policy_algorithm.py


def main(folder: str) -> None:
    """Read the request in the folder and write `agent.zip` there."""
    with open(os.path.join(folder, "request.json")) as file:
        request: AgentRequest = json.load(file)
    states = _read_states(request["entries"], os.path.join(folder, "tensors.bin"))
    model = _build_algorithm(request, states)
    _load_states(model, states)
    for name, value in request["counters"].items():
        setattr(model, name, value)
    if hasattr(model, "buffer_size"):
        model.buffer_size = _BUFFER
    dated = os.path.join(folder, "dated.zip")
    model.save(dated)
    _strip_timestamps(dated, os.path.join(folder, "agent.zip"))


def _read_states(entries: list[StateEntry], file: str) -> dict[str, Any]:
    """Return the state_dicts by member: nested dicts and lists, with tensors built from the file's bytes."""
    import torch

    with open(file, "rb") as stream:
        data = bytearray(stream.read())
    states: dict[str, Any] = {}
    for entry in entries:
        value = entry.get("value")
        if "dtype" in entry:
            dtype = getattr(torch, entry["dtype"])
            count = 1
            for extent in entry["shape"]:
                count *= extent
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry["offset"])
            value = flat.reshape(entry["shape"]).clone()
        *owners, (_, last) = entry["path"]
        group = states
        for _, step in owners:
            group = group.setdefault(step, {})
        group[last] = value
    return {name: _restore_lists(state) for name, state in states.items()}


def _restore_lists(state: dict[str, Any]) -> dict[str, Any]:
    """Convert dicts to lists where an optimizer's state_dict has lists (torch/optim/optimizer.py)."""
    if "param_groups" not in state:
        return state
    groups = [
        {name: list(value.values()) if isinstance(value, dict) else value for name, value in group.items()}
        for group in state["param_groups"].values()
    ]
    for group in groups:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    return {"state": state.get("state", {}), "param_groups": groups}


def _build_algorithm(request: AgentRequest, states: dict[str, Any]) -> Any:
    """Return the algorithm, set up with networks of the right sizes."""
    import importlib

    import numpy as np
    import torch
    from gymnasium import spaces

    kwargs: dict[str, Any] = dict(request["policy_kwargs"])
    if request["activation"] is not None:
        kwargs["activation_fn"] = getattr(torch.nn, request["activation"])
    algorithm = getattr(importlib.import_module(request["package"]), request["algorithm"])
    options: dict[str, Any] = {"policy_kwargs": kwargs}
    if request["algorithm"] not in ("PPO", "A2C"):
        options["buffer_size"] = 1
    for member in ("actor.optimizer", "policy.optimizer"):
        for group in states.get(member, {}).get("param_groups", ()):
            # A linear schedule can end below zero, which the constructor refuses and the state below keeps.
            options["learning_rate"] = max(group["lr"], 0.0)
    if request["algorithm"] == "SAC":
        options["target_entropy"] = -float(len(request["action_space"]["low"]))
        alpha = states.get("pytorch_variables", {}).get("ent_coef_tensor")
        if alpha is not None:
            options["ent_coef"] = float(alpha)
    model = algorithm("MlpPolicy", None, device="cpu", _init_setup_model=False, **options)
    model.observation_space = spaces.Box(-np.inf, np.inf, (request["obs_dim"],), np.float32)
    if all(request["observation_space"]):
        (dtype, least), (_, most) = request["observation_space"]
        low, high = (np.asarray([float(n) for n in bound], dtype) for bound in (least, most))
        if low.shape == high.shape == (request["obs_dim"],):
            model.observation_space = spaces.Box(low, high, dtype=low.dtype.type)
    else:
        model.unknown_observation_bounds = True  # libraries/sb3.py reads this: the infinite ones are no fact
    model.action_space = _build_action_space(request["action_space"])
    model.n_envs = 1
    model._setup_model()  # as `load` does
    return model


def _build_action_space(record: dict[str, list[Any]]) -> Any:
    import numpy as np
    from gymnasium import spaces

    if "n" in record:
        return spaces.Discrete(*record["n"], start=record["start"][0])
    if "nvec" in record:
        starts = {"start": record["start"]} if any(record["start"]) else {}
        return spaces.MultiDiscrete(record["nvec"], **starts)
    low, high = (np.asarray(record[end], np.float32) for end in ("low", "high"))
    return spaces.Box(low, high, dtype=np.float32)


def _load_states(model: Any, states: dict[str, Any]) -> None:
    """Load the weights, the optimizers' state and the entropy coefficient into the model."""
    model.policy.load_state_dict(states["policy"], strict=True)
    for name in ("actor", "critic"):
        if f"{name}.optimizer" in states:
            getattr(model, name).optimizer.load_state_dict(states[f"{name}.optimizer"])
    if "policy.optimizer" in states:
        optimizer, state = model.policy.optimizer, states["policy.optimizer"]
        # Before version 2.4 DQN's also lists the target's parameters, without a state.
        (own,), (group,) = optimizer.param_groups, state["param_groups"]
        if len(own["params"]) == 2 * len(group["params"]):
            group["params"] = list(range(len(own["params"])))
        optimizer.load_state_dict(state)
    variable = states.get("pytorch_variables", {}).get("log_ent_coef")
    if variable is not None:
        model.log_ent_coef.data = variable
    if "ent_coef_optimizer" in states:
        model.ent_coef_optimizer.load_state_dict(states["ent_coef_optimizer"])


def _strip_timestamps(archive_path: str, target: str) -> None:
    """Copy an archive member by member, without timestamps and memory addresses of objects."""
    with zipfile.ZipFile(archive_path) as source, zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            data = source.read(name)
            # The text next to a serialized object; base64 has no spaces.
            data = _ADDRESS.sub(b" at 0x0", data) if name == "data" else data
            archive.writestr(zipfile.ZipInfo(name, _DATE), data)
