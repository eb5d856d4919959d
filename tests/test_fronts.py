"""Policies that see images, several inputs or the past: they act as Stable-Baselines3 has them act."""

from __future__ import annotations

import base64
import copy
import functools
import importlib
import json
import pickle
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool import load_agent
from ckpttool.commands.convert import convert
from ckpttool.commands.verify import verify
from ckpttool.conversion.export import export
from ckpttool.core import CkpttoolError, EnvironmentMismatchError, UnsupportedError, display, plugins
from ckpttool.core.sidecar import parse_activation
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.gymnasium_engine import EnvSpec
from ckpttool.evaluation.playing import choose_environment, prepare_agent
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent
from ckpttool.evaluation.space_comparison import SpaceComparison
from ckpttool.formats import open_checkpoint
from ckpttool.libraries.sb3 import read_encoder_orders
from tests import sb3_files as sb3
from tests import warm_sb3
from tests.conftest import ckpttool, in_process
from tests.golden_texts import Golden

PICTURE, GRID, VECTOR = (40, 44, 3), (2, 3), (5,)
STEPS, BATCH = 20, 3
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "Pictures": ("CnnPolicy", {"features_dim": 24}),
    "Moves": ("CnnPolicy", {"features_dim": 24}),
    "Mixed": ("MultiInputPolicy", {"cnn_output_dim": 24}),
    "Goal": ("MultiInputPolicy", {}),
    "Grid": ("MlpPolicy", {}),
}
MORE = {"PPO": {"n_steps": 8, "batch_size": 8}, "A2C": {"n_steps": 8}}

ENVIRONMENTS = """
import gymnasium, numpy as np
from gymnasium import spaces

class Play(gymnasium.Env):
    action_space = spaces.Box(np.array([-1, -2], "f4"), np.array([1, 3], "f4"))
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.seen(), {}
    def step(self, action):
        self.left -= 1
        return self.seen(), float(np.sum(action)), False, self.left == 0, {}
    def image(self):
        return self.np_random.integers(0, 256, (40, 44, 3), dtype=np.uint8)

class Goal(Play):
    observation_space = spaces.Dict(
        {name: spaces.Box(-1, 1, (n,)) for name, n in (("observation", 4), ("goal", 3), ("achieved", 3))}
    )

class Grid(Play):
    observation_space = spaces.Box(-1, 1, (2, 5))

class Pictures(Play):
    observation_space = spaces.Box(0, 255, (40, 44, 3), np.uint8)
    seen = Play.image

class Moves(Pictures):
    action_space = spaces.Discrete(4)

class Mixed(Play):
    observation_space = spaces.Dict({
        "vector": spaces.Box(-1, 1, (5,)), "grid": spaces.Box(-1, 1, (2, 3)),
        "image": Pictures.observation_space,
    })
    def seen(self):
        draw = self.np_random.standard_normal
        return {"vector": draw(5).astype("f4"), "grid": draw((2, 3)).astype("f4"), "image": self.image()}

gymnasium.register("Pictures-v0", Pictures)
gymnasium.register("Mixed-v0", Mixed)
gymnasium.register("Moves-v0", Moves)
"""


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    (folder / "fronts_games.py").write_text(ENVIRONMENTS)
    return folder


@pytest.fixture(scope="module")
def make_agent(games: Path) -> Iterator[Any]:
    """Return a function that makes a small agent of the library, saves it, and gives it with its path."""
    library = pytest.importorskip("stable_baselines3")
    names: dict[str, Any] = {}
    exec(ENVIRONMENTS, names)  # the same environments as the command line's
    agents: dict[str, tuple[Any, str]] = {}

    def make(algorithm: str, policy: str, **settings: Any) -> tuple[Any, str]:
        label = f"{algorithm}_{policy}_{'_'.join(settings)}"
        if label not in agents:
            kind, extractor = KINDS[policy]
            more = MORE.get(algorithm, {"buffer_size": 2})
            kwargs = {"net_arch": [16, 12], "features_extractor_kwargs": extractor, **settings}
            torch.manual_seed(0)
            model = getattr(library, algorithm)(
                kind, names[policy](), policy_kwargs=kwargs, device="cpu", **more
            )
            if algorithm in MORE:
                nn.init.normal_(model.policy.action_net.weight)  # the library's first actions are nearly 0
            if policy == "Moves":  # the library's first actions hardly depend on the image
                _spread_outputs(model.policy)
            model.save(games / label)
            agents[label] = model, str(games / f"{label}.zip")
        return agents[label]

    yield make
    registry = importlib.import_module("gymnasium").registry
    for name in ("Pictures-v0", "Mixed-v0", "Moves-v0"):
        del registry[name]


def _spread_outputs(policy: nn.Module) -> None:
    """Give all layers of a policy wide weights."""
    for module in policy.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=2 / module.weight[0].numel() ** 0.5)
            nn.init.normal_(module.bias, std=0.1)


def observations(policy: str, *, first: bool = False) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (BATCH, *PICTURE), dtype=np.uint8)
    image = image.transpose(0, 3, 1, 2) if first else image
    if policy == "Pictures":
        return {"obs": image}
    rows = {
        name: draw.normal(size=(BATCH, *shape)).astype("f4")
        for name, shape in (("vector", VECTOR), ("grid", GRID))
    }
    return {"image": image, **rows}


def spec(observations: Mapping[str, np.ndarray], low: list[float], high: list[float]) -> EnvSpec:
    shapes = tuple((name, array.shape[1:], array.dtype.name) for name, array in observations.items())
    return EnvSpec("Given-v0", shapes, np.array(low, "f4"), np.array(high, "f4"), None, {})


def policy_of(
    path: str, observations: Mapping[str, np.ndarray], backend: str = "numpy", network: str = "actor"
) -> Any:
    how = Protocol(network=network)
    agent = restore_agent(path)
    low, high = agent.known.action_low or [-1, -2], agent.known.action_high or [1, 3]
    entrant = prepare_agent(
        agent, choose_environment(agent, "Given-v0", how), how, spec(observations, [*low], [*high])
    )
    module: Any = plugins.find("backends", backend).load()
    return module.build(entrant.network)


