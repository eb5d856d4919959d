"""What is written for a library of PyTorch: its own classes load it strictly and act as the agent did."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.core import UnsupportedError, UsageError
from ckpttool.core.sidecar import OUTPUT_RANGE
from ckpttool.evaluation.restore import restore_agent
from tests import test_layout_cleanrl as cleanrl
from tests import test_layout_d3rlpy as d3rlpy
from tests import test_layout_elegantrl as elegantrl
from tests import test_layout_fasttd3 as fasttd3
from tests import test_layout_rsl_rl as rsl_rl
from tests import test_layout_skrl as skrl
from tests import test_layout_spinningup as spinningup
from tests import test_layout_tianshou as tianshou
from tests.golden_texts import Golden
from tests.restored import HIGH, LOW, recognised
from tests.torch_agents import actions, agent, as_batch, close, mlp, observations, saved, values


def written(folder: Path, source: str, to: str) -> tuple[str, ConversionResult, Any]:
    """Convert for a library and return the file's path, the report, and what torch.load gives."""
    target = str(folder / f"{to}.pt")
    done = convert(source, target, to=to, allow_missing=True, sync=False)
    assert recognised(target).layout == to.removesuffix("_model")
    return target, done, torch.load(target, weights_only=True)


def unused(done: ConversionResult) -> set[str]:
    return {name.split("/")[0] for name in done.report.unused}


def moments(state: Mapping[str, Any], number: int) -> torch.Tensor:
    moment: torch.Tensor = state["state"][number]["exp_avg_sq"]
    return moment


# --- Tianshou: algorithm.state_dict() of 2.x -------------------------------------------------------------


def tianshou_networks(file: dict[str, Any], *, gaussian: bool, critics: int) -> tuple[Any, list[Any]]:
    """Load the algorithm strictly, optimizers first, as Algorithm.load_state_dict does."""
    heads = ("mu", "sigma") if gaussian else ("last",)
    names = {"policy.actor": tianshou.Last(3, 2, heads)}
    for q in ("critic", "critic2")[:critics]:
        names |= {q: tianshou.Last(5, 1), f"{q}_old.module": tianshou.Last(5, 1)}
    if gaussian:
        names["alpha"] = nn.Module()
        names["alpha"]._log_alpha = nn.Parameter(torch.zeros(1))
    else:
        names["actor_old.module"] = tianshou.Last(3, 2)
    whole, states = tianshou.whole(names), file.pop("_optimizers")
    trained = (whole.policy, *(getattr(whole, q) for q in ("critic", "critic2")[:critics]))
    optimizers = [torch.optim.Adam(network.parameters()) for network in trained]
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    whole.load_state_dict(file, strict=True)
    return whole, optimizers


@pytest.mark.parametrize(
    ("gaussian", "critics"), [(False, 2), (False, 1), (True, 2)], ids=["td3", "ddpg", "sac"]
)
def test_tianshou(tmp_path: Path, gaussian: bool, critics: int, golden: Golden) -> None:
    source, policy, twins, file = agent(tmp_path, 3, 2, gaussian=gaussian, critics=critics)
    path, done, state = written(tmp_path, source, "tianshou")
    assert not done.report.unused
    golden("\n".join(done.report.notes))
    assert not done.report.missing
    whole, optimizers = tianshou_networks(state, gaussian=gaussian, critics=critics)
    obs, action = (
        observations(3),
        torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (120, 2)).astype("f4")),
    )
    with torch.no_grad():
        # The Actor is made with max_action=1; map_action scales to the bounds.
        close(actions(path, obs, 2.0), 2.0 * torch.tanh(whole.policy.actor(as_batch(obs))), 2.0)
        close(2.0 * policy(as_batch(obs)).numpy(), 2.0 * torch.tanh(whole.policy.actor(as_batch(obs))), 2.0)
        last = (whole.critic2 if critics == 2 else whole.critic)(torch.cat([as_batch(obs), action], 1))
        close(getattr(twins, f"q{critics}")(torch.cat([as_batch(obs), action], 1)).numpy(), last)
    # One optimizer of both Q-functions becomes two: the second's first parameter was the seventh.
    assert torch.equal(
        moments(optimizers[-1].state_dict(), 0), moments(file["critic_optimizer"], 6 * critics - 6)
    )


