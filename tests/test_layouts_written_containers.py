"""What is written in containers of a library's own: SB2's zip, keras-rl's two files, RLlib's folder."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import (
    Output,
    Sidecar,
    TargetExistsError,
    UnsupportedError,
    UsageError,
    sidecar_path,
    write_atomically,
)
from ckpttool.core.digests import digest_checkpoint
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from tests import test_layout_stable_baselines2 as sb2
from tests.golden_texts import Golden
from tests.pickles import importable, stand_in

torch = pytest.importorskip("torch")

from tests import test_layout_rllib as rllib  # noqa: E402  # they need torch
from tests.torch_agents import actions, agent, as_batch, close, mlp, observations, saved  # noqa: E402

OBS, ACT = 3, 2


class Box:
    """gym's and gymnasium's: called with the two ends."""

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        self.low, self.high, self.called = low, high, True


def box(module: str) -> type:
    return type("Box", (Box,), {"__module__": module, "__qualname__": "Box"})


def bounded(path: str, low: tuple[float, ...] = (-1.0, 0.0), high: tuple[float, ...] = (2.0, 0.5)) -> str:
    """Put a sidecar beside the checkpoint that says its actions are tanh mapped to these bounds."""
    facts = Sidecar(
        digest_checkpoint(open_checkpoint(path)).sha256, head="affine", action_low=low, action_high=high
    )
    Path(sidecar_path(path)).write_bytes(facts.encode())
    return path


def clipped(last: torch.Tensor) -> torch.Tensor:
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 0.5])
    return low + (last + 1) / 2 * (high - low)


# --- Stable-Baselines 2 ----------------------------------------------------------------------------------


def loaded(path: str, *classes: type) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return settings and variables as stable_baselines/common/save_util.py reads them."""
    with zipfile.ZipFile(path) as archive, importable(*classes):
        data = json.loads(archive.read("data"))
        for name, value in data.items():
            if isinstance(value, dict) and ":serialized:" in value:
                data[name] = pickle.loads(base64.b64decode(value[":serialized:"]))
        names = json.loads(archive.read("parameter_list"))
        arrays = np.load(io.BytesIO(archive.read("parameters")), allow_pickle=False)
        return data, {name: arrays[name] for name in names}


BOX = box("gym.spaces.box")


@pytest.mark.parametrize("kind", ["td3", "sac", "ddpg"])
def test_sb2_gets_its_own_variables_back(kind: str, tmp_path: Path) -> None:
    variables = {"td3": sb2.td3, "sac": sb2.sac, "ddpg": sb2.ddpg}[kind]()
    more = {"observation_range": (-5.0, 5.0), "normalize_observations": False} if kind == "ddpg" else {}
    source, target = sb2.put(tmp_path, variables, kind, **more), str(tmp_path / "again.zip")
    assert convert(source, target, to="sb2", sync=False).report.complete
    data, arrays = loaded(target, BOX, sb2.POLICIES[kind])
    assert arrays.keys() == variables.keys()
    assert all(np.array_equal(arrays[name], array) for name, array in variables.items())
    assert data["policy"] is sb2.POLICIES[kind]
    assert (data["n_envs"], data["_vectorize_action"], data["policy_kwargs"]) == (
        1,
        False,
        {"layers": [5, 4]},
    )
    assert data["action_space"].called
    np.testing.assert_array_equal(data["action_space"].low, sb2.LOW)
    np.testing.assert_array_equal(data["action_space"].high, sb2.HIGH)
    assert (data["observation_space"].low == -np.inf).all()
    assert data.get("observation_range") == ([-5.0, 5.0] if kind == "ddpg" else None)
    obs = sb2.observations()
    np.testing.assert_array_equal(
        sb2.played(restore_agent(target), obs), sb2.played(restore_agent(source), obs)
    )
    again = str(tmp_path / "twice.zip")
    convert(source, again, to="sb2", sync=False)
    assert Path(again).read_bytes() == Path(target).read_bytes()