def predicted(model: Any, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    turned = {
        n: a.transpose(0, 3, 1, 2) if a.dtype == np.uint8 and a.shape[-1] == 3 else a for n, a in rows.items()
    }
    actions: np.ndarray = model.predict(turned.get("obs", turned), deterministic=True)[0]
    return actions


@pytest.mark.parametrize("policy", ["Pictures", "Mixed"])
@pytest.mark.parametrize("algorithm", ["TD3", "SAC", "PPO"])
def test_the_library_predicts_the_same_actions(make_agent: Any, algorithm: str, policy: str) -> None:
    model, path = make_agent(algorithm, policy)
    observed = observations(policy)
    actions, _ = policy_of(path, observed).step(observed.get("obs", observed))
    expected = predicted(model, observed)
    assert np.ptp(expected, axis=0).min() > 1e-3
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)


# Discrete actions that are chosen by images.

IMAGES = 64


def drawn_images() -> np.ndarray:
    draw = np.random.default_rng(1)
    colours = draw.integers(0, 2, (IMAGES, 3, 1, 1)) * draw.integers(0, 2, (IMAGES, 3, 40, 1))
    return (colours * draw.integers(1, 256, (IMAGES, 3, 40, 44))).astype(np.uint8)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("DQN", {}),
        ("DQN", {"net_arch": []}),
        ("DQN", {"normalize_images": False}),
        ("PPO", {}),
        ("A2C", {"share_features_extractor": False}),
    ],
)
def test_images_choose_the_actions_of_the_library(
    make_agent: Any, algorithm: str, settings: dict[str, Any]
) -> None:
    model, path = make_agent(algorithm, "Moves", **settings)
    images = drawn_images()
    agent = load_agent(path)
    with torch.no_grad():
        batch = torch.tensor(images)
        policy = model.policy
        expected = (
            policy.q_net(batch) if algorithm == "DQN" else policy.get_distribution(batch).distribution.logits
        )
    scores = agent.scores(images)
    if algorithm != "DQN":  # the library's logits are normalised
        scores = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    actions = predicted(model, {"obs": images})
    assert len({*actions.tolist()}) > 1
    np.testing.assert_array_equal(agent.predict(images)[0], actions)
    assert any("NatureCNN" in entry.value for entry in agent.ledger)


def test_the_target_of_an_image_q_network_plays(make_agent: Any, tmp_path: Path) -> None:
    model, _ = make_agent("DQN", "Moves")
    nn.init.normal_(model.q_net_target.features_extractor.cnn[2].weight)
    model.save(tmp_path / "a.zip")
    images = drawn_images()
    scores = load_agent(str(tmp_path / "a.zip"), network="critic_target/q1").scores(images)
    with torch.no_grad():
        expected = model.q_net_target(torch.tensor(images)).numpy()
        assert abs(expected - model.q_net(torch.tensor(images)).numpy()).max() > 1e-2
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


def test_quantiles_of_images(make_agent: Any, tmp_path: Path) -> None:
    """QR-DQN's file has DQN's modules under other names (sb3_contrib/qrdqn/policies.py)."""
    model, path = make_agent("DQN", "Moves")
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if name != "policy.optimizer.pth"}
    net, head = model.q_net, nn.Linear(12, 5 * 4)
    images = drawn_images()
    with torch.no_grad():
        features = net.extract_features(torch.tensor(images), net.features_extractor)
        quantiles = head(net.q_net[:-1](features)).view(IMAGES, 5, 4)
    state = {name.replace("q_net", "quantile_net"): leaf for name, leaf in model.policy.state_dict().items()}
    for name, tensor in head.state_dict().items():
        for target in ("", "_target"):
            state[f"quantile_net{target}.quantile_net.4.{name}"] = tensor
    contents["policy.pth"] = sb3.saved(state)
    agent = load_agent(sb3.put(tmp_path / "a.zip", contents))
    np.testing.assert_allclose(agent.scores(images), quantiles.mean(1).numpy(), rtol=1e-4, atol=1e-4)


def flattened(algorithm: str, space: Any, path: Path, **settings: Any) -> Any:
    """Save an agent of the library whose policy flattens images of that space; return it."""
    library, gymnasium = pytest.importorskip("stable_baselines3"), importlib.import_module("gymnasium")

    class Images(gymnasium.Env):  # type: ignore[misc, name-defined]
        observation_space = space
        action_space = (
            gymnasium.spaces.Discrete(4) if algorithm != "SAC" else gymnasium.spaces.Box(-1, 1, (2,))
        )

    torch.manual_seed(0)
    kwargs = {"net_arch": [9, 7], "activation_fn": nn.ELU, **settings}
    more = MORE.get(algorithm, {"buffer_size": 2})
    model = getattr(library, algorithm)("MlpPolicy", Images(), policy_kwargs=kwargs, device="cpu", **more)
    _spread_outputs(model.policy)
    model.save(path)
    return model


def image_space(kind: str) -> Any:
    """Return a Box of three axes: images to be divided, bytes or fractions that are not."""
    box = importlib.import_module("gymnasium").spaces.Box
    high, dtype = {"images": (255, np.uint8), "bytes": (100, np.uint8), "fractions": (1, np.float32)}[kind]
    return box(0, high, (10, 14, 3), dtype)


@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow", "onnxruntime"])
@pytest.mark.parametrize("algorithm", ["DQN", "PPO", "SAC"])
def test_flattened_images_are_divided_as_the_library_does(
    algorithm: str, backend: str, tmp_path: Path
) -> None:
    if not plugins.find("backends", backend).available():
        pytest.skip(f"{backend} is not installed")
    model = flattened(algorithm, image_space("images"), tmp_path / "a.zip")
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (200, *model.observation_space.shape), dtype=np.uint8)
    expected = model.predict(images, deterministic=True)[0]
    with load_agent(str(tmp_path / "a.zip"), backend=backend) as agent:
        actions = agent.act(images)
    if algorithm == "SAC":
        # VecTransposeImage gives the library an environment's images with the channels first.
        last = images.transpose(0, 2, 3, 1)
        played, _ = policy_of(str(tmp_path / "a.zip"), {"obs": last}, backend).step(last)
        np.testing.assert_allclose(played, actions, atol=1e-6)
        with torch.no_grad():
            means = model.actor.get_action_dist_params(torch.from_numpy(images))[0]
        # 420 products of each sum: 9.6e-7 with PyTorch on one processor.
        assert np.abs(actions - expected).max() <= 2e-6 * float(means.abs().max())
    else:
        assert len({*expected.tolist()}) > 1
        np.testing.assert_array_equal(actions, expected)


