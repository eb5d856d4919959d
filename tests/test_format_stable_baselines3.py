"""Stable-Baselines3: real agents of its zoo, and files built as its save_util.py builds them."""

from __future__ import annotations

import base64
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.core import (
    ChecksumError,
    FormatError,
    Leaf,
    Record,
    UnsupportedError,
    ValueLeaf,
    attr,
    display,
    key,
)
from ckpttool.core import Path as TreePath
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, open_checkpoint, torch_zip
from ckpttool.formats import sb3 as stable_baselines2
from ckpttool.listing.audit import audit_notes
from ckpttool.testing.formats import FormatContract
from tests import sb3_files as sb3
from tests.conftest import ROOT, in_process
from tests.golden_texts import Golden
from tests.pickles import ACTING, importable, stand_in

ZOO = ROOT / ".." / "shared" / "corpus" / "torch" / "sb3_zoo" / "ddpg"
DATA = attr("data")


class TestZip(FormatContract):
    module = stable_baselines2

    def make(self, folder: Path) -> str:
        return sb3.td3_agent(folder / "agent.zip")


class TestOldZip(FormatContract):
    """Before version 0.5: no version, `tensors.pth`; before torch 1.6: members that are no archives."""

    module = stable_baselines2

    def make(self, folder: Path) -> str:
        contents = {"tensors": {"log_ent_coef": torch.zeros(1)}, **sb3.states(sb3.sac())}
        return sb3.put(folder / "old.zip", sb3.members(contents, sb3.settings(sb3.SAC_POLICY), version=None))


def keys(path: str) -> dict[str, Leaf]:
    return {leaf.key: leaf for _, leaf in open_checkpoint(path).tree.tensors()}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "stream"])
def test_every_tensor_is_listed_under_its_member(legacy: bool, tmp_path: Path) -> None:
    module = sb3.td3()
    states = sb3.states(module)
    path = sb3.put(tmp_path / "a.zip", sb3.members(states, sb3.settings(sb3.TD3_POLICY), legacy=legacy))
    listed = keys(path)
    for name, tensor in states["policy"].items():
        np.testing.assert_array_equal(listed[f"policy.pth.{name}"].array(), tensor.numpy())
    slot = listed["critic.optimizer.pth.state.3.exp_avg_sq"]
    np.testing.assert_array_equal(slot.array(), np.full(slot.shape, 3.5, "f4"))
    assert slot.slot == "exp_avg_sq"
    tree = open_checkpoint(path).tree
    assert "policy/actor/mu/0/weight" in tree.names.values()
    assert "actor/optimizer/state/0/exp_avg" in tree.names.values()


def test_slots_know_their_parameters(tmp_path: Path) -> None:
    tree = open_checkpoint(sb3.sac_agent(tmp_path / "a.zip")).tree
    owners = {display(path): display(leaf.of) for path, leaf in tree.tensors() if leaf.of is not None}
    assert owners["actor/optimizer/state/0/exp_avg"] == "policy/actor/latent_pi/0/weight"
    assert owners["critic/optimizer/state/4/exp_avg"] == "policy/critic/qf1/0/weight"
    assert owners["ent_coef_optimizer/state/0/exp_avg_sq"] == "pytorch_variables/log_ent_coef"
    slots = [path for path, leaf in tree.tensors() if leaf.slot is not None]
    assert len(owners) == len(slots)


def on_policy(tmp_path: Path, state: dict[str, Any], *, target: bool) -> dict[TreePath, TreePath | None]:
    names = ("q_net", "q_net_target")
    nets = {name: sb3.owner(q_net=sb3.mlp((3, 4, 2), torch.nn.ReLU)) for name in names}
    module = sb3.owner(**nets) if target else sb3.ppo()
    contents = {"policy": module.state_dict(), "policy.optimizer": state}
    path = sb3.put(tmp_path / "a.zip", sb3.members(contents, sb3.settings(sb3.ON_POLICY)))
    return {p: leaf.of for p, leaf in open_checkpoint(path).tree.tensors() if leaf.slot is not None}


def test_the_optimizer_of_a_whole_policy(tmp_path: Path) -> None:
    owners = on_policy(tmp_path, sb3.adam(sb3.ppo()), target=False)
    assert (
        display(owners[key("policy.optimizer"), key("state"), key(0), key("exp_avg")] or ())
        == "policy/log_std"
    )
    # DQN's is given the network alone, in files before version 2.4 its target as well.
    network = sb3.owner(q_net=sb3.owner(q_net=sb3.mlp((3, 4, 2), torch.nn.ReLU)))
    owners = on_policy(tmp_path, sb3.adam(network), target=True)
    assert display(owners[key("policy.optimizer"), key("state"), key(3), key("exp_avg")] or ()).startswith(
        "policy/q_net/q_net/2"
    )