def test_tianshou_of_ppo_has_clipped_means_only(tmp_path: Path, golden: Golden) -> None:
    torch.manual_seed(0)
    networks = {"actor": tianshou.Last(3, 2, ("mu",)), "critic": tianshou.Last(3, 1)}
    networks["actor"].sigma_param = nn.Parameter(torch.zeros(2, 1))
    source = saved(tmp_path, "policy.pth", tianshou.whole(networks).state_dict())
    path, done, state = written(tmp_path, source, "tianshou")
    golden("\n".join(done.report.assumed))
    assert len(state.pop("_optimizers")[0]["param_groups"][0]["params"]) == 13
    tianshou.whole({"policy.actor": networks["actor"], "critic": networks["critic"]}).load_state_dict(state)
    np.testing.assert_array_equal(actions(path, observations(3)), actions(source, observations(3)))
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "a.pt"), to="rsl_rl", allow_missing=True)
    golden(caught.value)


# --- Spinning Up: the state_dict of its MLPActorCritic ---------------------------------------------------


@pytest.mark.parametrize(
    ("gaussian", "critics"), [(False, 2), (False, 1), (True, 2)], ids=["td3", "ddpg", "sac"]
)
def test_spinning_up(tmp_path: Path, gaussian: bool, critics: int, golden: Golden) -> None:
    source, _, _, _ = agent(tmp_path, 3, 2, gaussian=gaussian, critics=critics)
    path, done, state = written(tmp_path, source, "spinningup")
    actor = spinningup.SquashedGaussianMLPActor if gaussian else spinningup.MLPActor
    qs = ("q1", "q2") if critics == 2 else ("q",)
    whole = spinningup.MLPActorCritic(actor(nn.ReLU), **{q: spinningup.MLPQFunction(nn.ReLU) for q in qs})
    whole.load_state_dict(state, strict=True)
    obs = observations(3)
    with torch.no_grad():
        close(actions(path, obs, float(spinningup.LIMIT)), whole.pi(as_batch(obs)), 2.0)
    golden("\n".join(done.report.notes))
    assert unused(done) >= {"critic_target", "actor_optimizer", "critic_optimizer"}


def ppo(folder: Path, *, norm: bool = False, log: bool = True) -> tuple[str, nn.Module]:
    """Save an agent of rsl_rl, whose critic sees what the policy sees."""
    torch.manual_seed(0)
    actor, critic = mlp(6, 16, 8, 3, activation=nn.ELU), mlp(6, 16, 8, 1, activation=nn.ELU)
    return saved(folder, "model_9.pt", rsl_rl.file(5, actor, critic, norm=norm, log=log)), actor


def test_spinning_up_of_ppo(tmp_path: Path, golden: Golden) -> None:
    source, actor = ppo(tmp_path, log=False)
    path, done, state = written(tmp_path, source, "spinningup")
    whole = nn.Module()
    whole.pi, whole.v = nn.Module(), nn.Module()
    whole.pi.log_std = nn.Parameter(torch.zeros(3))
    whole.pi.mu_net, whole.v.v_net = mlp(6, 16, 8, 3), mlp(6, 16, 8, 1)
    whole.load_state_dict(state, strict=True)
    close(actions(path, observations(6)), actor(as_batch(observations(6))))
    torch.testing.assert_close(whole.pi.log_std.detach(), torch.full((3,), 0.7).log())
    golden("\n".join(done.report.notes))
    assert "actor_state_dict" not in unused(done)