def require_exported(path: str, images: np.ndarray, expected: np.ndarray, target: Path) -> None:
    """Export a policy of images; compare ONNX Runtime's actions, and those of the file read back."""
    result = export(path, str(target), facts=AgentFacts())
    assert result.written
    runtime = pytest.importorskip("onnxruntime").InferenceSession(str(target))
    assert runtime.get_inputs()[0].shape[1:] == list(images.shape[1:])
    actions = runtime.run(["action"], {"obs": images.astype(np.float32)})[0].reshape(expected.shape)
    np.testing.assert_allclose(actions, expected, atol=2e-5)
    with load_agent(str(target)) as agent:
        np.testing.assert_allclose(agent.act(images), expected, atol=2e-5)


@pytest.mark.parametrize("algorithm", ["DQN", "PPO", "SAC"])
def test_flattened_images_are_exported(algorithm: str, tmp_path: Path) -> None:
    model = flattened(algorithm, image_space("images"), tmp_path / "a.zip")
    images = np.random.default_rng(0).integers(0, 256, (50, *model.observation_space.shape), dtype=np.uint8)
    expected = np.asarray(model.predict(images, deterministic=True)[0])
    source, target = str(tmp_path / "a.zip"), tmp_path / "a.onnx"
    require_exported(source, images, expected, target)
    assert verify(source, str(target)).within
    assert verify(source, source).within
    # Layers alone receive flattened rows: they are written, and not compared.
    assert convert(source, str(tmp_path / "a.pt"), to="torch").written
    with pytest.raises(UnsupportedError):
        verify(source, str(tmp_path / "a.pt"))


@pytest.mark.parametrize("algorithm", ["DQN", "A2C"])
def test_convolutions_are_exported(make_agent: Any, algorithm: str, tmp_path: Path) -> None:
    model, path = make_agent(algorithm, "Moves")
    images = drawn_images()
    require_exported(path, images, predicted(model, {"obs": images}), tmp_path / "a.onnx")


@pytest.mark.parametrize(
    ("kind", "settings"), [("images", {"normalize_images": False}), ("bytes", {}), ("fractions", {})]
)
def test_other_numbers_of_three_axes_are_flattened_as_they_are(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = flattened("DQN", image_space(kind), tmp_path / "a.zip", **settings)
    space = model.observation_space
    images = np.stack([space.sample() for _ in range(200)])
    with torch.no_grad():
        expected = model.q_net(torch.from_numpy(images)).numpy()
    scores = load_agent(str(tmp_path / "a.zip")).scores(images)
    assert np.abs(scores - expected).max() <= 1e-6 * np.abs(expected).max()
    assert len({*expected.argmax(1).tolist()}) > 1


def test_parts_of_three_axes_that_are_no_images_are_flattened(tmp_path: Path) -> None:
    """CombinedExtractor has a NatureCNN for images alone."""
    library = pytest.importorskip("stable_baselines3")
    gymnasium = importlib.import_module("gymnasium")
    parts = {"a": image_space("bytes"), "b": image_space("fractions"), "c": gymnasium.spaces.Box(-1, 1, (2,))}
    parts["d"] = gymnasium.spaces.Box(0, 255, (36, 37, 3), np.uint8)

    class Parts(gymnasium.Env):  # type: ignore[misc, name-defined]
        observation_space = gymnasium.spaces.Dict(parts)
        action_space = gymnasium.spaces.Discrete(4)

    torch.manual_seed(0)
    model = library.DQN("MultiInputPolicy", Parts(), policy_kwargs={"net_arch": [9]}, buffer_size=2)
    _spread_outputs(model.policy)
    model.save(tmp_path / "a.zip")
    model.observation_space.seed(0)
    drawn = [model.observation_space.sample() for _ in range(50)]
    observed = {name: np.stack([drawing[name] for drawing in drawn]) for name in drawn[0]}
    with torch.no_grad():
        expected = model.q_net({name: torch.from_numpy(array) for name, array in observed.items()}).numpy()
    scores = load_agent(str(tmp_path / "a.zip")).scores(observed)
    assert np.abs(scores - expected).max() <= 2e-6 * np.abs(expected).max()
    # Whose layers receive flattened bytes, in an order that nothing shows.
    assert not read_encoder_orders(open_checkpoint(str(tmp_path / "a.zip")).tree)


def test_images_of_unknown_bounds_are_refused(tmp_path: Path) -> None:
    """Without them nobody knows whether the library divides them."""
    flattened("DQN", image_space("images"), tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(contents["data"])
    space = pickle.loads(base64.b64decode(data["observation_space"][":serialized:"]))
    space.low = space.low[:1]
    data["observation_space"][":serialized:"] = base64.b64encode(pickle.dumps(space)).decode()
    path = sb3.put(tmp_path / "b.zip", contents | {"data": json.dumps(data).encode()})
    with pytest.raises(UnsupportedError) as caught:
        load_agent(path)
    assert "bounds" in str(caught.value.found)


@pytest.mark.parametrize("algorithm", ["PPO", "SAC"])
def test_values_of_flattened_images_are_not_computed(algorithm: str, tmp_path: Path) -> None:
    model = flattened(algorithm, image_space("images"), tmp_path / "a.zip")
    images = np.zeros((2, *model.observation_space.shape), np.uint8)
    with load_agent(str(tmp_path / "a.zip")) as agent, pytest.raises(UnsupportedError):
        agent.value(images) if algorithm == "PPO" else agent.q_values(images, np.zeros((2, 2), "f4"))


def test_normalized_images_of_a_convolution_are_not_divided(tmp_path: Path) -> None:
    """NatureCNN accepts fractions with `normalized_image`, which preprocess_obs does not divide."""
    library = pytest.importorskip("stable_baselines3")
    gymnasium = importlib.import_module("gymnasium")

    class Fractions(gymnasium.Env):  # type: ignore[misc, name-defined]
        observation_space = gymnasium.spaces.Box(0, 1, (3, 40, 44), np.float32)
        action_space = gymnasium.spaces.Discrete(4)

    torch.manual_seed(0)
    kwargs = {"net_arch": [9], "features_extractor_kwargs": {"normalized_image": True, "features_dim": 5}}
    model = library.DQN("CnnPolicy", Fractions(), policy_kwargs=kwargs, device="cpu", buffer_size=2)
    _spread_outputs(model.policy)
    model.save(tmp_path / "a.zip")
    images = drawn_images().astype("f4") / 255
    with torch.no_grad():
        expected = model.q_net(torch.from_numpy(images)).numpy()
    scores = load_agent(str(tmp_path / "a.zip")).scores(images)
    assert np.abs(scores - expected).max() <= 1e-6 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("policy", ["Goal", "Grid"])
def test_rows_of_several_inputs_and_of_several_axes(make_agent: Any, policy: str) -> None:
    model, path = make_agent("TD3", policy)
    shapes = {"observation": (4,), "goal": (3,), "achieved": (3,)} if policy == "Goal" else {"obs": (2, 5)}
    draw = np.random.default_rng(0)
    observed = {name: draw.normal(size=(BATCH, *shape)).astype("f4") for name, shape in shapes.items()}
    actions, _ = policy_of(path, observed).step(observed.get("obs", observed))
    np.testing.assert_allclose(actions, predicted(model, observed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_other_backends_too(make_agent: Any, backend: str) -> None:
    if not plugins.find("backends", backend).available():
        pytest.skip(f"{backend} is not installed")
    model, path = make_agent("TD3", "Mixed")
    observed = observations("Mixed")
    np.testing.assert_allclose(
        policy_of(path, observed, backend).step(observed)[0], predicted(model, observed), atol=1e-5
    )


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("SAC", {"normalize_images": False}),
        ("SAC", {"share_features_extractor": True}),
        ("PPO", {"share_features_extractor": False}),
        ("PPO", {"activation_fn": nn.ELU}),
    ],
)
def test_settings_that_change_the_front(make_agent: Any, algorithm: str, settings: dict[str, Any]) -> None:
    model, path = make_agent(algorithm, "Pictures", **settings)
    if "share_features_extractor" in settings and algorithm == "PPO":
        nn.init.normal_(model.policy.vf_features_extractor.linear[0].weight)  # which is not the policy's
    observed = observations("Pictures")
    np.testing.assert_allclose(
        policy_of(path, observed).step(observed["obs"])[0], predicted(model, observed), rtol=1e-5, atol=1e-5
    )


def test_channels_may_come_first_and_the_slow_copy_plays(make_agent: Any) -> None:
    model, path = make_agent("TD3", "Pictures")
    first = observations("Pictures", first=True)
    nn.init.normal_(model.actor_target.features_extractor.cnn[0].bias)
    model.save(path)
    actions, _ = policy_of(path, first, network="actor_target").step(first["obs"])
    with torch.no_grad():
        expected = model.actor_target(torch.tensor(first["obs"])).numpy()
    np.testing.assert_allclose(actions, [-1, -2] + (expected + 1) / 2 * [2, 5], rtol=1e-5, atol=1e-5)
    assert abs(actions - policy_of(path, first).step(first["obs"])[0]).max() > 1e-3


def test_an_extractor_of_ones_own_is_refused(make_agent: Any) -> None:
    from stable_baselines3.common.torch_layers import NatureCNN

    class Mine(NatureCNN):
        pass

    settings = {"features_extractor_class": Mine}
    _, path = make_agent("SAC", "Pictures", **settings)
    with pytest.raises(UnsupportedError, match="features_extractor") as caught:
        restore_agent(path).playable("actor")
    assert "Mine" in caught.value.message  # the class is the cause


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((1, 40, 40, 3), np.uint8)}, r"image \[40, 40, 3\].*image \[3, 40, 44\]"),
        ({"other": np.zeros((1, 2))}, r"other \[2\]"),
        ({"vector": np.zeros((1, 6))}, r"vector \[6\].*vector \[5\]"),
    ],
    ids=["image", "other", "vector"],
)
def test_other_observations_are_refused(
    make_agent: Any, change: dict[str, np.ndarray], message: str, golden: Golden
) -> None:
    _, path = make_agent("SAC", "Mixed")
    with pytest.raises(EnvironmentMismatchError) as caught:
        policy_of(path, {**observations("Mixed"), **change})
    golden(caught.value.message)
    assert re.search(message, f"{caught.value.expected} {caught.value.found}")


