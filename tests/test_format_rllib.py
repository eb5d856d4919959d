"""RLlib: files built as its source builds them; no file of the library itself was at hand.

Followed in github.com/ray-project/ray: rllib/evaluation/rollout_worker.py (`save`), rllib/agents/trainer.py
(`__getstate__`), rllib/policy/policy.py and tf_policy.py (`get_state`), rllib/utils/filter.py,
rllib/utils/checkpoints.py, rllib/algorithms/algorithm.py (`save_checkpoint`).
"""

from __future__ import annotations

import collections
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import (
    FormatError,
    Tree,
    UnsupportedError,
    ValueLeaf,
    attr,
    dangerous_calls,
    display,
    key,
)
from ckpttool.formats import Probe, open_checkpoint, rllib
from ckpttool.listing.audit import audit_notes
from tests.golden_texts import Golden
from tests.pickles import ACTING, importable, instance, stand_in
from tests.test_format_pytorch_containers import WithoutChecksums

FILTER = stand_in("ray.rllib.utils.filter.MeanStdFilter")
STAT = stand_in("ray.rllib.utils.filter.RunningStat")
SPEC = stand_in("ray.rllib.policy.policy.PolicySpec")
POLICY = "default_policy"


def dumps(value: object) -> bytes:
    with importable(FILTER, STAT, SPEC):
        return pickle.dumps(value, 4)


def weights(policy: str = POLICY) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    shapes = {"fc_1/kernel": (17, 32), "fc_1/bias": (32,), "fc_out/kernel": (32, 12), "value_out/bias": (1,)}
    return {f"{policy}/{name}": generator.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def optimizer(policy: str = POLICY) -> dict[str, np.ndarray]:
    variables = {f"{policy}/beta1_power": np.float32(0.9), f"{policy}/beta2_power": np.float32(0.999)}
    for name, array in weights(policy).items():
        variables[f"{policy}/{name}/Adam"] = np.full_like(array, 0.5)
        variables[f"{policy}/{name}/Adam_1"] = np.full_like(array, 0.25)
    return variables


def mean_std() -> Any:
    def stat(count: int) -> Any:
        return instance(STAT, _n=count, _M=np.arange(17.0), _S=np.ones(17))

    shape = np.array([17])
    return instance(FILTER, shape=shape, demean=True, destd=True, clip=10.0, rs=stat(100), buffer=stat(0))


def policy_state(policy: str = POLICY) -> dict[str, Any]:
    return {
        "weights": weights(policy),
        "global_timestep": 4000,
        "_optimizer_variables": collections.OrderedDict(optimizer(policy)),
        "_exploration_state": {"last_timestep": np.int64(4000)},
    }


def single(state: object = None) -> bytes:
    inner = {"filters": {POLICY: mean_std()}, "state": state or {POLICY: policy_state()}}
    metrics = {"counters": {"num_steps_trained": 4000}, "info": {}, "timers": {}}
    return dumps({"worker": dumps(inner), "train_exec_impl": metrics})


def put(folder: Path, data: bytes, name: str) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return str(folder / name)


def algorithm(folder: Path, policies: tuple[str, ...] = (POLICY,)) -> str:
    about = {
        "type": "Algorithm",
        "checkpoint_version": "1.1",
        "format": "cloudpickle",
        "ray_version": "2.6.3",
    }
    put(folder, json.dumps(about | {"state_file": "/etc/passwd"}).encode(), "agent/rllib_checkpoint.json")
    worker = {"filters": {name: mean_std() for name in policies}, "policy_ids": list(policies)}
    state = {"worker": worker, "counters": {"num_env_steps_sampled": 4000}, "config": {"gamma": 0.99}}
    put(folder, dumps(state), "agent/algorithm_state.pkl")
    for name in policies:
        spec = instance(SPEC, observation_space=None, config={"lr": 0.001})
        put(
            folder,
            dumps({**policy_state(name), "policy_spec": spec}),
            f"agent/policies/{name}/policy_state.pkl",
        )
        put(folder, b'{"type": "Policy"}', f"agent/policies/{name}/rllib_checkpoint.json")
    return str(folder / "agent")


class TestSingleFile(WithoutChecksums):
    module = rllib

    def make(self, folder: Path) -> str:
        return put(folder, single(), "checkpoint-10")


class TestFolder(WithoutChecksums):
    module, damages = rllib, 100

    def make(self, folder: Path) -> str:
        return algorithm(folder)

    def test_reading_leaves_the_files_as_they_were(self, path: str) -> None:
        before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in Path(path).rglob("*.*")}
        open_checkpoint(path)
        assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in before} == before