# --- rsl_rl: the file of version 5 -----------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 5])
@pytest.mark.parametrize("norm", [False, True])
def test_rsl_rl(tmp_path: Path, version: int, norm: bool) -> None:
    actor, critic = rsl_rl.networks()
    source = saved(tmp_path, "model_250.pt", rsl_rl.file(version, actor, critic, norm=norm, log=True))
    path, _, state = written(tmp_path, source, "rsl_rl")
    sizes = {"actor": rsl_rl.OBS, "critic": rsl_rl.PRIVILEGED}
    for name, network in {"actor": actor, "critic": critic}.items():
        whole = nn.Module()
        if norm:
            whole.obs_normalizer = nn.Module()
            for buffer, tensor in rsl_rl.statistics(sizes[name]).items():
                whole.obs_normalizer.register_buffer(buffer, torch.zeros_like(tensor))
        if name == "actor":
            whole.distribution = nn.Module()
            whole.distribution.log_std_param = nn.Parameter(torch.zeros(rsl_rl.ACT))
        whole.mlp = network
        assert [tuple(t.shape) for t in state[f"{name}_state_dict"].values()] == [
            tuple(t.shape) for t in whole.state_dict().values()
        ]
        whole.load_state_dict(state[f"{name}_state_dict"], strict=True)
    weights = [*actor.parameters(), *critic.parameters(), torch.zeros(3, requires_grad=True)]
    torch.optim.Adam(weights).load_state_dict(state["optimizer_state_dict"])
    assert (state["iter"], state["infos"]) == (250, None)
    obs = observations(rsl_rl.OBS)
    np.testing.assert_array_equal(actions(path, obs), actions(source, obs))


def test_rsl_rl_has_no_place_for_tanh(tmp_path: Path, golden: Golden) -> None:
    source, _, _, _ = agent(tmp_path, 3, 2)
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "a.pt"), to="rsl_rl", allow_missing=True)
    golden(caught.value)


# --- FastTD3 and FastSAC: save_params --------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_fasttd3(tmp_path: Path, norm: bool, golden: Golden) -> None:
    file, actor, critic = fasttd3.agent(critic_obs=9, norm=norm)
    source = saved(tmp_path, "x_1000.pt", file)
    path, done, state = written(tmp_path, source, "fasttd3")
    assert not done.report.unused
    actor.noise_scales = torch.zeros(1, 1)  # one environment
    actor.load_state_dict(state["actor_state_dict"], strict=True)
    for entry in ("qnet_state_dict", "qnet_target_state_dict"):
        critic.load_state_dict(state[entry], strict=True)
        for name, tensor in file[entry].items():
            assert torch.equal(state[entry][name], tensor)
    obs = fasttd3.observed()
    np.testing.assert_array_equal(actions(path, obs), actions(source, obs))
    assert state["obs_normalizer_state"].keys() == file["obs_normalizer_state"].keys()
    assert state["global_step"] == 1000
    # The arguments are gone, and the sidecar says what they said.
    golden("\n".join(done.report.notes))


def test_fastsac_is_any_agent_of_sac(tmp_path: Path, golden: Golden) -> None:
    source, _, twins, _ = agent(tmp_path, 3, 2, gaussian=True)
    path, done, state = written(tmp_path, source, "fasttd3")
    whole = nn.Module()
    whole.net, whole.fc_mu, whole.fc_logstd = nn.Sequential(*mlp(3, 16, 8)), nn.Linear(8, 2), nn.Linear(8, 2)
    whole.load_state_dict(state["actor_state_dict"], strict=True)
    critics = nn.Module()
    for number in (1, 2):
        setattr(critics, f"qnet{number}", nn.Module())
        getattr(critics, f"qnet{number}").net = mlp(5, 16, 8, 1)
    critics.load_state_dict(state["qnet_state_dict"], strict=True)
    obs, action = observations(3), np.zeros((120, 2), "f4")
    close(values(path, "critic/q2", obs, action), twins.q2(torch.cat([as_batch(obs), as_batch(action)], 1)))
    golden("\n".join(done.report.notes))
    plain, _, _, _ = agent(tmp_path, 3, 2)
    with pytest.raises(UnsupportedError) as caught:
        convert(plain, str(tmp_path / "a.pt"), to="fasttd3", allow_missing=True)
    golden(caught.value)