@pytest.mark.parametrize(("algorithm", "kind"), [("PPO", "Pictures"), ("SAC", "Mixed"), ("SAC", "Grid")])
def test_a_loaded_agent_takes_the_observations_of_its_library(
    make_agent: Any, algorithm: str, kind: str
) -> None:
    model, path = make_agent(algorithm, kind)
    grid = np.random.default_rng(1).uniform(-1, 1, (BATCH, 2, 5)).astype("f4")
    observed: Any = grid if kind == "Grid" else observations(kind)
    observed = observed["obs"] if kind == "Pictures" else observed
    expected, _ = model.predict(observed, deterministic=True)
    agent = load_agent(path)
    np.testing.assert_allclose(agent.act(observed), expected, rtol=1e-5, atol=1e-5)
    one = {name: rows[1] for name, rows in observed.items()} if isinstance(observed, dict) else observed[1]
    np.testing.assert_allclose(agent.act(one), expected[1], rtol=1e-5, atol=1e-5)
    if not isinstance(observed, dict):
        actions = agent.act(torch.from_numpy(observed)).numpy()
        np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(EnvironmentMismatchError):
            agent.act(np.swapaxes(observed, 1, 2)[:, 1:])


def test_conversions_do_not_take_half_a_policy(make_agent: Any, tmp_path: Path) -> None:
    model, path = make_agent("SAC", "Mixed")
    ran = in_process("convert", path, tmp_path / "a.pt", "--json")
    assert (ran.status, ran.json()["unused"]) == (0, [])
    copied = torch.load(tmp_path / "a.pt", weights_only=True)["policy"]
    assert copied.keys() == model.policy.state_dict().keys()
    assert all(torch.equal(copied[name], value) for name, value in model.policy.state_dict().items())
    assert sum(name.startswith("actor.features_extractor.extractors.image") for name in copied) == 8
    ran = in_process("convert", path, tmp_path / "a.tf", "--to", "tf", "--json")
    assert ran.status == 1
    assert not list(tmp_path.glob("a.tf*"))
    ran = in_process("convert", path, tmp_path / "a.onnx", "--json")
    assert ran.status == 2
    assert "features_extractor" in ran.json()["error"]["message"] + str(ran.json()["error"])


# Memory: the contrib's file, made of plain torch (sb3_contrib/common/recurrent/policies.py).


def recurrent(layers: int) -> nn.Module:
    torch.manual_seed(layers)
    units = 6
    module = nn.Module()
    module.log_std = nn.Parameter(torch.zeros(2))
    module.lstm_actor = nn.LSTM(sb3.OBS, units, layers)
    module.lstm_critic = nn.LSTM(sb3.OBS, units, layers)
    nets = {f"{name}_net": nn.Sequential(nn.Linear(units, 5), nn.Tanh()) for name in ("policy", "value")}
    module.mlp_extractor = sb3.owner(**nets)
    module.action_net, module.value_net = nn.Linear(5, 2), nn.Linear(5, 1)
    nn.init.normal_(module.action_net.weight)
    return module


