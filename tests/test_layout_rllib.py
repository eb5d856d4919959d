"""RLlib's new API stack: the networks of an RLModule in a checkpoint's folder, and what its arguments say."""

from __future__ import annotations

import base64
import io
import pickle
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.core import CkpttoolError, Tree, UnsupportedError, sidecar
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import recognize_tree, rllib
from tests.restored import HIGH, LOW, actions, bound, observations, played, recognised, same
from tests.test_layouts import LayoutContract, torch_tree
from tests.trees import torch_dense

OBS, ACT, HIDDEN = 3, 2, 8
MODULE = "learner_group/learner/rl_module/default_policy"


def module(layers: dict[str, tuple[int, int]], *, head: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {}
    for name, sizes in layers.items():
        arrays |= torch_dense(generator, name, *sizes)
    if head:
        arrays["pi.log_std_clip_param_const"] = np.full(1, 20, np.float32)
    return {f"{MODULE}/{name}": array for name, array in arrays.items()}


def mlp(name: str, inputs: int) -> dict[str, tuple[int, int]]:
    return {f"{name}.net.mlp.0": (inputs, HIDDEN), f"{name}.net.mlp.2": (HIDDEN, HIDDEN)}


def sac() -> Tree:
    layers = {**mlp("pi_encoder", OBS), "pi.net.mlp.0": (HIDDEN, 2 * ACT)}
    for q in ("qf", "qf_twin", "target_qf", "target_qf_twin"):
        layers |= {**mlp(f"{q}_encoder", OBS + ACT), f"{q}.net.mlp.0": (HIDDEN, 1)}
    return torch_tree({**module(layers, head=1), "algorithm_state/training_iteration": 3})


def ppo(*, shared: bool = False) -> Tree:
    actor = "encoder.encoder" if shared else "encoder.actor_encoder"
    layers = {**mlp(actor, OBS), "pi.net.mlp.0": (HIDDEN, 2 * ACT)}
    if not shared:
        layers |= {**mlp("encoder.critic_encoder", OBS), "vf.net.mlp.0": (HIDDEN, 1)}
    return torch_tree({**module(layers)})


class TestSac(LayoutContract):
    name = "rllib"

    @pytest.fixture
    def tree(self) -> Tree:
        return sac()


class TestPpo(LayoutContract):
    name = "rllib"

    @pytest.fixture
    def tree(self) -> Tree:
        return ppo()


@pytest.mark.parametrize("tree", [sac(), ppo(), ppo(shared=True)], ids=["sac", "ppo", "shared encoder"])
def test_the_mean_is_the_first_half_of_the_last_layer(tree: Tree) -> None:
    arrays = {tree.names[path].removeprefix(f"{MODULE}/"): leaf.array() for path, leaf in tree.tensors()}
    obs = np.random.default_rng(0).normal(size=(20, OBS)).astype(np.float32) * 3
    x, names = obs, list(dict.fromkeys(n.rpartition("/")[0] for n in arrays))
    first, second = (
        n for n in names if "encoder" in n and n.startswith(("pi_enc", "encoder/a", "encoder/e"))
    )
    for name in (first, second):
        x = np.tanh(x @ arrays[f"{name}/weight"].T + arrays[f"{name}/bias"])
    mean = (x @ arrays["pi/net/mlp/0/weight"].T + arrays["pi/net/mlp/0/bias"])[:, :ACT]
    squashed = np.tanh(mean) if any("pi_encoder" in n for n in names) else np.clip(mean, -1, 1)
    low, high = np.asarray([-2.0, 0.0]), np.asarray([2.0, 3.0])
    np.testing.assert_allclose(
        played(tree, obs, low.tolist(), high.tolist()), low + (squashed + 1) / 2 * (high - low), atol=1e-5
    )


def test_hidden_layers_of_the_head_are_relu() -> None:
    layers = {**mlp("pi_encoder", OBS), "pi.net.mlp.0": (HIDDEN, HIDDEN), "pi.net.mlp.2": (HIDDEN, 2 * ACT)}
    assert bound(torch_tree(module(layers))).facts.activations == ("tanh", "tanh", "relu")


def test_the_arguments_tell_bounds_and_activation(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*MODULE.split("/"))
    folder.mkdir(parents=True)
    space = {"low": np.asarray([-2, 0], np.float32), "high": np.asarray([2, 3], np.float32)}
    record = {"kwargs": {"action_space": space, "model_config": {"fcnet_activation": "silu"}}}
    (file := folder / "class_and_ctor_args.pkl").write_bytes(pickle.dumps(record, 2))
    assert rllib.companions(str(tmp_path)) == [str(file)]
    binding = rllib.read_companion(bound(sac()), str(file), open_checkpoint(str(file)).tree)
    assert (binding.facts.action_low, binding.facts.action_high) == ((-2.0, 0.0), (2.0, 3.0))
    assert (binding.facts.hidden, binding.facts.origins["hidden"]) == ("silu", "class_and_ctor_args.pkl")


def test_arguments_that_say_nothing_change_nothing() -> None:
    binding = bound(sac())
    assert rllib.read_companion(binding, "x", torch_tree({"a": 1})) is binding
    assert rllib.companions("/nowhere") == ()


def test_several_modules_are_no_single_agent() -> None:
    tree = sac()
    more = {path: replace(leaf, key=f"2{leaf.key}") for path, leaf in tree.tensors()}
    other = torch_tree(
        {name.replace("default_policy", "other"): np.zeros(1, "f4") for name in tree.names.values()}
    )
    assert recognize_tree(Tree({**more, **other.leaves}), "folder") is None


def folder_of(path: Path, tree: Tree) -> str:
    """Save the module as Checkpointable.save_to_path does; return the folder."""
    (inner := path.joinpath("agent", *MODULE.split("/"))).mkdir(parents=True)
    state = {leaf.key.removeprefix(f"{MODULE}/"): leaf.array() for _, leaf in tree.tensors()}
    (inner / "module_state.pkl").write_bytes(pickle.dumps(state, 4))
    (path / "agent" / "rllib_checkpoint.json").write_text('{"checkpoint_version": "2.1"}')
    return str(path / "agent")


@pytest.mark.parametrize("to", ["torch", "tf"])
@pytest.mark.parametrize("tree", [sac(), ppo()], ids=["sac", "ppo"])
def test_a_folder_becomes_an_agent_of_either_framework(tmp_path: Path, tree: Tree, to: str) -> None:
    folder, target = folder_of(tmp_path, tree), str(tmp_path / "written-1")
    assert not convert(folder, target, to=to).report.missing
    assert recognised(target).layout == f"td3_{to}"
    same(actions(target), actions(folder))


def test_arrays_of_a_folder_become_the_same_agent(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, sac())
    convert(folder, str(tmp_path / "a.npz"))
    direct, through = str(tmp_path / "direct.pt"), str(tmp_path / "through.pt")
    convert(folder, direct)
    convert(str(tmp_path / "a.npz"), through)
    assert digest(direct).sha256 == digest(through).sha256


def serialized(array: np.ndarray) -> str:
    """Return an array as rllib/utils/serialization.py has it (`_serialize_ndarray`)."""
    np.save(buffer := io.BytesIO(), array)
    return base64.b64encode(zlib.compress(buffer.getvalue())).decode()


def connected(folder: str, name: str, state: object = None) -> None:
    """Add a connector between environment and module, as ConnectorPipelineV2 saves one."""
    (inner := Path(folder, "env_runner", "env_to_module_connector", name)).mkdir(parents=True)
    (inner / "class_and_ctor_args.pkl").write_bytes(pickle.dumps({"class": name}, 4))
    if state is not None:
        (inner / "state.pkl").write_bytes(pickle.dumps(state, 4))


def running(rows: np.ndarray, *, clip: float | None = 10.0, parts: int = 1) -> dict[None, object]:
    stat = {
        "num_pushes": len(rows),
        "mean_array": serialized(rows.mean(0)),
        "sum_sq_diff_array": serialized(((rows - rows.mean(0)) ** 2).sum(0)),
    }
    flags = {"de_mean_to_zero": True, "de_std_to_one": True, "clip_by_value": clip}
    return {None: {"shape": np.array([OBS]), **flags, "running_stats": [stat] * parts}}


@pytest.mark.parametrize("clip", [10.0, 1.0, None])
def test_observations_pass_the_filter_of_the_connectors(tmp_path: Path, clip: float | None) -> None:
    bare, filtered = folder_of(tmp_path / "bare", sac()), folder_of(tmp_path, sac())
    connected(bare, "NumpyToTensor")
    rows = np.random.default_rng(2).normal(3, 2, (50, OBS))
    connected(filtered, "MeanStdFilter", running(rows, clip=clip))
    plain, agent = restore_agent(bare), restore_agent(filtered)
    observed = (observations(OBS) - rows.mean(0)) / (rows.std(0, ddof=1) + 1e-8)
    observed = observed if clip is None else np.clip(observed, -clip, clip)
    same(actions(filtered), played(sac(), observed.astype("f4"), LOW, HIGH))
    # RLlib itself plays SAC's mean without its tanh: nothing else is open.
    assert {entry.what for entry in agent.ledger if entry.open} == {"action map", "activation"}
    stated = AgentFacts(head="affine", activations="tanh")
    assert not sidecar.has_open_entries(restore_agent(filtered, facts=stated).ledger)
    assert [e.value for e in plain.ledger if e.use == "not used"] == []


@pytest.mark.parametrize("parts", [0, 2])
def test_a_filter_that_cannot_be_applied_decides(tmp_path: Path, parts: int) -> None:
    folder = folder_of(tmp_path, ppo())
    connected(folder, "MeanStdFilter", running(np.ones((5, OBS)), parts=parts) if parts else None)
    assert sidecar.has_open_entries(restore_agent(folder).ledger)


def test_a_connector_of_ones_own_decides(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ppo())
    connected(folder, "001_MyScaler")
    (entry,) = (entry for entry in restore_agent(folder).ledger if entry.use == "not used")
    assert (entry.what, entry.decides) == ("wrapper", True)


@pytest.mark.parametrize(
    ("stated", "expected"), [("elu", ("silu", "silu", "elu")), (None, ("silu", "silu", "relu"))]
)
def test_the_head_has_an_activation_of_its_own(
    tmp_path: Path, stated: str | None, expected: tuple[str, ...]
) -> None:
    layers = {**mlp("pi_encoder", OBS), "pi.net.mlp.0": (HIDDEN, HIDDEN), "pi.net.mlp.2": (HIDDEN, 2 * ACT)}
    folder = folder_of(tmp_path, torch_tree(module(layers)))
    config = {"fcnet_activation": "silu", **({} if stated is None else {"head_fcnet_activation": stated})}
    file = Path(folder, *MODULE.split("/"), "class_and_ctor_args.pkl")
    file.write_bytes(pickle.dumps({"kwargs": {"model_config": config}}, 4))
    assert restore_agent(folder).binding.facts.activations == expected


# Q-functions that encode observation and action separately (rllib/core/models/torch/encoder.py).


def fused(head: int = 0, fusion: tuple[int, ...] = (7, 5), encoder: tuple[int, ...] = (9, HIDDEN)) -> Tree:
    """Return a SAC module with its Q-functions and their targets, of Ray 2.50 or later."""

    def chain(name: str, *sizes: int) -> dict[str, tuple[int, int]]:
        return {f"{name}.net.mlp.{2 * n}": pair for n, pair in enumerate(pairwise(sizes))}

    more = (head,) if head else ()
    layers = {**chain("pi_encoder", OBS, *encoder), **chain("pi", encoder[-1], *more, 2 * ACT)}
    joined = 2 * encoder[-1]
    for q in ("qf", "qf_twin", "target_qf", "target_qf_twin"):
        layers |= chain(f"{q}_encoder.base_encoders.actions", ACT, *encoder)
        layers |= chain(f"{q}_encoder.base_encoders.obs", OBS, *encoder)
        inputs = [joined, *(width + joined for width in fusion)]
        fusions = zip(inputs, (*fusion, encoder[-1]), strict=True)
        names = [*(f"fusion_layers.{n}" for n in range(len(fusion))), "output_layer"]
        layers |= {f"{q}_encoder.{name}": pair for name, pair in zip(names, fusions, strict=True)}
        layers |= chain(q, encoder[-1], *more, 1)
    return torch_tree(module(layers, head=1))


STATED = {"fcnet_activation": "silu", "fusionnet_activation": "relu", "head_fcnet_activation": "tanh"}
FUNCTIONS = {"silu": lambda x: x / (1 + np.exp(-x)), "relu": lambda x: np.maximum(x, 0), "tanh": np.tanh}


def fused_folder(path: Path, tree: Tree, stated: dict[str, str]) -> str:
    folder = folder_of(path, tree)
    space = {"low": np.full(ACT, -2, np.float32), "high": np.full(ACT, 2, np.float32)}
    record = {"kwargs": {"action_space": space, "model_config": stated}}
    Path(folder, *MODULE.split("/"), "class_and_ctor_args.pkl").write_bytes(pickle.dumps(record, 4))
    return folder


def fused_value(
    tree: Tree, q: str, obs: np.ndarray, action: np.ndarray, stated: dict[str, str]
) -> np.ndarray:
    """Return what TorchMultiStreamEncoder and the head compute, [rows, 1]."""
    arrays = {tree.names[path].removeprefix(f"{MODULE}/"): leaf.array() for path, leaf in tree.tensors()}

    def through(prefix: str, x: np.ndarray, setting: str, *, last: bool) -> np.ndarray:
        names = [n.removesuffix("/weight") for n in arrays if n.startswith(prefix) and n.endswith("/weight")]
        for number, name in enumerate(names):
            x = x @ arrays[f"{name}/weight"].T + arrays[f"{name}/bias"]
            x = FUNCTIONS[stated[setting]](x) if last or number < len(names) - 1 else x
        return x

    encoded = [
        through(f"{q}_encoder/base_encoders/{name}/", x, "fcnet_activation", last=True)
        for name, x in (("actions", action), ("obs", obs))
    ]
    embeds = x = np.concatenate(encoded, 1)
    count = sum(n.startswith(f"{q}_encoder/fusion_layers/") for n in arrays) // 2
    for number, name in enumerate([*(f"fusion_layers/{n}" for n in range(count)), "output_layer"]):
        x = np.concatenate([x, embeds], 1) if number else embeds
        x = through(f"{q}_encoder/{name}/", x, "fusionnet_activation", last=True)
    return through(f"{q}/net/", x, "head_fcnet_activation", last=False)


@pytest.mark.parametrize(
    ("head", "fusion", "stated"),
    [(6, (7, 5), STATED), (0, (7,), STATED), (6, (), dict.fromkeys(STATED, "tanh"))],
    ids=["several", "no head", "one activation"],
)
def test_q_functions_encode_observation_and_action_separately(
    head: int, fusion: tuple[int, ...], stated: dict[str, str], tmp_path: Path
) -> None:
    tree = fused(head, fusion)
    folder = fused_folder(tmp_path, tree, stated)
    generator = np.random.default_rng(4)
    obs, action = (generator.uniform(-2, 2, (30, size)).astype(np.float32) for size in (OBS, ACT))
    expected = np.concatenate([fused_value(tree, q, obs, action, stated) for q in ("qf", "qf_twin")], 1)
    agent = load_agent(folder)
    np.testing.assert_allclose(agent.q_values(obs, action), expected, rtol=1e-5, atol=1e-5)
    # The same through files without the library's names, and written for the library again.
    for to, name in (("torch", "a.pt"), ("tf", "a-1"), ("npz", "a.npz"), ("safetensors", "a.safetensors")):
        target = str(tmp_path / name)
        assert convert(folder, target, to=to, sync=False).report.complete, to
        loaded = load_agent(target)
        np.testing.assert_array_equal(loaded.q_values(obs, action), agent.q_values(obs, action))
        np.testing.assert_array_equal(loaded.act(obs), agent.act(obs))
    for source in (folder, str(tmp_path / "a.pt")):
        written = tmp_path / f"module{len(source)}"
        assert convert(source, str(written), to="rllib", sync=False).report.complete
        state = pickle.loads((written / "module_state.pkl").read_bytes())
        before = {tree.names[path].removeprefix(f"{MODULE}/"): leaf.array() for path, leaf in tree.tensors()}
        for location, array in before.items():
            if "clip_param" not in location:
                np.testing.assert_array_equal(state[location.replace("/", ".")], array)
        assert not {name.replace(".", "/") for name in state} - before.keys() - CLIPS
        np.testing.assert_array_equal(
            load_agent(str(written)).q_values(obs, action), agent.q_values(obs, action)
        )


CLIPS = {f"{name}/log_std_clip_param_const" for name in ("qf", "qf_twin", "target_qf", "target_qf_twin")}


def test_other_libraries_have_no_place_for_separate_encoders(tmp_path: Path) -> None:
    folder = fused_folder(tmp_path, fused(), STATED)
    for to in ("sb3", "d3rlpy_model", "cleanrl", "tianshou", "skrl"):
        with pytest.raises(UnsupportedError):
            convert(folder, str(tmp_path / f"to_{to}"), to=to, allow_missing=True)


def test_a_fusion_that_is_no_multi_stream_encoder_is_not_run(tmp_path: Path) -> None:
    tree = fused()
    wide = {path: leaf for path, leaf in tree.tensors() if "fusion_layers/1" not in tree.names[path]}
    agent = restore_agent(fused_folder(tmp_path, Tree(wide), STATED))
    assert not [part for part in agent.binding.parts if part.component == "critic"]
    assert agent.binding.unplaced["critic"]


@pytest.mark.parametrize("settings", [{}, {"head_fcnet_hiddens": [6], "fusionnet_hiddens": [7]}])
def test_the_library_loads_and_plays_the_module_that_is_written(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    sac_modules = pytest.importorskip("ray.rllib.algorithms.sac.torch", exc_type=ImportError)
    assert sac_modules
    import torch
    from ray.rllib.core.rl_module.rl_module import RLModule

    from tests.agent_truth import agents, libraries

    obs = np.random.default_rng(1).normal(size=(20, agents.OBS)).astype(np.float32)
    action = np.random.default_rng(2).uniform(-1, 1, (20, agents.ACT)).astype(np.float32)
    source, _ = libraries._rl_module("sac", **settings)(tmp_path / "agent", obs)
    assert convert(source, str(tmp_path / "module"), to="rllib").report.complete
    outputs = []
    for folder in (Path(source, *MODULE.split("/")), tmp_path / "module"):
        module_ = RLModule.from_checkpoint(str(folder))
        batch = {"obs": torch.from_numpy(obs), "actions": torch.from_numpy(action)}
        networks = ((module_.qf_encoder, module_.qf), (module_.qf_twin_encoder, module_.qf_twin))
        with torch.no_grad():
            policy = module_.forward_inference(batch)["action_dist_inputs"]
            values = [module_._qf_forward_train_helper(batch, *pair) for pair in networks]
        outputs.append((policy.numpy(), torch.stack(values, 1).numpy()))
    for before, after in zip(*outputs, strict=True):
        np.testing.assert_array_equal(after, before)
    result = load_agent(source).q_values(obs, action)
    np.testing.assert_allclose(result, outputs[0][1], rtol=1e-5, atol=1e-5)


# Discrete actions.


def chooser(layers: dict[str, tuple[int, int]], folder: Path, **space: object) -> str:
    """Save a module of discrete actions with its arguments; return the folder."""
    path = folder_of(folder, torch_tree(module(layers, head=1)))
    record = {"kwargs": {"action_space": space, "model_config": {"fcnet_activation": "silu"}}}
    (Path(path).joinpath(*MODULE.split("/")) / "class_and_ctor_args.pkl").write_bytes(pickle.dumps(record, 4))
    return path


def forward(path: str, obs: np.ndarray, *names: str) -> np.ndarray:
    """Return the output of these modules, with SiLU between layers and ReLU in heads."""
    tree = open_checkpoint(path).tree
    arrays = {tree.names[p].removeprefix(f"{MODULE}/"): leaf.array() for p, leaf in tree.tensors()}
    weights = [n for name in names for n in arrays if n.startswith(f"{name}/") and n.endswith("/weight")]
    layers = [n.rpartition("/")[0] for n in weights]
    x = obs
    for number, layer in enumerate(layers):
        x = x @ arrays[f"{layer}/weight"].T + arrays[f"{layer}/bias"]
        if number < len(layers) - 1:
            x = x * (1 + np.tanh(x / 2)) / 2 if "encoder" in layer else np.maximum(x, 0)
    return x


@pytest.mark.parametrize(
    ("space", "counts"),
    [
        ({"n": 3, "start": 0}, (3,)),
        ({"n": np.int64(4), "start": np.int64(-1)}, (4,)),
        ({"nvec": np.array([2, 3]), "start": np.array([0, 1])}, (2, 3)),
        ({"spaces": [{"n": np.int64(2), "dtype": None}, {"n": np.int64(3), "dtype": None}]}, (2, 3)),
    ],
    ids=["odd", "first action", "several", "tuple"],
)
@pytest.mark.parametrize("shared", [True, False])
def test_logits_of_ppo_are_not_divided(
    space: dict[str, object], counts: tuple[int, ...], shared: bool, tmp_path: Path
) -> None:
    actor = "encoder.encoder" if shared else "encoder.actor_encoder"
    layers = {**mlp(actor, OBS), "pi.net.mlp.0": (HIDDEN, sum(counts))}
    layers |= {} if shared else {**mlp("encoder.critic_encoder", OBS), "vf.net.mlp.0": (HIDDEN, 1)}
    path = chooser(layers, tmp_path, **space)
    agent = load_agent(path)
    assert agent.choices is not None
    # RLlib gives the environment numbers from 0, whatever the space's start is.
    assert agent.choices[:2] == (counts, (0,) * len(counts))
    expected = forward(path, observations(), actor.replace(".", "/"), "pi")
    same(agent.scores(observations()), expected)
    assert not agent.assumed
    ends = np.split(expected, np.cumsum(counts)[:-1], axis=1)
    chosen = np.stack([part.argmax(1) for part in ends], 1)
    np.testing.assert_array_equal(agent.act(observations()).reshape(chosen.shape), chosen)


@pytest.mark.parametrize("dueling", [True, False])
def test_dqn_has_values_or_advantages(dueling: bool, tmp_path: Path) -> None:
    layers = {}
    for prefix in ("", "_target_"):
        layers |= {**mlp(f"{prefix}encoder", OBS), f"{prefix}af.net.mlp.0": (HIDDEN, 6)}
        layers |= {f"{prefix}af.net.mlp.2": (6, 3)}
        if dueling:
            layers |= {f"{prefix}vf.net.mlp.0": (HIDDEN, 6), f"{prefix}vf.net.mlp.2": (6, 1)}
    path = chooser(layers, tmp_path, n=3)
    expected = forward(path, observations(), "encoder", "af")
    if dueling:
        expected = expected - expected.mean(1, keepdims=True) + forward(path, observations(), "encoder", "vf")
    agent = load_agent(path)
    same(agent.scores(observations()), expected)
    np.testing.assert_array_equal(agent.act(observations()), expected.argmax(1))


@pytest.mark.parametrize(
    "space",
    [
        {"n": 0},
        {"n": "2"},
        {"nvec": np.array([[2, 3]], np.float32)},
        {"spaces": [{"n": 2}, {"low": np.zeros(1)}]},
        {"spaces": [{"n": 2}, {"nvec": np.array([2, 3])}]},
    ],
)
def test_an_unclear_number_of_actions_is_refused(space: dict[str, object], tmp_path: Path) -> None:
    layers = {**mlp("encoder.encoder", OBS), "pi.net.mlp.0": (HIDDEN, 2)}
    with pytest.raises(CkpttoolError):
        load_agent(chooser(layers, tmp_path, **space))