# --- skrl: its own models, made from a list of layers ----------------------------------------------------


class Instantiated(nn.Module):
    """What skrl's model instantiators make of `layers`."""

    def __init__(self, *sizes: int, deviations: int = 0) -> None:
        super().__init__()
        self.net_container = mlp(*sizes)
        if deviations:
            self.log_std_parameter = nn.Parameter(torch.zeros(deviations))


@pytest.mark.parametrize("critics", [1, 2], ids=["ddpg", "td3"])
def test_skrl(tmp_path: Path, critics: int) -> None:
    source, policy, _, file = agent(tmp_path, 5, 2, critics=critics, targets=False)
    path, done, state = written(tmp_path, source, "skrl")
    numbers = ("_1", "_2") if critics == 2 else ("",)
    names = ["policy", "target_policy", *(f"{which}critic{n}" for which in ("", "target_") for n in numbers)]
    assert state.keys() == {*names, "policy_optimizer", "critic_optimizer"}
    for name in names:
        network = Instantiated(5, 16, 8, 2) if "policy" in name else Instantiated(7, 16, 8, 1)
        network.load_state_dict(state[name], strict=True)
        assert torch.equal(
            network.net_container[0].weight, state[name.replace("target_", "")]["net_container.0.weight"]
        )
    (sentence,) = done.report.assumed
    assert "actor_target" in sentence
    assert "critic_target" in sentence
    with torch.no_grad():
        close(actions(path, observations(5), 2.0), 2.0 * policy(as_batch(observations(5))), 2.0)
    assert torch.equal(moments(state["critic_optimizer"], 3), moments(file["critic_optimizer"], 3))


def test_skrl_of_ppo_keeps_its_preprocessor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, value = skrl.Gaussian(), skrl.Critic(skrl.OBS, nn.ELU)
    source = saved(tmp_path, "a.pt", skrl.ppo(model, value) | {"state_preprocessor": skrl.scaler()})
    path, _, state = written(tmp_path, source, "skrl")
    Instantiated(skrl.OBS, 16, 8, skrl.ACT, deviations=skrl.ACT).load_state_dict(state["policy"], strict=True)
    for name, tensor in skrl.scaler().items():
        assert torch.equal(state["observation_preprocessor"][name], tensor)
    np.testing.assert_array_equal(actions(path, observations(5)), actions(source, observations(5)))


def test_skrls_own_models_have_no_second_head(tmp_path: Path, golden: Golden) -> None:
    source, _, _, _ = agent(tmp_path, 3, 2, gaussian=True)
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "a.pt"), to="skrl", allow_missing=True)
    golden(caught.value)


# --- ElegantRL: a policy's state_dict --------------------------------------------------------------------


@pytest.mark.parametrize("gaussian", [False, True])
def test_elegantrl(tmp_path: Path, gaussian: bool) -> None:
    source, policy, _, _ = agent(tmp_path, elegantrl.OBS, elegantrl.ACT, gaussian=gaussian)
    path, done, state = written(tmp_path, source, "elegantrl")
    whole = elegantrl.ActorSAC() if gaussian else elegantrl.Actor()
    whole.load_state_dict(state, strict=True)
    obs = observations(elegantrl.OBS)
    with torch.no_grad():
        close(actions(path, obs), whole(as_batch(obs)))
        close(policy(as_batch(obs)).numpy(), whole(as_batch(obs)))
    assert unused(done) >= {"critic", "critic_optimizer", "actor_optimizer"}
    if gaussian:
        assert torch.equal(state["net_a.0.weight"][elegantrl.ACT :], policy.log_std.weight)
        assert torch.equal(state["net_a.0.bias"][: elegantrl.ACT], policy.l3.bias)