def test_sb2_takes_an_agent_of_torch(tmp_path: Path, golden: Golden) -> None:
    source, policy, twins, _ = agent(tmp_path, OBS, ACT, targets=False)
    target = str(tmp_path / "agent.zip")
    done = convert(bounded(source), target, to="sb2", allow_missing=True, sync=False)
    _, arrays = loaded(target, BOX, stand_in("stable_baselines.td3.policies.MlpPolicy"))
    np.testing.assert_array_equal(arrays["model/pi/fc0/kernel:0"], policy.l1.weight.detach().numpy().T)
    np.testing.assert_array_equal(arrays["target/pi/fc0/kernel:0"], arrays["model/pi/fc0/kernel:0"])
    np.testing.assert_array_equal(arrays["model/values_fn/qf2/qf2/bias:0"], twins.q2[4].bias.detach().numpy())
    close(actions(target, observations(OBS)), clipped(policy(as_batch(observations(OBS)))), 3.0)
    golden("\n".join(done.report.notes))
    assert {name.split("/")[0] for name in done.report.unused} == {
        "actor_optimizer",
        "critic_optimizer",
    }


def test_sb2_names_its_activation(tmp_path: Path) -> None:
    source = sb2.put(tmp_path, sb2.td3(), "td3")
    document = {
        **json.loads(Sidecar(digest_checkpoint(open_checkpoint(source)).sha256).encode()),
        "activations": ["elu"] * 2,
    }
    Path(sidecar_path(source)).write_text(json.dumps(document))
    convert(source, str(tmp_path / "elu.zip"), to="sb2", sync=False)
    elu = stand_in("tensorflow.python.ops.gen_nn_ops.elu")
    data, _ = loaded(str(tmp_path / "elu.zip"), BOX, sb2.POLICIES["td3"], elu)
    assert data["policy_kwargs"] == {"layers": [5, 4], "act_fun": elu}
    assert restore_agent(str(tmp_path / "elu.zip")).known.activations == ["elu", "elu"]


def test_sb2_keeps_its_layer_norm(tmp_path: Path, golden: Golden) -> None:
    variables = sb2.td3(norm=True)
    convert(sb2.put(tmp_path, variables, "td3"), str(tmp_path / "n.zip"), to="sb2", sync=False)
    data, arrays = loaded(str(tmp_path / "n.zip"), BOX, stand_in("stable_baselines.td3.policies.LnMlpPolicy"))
    assert arrays.keys() == variables.keys()
    assert data["policy"].__name__ == "LnMlpPolicy"
    # The way over PyTorch, whose own epsilon is another, keeps that of the library.
    convert(str(tmp_path / "n.zip"), str(tmp_path / "n.pt"), sync=False)
    convert(str(tmp_path / "n.pt"), str(tmp_path / "again.zip"), to="sb2", sync=False)
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "n.zip").read_bytes()
    Path(sidecar_path(str(tmp_path / "n.pt"))).unlink()
    bounded(str(tmp_path / "n.pt"))
    with pytest.raises(UnsupportedError) as caught:
        convert(str(tmp_path / "n.pt"), str(tmp_path / "other.zip"), to="sb2", sync=False)
    golden(caught.value)


def test_what_sb2_cannot_be_is_refused(tmp_path: Path, golden: Golden) -> None:
    target = str(tmp_path / "x.zip")
    unbounded, _, _, _ = agent(tmp_path / "a", OBS, ACT, critics=1)
    with pytest.raises(UnsupportedError) as caught:
        convert(bounded(unbounded), target, to="sb2", allow_missing=True)
    golden(caught.value)
    wide = {"actor": mlp(OBS, 16, ACT).state_dict(), "critic": mlp(OBS + ACT, 8, 1).state_dict()}
    wide |= {"actor_target": wide["actor"], "critic_target": wide["critic"]}
    with pytest.raises(UnsupportedError):
        convert(bounded(saved(tmp_path, "wide.pt", wide)), target, to="sb2", allow_missing=True)
    gaussian, _, _, _ = agent(tmp_path / "b", OBS, ACT, gaussian=True)
    done = convert(bounded(gaussian), target, to="sb2")
    # Its SAC has a value of the state, which a file without one cannot give.
    assert set(done.report.missing) == {"value", "value_target"}
    assert not done.written


# --- keras-rl --------------------------------------------------------------------------------------------


