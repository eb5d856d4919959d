"""Files of Stable-Baselines3 made of plain torch and zipfile, as its save_util.py makes them."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.pickles import importable, instance, stand_in

BOX = stand_in("gymnasium.spaces.box.Box")
DISCRETE = stand_in("gymnasium.spaces.discrete.Discrete")
MULTI_DISCRETE = stand_in("gymnasium.spaces.multi_discrete.MultiDiscrete")
TD3_POLICY = stand_in("stable_baselines3.td3.policies.TD3Policy")
SAC_POLICY = stand_in("stable_baselines3.sac.policies.SACPolicy")
ON_POLICY = stand_in("stable_baselines3.common.policies.ActorCriticPolicy")
MEAN_STD = stand_in("stable_baselines3.common.running_mean_std.RunningMeanStd")
NORMALIZE = stand_in("stable_baselines3.common.vec_env.vec_normalize.VecNormalize")
_CLASSES = (BOX, DISCRETE, MULTI_DISCRETE, TD3_POLICY, SAC_POLICY, ON_POLICY, MEAN_STD, NORMALIZE)

OBS, LOW, HIGH = 3, (-1.0, 0.0), (2.0, 0.5)
RATE = 3e-4


def mlp(
    sizes: Sequence[int], activation: type[nn.Module], last: type[nn.Module] | None = None
) -> nn.Sequential:
    """Return what common/torch_layers.py, create_mlp, returns."""
    layers: list[nn.Module] = []
    for number, (one, other) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(one, other))
        if number < len(sizes) - 2:
            layers.append(activation())
    return nn.Sequential(*layers, *([last()] if last else []))


def owner(**parts: nn.Module) -> nn.Module:
    """Return a module with these modules as attributes."""
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def critic(n_critics: int, outputs: int = 1, act: int = len(LOW)) -> nn.Module:
    return owner(**{f"qf{n}": mlp((OBS + act, 6, outputs), nn.ReLU) for n in range(n_critics)})


def td3(n_critics: int = 2, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Return td3/policies.py, TD3Policy, with hidden layers of 5 and 4 units, in the critics of 6."""
    torch.manual_seed(n_critics)
    sizes = (OBS, 5, 4, len(LOW))
    actors = {name: owner(mu=mlp(sizes, activation, nn.Tanh)) for name in ("actor", "actor_target")}
    return owner(**actors, critic=critic(n_critics), critic_target=critic(n_critics))


def sac(*, gsde: bool = False, outputs: int = 1) -> nn.Module:
    """Return sac/policies.py, SACPolicy, of the same sizes; `outputs` above 1 are TQC's quantiles."""
    torch.manual_seed(7)
    latent = nn.Sequential(*mlp((OBS, 5, 4), nn.ReLU), nn.ReLU())
    actor = owner(latent_pi=latent)
    if gsde:
        actor.log_std = nn.Parameter(torch.full((4, len(LOW)), -3.0))
        actor.mu = nn.Sequential(nn.Linear(4, len(LOW)), nn.Hardtanh(-2, 2))
    else:
        actor.mu, actor.log_std = nn.Linear(4, len(LOW)), nn.Linear(4, len(LOW))
    return owner(actor=actor, critic=critic(2, outputs), critic_target=critic(2, outputs))


def ppo(act: int = len(LOW)) -> nn.Module:
    """Return common/policies.py, ActorCriticPolicy."""
    torch.manual_seed(3)
    module = nn.Module()
    module.log_std = nn.Parameter(torch.zeros(act))
    nets = {
        f"{name}_net": nn.Sequential(*mlp((OBS, 5, 4), nn.Tanh), nn.Tanh()) for name in ("policy", "value")
    }
    module.mlp_extractor = owner(**nets)
    module.action_net, module.value_net = nn.Linear(4, act), nn.Linear(4, 1)
    return module


def adam(module: nn.Module, step: int = 7) -> dict[str, Any]:
    """Return Adam's state_dict for the module's parameters; no optimizer is built."""
    parameters = list(module.parameters())
    state = {
        number: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.full_like(parameter.data, number),
            "exp_avg_sq": torch.full_like(parameter.data, number + 0.5),
        }
        for number, parameter in enumerate(parameters)
    }
    group = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
    return {"state": state, "param_groups": [{**group, "params": list(range(len(parameters)))}]}