def test_elegantrl_divides_by_another_number_for_the_same_function(tmp_path: Path, golden: Golden) -> None:
    file, actor, _ = fasttd3.agent()
    source = saved(tmp_path, "x.pt", file)
    path, done, state = written(tmp_path, source, "elegantrl")
    std = fasttd3.statistics(fasttd3.OBS)["_std"].reshape(-1)
    torch.testing.assert_close(state["state_std"], std + 1e-2)
    obs = fasttd3.observed()
    close(actions(path, obs), actor(fasttd3.normalised(obs)))
    golden("\n".join(done.report.notes))


def test_a_limit_that_elegantrl_does_not_have_is_refused(tmp_path: Path, golden: Golden) -> None:
    source = saved(tmp_path, "a.pt", skrl.td3()[0] | {"state_preprocessor": skrl.scaler()})
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "b.pt"), to="elegantrl", allow_missing=True)
    golden(caught.value)


# --- d3rlpy: what save_model writes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaussian", "critics"), [(False, 2), (False, 1), (True, 5)], ids=["td3", "ddpg", "sac"]
)
def test_d3rlpy(tmp_path: Path, gaussian: bool, critics: int, golden: Golden) -> None:
    source, policy, _, file = agent(tmp_path, d3rlpy.OBS, d3rlpy.ACT, gaussian=gaussian, critics=critics)
    path, done, state = written(tmp_path, source, "d3rlpy_model")
    assert not done.report.unused
    golden("\n".join(done.report.notes))
    head = d3rlpy.Head(d3rlpy.OBS, d3rlpy.ACT, "_mu" if gaussian else "_fc")
    head.load_state_dict(state["policy"], strict=True)
    for entry in ("q_funcs", "targ_q_funcs"):
        d3rlpy.critics(critics).load_state_dict(state[entry], strict=True)
    modules = {"policy", "q_funcs", "targ_q_funcs", "actor_optim", "critic_optim"}
    assert state.keys() == modules | ({"log_temp", "temp_optim"} if gaussian else {"targ_policy"})
    with torch.no_grad():
        close(actions(path, observations(d3rlpy.OBS)), torch.tanh(head(as_batch(observations(d3rlpy.OBS)))))
        close(policy(as_batch(observations(5))).numpy(), torch.tanh(head(as_batch(observations(5)))))
    for name, state_of in (("actor_optim", "actor_optimizer"), ("critic_optim", "critic_optimizer")):
        assert state[name]["lr_scheduler"] is None
        assert torch.equal(moments(state[name]["optim"], 5), moments(file[state_of], 5))
    if gaussian:
        assert state["log_temp"]["_parameter"].tolist() == [[-1.5]]
        assert not state["temp_optim"]["optim"]["state"]


def test_d3rlpy_imitates_a_policy_alone(tmp_path: Path) -> None:
    source = elegantrl.saved(tmp_path, "act.pth", elegantrl.Actor().state_dict())
    _, _, state = written(tmp_path, source, "d3rlpy_model")
    d3rlpy.Head(elegantrl.OBS, elegantrl.ACT).load_state_dict(state["imitator"], strict=True)
    assert state.keys() == {"imitator", "optim"}


@pytest.mark.parametrize("gaussian", [False, True], ids=["td3", "sac"])
def test_a_d3_file_tells_all_that_its_agent_needs(tmp_path: Path, gaussian: bool) -> None:
    actor = cleanrl.saved(tmp_path / "a.cleanrl_model", gaussian=gaussian)[0]
    target = str(tmp_path / "agent.d3")
    done = convert(str(tmp_path / "a.cleanrl_model"), target, sync=False)
    assert done.report.complete
    entries = pickle.loads(Path(target).read_bytes())  # a file of our own
    assert list(entries) == ["torch", "config", "version"]
    state = torch.load(io.BytesIO(entries["torch"]), weights_only=True)
    head = d3rlpy.Head(3, 2, "_mu" if gaussian else "_fc", hidden=[16, 16])
    head.load_state_dict(state["policy"], strict=True)
    document = json.loads(entries["config"])
    assert (document["observation_shape"], document["action_size"]) == ([3], 2)
    params = document["config"]["params"]
    assert (document["config"]["type"], params["n_critics"]) == ("sac" if gaussian else "td3", 2)
    assert params["actor_encoder_factory"]["params"] == {"hidden_units": [16, 16], "activation": "relu"}
    assert params["action_scaler"]["params"] == {"minimum": list(LOW), "maximum": list(HIGH)}
    (tmp_path / "agent.d3.ckpttool.json").unlink()
    obs = observations(3)
    with torch.no_grad():
        close(actions(target, obs), actor(as_batch(obs)), 3.0)
    assert restore_agent(target).known.is_read("action_high")
    assert restore_agent(target).known.origin("action_high") == f"config {OUTPUT_RANGE}"