def test_slots_that_fit_nothing_have_no_parameter(tmp_path: Path) -> None:
    owners = on_policy(tmp_path, sb3.adam(sb3.td3()), target=False)
    assert set(owners.values()) == {None}


def test_settings_are_values_and_objects_are_inert(tmp_path: Path, golden: Golden) -> None:
    checkpoint = open_checkpoint(sb3.td3_agent(tmp_path / "a.zip"))
    tree = checkpoint.tree
    assert tree[DATA, key("gamma")] == ValueLeaf(0.99)
    assert tree[DATA, key("policy_class")] == ValueLeaf(Record("stable_baselines3.td3.policies.TD3Policy"))
    low = tree[DATA, key("action_space"), attr("low")]
    assert isinstance(low, Leaf)
    assert (low.array().tolist(), low.role) == (list(sb3.LOW), "other")
    assert tree[attr("system_info"), key("OS")] == ValueLeaf("Linux 6.1")
    assert checkpoint.writer == "Stable-Baselines3 2.9.2"
    assert checkpoint.integrity == "crc32"
    golden("\n".join(checkpoint.notes))


@pytest.mark.parametrize("policy", ["stable_baselines3.dqn.policies.DQNPolicy", "sbx.sac.policies.SACPolicy"])
def test_other_algorithms_are_named(policy: str, tmp_path: Path, golden: Golden) -> None:
    text = base64.b64encode(b"\x80\x02c" + "\n".join(policy.rsplit(".", 1)).encode() + b"\n.").decode()
    contents = sb3.members({"policy": {}}, {})
    contents["data"] = json.dumps({"policy_class": {":type:": "", ":serialized:": text}}).encode()
    checkpoint = open_checkpoint(sb3.put(tmp_path / "a.zip", contents))
    golden("\n".join(checkpoint.notes))


def test_networks_of_jax_are_tensors(tmp_path: Path) -> None:
    array = np.arange(6, dtype="f4").reshape(3, 2)
    rebuild = stand_in("jax._src.array._reconstruct_array")
    function, args, state = array.__reduce__()

    class Weights:
        def __reduce__(self) -> tuple[Any, ...]:
            return rebuild, (function, args, state, {"weak_type": False})

    policy = {"actor_state": {"params": {"Dense_0": {"kernel": Weights()}}}}
    with importable(rebuild):
        text = base64.b64encode(pickle.dumps(policy, 4)).decode()
    contents = sb3.members({}, {})
    contents["data"] = json.dumps({"policy": {":type:": "", ":serialized:": text}}).encode()
    tensors = dict(open_checkpoint(sb3.put(tmp_path / "a.zip", contents)).tree.tensors())
    assert [display(path) for path in tensors] == ["data/policy/actor_state/params/Dense_0/kernel"]
    (leaf,) = tensors.values()
    np.testing.assert_array_equal(leaf.array(), array)
    assert leaf.role == "parameter"


@pytest.mark.parametrize(("pickled", "name"), ACTING.values(), ids=ACTING)
def test_settings_that_act_are_records(pickled: bytes, name: str, tmp_path: Path, golden: Golden) -> None:
    text = base64.b64encode(b"\x80\x04" + pickled).decode()
    contents = sb3.members(sb3.states(sb3.td3()), {})
    contents["data"] = json.dumps({"x": {":type:": "", ":serialized:": text}}).encode()
    checkpoint = open_checkpoint(sb3.put(tmp_path / "a.zip", contents))
    assert any(name in note for note in audit_notes(checkpoint.code_references))
    golden("\n".join(audit_notes(checkpoint.code_references)))
    assert len([p for p, _ in checkpoint.tree.tensors() if p[0] == key("policy")]) == 28


def test_a_folder_that_a_zip_was_unpacked_into(tmp_path: Path) -> None:
    path = sb3.td3_agent(tmp_path / "a.zip")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unpacked")
    (tmp_path / "unpacked" / "policy.pth").chmod(0o600)
    checkpoint = open_checkpoint(str(tmp_path / "unpacked"))
    assert checkpoint.format == "stable_baselines3"
    rows = {(row.key, row.sha256) for row in digest_checkpoint(checkpoint).tensors}
    assert rows == {(row.key, row.sha256) for row in digest_checkpoint(open_checkpoint(path)).tensors}