def tensors(tree: Tree) -> dict[str, Any]:
    return {display(path): leaf for path, leaf in tree.tensors()}


def check_policy(leaves: dict[str, Any], top: str, policy: str = POLICY) -> None:
    for name, array in weights(policy).items():
        leaf = leaves[f"{top}/weights/{name}"]
        np.testing.assert_array_equal(leaf.array(), array)
        assert (leaf.role, leaf.name) == ("parameter", name)
    for name, array in optimizer(policy).items():
        leaf = leaves[f"{top}/_optimizer_variables/{name}"]
        np.testing.assert_array_equal(leaf.array(), array)
        of, _, last = name.rpartition("/")
        if last.startswith("Adam"):
            assert (leaf.role, leaf.slot) == ("slot", {"Adam": "m", "Adam_1": "v"}[last])
            assert display(leaf.of) == f"{top}/weights/{of.removeprefix(policy + '/')}"
        else:
            assert (leaf.role, leaf.of) == ("other", None)


def test_the_worker_s_pickle_is_opened(tmp_path):
    saved = open_checkpoint(put(tmp_path, single(), "checkpoint-10"))
    listed = tensors(saved.tree)
    check_policy(listed, f"worker/state/{POLICY}")
    mean = listed[f"worker/filters/{POLICY}/rs/_M"]
    assert (mean.role, mean.array().tolist()) == ("buffer", list(map(float, range(17))))
    worker = key("worker")
    count = saved.tree[worker, key("filters"), key(POLICY), attr("rs"), attr("_n")]
    assert count == ValueLeaf(100, "counter")
    steps = saved.tree[key("train_exec_impl"), key("counters"), key("num_steps_trained")]
    assert steps == ValueLeaf(4000, "counter")
    assert saved.tree[worker, key("state"), key(POLICY), key("global_timestep")] == ValueLeaf(4000, "counter")


def test_a_nested_array_is_a_span_of_the_file(tmp_path):
    path = put(tmp_path, single(), "checkpoint-10")
    leaf = tensors(open_checkpoint(path).tree)[f"worker/state/{POLICY}/weights/{POLICY}/fc_1/kernel"]
    assert leaf.source.file.path == path
    assert (
        Path(path).read_bytes()[leaf.source.offset :][:16]
        == weights()[f"{POLICY}/fc_1/kernel"].tobytes()[:16]
    )


def test_states_of_older_releases(tmp_path):
    """As rollout_worker.py wrote then: a policy's state is its weights, beside `_optimizer_variables`."""
    state = {**weights(), "_optimizer_variables": list(optimizer().values())}
    leaves = tensors(open_checkpoint(put(tmp_path, single({POLICY: state}), "checkpoint-3")).tree)
    assert leaves[f"worker/state/{POLICY}/{POLICY}/fc_1/kernel"].role == "parameter"
    assert leaves[f"worker/state/{POLICY}/_optimizer_variables/0"].role == "other"


def test_states_of_pytorch_policies(tmp_path):
    """As torch_policy.py writes: convert_to_numpy of the weights and of each optimizer's state_dict."""
    moments = {0: {"step": np.array(5), "exp_avg": np.ones((4, 3)), "exp_avg_sq": np.ones((4, 3))}}
    state = {
        "weights": collections.OrderedDict({"_logits._model.0.weight": np.ones((4, 3), "f4")}),
        "_optimizer_variables": [{"state": moments, "param_groups": [{"lr": 0.1, "params": [0]}]}],
    }
    leaves = tensors(open_checkpoint(put(tmp_path, single({POLICY: state}), "checkpoint-3")).tree)
    top = f"worker/state/{POLICY}"
    assert leaves[f"{top}/weights/_logits/_model/0/weight"].role == "parameter"
    slot = leaves[f"{top}/_optimizer_variables/0/state/0/exp_avg"]
    assert (slot.role, slot.slot) == ("slot", "exp_avg")
    assert leaves[f"{top}/_optimizer_variables/0/state/0/step"].role == "counter"


def test_tune_s_folder_and_its_metadata(tmp_path):
    inside = put(tmp_path, single(), "checkpoint_000010/checkpoint-10")
    put(
        tmp_path,
        dumps({"iteration": 10, "episodes_total": 7}),
        "checkpoint_000010/checkpoint-10.tune_metadata",
    )
    put(tmp_path, b"", "checkpoint_000010/.is_checkpoint")
    checkpoint = open_checkpoint(str(tmp_path / "checkpoint_000010"))
    assert checkpoint.path == inside
    assert checkpoint.tree[attr("tune_metadata"), key("iteration")] == ValueLeaf(10, "counter")
    assert len(checkpoint.files) == 2


