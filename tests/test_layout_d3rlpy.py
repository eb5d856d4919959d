"""d3rlpy's agents: files built as versions 2.0 and 2.8 save them, acted as plain torch acts."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool import convert, load_agent
from ckpttool.core import EnvironmentMismatchError, Tree, UnsupportedError, UsageError, display
from ckpttool.evaluation.agent_networks import require_facts
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import d3rlpy, plan_torch, recognize_tree, schema
from ckpttool.mapping import apply_plan
from ckpttool.mapping.rules import canonical_tree
from ckpttool.testing.layouts import same
from tests.golden_texts import Golden
from tests.test_format_d3rlpy import archive, written
from tests.test_layouts import LayoutContract
from tests.torch_agents import actions, adam, as_batch, close, observations, saved, values

OBS, ACT = 5, 3
NONE = {"type": "none", "params": {}}
ENCODER = {"type": "default", "params": {"activation": "relu"}}


class Encoder(nn.Module):
    """`VectorEncoder` of d3rlpy/models/torch/encoders.py: `_layers` since 2.3, `_fcs` before."""

    def __init__(self, sizes: list[int], *, old: bool, act: nn.Module, norm: bool) -> None:
        super().__init__()
        pairs = list(pairwise(sizes))
        if old:
            self._fcs = nn.ModuleList([nn.Linear(*pair) for pair in pairs])
        else:
            layers = [[nn.Linear(*pair), act, *([nn.LayerNorm(pair[1])] if norm else [])] for pair in pairs]
            self._layers = nn.Sequential(*(layer for item in layers for layer in item))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "_layers"):
            return self._layers(x)  # type: ignore[no-any-return]
        for layer in self._fcs:
            x = self.act(layer(x))
        return x


class Head(nn.Module):
    """A policy, a Q-function or a value: an encoder, and one layer after it."""

    def __init__(self, inputs: int, outputs: int, last: str = "_fc", **how: Any) -> None:
        super().__init__()
        hidden = how.pop("hidden", [16, 8])
        how = {"old": False, "act": nn.ReLU(), "norm": False, **how}
        self._encoder = Encoder([inputs, *hidden], **how)
        setattr(self, last, nn.Linear(hidden[-1], outputs))
        if last == "_mu":
            self._logstd = nn.Linear(hidden[-1], outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self._fc if hasattr(self, "_fc") else self._mu
        return last(self._encoder(x))  # type: ignore[no-any-return]


def critics(count: int = 2, outputs: int = 1, **how: Any) -> nn.ModuleList:
    return nn.ModuleList([Head(OBS + ACT, outputs, **how) for _ in range(count)])


def td3(*, old: bool = False, outputs: int = 1, **how: Any) -> tuple[dict[str, Any], Head, nn.ModuleList]:
    """Return the state_dicts of a TD3 agent, its policy and its Q-functions."""
    torch.manual_seed(0)
    policy, target = Head(OBS, ACT, old=old, **how), Head(OBS, ACT, old=old, **how)
    qs, slow = critics(outputs=outputs, old=old, **how), critics(outputs=outputs, old=old, **how)
    optimizers = {"actor_optim": adam(policy.parameters()), "critic_optim": adam(qs.parameters())}
    if old:
        wrapped = {f"_{n}": {f"_q_funcs.{k}": v for k, v in m.state_dict().items()} for n, m in
                   {"q_func": qs, "targ_q_func": slow}.items()}  # fmt: skip
        named = {"_policy": policy.state_dict(), "_targ_policy": target.state_dict(), **wrapped}
        return named | {f"_{name}": state for name, state in optimizers.items()}, policy, qs
    modules = {"policy": policy, "targ_policy": target, "q_funcs": qs, "targ_q_funcs": slow}
    later = {name: {"optim": state, "lr_scheduler": None} for name, state in optimizers.items()}
    return {name: module.state_dict() for name, module in modules.items()} | later, policy, qs


def config(kind: str = "td3", encoders: Any = (ENCODER, ENCODER), **params: Any) -> dict[str, Any]:
    actor, critic = encoders
    both = {"actor_encoder_factory": actor, "critic_encoder_factory": critic}
    scalers = dict.fromkeys(("observation_scaler", "action_scaler", "reward_scaler"), NONE)
    parameters = {**scalers, **both, **params}
    return {"observation_shape": [OBS], "action_size": ACT, "config": {"type": kind, "params": parameters}}


def d3(folder: Path, state: dict[str, Any], settings: dict[str, Any]) -> str:
    return written(folder / "agent.d3", torch=archive(state), config=json.dumps(settings))


class TestNew(LayoutContract):
    name = "d3rlpy"

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(saved(tmp_path, "model_100.pt", td3()[0])).tree


class TestOld(LayoutContract):
    name = "d3rlpy"

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(saved(tmp_path, "model_100.pt", td3(old=True)[0])).tree


@pytest.mark.parametrize("old", [False, True])
def test_without_scalers_an_action_is_tanh(old: bool, tmp_path: Path) -> None:
    state, policy, qs = td3(old=old)
    path = d3(tmp_path, state, config())
    obs = observations(OBS)
    # Whatever the environment's bounds are: the file says that nothing scales.
    close(actions(path, obs, high=5.0), torch.tanh(policy(as_batch(obs))))
    action = np.random.default_rng(1).uniform(-1, 1, (len(obs), ACT)).astype("f4")
    for number, q in enumerate(qs, start=1):
        close(
            values(path, f"critic/q{number}", obs, action), q(torch.cat([as_batch(obs), as_batch(action)], 1))
        )
    assert not restore_agent(path).binding.facts.lacks


MEAN, STD = [0.5, -1.0, 20.0, 0.0, 3.0], [1.0, 2.0, 0.5, 0.1, 4.0]
LOW, HIGH = [-2.0, -1.0, 0.0], [2.0, 3.0, 0.5]


@pytest.mark.parametrize("kind", ["standard", "min_max", "pixel"])
def test_scalers_are_those_of_the_configuration(kind: str, tmp_path: Path) -> None:
    state, policy, _ = td3()
    params: dict[str, Any] = {
        "standard": {"mean": MEAN, "std": STD, "eps": 1e-3},
        "min_max": {"minimum": [-1.0] * OBS, "maximum": [4.0, 2.0, 3.0, 9.0, 1.5]},
        "pixel": {},
    }[kind]
    scaler = {"type": "min_max", "params": {"minimum": LOW, "maximum": HIGH}}
    path = d3(
        tmp_path, state, config(observation_scaler={"type": kind, "params": params}, action_scaler=scaler)
    )
    obs = observations(OBS)
    x = as_batch(obs)
    if kind == "standard":
        x = (x - torch.tensor(MEAN)) / (torch.tensor(STD) + 1e-3)
    elif kind == "min_max":
        low, high = (torch.tensor(params[name]) for name in ("minimum", "maximum"))
        x = (x - low) / (high - low) * 2 - 1
    else:
        x = x / 255
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    close(actions(path, obs), (high - low) * ((torch.tanh(policy(x)) + 1) / 2) + low, 3.0)
    known = restore_agent(path).known
    for name in ("action_low", "obs_norm", "activations"):
        assert known.is_read(name)
        assert known.origin(name).split(" (")[0] == "config"


def test_a_params_json_says_as_much(tmp_path: Path) -> None:
    state, policy, _ = td3()
    path = saved(tmp_path, "model_100.pt", state)
    assert restore_agent(path).binding.facts.lacks == d3rlpy.TABLE.facts.lacks
    scaler = {"type": "min_max", "params": {"minimum": LOW, "maximum": HIGH}}
    (tmp_path / "params.json").write_text(json.dumps(config(action_scaler=scaler)))
    agent = restore_agent(path)
    (note,) = agent.notes
    assert note.startswith("params.json ")
    assert agent.known.action_high == HIGH
    (tmp_path / "params.json").write_text('{"algorithm": "TD3", "scaler": null}')
    assert not any("params.json" in note for note in restore_agent(path).notes)
    obs = observations(OBS)
    close(actions(path, obs), torch.tanh(policy(as_batch(obs))))


ACTIVATIONS = {
    "tanh": ({"activation": "tanh"}, [torch.tanh, torch.tanh]),
    "swish": ({"activation": "swish"}, [nn.functional.silu, nn.functional.silu]),
    "last": ({"activation": "relu", "last_activation": "tanh"}, [torch.relu, torch.tanh]),
    "none last": ({"activation": "relu", "exclude_last_activation": True}, [torch.relu, lambda x: x]),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_the_configuration(name: str, tmp_path: Path) -> None:
    params, functions = ACTIVATIONS[name]
    encoder = {"type": "vector", "params": {"hidden_units": [16, 8], **params}}
    state, policy, _ = td3()
    path = d3(tmp_path, state, config(encoders=(encoder, encoder)))
    obs = observations(OBS)
    first, second = (policy._encoder._layers[n] for n in (0, 2))
    hidden = functions[1](second(functions[0](first(as_batch(obs)))))
    close(actions(path, obs), torch.tanh(policy._fc(hidden)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("activations", {"encoders": ({"type": "vector", "params": {"activation": "geglu"}},) * 2}),
        ("activations", {"encoders": ({"type": "own", "params": {}},) * 2}),
        ("head", {"action_scaler": {"type": "own", "params": {"minimum": LOW, "maximum": HIGH}}}),
        ("obs_norm", {"observation_scaler": {"type": "own", "params": {}}}),
    ],
)
def test_settings_that_are_not_supported_are_not_replaced_by_defaults(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    state, _, _ = td3()
    path = d3(tmp_path, state, config(**settings))
    agent = restore_agent(path)
    assert [*agent.binding.facts.stated] == [name]
    assert getattr(agent.known, name) is None
    assert any(entry.open for entry in agent.ledger)
    with pytest.raises(UnsupportedError):
        require_facts(agent)
    with pytest.raises(UnsupportedError):
        convert(path, str(tmp_path / "out"), to="d3rlpy_model")


def test_critics_with_activations_that_are_not_supported_are_not_run(tmp_path: Path, golden: Golden) -> None:
    other = {"type": "vector", "params": {"activation": "geglu"}}
    agent = restore_agent(d3(tmp_path, td3()[0], config(encoders=(ENCODER, other))))
    assert agent.runnable("actor") is not None
    with pytest.raises(UnsupportedError) as caught:
        agent.runnable("critic/q1")
    golden(caught.value)


def test_every_network_has_its_own_activations(tmp_path: Path) -> None:
    encoders = [
        {"type": "vector", "params": {"hidden_units": [16, 8], "activation": name, **more}}
        for name, more in (("relu", {}), ("tanh", {"last_activation": "swish"}))
    ]
    state, policy, qs = td3()
    slow = critics()
    slow.load_state_dict(state["targ_q_funcs"])
    path = d3(tmp_path, state, config(encoders=encoders))
    obs = observations(OBS)
    action = np.random.default_rng(1).uniform(-1, 1, (len(obs), ACT)).astype("f4")

    def critic(q: nn.Module) -> torch.Tensor:
        first, second = (q._encoder._layers[n] for n in (0, 2))
        x = torch.tanh(first(torch.cat([as_batch(obs), as_batch(action)], 1)))
        return q._fc(nn.functional.silu(second(x)))

    # The facts of a file, of a sidecar beside other weights, and of a file written for the library.
    through, again = str(tmp_path / "agent.pt"), str(tmp_path / "again.d3")
    assert convert(path, through).report.complete
    assert convert(path, again, to="d3rlpy").report.complete
    Path(f"{again}.ckpttool.json").unlink()
    convert(through, str(tmp_path / "third.d3"), to="d3rlpy")
    for file in (path, through, again, str(tmp_path / "third.d3")):
        close(actions(file, obs), torch.tanh(policy(as_batch(obs))))
        for number, q in enumerate(qs, start=1):
            close(values(file, f"critic/q{number}", obs, action), critic(q))
            close(values(file, f"critic_target/q{number}", obs, action), critic(slow[number - 1]))
    written_ = json.loads(pickle.loads(Path(again).read_bytes())["config"])["config"]["params"]
    assert written_["actor_encoder_factory"] == encoders[0]
    assert written_["critic_encoder_factory"] == encoders[1]
    # One setting for all networks cannot represent them.
    with pytest.raises(UnsupportedError) as caught:
        convert(path, str(tmp_path / "agent.zip"), to="sb3", allow_missing=True)
    assert caught.value.found == "relu, silu, tanh"


@pytest.mark.parametrize("name", ["TD3", "SAC", "DDPG"])
def test_the_library_plays_what_is_written_for_it(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("d3rlpy")
    encoder = library.models.encoders.VectorEncoderFactory
    agent = getattr(library.algos, f"{name}Config")(
        actor_encoder_factory=encoder([16, 8]),
        critic_encoder_factory=encoder([12, 8], activation="tanh", last_activation="swish"),
    ).create()
    agent.create_impl((OBS,), ACT)
    agent.save(str(tmp_path / "agent.d3"))
    convert(str(tmp_path / "agent.d3"), str(tmp_path / "again.d3"), to="d3rlpy")
    again = library.load_learnable(str(tmp_path / "again.d3"))
    assert type(again) is type(agent)
    obs = observations(OBS)
    action = np.random.default_rng(1).uniform(-1, 1, (len(obs), ACT)).astype("f4")
    np.testing.assert_array_equal(again.predict(obs), agent.predict(obs))
    np.testing.assert_array_equal(again.predict_value(obs, action), agent.predict_value(obs, action))


def sac(**more: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    policy, qs = Head(OBS, ACT, "_mu"), critics()
    state = {"policy": policy, "q_funcs": qs, "targ_q_funcs": critics()}
    return {name: module.state_dict() for name, module in state.items()} | {
        "log_temp": {"_parameter": torch.full((1, 1), -0.3)},
        "actor_optim": adam(policy.parameters()),
        "temp_optim": adam([torch.zeros(1, 1)]),
        **more,
    }


def test_sac_acts_by_the_tanh_of_its_mean(tmp_path: Path) -> None:
    state = sac()
    path = d3(tmp_path, state, config("sac"))
    obs = observations(OBS)
    torch.manual_seed(1)
    close(actions(path, obs), torch.tanh(Head(OBS, ACT, "_mu")(as_batch(obs))))
    tree = open_checkpoint(path).tree
    binding = recognize_tree(tree, "agent.d3")
    assert binding is not None
    names = {display(move.target) for move in binding.moves.moves}
    moment = "temperature_optimizer/m/log_alpha"
    assert names >= {
        "temperature/log_alpha",
        "actor/log_std/kernel",
        moment,
        "actor_optimizer/v/log_std/bias",
    }
    assert not [name for name in binding.moves.assumed if "samples" in name]
    canonical = canonical_tree(tree, binding.moves)
    written_ = apply_plan(canonical, plan_torch(binding, canonical, {}))
    again = recognize_tree(written_, "x.pt")
    assert again is not None
    back = canonical_tree(written_, again.moves)
    assert all(same(back[p], leaf) for p, leaf in canonical.items() if p in back)
    assert {p for p in canonical if p not in back} == set()


def test_iql_has_a_value_and_one_deviation(tmp_path: Path) -> None:
    torch.manual_seed(2)
    policy, value = Head(OBS, ACT, "_mu"), Head(OBS, 1)
    state = {k: v for k, v in policy.state_dict().items() if not k.startswith("_logstd")}
    file = {
        "policy": {"_logstd": torch.zeros(1, ACT), **state},
        "q_funcs": critics().state_dict(),
        "targ_q_funcs": critics().state_dict(),
        "value_func": value.state_dict(),
    }
    path = d3(tmp_path, file, config("iql", value_encoder_factory=ENCODER))
    obs = observations(OBS)
    close(values(path, "value", obs), value(as_batch(obs)))
    assert "actor/log_std" in {display(m.target) for m in restore_agent(path).binding.moves.moves}


@pytest.mark.parametrize("last", ["_fc", "_mu"])
def test_an_imitator_alone_is_a_policy(last: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    policy = Head(OBS, ACT, last)
    file = {
        "imitator": policy.state_dict(),
        "optim": {"optim": adam(policy.parameters()), "lr_scheduler": None},
    }
    document = config("bc", encoder_factory=ENCODER)
    path = d3(tmp_path, file, document)
    obs = observations(OBS)
    close(actions(path, obs), torch.tanh(policy(as_batch(obs))))


def test_agents_that_sample_actions_decide(tmp_path: Path) -> None:
    # CRR: a target of a Gaussian policy, no temperature. BEAR: a decoder beside a Gaussian policy.
    state = sac()
    crr = {name: tensor for name, tensor in state.items() if name not in ("log_temp", "temp_optim")}
    for more in (
        {**crr, "targ_policy": sac()["policy"]},
        {**state, "vae_decoder": Head(7, ACT).state_dict()},
    ):
        ledger = restore_agent(saved(tmp_path, "m.pt", more)).ledger
        assert [entry.what for entry in ledger if entry.open and entry.use == "not used"] == ["action map"]


def test_a_policy_before_a_decoder_is_no_actor(tmp_path: Path, golden: Golden) -> None:
    state, _, _ = td3()
    path = saved(tmp_path, "m.pt", {**state, "vae_decoder": Head(7, ACT).state_dict()})
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(path).runnable("actor")
    golden(caught.value)


def test_networks_of_another_algorithm_are_no_agent(tmp_path: Path, golden: Golden) -> None:
    state, _, _ = td3()
    path = d3(tmp_path, state, config("discrete_bc"))
    with pytest.raises(UsageError) as caught:
        restore_agent(path)
    golden(caught.value)
    state["q_funcs"] = nn.ModuleList([Head(OBS, ACT)]).state_dict()
    path = d3(tmp_path, state, config("td3"))
    with pytest.raises(UsageError):
        restore_agent(path)


@pytest.mark.parametrize("outputs", [OBS + ACT, 4])
def test_quantiles_are_no_value_and_stay_apart(outputs: int, tmp_path: Path, golden: Golden) -> None:
    tree = open_checkpoint(saved(tmp_path, "m.pt", td3(outputs=outputs)[0])).tree
    binding = recognize_tree(tree, "m.pt")
    assert binding is not None
    golden("\n".join(binding.moves.notes))
    agent = canonical_tree(tree, binding.moves)
    again = recognize_tree(apply_plan(agent, plan_torch(binding, agent, {})), "x.pt")
    assert again is not None
    assert [part.title for part in again.parts] == [part.title for part in binding.parts]


def test_the_number_of_actions_shows_quantiles(tmp_path: Path) -> None:
    # DiscreteQRQFunction: reshape(-1, action_size, n_quantiles), and the mean of the last axis.
    torch.manual_seed(0)
    functions = nn.ModuleList([Head(4, 2 * 11)])
    path = saved(tmp_path, "model.pt", {"q_funcs": functions.state_dict()})
    assert schema.QUANTILES in load_agent(path).ledger
    agent = load_agent(path, "CartPole-v1")
    assert schema.QUANTILES not in agent.ledger
    obs = observations(4)
    with torch.no_grad():
        expected = functions[0](as_batch(obs)).reshape(-1, 2, 11).mean(2).argmax(1)
    np.testing.assert_array_equal(agent.act(obs), expected.numpy())
    functions[0]._fc = nn.Linear(8, 5)
    with pytest.raises(EnvironmentMismatchError):
        load_agent(saved(tmp_path, "odd.pt", {"q_funcs": functions.state_dict()}), "CartPole-v1")


@pytest.mark.parametrize(
    "extra",
    [
        "_encoder._cnn_layers.0.weight",
        "_encoder._layers.2.running_mean",
        "_encoder._layers.1._layers.0.weight",
    ],
)
def test_networks_of_other_kinds_are_not_run(extra: str, tmp_path: Path, golden: Golden) -> None:
    state, _, _ = td3()
    state["policy"][extra] = torch.zeros((4, 3, 8, 8) if "cnn" in extra else (16,))
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(saved(tmp_path, "m.pt", state)).runnable("actor")
    golden(caught.value)


def test_a_norm_after_the_activation_is_not_run_before_it(tmp_path: Path, golden: Golden) -> None:
    state, _, _ = td3()
    state["q_funcs"] = critics(norm=True).state_dict()
    agent = restore_agent(saved(tmp_path, "m.pt", state))
    assert agent.runnable("actor") is not None
    with pytest.raises(UnsupportedError) as caught:
        agent.runnable("critic/q1")
    golden(caught.value)