def test_keras_rl_gets_two_files_in_the_order_of_their_layers(tmp_path: Path, golden: Golden) -> None:
    h5py = pytest.importorskip("h5py")
    source, policy, twins, _ = agent(tmp_path, OBS, ACT, critics=1)
    done = convert(bounded(source), str(tmp_path / "w.h5f"), to="keras_rl", allow_missing=True, sync=False)
    assert sorted(p.name for p in tmp_path.glob("w*")) == [
        "w.h5f.ckpttool.json",
        "w.h5f.ckpttool.residue.pt",
        "w_actor.h5f",
        "w_critic.h5f",
    ]
    with h5py.File(tmp_path / "w_actor.h5f") as actor, h5py.File(tmp_path / "w_critic.h5f") as critic:
        assert list(actor.attrs["layer_names"]) == [b"dense_1", b"dense_2", b"dense_3"]
        assert list(critic.attrs["layer_names"]) == [b"dense_4", b"dense_5", b"dense_6"]
        assert list(actor["dense_1"].attrs["weight_names"]) == [b"dense_1/kernel:0", b"dense_1/bias:0"]
        kernel = actor["dense_1"]["dense_1/kernel:0"][()]
        np.testing.assert_array_equal(kernel, policy.l1.weight.detach().numpy().T)
        last = critic["dense_6"]["dense_6/bias:0"][()]
        np.testing.assert_array_equal(last, twins.q1[4].bias.detach().numpy())
    close(
        actions(str(tmp_path / "w.h5f"), observations(OBS)), clipped(policy(as_batch(observations(OBS)))), 3.0
    )
    golden("\n".join(done.report.notes))
    convert(source, str(tmp_path / "v"), to="keras_rl", allow_missing=True, sync=False)
    for member in ("actor", "critic"):
        assert (tmp_path / f"v_{member}.h5f").read_bytes() == (tmp_path / f"w_{member}.h5f").read_bytes()
    with pytest.raises(TargetExistsError):
        convert(source, str(tmp_path / "w.h5f"), to="keras_rl", allow_missing=True, sync=False)


# --- RLlib -----------------------------------------------------------------------------------------------


def module(folder: Path, *classes: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], type]:
    """Return a module's state, the arguments of its class, and that class, as RLlib unpickles them."""
    stand_ins = [stand_in(f"ray.rllib.algorithms.{name}") for name in classes]
    with importable(box("gymnasium.spaces.box"), *stand_ins):
        about = pickle.loads((folder / "class_and_ctor_args.pkl").read_bytes())
    state = pickle.loads((folder / "module_state.pkl").read_bytes())
    assert about["class"] is stand_ins[0]
    assert about["ctor_args_and_kwargs"][0] == ()
    arguments = about["ctor_args_and_kwargs"][1]
    assert arguments.pop("catalog_class") is stand_ins[1]
    return {name: torch.from_numpy(array.copy()) for name, array in state.items()}, arguments, stand_ins[0]


SAC = ("sac.torch.default_sac_torch_rl_module.DefaultSACTorchRLModule", "sac.sac_catalog.SACCatalog")


def test_rllib_gets_a_module_for_inference(tmp_path: Path, golden: Golden) -> None:
    source, policy, _, _ = agent(tmp_path, OBS, ACT, gaussian=True)
    folder = tmp_path / "module"
    done = convert(bounded(source), str(folder), to="rllib", allow_missing=True, sync=False)
    assert sorted(os.listdir(folder)) == ["class_and_ctor_args.pkl", "metadata.json", "module_state.pkl"]
    assert json.loads((folder / "metadata.json").read_text())["state_file"] == "module_state"
    state, arguments, _ = module(folder, *SAC)
    spaces = [arguments.pop(name) for name in ("observation_space", "action_space")]
    assert arguments == {
        "inference_only": True,
        "learner_only": False,
        "model_config": {"fcnet_hiddens": [16, 8], "fcnet_activation": "relu", "twin_q": True},
    }
    assert spaces[0].low.tolist() == [-np.inf] * OBS
    assert (spaces[1].low.tolist(), spaces[1].high.tolist()) == ([-1.0, 0.0], [2.0, 0.5])
    whole = torch.nn.Module()
    for name, sizes in {"pi_encoder": (OBS, 16, 8), "pi": (8, 2 * ACT)}.items():
        setattr(whole, name, torch.nn.Module())
        getattr(whole, name).net = torch.nn.Module()
        layers = mlp(*sizes)
        getattr(whole, name).net.mlp = (
            torch.nn.Sequential(*layers, torch.nn.ReLU()) if name != "pi" else layers
        )
    assert state.pop("pi.log_std_clip_param_const").tolist() == [20.0]
    whole.load_state_dict(state, strict=True)
    obs = as_batch(observations(OBS))
    with torch.no_grad():
        mean, deviation = whole.pi.net.mlp(whole.pi_encoder.net.mlp(obs)).chunk(2, -1)
        torch.testing.assert_close(torch.tanh(mean), policy(obs))
        hidden = torch.relu(policy.l2(torch.relu(policy.l1(obs))))
        torch.testing.assert_close(deviation, policy.log_std(hidden))
    known = restore_agent(str(folder))
    assert (known.binding.layout, known.known.action_low, known.known.head) == (
        "rllib",
        [-1.0, 0.0],
        "affine",
    )
    close(actions(str(folder), observations(OBS)), clipped(policy(obs)), 3.0)
    golden("\n".join(done.report.notes))
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