def recurrent_agent(path: Path, module: nn.Module) -> str:
    data = sb3.settings(sb3.ON_POLICY, action_space=sb3.box([-1, -1], [1, 1]))
    return sb3.put(path, sb3.members({"policy": module.state_dict()}, data))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_recurrent_policy_remembers(tmp_path: Path, layers: int) -> None:
    module = recurrent(layers)
    path = recurrent_agent(tmp_path / "a.zip", module)
    obs = np.random.default_rng(0).normal(size=(STEPS, BATCH, sb3.OBS)).astype("f4")
    with torch.no_grad():
        remembered, _ = module.lstm_actor(torch.tensor(obs))
        mean = module.action_net(module.mlp_extractor.policy_net(remembered)).numpy()
    expected = np.clip(mean, -1, 1)
    assert (expected == mean).mean() > 0.3
    policy, state = policy_of(path, {"obs": obs[0]}), ()
    for step in range(STEPS):
        actions, state = policy.step(obs[step], state)
        np.testing.assert_allclose(actions, expected[step], rtol=1e-5, atol=1e-5)
    assert len(state) == 2 * layers


def test_memory_is_not_left_out_of_what_cannot_run(tmp_path: Path) -> None:
    agent = restore_agent(recurrent_agent(tmp_path / "a.zip", recurrent(1)))
    assert agent.playable("actor") is not None
    with pytest.raises(UnsupportedError, match="lstm_actor"):
        agent.runnable("actor")
    with pytest.raises(UnsupportedError, match="lstm_critic"):
        agent.runnable("value")


def test_statistics_come_before_memory(tmp_path: Path) -> None:
    module = recurrent(1)
    path = recurrent_agent(tmp_path / "a.zip", module)
    sb3.statistics(tmp_path / "vecnormalize.pkl")
    obs = np.random.default_rng(1).normal(size=(BATCH, sb3.OBS)).astype("f4")
    mean, var = np.linspace(-1, 1, sb3.OBS), np.linspace(0.5, 2, sb3.OBS)
    normalized = np.clip((obs - mean) / np.sqrt(var + 1e-8), -5, 5).astype("f4")
    with torch.no_grad():
        expected = module.action_net(
            module.mlp_extractor.policy_net(module.lstm_actor(torch.tensor(normalized)[None])[0])
        )
    actions, _ = policy_of(path, {"obs": obs}).step(obs)
    np.testing.assert_allclose(actions, np.clip(expected[0].numpy(), -1, 1), rtol=1e-5, atol=1e-5)


class Renormalised(nn.Module):
    """sb3_contrib/common/torch_layers.py, BatchRenorm, of a policy that acts."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.rand(width)), nn.Parameter(torch.randn(width))
        self.register_buffer("ra_mean", 5 * torch.randn(width))
        self.register_buffer("ra_var", torch.rand(width))
        self.register_buffer("steps", torch.tensor(7))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x - self.ra_mean) / (self.ra_var + self.epsilon).sqrt() + self.bias


def crossq(epsilon: float = 1e-3) -> nn.Module:
    """Return the policy of sb3_contrib/crossq/policies.py."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for rows, columns in ((sb3.OBS, 5), (5, 4)):
        layers += [Renormalised(rows, epsilon), nn.Linear(rows, columns), nn.ReLU()]
    actor = sb3.owner(latent_pi=nn.Sequential(*layers, Renormalised(4, epsilon)))
    actor.mu, actor.log_std = nn.Linear(4, 2), nn.Linear(4, 2)
    return sb3.owner(actor=actor, critic=sb3.critic(2))


@pytest.mark.parametrize("facts", [{}, {"batch_norm_eps": 0.25}])
def test_batch_renormalisation(tmp_path: Path, facts: dict[str, float]) -> None:
    module = crossq(*facts.values())
    kwargs = {"net_arch": [5, 4], **facts}
    data = sb3.settings(sb3.SAC_POLICY, policy_kwargs=kwargs)
    path = sb3.put(tmp_path / "a.zip", sb3.members({"policy": module.state_dict()}, data))
    obs = np.random.default_rng(1).normal(size=(BATCH, sb3.OBS)).astype("f4")
    with torch.no_grad():
        squashed = torch.tanh(module.actor.mu(module.actor.latent_pi(torch.tensor(obs)))).numpy()
    low, high = np.array(sb3.LOW), np.array(sb3.HIGH)
    actions, _ = policy_of(path, {"obs": obs}).step(obs)
    np.testing.assert_allclose(actions, low + (squashed + 1) / 2 * (high - low), rtol=1e-5, atol=1e-5)
    assert any("epsilon 0.001" in text for text in restore_agent(path).binding.fronts["actor"].assumed) == (
        not facts
    )


def test_an_encoder_does_not_answer_how_observations_were_normalised(tmp_path: Path, make_agent: Any) -> None:
    data = sb3.settings(sb3.SAC_POLICY, policy_kwargs={"net_arch": [5, 4]})
    paths = {
        "recurrent": recurrent_agent(tmp_path / "recurrent.zip", recurrent(1)),
        "crossq": sb3.put(tmp_path / "crossq.zip", sb3.members({"policy": crossq().state_dict()}, data)),
        "dict": make_agent("SAC", "Mixed")[1],
    }
    for path in paths.values():
        agent = restore_agent(path)
        assert "actor" in agent.binding.fronts
        assert any(entry.what == "observation statistics" for entry in agent.ledger)
        assert all(lack.what != "architecture" for lack in agent.binding.facts.lacks)


def test_a_norm_in_another_place_is_refused(tmp_path: Path) -> None:
    module = crossq()
    chain = module.actor.latent_pi
    module.actor.latent_pi = nn.Sequential(chain[1], chain[2], Renormalised(5, 1), *chain[4:])
    path = sb3.put(
        tmp_path / "a.zip", sb3.members({"policy": module.state_dict()}, sb3.settings(sb3.SAC_POLICY))
    )
    with pytest.raises(UnsupportedError, match="latent_pi"):
        restore_agent(path).playable("actor")