def box(low: Sequence[float], high: Sequence[float]) -> Any:
    ends = {"low": np.array(low, "f4"), "high": np.array(high, "f4")}
    return instance(BOX, dtype=np.dtype("f4"), _shape=(len(low),), **ends)


def settings(policy: type, **more: Any) -> dict[str, Any]:
    return {
        "policy_class": policy,
        "policy_kwargs": {"net_arch": [5, 4]},
        "observation_space": box((-1.0, -1.0, -8.0), (1.0, 1.0, 8.0)),  # Pendulum's
        "action_space": box(LOW, HIGH),
        "num_timesteps": 1_000,
        "_n_updates": 250,
        "gamma": 0.99,
        **more,
    }


def as_json(values: dict[str, Any]) -> bytes:
    """Return the member `data` (save_util.py, data_to_json)."""
    document: dict[str, Any] = {}
    with importable(*_CLASSES):
        for name, value in values.items():
            try:
                json.dumps(value)
                document[name] = value
            except TypeError:
                text = base64.b64encode(pickle.dumps(value, 4)).decode()
                document[name] = {":type:": str(type(value)), ":serialized:": text, "shown": "as text"}
    return json.dumps(document, indent=4).encode()


def saved(value: Any, *, legacy: bool = False) -> bytes:
    """Return what torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def states(module: nn.Module) -> dict[str, Any]:
    """Return the state_dicts that an off-policy algorithm saves, by member."""
    parts = {name: getattr(module, name) for name in ("actor", "critic")}
    return {"policy": module.state_dict(), **{f"{n}.optimizer": adam(part) for n, part in parts.items()}}


def members(
    result: dict[str, Any],
    data: dict[str, Any] | None,
    *,
    legacy: bool = False,
    version: str | None = "2.9.2",
) -> dict[str, bytes]:
    contents = {} if data is None else {"data": as_json(data)}
    contents |= {f"{name}.pth": saved(value, legacy=legacy) for name, value in result.items()}
    if version is not None:
        contents["_stable_baselines3_version"] = version.encode()
        contents["system_info.txt"] = b"- OS: Linux 6.1\n- Python: 3.11\n- Stable-Baselines3: 2.9.2\n"
    return contents


def put(path: Path, result: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> str:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in result.items():
            archive.writestr(name, data)
    return str(path)


def td3_agent(path: Path, n_critics: int = 2, **more: Any) -> str:
    """Write a whole TD3 agent (DDPG: one critic) and return its path."""
    contents = {"pytorch_variables": None, **states(td3(n_critics))}
    return put(path, members(contents, settings(TD3_POLICY, **more)))


def sac_agent(path: Path, **more: Any) -> str:
    """Write a whole SAC agent, its entropy coefficient trained, and return its path."""
    log_alpha = torch.tensor([-0.25], requires_grad=True)
    variables = {"log_ent_coef": log_alpha.detach()}
    entropy = {"ent_coef_optimizer": adam(nn.ParameterList([nn.Parameter(torch.zeros(1))]))}
    contents = {"pytorch_variables": variables, **states(sac()), **entropy}
    return put(path, members(contents, settings(SAC_POLICY, **more)))


def statistics(path: Path, *, norm_obs: bool = True, **more: Any) -> str:
    """Write what VecNormalize.save writes: statistics of observations in float64."""
    mean, var = np.linspace(-1, 1, OBS), np.linspace(0.5, 2, OBS)
    rms = instance(MEAN_STD, mean=mean, var=var, count=100.0001)
    values = {
        "obs_rms": rms,
        "ret_rms": instance(MEAN_STD, mean=np.float64(0), var=np.float64(1), count=1e-4),
    }
    values |= {"norm_obs": norm_obs, "clip_obs": 5.0, "epsilon": 1e-8, "gamma": 0.99, "training": True}
    with importable(*_CLASSES):
        path.write_bytes(pickle.dumps(instance(NORMALIZE, **{**values, **more}), 4))
    return str(path)
