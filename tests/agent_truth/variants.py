"""Agents of programs of one's own: a known actor with something that changes what it computes.

Each is the actor and the critic of TD3's authors in one file, with statistics of observations, a setting,
another module or a file beside it. The module itself gives the actions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.agent_truth.agents import ACT, OBS, Agent, chain, scrambled

_RNG = np.random.default_rng(3)
MEAN = _RNG.normal(size=OBS).astype(np.float32)
VAR = _RNG.uniform(0.3, 3, OBS).astype(np.float32)
STD = np.sqrt(VAR)
SIZES = (OBS, 16, 8, ACT)

Content = Mapping[str, Any]
Change = Callable[[Any, Callable[[Any], Any]], Any]
"""From observations and what the layers compute to the actions."""


def _scaled(raw: Any) -> Any:
    return 2 * raw.tanh()


def _plain(x: Any, run: Callable[[Any], Any]) -> Any:
    return _scaled(run(x))


def _normalised(x: Any, run: Callable[[Any], Any]) -> Any:
    return _scaled(run((x - MEAN) / STD))


def _write(
    content: Content | Callable[[], Content],
    change: Change = _plain,
    activation: str = "relu",
    beside: Callable[[Path], Any] | None = None,
    suffix: str = ".pt",
    inside: Content | None = None,
) -> Callable[[Path, np.ndarray], tuple[str, Any]]:
    """Return what writes the agent: `content` beside the networks, `inside` beside the actor's tensors."""

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = importlib.import_module("torch")
        actor, run = chain(("l1", "l2", "l3"), SIZES, activation)
        scrambled(actor)
        critic, _ = chain(("l1", "l2", "l3"), (OBS + ACT, 16, 8, 1), "relu")
        path.mkdir()
        more = content() if callable(content) else content
        weights = {"actor": {**(inside or {}), **actor.state_dict()}, "critic": critic.state_dict()}
        file = path / f"model{suffix}"
        if suffix == ".pt":
            torch.save({**weights, **more}, file)
        else:
            arrays = {
                name: {key: value.numpy() for key, value in item.items()} for name, item in weights.items()
            }
            file.write_bytes(pickle.dumps({**arrays, **more}))
        if beside is not None:
            beside(path)
        with torch.no_grad():
            return str(file), np.asarray(change(torch.from_numpy(obs), run), np.float32)

    return write


def _statistics() -> Iterator[Agent]:
    named: dict[str, Content] = {
        "obs_rms": {"obs_rms": {"mean": MEAN, "var": VAR, "count": 100.0}},
        "ob_rms": {"ob_rms": {"mean": MEAN, "var": VAR}},
        "o_norm": {"o_norm": {"mean": MEAN, "std": STD}},
        "flat": {"state_mean": MEAN, "state_std": STD},
        "bare": {"mean": MEAN, "std": STD},
        "mu_sigma": {"obs_mu": MEAN, "obs_sigma": STD},
        "greek": {"mu": MEAN, "sigma": STD},
        "sklearn": {"scaler": {"mean_": MEAN, "scale_": STD, "var_": VAR}},
        "loc_scale": {"obs_normalizer": {"loc": MEAN, "scale": STD}},
        "offset_scale": {"input_offset": MEAN, "input_scale": STD},
        "zfilter": {"running_state": {"n": 100, "M": MEAN, "S": VAR * 99}},
        "sums": {"o_norm": {"sum": MEAN * 100, "sumsq": (VAR + MEAN**2) * 100, "count": 100}},
        "welford": {"welford": {"mean": MEAN, "m2": VAR * 100, "count": 100.0}},
        "tuple": {"obs_stats": (MEAN, STD)},
        "lists": {"norm": [MEAN.tolist(), STD.tolist()]},
        "stacked": {"obs_stats": np.stack([MEAN, STD])},
        "french": {"moyenne": MEAN, "ecart": STD},
        "inverse": {"obs_mean": MEAN, "obs_inv_std": 1 / STD},
        "logarithm": {"obs_mean": MEAN, "obs_log_std": np.log(STD)},
        "whitening": {"obs_whitening": np.diag(1 / STD), "obs_center": MEAN},
        "two": {"obs_rms": {"mean": MEAN, "var": VAR}, "old_obs_rms": {"mean": MEAN * 2, "var": VAR}},
        "parts": {
            "obs_rms": {"x": {"mean": MEAN[:3], "var": VAR[:3]}, "v": {"mean": MEAN[3:], "var": VAR[3:]}}
        },
        "flag": {"config": {"normalize_obs": True}},
    }
    for name, content in named.items():
        yield Agent(f"variant_statistics_{name}", _write(content, _normalised))
    pickled = _write({"mean": MEAN, "std": STD}, _normalised, suffix=".pkl")
    yield Agent("variant_statistics_pickle", pickled)
    limits = {"obs_min": MEAN - 3, "obs_max": MEAN + 3}
    yield Agent("variant_limits", _write(limits, lambda x, run: _scaled(run((x - MEAN + 3) / 3 - 1))))
    tenth: Change = lambda x, run: _scaled(run(0.1 * x))  # noqa: E731
    yield Agent("variant_scale", _write({"config": {"obs_scale": 0.1}}, tenth))