class Remembering(nn.Module):
    """An actor as people write it: memory first, then dense layers."""

    def __init__(self, kind: type[nn.RNNBase], layers: int, *, bias: bool = True, first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        if first:
            self.memory = kind(4, 6, layers, bias=bias)
        self.l1, self.l2 = nn.Linear(6, 5), nn.Linear(5, 2)
        if not first:
            self.memory = kind(4, 6, layers)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(self.l2(torch.relu(self.l1(self.memory(obs)[0]))))


@pytest.mark.parametrize(
    ("kind", "layers", "bias"), [(nn.LSTM, 1, True), (nn.LSTM, 2, False), (nn.GRU, 2, True)]
)
def test_a_recurrent_actor_of_plain_torch(
    tmp_path: Path, kind: Any, layers: int, golden: Golden, *, bias: bool
) -> None:
    actor = Remembering(kind, layers, bias=bias)
    torch.save({"actor": actor.state_dict(), "total_it": 5}, tmp_path / "a.pt")
    obs = np.random.default_rng(0).normal(size=(STEPS, BATCH, 4)).astype("f4")
    with torch.no_grad():
        expected = actor(torch.tensor(obs)).numpy()
    how = Protocol()
    agent = restore_agent(str(tmp_path / "a.pt"))
    entrant = prepare_agent(
        agent, choose_environment(agent, "Given-v0", how), how, spec({"obs": obs[0]}, [-3, -3], [3, 3])
    )
    golden("\n".join(entrant.assumed))
    module: Any = plugins.find("backends", "numpy").load()
    policy, state = module.build(entrant.network), ()
    for step in range(STEPS):
        actions, state = policy.step(obs[step], state)
        np.testing.assert_allclose(actions, expected[step], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "actor",
    [
        Remembering(nn.LSTM, 1, first=False),
        Remembering(nn.RNN, 1),
        Remembering(lambda *sizes, bias: nn.LSTM(*sizes, bidirectional=True), 1),
        Remembering(lambda *sizes, bias: nn.LSTM(*sizes, proj_size=3), 1),
    ],
    ids=["last", "no gates", "two directions", "projected"],
)
def test_memory_of_another_form_is_refused(tmp_path: Path, actor: nn.Module, golden: Golden) -> None:
    torch.save({"actor": actor.state_dict(), "total_it": 5}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(str(tmp_path / "a.pt")).playable("actor")
    golden(caught.value)


@pytest.mark.parametrize(
    ("names", "known"), [(("rnn1", "rnn2", "rnn3"), True), (("first", "slow", "fast"), False)]
)
def test_only_numbers_order_recurrent_layers_of_one_size(
    tmp_path: Path, names: tuple[str, ...], known: bool
) -> None:
    actor = nn.ModuleDict({name: nn.GRU(5 if name == names[0] else 8, 8) for name in names})
    actor["l1"] = nn.Linear(8, 2)
    torch.save({"actor": actor.state_dict(), "total_it": 5}, tmp_path / "a.pt")
    agent = restore_agent(str(tmp_path / "a.pt"))
    if known:
        assert agent.playable("actor") is not None
    else:
        with pytest.raises(UnsupportedError):
            agent.playable("actor")


@pytest.mark.environment
@pytest.mark.parametrize(("algorithm", "policy"), [("SAC", "Pictures"), ("SAC", "Mixed"), ("DQN", "Moves")])
def test_the_command_plays_them(make_agent: Any, games: Path, algorithm: str, policy: str) -> None:
    pytest.importorskip("gymnasium")
    _, path = make_agent(algorithm, policy)
    ran = ckpttool(
        "eval",
        path,
        "--env",
        f"fronts_games:{policy}-v0",
        "--episodes",
        "3",
        "--num-envs",
        "2",
        "--json",
        env={"PYTHONPATH": str(games)},
    )
    assert ran.status == 0, ran.err
    document = ran.json()
    assert document["lengths"] == [5, 5, 5]
    assert any("NatureCNN" in sentence for sentence in document["assumed"])


@pytest.mark.environment
def test_each_episode_of_a_recurrent_policy_begins_anew(tmp_path: Path) -> None:
    """Returns do not depend on which episode a row played before: with one row as with four."""
    pytest.importorskip("gymnasium")
    module = recurrent(1)
    module.action_net, module.log_std = nn.Linear(5, 1), nn.Parameter(torch.zeros(1))
    data = sb3.settings(sb3.ON_POLICY, action_space=sb3.box([-2], [2]))
    path = sb3.put(tmp_path / "a.zip", sb3.members({"policy": module.state_dict()}, data))
    returns = []
    for rows in ("1", "4"):
        ran = in_process(
            "eval", path, "--env", "Pendulum-v1", "--episodes", "4", "--num-envs", rows, "--json"
        )
        assert ran.status == 0, ran.err
        returns.append(ran.json()["returns"])
    np.testing.assert_allclose(*returns, rtol=1e-6)


# --- Statistics of the parts of a Dict -------------------------------------------------------------------

PARTS = """
import json, sys
import gymnasium, numpy as np, torch
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

class Parts(gymnasium.Env):
    observation_space = spaces.Dict({
        "far": spaces.Box(-np.inf, np.inf, (5,)), "grid": spaces.Box(-np.inf, np.inf, (2, 3)),
        "near": spaces.Box(-np.inf, np.inf, (2,)),
    })
    action_space = spaces.Box(np.float32([-1, -2]), np.float32([1, 3]))
    def seen(self):
        draw = self.np_random.standard_normal
        rows = {"far": 7 + 3 * draw(5), "grid": draw((2, 3)) - 2, "near": 9 * draw(2)}
        return {name: row.astype("f4") for name, row in rows.items()}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(), {}
    def step(self, action):
        return self.seen(), 0.0, False, False, {}

folder, keys = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
env = VecNormalize(DummyVecEnv([Parts]), norm_obs_keys=keys, clip_obs=1.5)
model = SAC("MultiInputPolicy", env, policy_kwargs={"net_arch": [8]}, buffer_size=2, device="cpu")
env.reset()
for _ in range(50):
    env.step(np.zeros((1, 2), "f4"))
model.save(folder + "/agent.zip")
env.save(folder + "/vecnormalize.pkl")
obs = [Parts().reset(seed=seed)[0] for seed in range(20)]
obs = {name: np.stack([each[name] for each in obs]) for name in obs[0]}
found = model.predict(env.normalize_obs(obs), deterministic=True)[0]
print(json.dumps([{name: each.tolist() for name, each in obs.items()}, found.tolist()]))
"""


@pytest.mark.parametrize("keys", [None, ["near", "far", "grid"], ["far"], ["near", "grid"], ["grid", "far"]])
def test_statistics_of_parts_are_applied_to_those_parts(keys: list[str] | None, tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    drawn, expected = warm_sb3.run_program(PARTS, str(tmp_path), json.dumps(keys))
    obs = {name: np.array(array, "f4") for name, array in drawn.items()}
    path = str(tmp_path / "agent.zip")
    actions, _ = policy_of(path, obs).step(obs)
    assert np.ptp(expected, axis=0).min() > 0.05
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)
    assert in_process("convert", path, tmp_path / "row.pt").status == 0
    rows = np.concatenate([obs[name].reshape(len(actions), -1) for name in ("far", "grid", "near")], axis=1)
    if keys is None or len(keys) == 3:
        np.testing.assert_allclose(
            load_agent(str(tmp_path / "row.pt")).act(rows), expected, rtol=1e-5, atol=1e-5
        )
    else:
        with pytest.raises(UnsupportedError):
            load_agent(str(tmp_path / "row.pt"))
    beside = restore_agent(path).known.obs_norm
    (tmp_path / "vecnormalize.pkl").rename(tmp_path / "statistics.pkl")
    stats = restore_agent(path, facts=AgentFacts(obs_norm=str(tmp_path / "statistics.pkl"))).known.obs_norm
    assert beside is not None
    assert stats is not None
    assert stats["parts"].items() == beside["parts"].items()


def test_statistics_of_parts_that_the_policy_lacks_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    warm_sb3.run_program(PARTS, str(tmp_path), "null")
    (tmp_path / "vecnormalize.pkl").unlink()
    norm = {"mean": [0.0] * 3, "var": [1.0] * 3, "parts": {"other": 3}}
    agent = restore_agent(str(tmp_path / "agent.zip"), facts=AgentFacts(obs_norm=norm))
    how = Protocol()
    observed = {
        "far": np.zeros((1, 5), "f4"),
        "grid": np.zeros((1, 2, 3), "f4"),
        "near": np.zeros((1, 2), "f4"),
    }
    with pytest.raises(UnsupportedError):
        prepare_agent(
            agent, choose_environment(agent, "Given-v0", how), how, spec(observed, [-1, -2], [1, 3])
        )


def test_the_bounds_of_each_part_are_compared(make_agent: Any) -> None:
    _, path = make_agent("SAC", "Mixed")
    observed = observations("Mixed")
    agent = restore_agent(path)
    assert agent.known.observation_space is not None
    assert {*agent.known.observation_space["parts"]} == {"vector", "grid", "image"}
    shapes = {name: array.shape[1:] for name, array in observed.items()}
    own = {name: (np.full(shape, -1, "f4"), np.full(shape, 1, "f4")) for name, shape in shapes.items()}
    own["image"] = np.zeros(shapes["image"], "u1"), np.full(shapes["image"], 255, "u1")
    given_spec = spec(observed, list(agent.known.action_low or ()), list(agent.known.action_high or ()))
    environment = choose_environment(agent, "Given-v0", Protocol())

    def entries(**bounds: Any) -> list[Any]:
        there = replace(given_spec, observation_bounds={**own, **bounds})
        return list(SpaceComparison(agent, environment, Protocol(), there).observation_entries())

    assert entries() == []
    (entry,) = entries(vector=(np.full(5, -9, "f4"), np.full(5, 9, "f4")))
    assert ("vector" in entry.value, entry.decides) == (True, True)
    assert entries(image=(np.zeros(shapes["image"], "f4"), np.ones(shapes["image"], "f4")))


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("PPO", {}), ("PPO", {"net_arch": []}), ("SAC", {"net_arch": []}), ("TD3", {})],
)
def test_the_library_states_what_its_extractor_flattens(
    make_agent: Any, algorithm: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, path = make_agent(algorithm, "Pictures", **settings)
    ran = in_process("convert", path, tmp_path / "a", "--to", "tf", "--optimizer", "none", "--json")
    assert ran.status == 0, ran.out + ran.err
    tree = open_checkpoint(str(tmp_path / "a")).tree
    written = {tree.names[path].removeprefix("policy/"): leaf.array() for path, leaf in tree.tensors()}
    weights = model.policy.state_dict()
    compared = 0
    for name in weights:
        if not name.endswith("features_extractor.linear.0.weight"):
            continue
        channels = weights[name.replace("linear.0", "cnn.4")].shape[0]
        turned = weights[name].unflatten(1, (channels, -1)).permute(2, 1, 0).flatten(0, 1)
        prefix = name.removesuffix("0.weight").replace(".", "/")
        kernel = next(
            (array for other, array in written.items() if other.startswith(prefix) and array.ndim == 2), None
        )
        if kernel is not None:  # shared extractors are stored once
            np.testing.assert_array_equal(kernel, turned.numpy())
            compared += 1
    assert compared


def test_options_that_a_refused_conversion_prints_convert(make_agent: Any, tmp_path: Path) -> None:
    from stable_baselines3.common.torch_layers import NatureCNN

    class Mine(NatureCNN):
        pass

    model, path = make_agent("SAC", "Pictures", net_arch=[], features_extractor_class=Mine)
    model.save(path)
    command = ["convert", path, tmp_path / "a", "--to", "tf", "--optimizer", "none"]
    ran = in_process(*command)
    assert ran.status == 1, ran.out
    assert "activation  " not in ran.out
    # The first option of a layer is its image; a layer after the extractor only has `no`.
    options: dict[str, str] = {}
    for name, value in re.findall(r"--flatten '([^'=]+)=([^']+)'", ran.out + ran.err):
        options.setdefault(name, value)
    assert options
    followed = in_process(*command, *(f"--flatten={name}={value}" for name, value in options.items()))
    # What remains is the class, whose code is not run.
    assert (tmp_path / "a.index").exists(), followed.out + followed.err


def test_observations_with_exchanged_axes_are_read(make_agent: Any) -> None:
    """NumPy 2.4 pickles the transposed images of VecTransposeImage in axis order K."""
    model, path = make_agent("PPO", "Pictures")
    images = np.random.default_rng(0).integers(0, 255, (2, 5, 4, 3), np.uint8)
    model._last_obs = images.transpose(0, 3, 1, 2)
    assert not model._last_obs.flags.forc
    model.save(path)
    stored = {display(path): leaf for path, leaf in open_checkpoint(str(path)).tree.tensors()}
    np.testing.assert_array_equal(stored["data/_last_obs"].array(), model._last_obs)


class OwnReLU(nn.ReLU):
    """A subclass, which may compute anything."""


@pytest.mark.parametrize(
    ("function", "hidden"),
    [
        (functools.partial(nn.LeakyReLU, negative_slope=0.2), "leaky_relu(0.2)"),
        (functools.partial(nn.LeakyReLU, 0.3, True), "leaky_relu(0.3)"),
        (functools.partial(nn.LeakyReLU, 0.01), "leaky_relu"),
        (functools.partial(nn.ReLU, inplace=True), "relu"),
        (functools.partial(nn.Hardtanh, -1, max_val=1.0), "hardtanh"),
        *((getattr(nn, name), name.lower()) for name in ("Mish", "SELU", "ReLU6", "Hardtanh", "Hardswish")),
        (functools.partial(nn.ELU, 0.5), "functools.partial(ELU, 0.5)"),
        (functools.partial(nn.ELU, 0.5, True), "functools.partial(ELU, 0.5, True)"),
        (functools.partial(nn.Hardtanh, -2, 2), "functools.partial(Hardtanh, -2, 2)"),
        (functools.partial(nn.Softplus, beta=2), "functools.partial(Softplus, beta=2)"),
        (nn.Hardsigmoid, "torch.nn.modules.activation.Hardsigmoid"),
        (OwnReLU, f"{__name__}.OwnReLU"),
    ],
)
def test_an_activation_with_arguments_is_played_or_named(
    make_agent: Any, function: Any, hidden: str, tmp_path: Path
) -> None:
    model, _ = make_agent("PPO", "Grid", activation_fn=nn.ReLU)
    path = str(tmp_path / "agent.zip")
    model.policy_kwargs = {**model.policy_kwargs, "activation_fn": function}
    model.save(path)
    assert restore_agent(path).binding.facts.hidden == hidden
    observed = {"obs": np.random.default_rng(3).normal(0, 3, (8, 2, 5)).astype("f4")}
    if parse_activation(hidden) is None:
        with pytest.raises(CkpttoolError, match=re.escape(hidden)):
            policy_of(path, observed)
        return
    layers = model.policy.mlp_extractor.policy_net
    plain = [function() if isinstance(layer, nn.ReLU) else layer for layer in layers]
    model = copy.copy(model)
    model.policy = copy.deepcopy(model.policy)
    model.policy.mlp_extractor.policy_net = nn.Sequential(*plain)
    expected, _ = model.predict(observed["obs"], deterministic=True)
    got, _ = policy_of(path, observed).step(observed["obs"])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_target_of_joined_inputs_names_the_file_that_plays(
    make_agent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gymnasium = importlib.import_module("gymnasium")
    model, source = make_agent("PPO", "Goal")
    source = shutil.copy(source, tmp_path / "source.zip")
    target = str(tmp_path / "target.safetensors")
    assert in_process("convert", source, target).status == 0
    task = type(model.env.envs[0].unwrapped)
    monkeypatch.setattr(task, "seen", lambda _: task.observation_space.sample(), raising=False)
    gymnasium.register("Goal-v0", task)
    try:
        ran = in_process("eval", target, "--env", "Goal-v0", "--episodes", "1")
        assert ran.status == 2
        hint = shlex.split(ran.err.partition("hint: ")[2])
        followed = in_process(*hint[1:])
    finally:
        del gymnasium.registry["Goal-v0"]
    assert followed.status == 0, followed.out + followed.err


# The same policies as modules that can be trained, and their drawn actions.


@pytest.mark.parametrize(("algorithm", "policy"), [("PPO", "Pictures"), ("SAC", "Mixed")])
def test_modules_of_image_policies_act_as_the_library(make_agent: Any, algorithm: str, policy: str) -> None:
    model, path = make_agent(algorithm, policy)
    observed = observations(policy, first=True)
    actor = load_agent(path).networks("torch", "actor")["actor"]
    with torch.no_grad():
        inputs = [torch.from_numpy(observed[name]) for name in actor.inputs]
        actions, (mean, deviation) = actor(*inputs), actor.distribution(*inputs)
        tensors = {name: torch.from_numpy(array) for name, array in observed.items()}
        inputs = tensors.get("obs", tensors)
        if algorithm == "PPO":
            drawn = model.policy.get_distribution(inputs).distribution
            expected = drawn.mean, drawn.stddev
        else:
            mu, log_std, _ = model.actor.get_action_dist_params(inputs)
            expected = mu, log_std.exp()
    np.testing.assert_allclose(actions.numpy(), predicted(model, observed), rtol=1e-5, atol=1e-5)
    for array, known in zip((mean, deviation), expected, strict=True):
        np.testing.assert_allclose(array.numpy(), known.numpy(), rtol=1e-4, atol=1e-5)
    stored = {tensor.numpy().tobytes() for tensor in model.policy.state_dict().values()}
    parameters = [*actor.parameters()]
    assert len(parameters) > 8
    assert all(parameter.detach().numpy().tobytes() in stored for parameter in parameters)


def test_a_module_with_memory_carries_its_state_and_its_actions_are_drawn(tmp_path: Path) -> None:
    module = recurrent(1)
    module.log_std.data = torch.tensor([-3.0, -2.0])
    path = recurrent_agent(tmp_path / "a.zip", module)
    obs = np.random.default_rng(0).normal(size=(4, BATCH, sb3.OBS)).astype("f4")
    agent = load_agent(path)
    actor = agent.networks("torch", "actor")["actor"]
    carried: Any = tuple(torch.zeros(BATCH, 6) for _ in actor.inputs[1:])
    state, drawn = None, None
    agent.seed(3)
    noise = np.random.default_rng([3, 2])
    with torch.no_grad():
        remembered, _ = module.lstm_actor(torch.tensor(obs))
        mean = module.action_net(module.mlp_extractor.policy_net(remembered)).numpy()
    for step in range(4):
        actions, *carried = actor(torch.from_numpy(obs[step]), *carried)
        known, state = agent.predict(obs[step], state)
        np.testing.assert_allclose(actions.detach().numpy(), known, rtol=1e-5, atol=1e-6)
        sample, drawn = agent.predict(obs[step], drawn, deterministic=False)
        expected = mean[step] + np.exp([-3.0, -2.0]) * noise.standard_normal((BATCH, 2))
        np.testing.assert_allclose(sample, np.clip(expected, -1, 1), rtol=1e-4, atol=1e-5)


def test_batch_norms_are_not_trained(tmp_path: Path) -> None:
    data = sb3.settings(sb3.SAC_POLICY, policy_kwargs={"net_arch": [5, 4]})
    path = sb3.put(tmp_path / "a.zip", sb3.members({"policy": crossq().state_dict()}, data))
    with pytest.raises(UnsupportedError, match="batch norms"):
        load_agent(path).networks("torch", "actor")