PPO = ("ppo.torch.default_ppo_torch_rl_module.DefaultPPOTorchRLModule", "ppo.ppo_catalog.PPOCatalog")


def test_rllibs_ppo_gets_its_own_module_back(tmp_path: Path) -> None:
    tree = rllib.ppo()
    source, folder = rllib.folder_of(tmp_path / "old", tree), tmp_path / "module"
    facts = Sidecar(
        digest_checkpoint(open_checkpoint(source)).sha256,
        action_low=(-1.0,) * rllib.ACT,
        action_high=(1.0,) * rllib.ACT,
    )
    Path(sidecar_path(source)).write_bytes(facts.encode())
    assert not convert(source, str(folder), to="rllib", allow_missing=True, sync=False).report.missing
    state, arguments, _ = module(folder, *PPO)
    before = {leaf.key.removeprefix(f"{rllib.MODULE}/"): leaf.array() for _, leaf in tree.tensors()}
    clips = [name for name in state if name.endswith("log_std_clip_param_const")]
    assert clips == ["pi.log_std_clip_param_const", "vf.log_std_clip_param_const"]
    kept = {name: array for name, array in before.items() if name not in clips}
    assert state.keys() - set(clips) == kept.keys()
    assert all(np.array_equal(state[name].numpy(), array) for name, array in kept.items())
    assert (arguments["inference_only"], arguments["model_config"]["vf_share_layers"]) == (False, False)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, golden: Golden) -> None:
    source, _, _, _ = agent(tmp_path, OBS, ACT, gaussian=True)
    with pytest.raises((UsageError, UnsupportedError)) as caught:
        convert(source, str(tmp_path / "module"), to="rllib", allow_missing=True)
    golden(caught.value)
    bounded(source)
    (tmp_path / "module").mkdir()
    for force in (False, True):
        with pytest.raises(TargetExistsError):
            convert(source, str(tmp_path / "module"), to="rllib", allow_missing=True, force=force)
    (tmp_path / "module").rmdir()
    plain, _, _, _ = agent(tmp_path / "b", OBS, ACT)
    with pytest.raises(UnsupportedError) as caught:
        convert(bounded(plain), str(tmp_path / "module"), to="rllib", allow_missing=True)
    golden(caught.value)
    assert not (tmp_path / "module").exists()
    assert not [name for name in os.listdir(tmp_path) if "ckpttool-tmp" in name]


def test_a_folder_goes_again_if_what_comes_after_it_fails(tmp_path: Path, golden: Golden) -> None:
    def write(stream: Any) -> None:
        stream.write(b"1")

    folder, late = str(tmp_path / "module"), str(tmp_path / "module.json")
    inside = [Output(folder, write, suffix=f"/{name}") for name in ("a", "b")]
    write_atomically(inside)
    assert sorted(os.listdir(folder)) == ["a", "b"]
    for name in ("a", "b"):
        os.unlink(os.path.join(folder, name))
    # Not even an empty folder is taken.
    with pytest.raises(TargetExistsError):
        write_atomically(inside)
    os.rmdir(folder)
    Path(late).write_text("mine")
    with pytest.raises(TargetExistsError) as caught:
        write_atomically([*inside, Output(late, write)])
    golden(caught.value)
    assert os.listdir(tmp_path) == ["module.json"]