def test_compressed_members_are_explained(tmp_path: Path, golden: Golden) -> None:
    contents = sb3.members(sb3.states(sb3.td3()), sb3.settings(sb3.TD3_POLICY))
    path = sb3.put(tmp_path / "a.zip", contents, zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(path)
    golden(caught.value)


WRONG = {
    "a member that is no torch file": {"policy.pth": b"nothing"},
    "data that is no dict": {"data": b"[]"},
    "data 100,000 deep": {"data": b"[" * 100_000},
    "no base64": {"data": b'{"a": {":serialized:": "*"}}'},
    "no pickle": {"data": b'{"a": {":serialized:": "AAAA"}}'},
    "a long version": {"_stable_baselines3_version": b"x" * 100_000},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_damage_is_one_sentence(change: dict[str, bytes], tmp_path: Path, golden: Golden) -> None:
    contents = sb3.members(sb3.states(sb3.td3()), sb3.settings(sb3.TD3_POLICY)) | change
    path = sb3.put(tmp_path / "a.zip", contents)
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    golden(caught.value)
    assert caught.value.file == path


@pytest.mark.parametrize("name", ["policy.pth", "actor.optimizer.pth"])
def test_the_checksum_of_an_archive_in_the_archive_is_verified(name: str, tmp_path: Path) -> None:
    path = Path(sb3.td3_agent(tmp_path / "a.zip"))
    with zipfile.ZipFile(path) as archive:
        right = archive.getinfo(name).CRC.to_bytes(4, "little")
    # In both headers, so that only the data contradict it.
    path.write_bytes(path.read_bytes().replace(right, bytes(byte ^ 1 for byte in right)))
    with zipfile.ZipFile(path) as archive, pytest.raises(zipfile.BadZipFile):
        archive.read(name)
    with pytest.raises(ChecksumError) as caught:
        digest_checkpoint(open_checkpoint(str(path)))
    assert caught.value.file == str(path)


def test_members_of_other_kinds_are_named(tmp_path: Path, golden: Golden) -> None:
    contents = sb3.members(sb3.states(sb3.td3()), sb3.settings(sb3.TD3_POLICY)) | {"README.md": b"hello"}
    checkpoint = open_checkpoint(sb3.put(tmp_path / "a.zip", contents))
    golden("\n".join(checkpoint.notes))


def test_other_archives_are_not_claimed(tmp_path: Path) -> None:
    torch.save({"data": torch.zeros(2)}, tmp_path / "data.pth")
    assert stable_baselines2.claims(Probe(str(tmp_path / "data.pth"))) is None
    assert torch_zip.claims(Probe(str(tmp_path / "data.pth"))) is not None
    sb2 = sb3.put(tmp_path / "sb2.zip", {"data": b"{}", "parameters": b"", "parameter_list": b"[]"})
    assert stable_baselines2.claims(Probe(sb2)) is None
    assert stable_baselines2.sb2_claims(Probe(sb2)) is not None
    assert stable_baselines2.claims(Probe(str(tmp_path))) is None


def test_listing_loads_no_framework(tmp_path: Path) -> None:
    path = sb3.td3_agent(tmp_path / "a.zip")
    code = (
        "import sys, ckpttool; ckpttool.summary(sys.argv[1]);"
        "print(sorted({'torch', 'numpy', 'stable_baselines3', 'gymnasium'} & set(sys.modules)))"
    )
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["Pendulum-v1", "MountainCarContinuous-v0", "LunarLanderContinuous-v2"])
def test_real_agents(name: str) -> None:
    path = ZOO / f"{name}_1" / f"{name}.zip"
    truth = json.loads(Path(f"{path}.truth.json").read_text())
    rows = {row.key: row.sha256 for row in digest_checkpoint(open_checkpoint(str(path))).tensors}
    assert {stored: tensor["sha256"] for stored, tensor in truth.items()}.items() <= rows.items()


@pytest.mark.corpus
def test_the_command_line_names_the_agent(golden: Golden) -> None:
    ran = in_process("inspect", ZOO / "Pendulum-v1_1" / "Pendulum-v1.zip")
    assert ran.status == 0
    golden("\n".join(ran.out.splitlines()[2:5]))


def test_statistics_alone_are_a_pickle_with_buffers(tmp_path: Path) -> None:
    space = sb3.box([-1.0], [1.0])
    path = sb3.statistics(tmp_path / "vecnormalize.pkl", observation_space=space, old_obs=np.zeros(3))
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "pickle"
    roles = {display(path): leaf.role for path, leaf in checkpoint.tree.tensors()}
    assert (roles["obs_rms/mean"], roles["obs_rms/var"]) == ("buffer", "buffer")
    assert "parameter" not in roles.values()
    assert checkpoint.tree[attr("clip_obs"),] == ValueLeaf(5.0)