def test_a_folder_of_several_policies(tmp_path, golden: Golden):
    checkpoint = open_checkpoint(algorithm(tmp_path, ("left", "right")))
    listed = tensors(checkpoint.tree)
    for name in ("left", "right"):
        check_policy(listed, f"policies/{name}", name)
        assert listed[f"algorithm_state/worker/filters/{name}/rs/_S"].role == "buffer"
    state = attr("algorithm_state")
    steps = checkpoint.tree[state, key("counters"), key("num_env_steps_sampled")]
    assert steps == ValueLeaf(4000, "counter")
    golden(str(checkpoint.writer))
    assert len(checkpoint.files) == 4


def test_a_policy_s_folder_or_file_alone(tmp_path):
    top = Path(algorithm(tmp_path)) / "policies" / POLICY
    for path in (top, top / "policy_state.pkl", top / "rllib_checkpoint.json"):
        checkpoint = open_checkpoint(str(path))
        assert checkpoint.format == "rllib"
        assert f"weights/{POLICY}/fc_1/kernel" in tensors(checkpoint.tree)


def test_modules_of_version_2(tmp_path):
    """As Checkpointable.save_to_path writes: one folder for each component, weights as NumPy arrays."""
    module = "agent/learner_group/learner/rl_module/default_policy"
    put(tmp_path, json.dumps({"checkpoint_version": "2.1"}).encode(), "agent/rllib_checkpoint.json")
    put(tmp_path, dumps({"pi.net.mlp.0.weight": np.ones((4, 3), "f4")}), f"{module}/module_state.pkl")
    put(tmp_path, dumps({"optimizer": {}}), "agent/learner_group/learner/state.pkl")
    checkpoint = open_checkpoint(str(tmp_path / "agent"))
    [(path, leaf)] = tensors(checkpoint.tree).items()
    assert path.endswith("rl_module/default_policy/pi/net/mlp/0/weight")
    assert leaf.role == "parameter"


@pytest.mark.parametrize("name", ["module_state.pt", "policy_state.msgpck", "rllib_checkpoint.json"])
def test_other_forms_are_named(name, tmp_path, golden: Golden):
    put(tmp_path, b"{}", f"agent/{name}")
    with pytest.raises((UnsupportedError, FormatError)) as caught:
        open_checkpoint(str(tmp_path / "agent"))
    golden(caught.value)


def test_what_is_left_out_is_told(tmp_path, golden: Golden):
    put(tmp_path, b"PK", "agent/learner/module_state.pt")
    put(tmp_path, dumps({"weights": weights()}), "agent/policy_state.pkl")
    [note] = open_checkpoint(str(tmp_path / "agent")).notes
    golden(note)


@pytest.mark.parametrize("data", [data for data, _ in ACTING.values()], ids=ACTING)
def test_pickles_that_act_are_named_inside_the_worker_too(data, tmp_path, monkeypatch):
    acted: list[int] = []
    monkeypatch.setattr(os, "getcwd", lambda: acted.append(1) or "/")
    for filling in (b"", b"N0" * 64):
        path = put(tmp_path, dumps({"worker": b"\x80\x04" + filling + data}), "checkpoint-1")
        checkpoint = open_checkpoint(path)
        [name] = dangerous_calls(checkpoint.code_references)
        assert any(name in note for note in audit_notes(checkpoint.code_references))
    assert not acted


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    outside = put(tmp_path, dumps({"weights": weights()}), "outside/policy_state.pkl")
    top = Path(algorithm(tmp_path))
    (top / "policies" / "loop").symlink_to(top)
    (top / "policies" / "out").symlink_to(Path(outside).parent)
    names = {file.path for file in open_checkpoint(str(top)).files}
    assert not any("loop" in name or "/out" in name for name in names)


def test_a_fifo_is_not_opened(tmp_path):
    top = Path(algorithm(tmp_path))
    os.mkfifo(top / "state.pkl")
    assert open_checkpoint(str(top)).format == "rllib"


def test_other_folders_and_files_are_not_claimed(tmp_path):
    (tmp_path / "empty").mkdir()
    put(tmp_path, b"\x80\x04N.", "tf/checkpoint")
    put(tmp_path, b"", "tf/checkpoint-10.index")
    put(tmp_path, b"PK", "two/checkpoint-10")
    for name in ("empty", "tf", "two", "two/checkpoint-10"):
        assert rllib.claims(Probe(str(tmp_path / name))) is None