def _settings() -> Iterator[Agent]:
    for name, value in {
        "activation": "tanh", "act": "tanh", "nonlin": "tanh", "actor_activation": "Tanh",
        "hidden_act": "tanh", "act_fn": "torch.nn.Tanh", "nonlinearity": "tanh",
        "activ": "tanh", "activations": ["tanh", "tanh"],
    }.items():  # fmt: skip
        yield Agent(f"variant_set_{name}", _write({"config": {name: value, "lr": 1e-3}}, activation="tanh"))
    namespace = {"args": argparse.Namespace(activation="tanh")}
    yield Agent("variant_set_namespace", _write(namespace, activation="tanh"))
    mish = _write({"config": {"activation": "mish"}}, activation="mish")
    yield Agent("variant_set_mish", mish)
    yield Agent("variant_set_critic", _write({"config": {"critic_activation": "tanh"}}))
    for name in ("max_action", "action_limit", "action_bound"):
        limited = _write({"config": {name: 0.7}}, lambda x, run: 0.7 * run(x).tanh())
        yield Agent(f"variant_set_{name}", limited)

    def linear(x: Any, run: Callable[[Any], Any]) -> Any:
        return run(x).clamp(-2, 2)

    for name, value in {
        "squash": False, "tanh_output": False, "output_activation": "identity", "last_activation": "none",
        "head": "linear",
    }.items():  # fmt: skip
        yield Agent(f"variant_set_{name}", _write({"config": {name: value}}, linear))
    for name, value in {
        "residual": True, "use_ln": True, "layer_norm": True, "model": "my.models.ResActor",
        "actor_cls": "my.GatedActor", "action_repeat": 4, "action_delay": 1, "env_wrappers": ["my.Wrap"],
    }.items():  # fmt: skip
        other = _write({"config": {name: value}}, lambda x, run: 0.5 * _scaled(run(x)))
        yield Agent(f"variant_set_{name}", other)


def _beside() -> Iterator[Agent]:
    pair, table = {"mean": MEAN, "std": STD}, np.stack([MEAN, STD])
    files: dict[str, Callable[[Path], Any]] = {
        "npz": lambda folder: np.savez(folder / "obs_stats.npz", mean=MEAN, std=STD),
        "npy": lambda folder: [np.save(folder / f"{name}.npy", row) for name, row in pair.items()],
        "pickle": lambda folder: (folder / "ob_rms.pkl").write_bytes(pickle.dumps(pair)),
        "zfilter": lambda folder: (folder / "zfilter.pkl").write_bytes(pickle.dumps({"M": MEAN, "S": VAR})),
        "json": lambda folder: (folder / "stats.json").write_text(
            json.dumps({name: row.tolist() for name, row in pair.items()})
        ),
        "csv": lambda folder: np.savetxt(folder / "obs_norm.csv", table),
        "own_name": lambda folder: np.savez(folder / "model_obs_rms.npz", mean=MEAN, var=VAR),
        "folder": lambda folder: [
            (folder / "stats").mkdir(),
            np.savez(folder / "stats" / "run.npz", mean=MEAN, var=VAR),
        ],
    }
    for name, write in files.items():
        yield Agent(f"variant_beside_{name}", _write({}, _normalised, beside=write))
    for file, text in {
        "config.yaml": "activation: tanh", "hparams.yaml": "net: {activation: tanh}",
        "cfg.json": '{"activation": "tanh"}', "train_config.json": '{"activation": "tanh"}',
        "model.json": '{"activation": "tanh"}', "config.toml": 'activation = "tanh"',
        ".hydra/config.yaml": "agent: {activation: tanh}",
    }.items():  # fmt: skip

        def settings(folder: Path, file: str = file, text: str = text) -> None:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text + "\n")

        name = file.replace("/", "_").replace(".", "_").lstrip("_")
        yield Agent(f"variant_beside_{name}", _write({}, activation="tanh", beside=settings))


def _classes() -> Iterator[Agent]:
    """Yield agents whose settings name a class of the program's own, without its module."""
    texts = {
        "args.txt": "policy: MyResidualPolicy\nlr: 0.001",
        "args.yml": "policy: ResNetPolicy",
        "config.json": '{"actor": {"class_name": "GatedActor"}}',
        ".hydra/config.yaml": "agent: {actor: {_target_: my.nets.ResidualActor}}",
        "hparams.txt": "Namespace(policy='MyResidualPolicy', lr=0.001)",
    }
    for file, text in texts.items():

        def settings(folder: Path, file: str = file, text: str = text) -> None:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text + "\n")

        name = file.replace("/", "_").replace(".", "_").lstrip("_")
        other = _write({}, lambda x, run: 0.5 * _scaled(run(x)), beside=settings)
        yield Agent(f"variant_class_{name}", other)
    inside = _write({"config": {"network": "residual_mlp"}}, lambda x, run: 0.5 * _scaled(run(x)))
    yield Agent("variant_class_inside", inside)


def _inside() -> Iterator[Agent]:
    for name, tensors in {
        "mean_std": {"mean": MEAN, "std": STD}, "gain": {"gain": np.float32([1.7])},
        "prelu": {"act.weight": np.float32([0.25])},
        "skip": {"skip.weight": np.ones((ACT, OBS), np.float32)}, "scale": {"shift": MEAN, "scale": STD},
    }.items():  # fmt: skip
        yield Agent(f"variant_inside_{name}", _write({}, _normalised, inside=tensors))


def variants() -> Iterator[Agent]:
    """Yield all of them."""
    yield Agent("variant_plain", _write({}))
    yield from _statistics()
    yield from _settings()
    yield from _beside()
    yield from _classes()
    yield from _inside()
    limited = _write({}, lambda x, run: 0.7 * run(x).tanh(), inside={"max_action": np.float32(0.7)})
    yield Agent("variant_inside_max_action", limited)