def test_a_d3_file_normalises_as_the_agent_did(tmp_path: Path) -> None:
    file, actor, _ = fasttd3.agent(gaussian=True)
    target = str(tmp_path / "agent.d3")
    convert(saved(tmp_path, "x.pt", file), target, allow_missing=True, sync=False)
    (tmp_path / "agent.d3.ckpttool.json").unlink()
    obs = fasttd3.observed()
    close(actions(target, obs), actor(fasttd3.normalised(obs)))


def test_a_d3_file_without_bounds_is_refused(tmp_path: Path) -> None:
    source, _, _, _ = agent(tmp_path, 3, 2)
    with pytest.raises(UsageError):
        convert(source, str(tmp_path / "a.d3"), allow_missing=True)


# --- What cannot be said there ---------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["fujimoto", "skrl", "spinningup"])
def test_bounds_that_differ_are_no_one_number(tmp_path: Path, to: str, golden: Golden) -> None:
    cleanrl.saved(tmp_path / "uneven.cleanrl_model")
    source = str(tmp_path / "uneven.cleanrl_model")
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "a"), to=to, allow_missing=True)
    golden(caught.value)
    for other in ("tianshou", "elegantrl", "d3rlpy", "d3rlpy_model", "cleanrl"):
        path = str(tmp_path / f"{other}{'.d3' if other == 'd3rlpy' else '.pt'}")
        convert(source, path, to=other, allow_missing=True, sync=False)
        np.testing.assert_array_equal(actions(path, observations(3)), actions(source, observations(3)))


def test_a_clipped_action_whose_bounds_nobody_knows_is_refused(tmp_path: Path, golden: Golden) -> None:
    source = saved(tmp_path, "policy.pth", tianshou.td3("1.x").state_dict())
    with pytest.raises(UnsupportedError) as error:
        convert(source, str(tmp_path / "a.pt"), to="d3rlpy_model", allow_missing=True)
    golden(error.value)
    assert "--bounds" in str(error.value.hint)
    assert convert(source, str(tmp_path / "b.pt"), to="tianshou", sync=False).report.complete


@pytest.mark.parametrize("to", ["tianshou", "skrl", "d3rlpy", "spinningup", "cleanrl"])
def test_an_action_that_joins_later_is_refused(tmp_path: Path, to: str, golden: Golden) -> None:
    source, policy, _, _ = agent(tmp_path, 3, 2, critics=1)
    file = torch.load(source, weights_only=True)
    critic = {"l1": nn.Linear(3, 16), "l2": nn.Linear(18, 8), "l3": nn.Linear(8, 1)}
    file = {"actor": policy.state_dict(), "critic": nn.ModuleDict(critic).state_dict(), "total_it": 3}
    with pytest.raises(UnsupportedError) as caught:
        convert(saved(tmp_path, "late.pt", file), str(tmp_path / "a"), to=to, allow_missing=True)
    golden(caught.value)


def test_more_q_functions_than_there_are_names_for_are_refused(tmp_path: Path, golden: Golden) -> None:
    source, _, _, _ = agent(tmp_path, 3, 2, critics=3)
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "a.pt"), to="skrl", allow_missing=True)
    golden(caught.value)
