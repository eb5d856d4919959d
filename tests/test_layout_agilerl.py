"""AgileRL's checkpoints, acted as its own networks compute: encoders, heads, norms without parameters."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.verify import verify
from ckpttool.core import UnsupportedError
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import restore_agent
from tests.pickles import importable, instance, stand_in

torch = pytest.importorskip("torch")
spaces = pytest.importorskip("gymnasium").spaces
nn = torch.nn

OBS, LATENT, NAMES = (
    4,
    9,
    {"Tanh": nn.Tanh, "ELU": nn.ELU, "ReLU": nn.ReLU, "Sigmoid": nn.Sigmoid, "PReLU": nn.PReLU},
)
SEEN = spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
CHOICES, BOX = spaces.Discrete(3, start=5), spaces.Box(np.float32([-1, -2]), np.float32([3, 2]))
CLASSES = {
    name: stand_in(f"agilerl.networks.{module}.{name}")
    for module, names in {
        "q_networks": ("QNetwork", "ContinuousQNetwork", "RainbowQNetwork"),
        "actors": ("DeterministicActor", "StochasticActor"),
        "value_networks": ("ValueNetwork",),
    }.items()
    for name in names
}


def part(name: str, sizes: tuple[int, ...], config: dict[str, Any]) -> Any:
    """Return utils/evolvable_networks.py's create_mlp."""
    layers: dict[str, Any] = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes[:-1]), start=1):
        layers[f"{name}_linear_layer_{number}"] = nn.Linear(inputs, outputs)
        if config["layer_norm"]:
            layers[f"{name}_layer_norm_{number}"] = norm = nn.LayerNorm(outputs)
            nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        layers[f"{name}_activation_{number}"] = NAMES[config["activation"]]()
    layers[f"{name}_linear_layer_output"] = nn.Linear(*sizes[-2:])
    if config["output_layernorm"]:
        layers[f"{name}_layer_norm_output"] = nn.LayerNorm(sizes[-1], elementwise_affine=False)
    output = config["output_activation"]
    layers[f"{name}_activation_output"] = nn.Identity() if output is None else NAMES[output]()
    named = nn.Sequential()
    for item, layer in layers.items():
        named.add_module(item, layer)
    return named


class Net(nn.Module):
    """A network: an encoder, then a head, which is wrapped in a stochastic actor."""

    def __init__(
        self, kind: str, outputs: int, more: int = 0, *, plain_norm: bool = True, **head: Any
    ) -> None:
        super().__init__()
        self.kind, wrapped = kind, kind == "StochasticActor"
        encoder = {"activation": "Tanh", "output_activation": "ELU", "layer_norm": not more}
        self.configs = {
            "encoder_config": {**encoder, "output_layernorm": plain_norm},
            "head_config": {"activation": "ReLU", "layer_norm": True, "output_layernorm": False}
            | {"output_activation": None, **head},
        }
        self.encoder, self.head_net = nn.Module(), nn.Module()
        self.encoder.model = part("encoder", (OBS, 17, 12, LATENT), self.configs["encoder_config"])
        built = part("value", (LATENT + more, 33, outputs), self.configs["head_config"])
        owner = self.head_net
        if wrapped:
            self.head_net._wrapped = owner = nn.Module()
        owner.model = built
        self._head = [built]

    def forward(self, obs: Any, action: Any = None) -> Any:
        latent = self.encoder.model(obs)
        return self._head[0](latent if action is None else torch.cat([latent, action], -1))

    def entries(self, name: str, **settings: Any) -> dict[str, Any]:
        init = {"simba": False, "recurrent": False, "encoder_cls": None, **self.configs, **settings}
        return {
            f"{name}_cls": CLASSES[self.kind],
            f"{name}_init_dict": init,
            f"{name}_state_dict": self.state_dict(),
        }


def write(
    path: Path, networks: dict[str, Net], action_space: Any, *, settings: Any = None, **more: Any
) -> str:
    """Write what get_checkpoint_dict returns, with an Adam of each network without a target's name."""
    modules: dict[str, Any] = {}
    for name, net in networks.items():
        modules |= net.entries(name, **(settings or {}))
    optimizers: dict[str, Any] = {}
    joint = "critic" in networks and networks["critic"].kind == "ValueNetwork"
    alone = networks["actor"].kind == "QNetwork"
    groups = [["actor", "critic"]] if joint else [[n] for n in networks if "target" not in n]
    for group in groups:
        rates = [{"params": list(networks[name].parameters())} for name in group]
        adam = torch.optim.Adam(rates, lr=3e-4)
        for item in adam.param_groups:
            for parameter in item["params"]:
                parameter.grad = torch.ones_like(parameter)
        adam.step()
        name = "optimizer" if joint or alone else f"{group[0]}_optimizer"
        optimizers |= {f"{name}_cls": "Adam", f"{name}_state_dict": adam.state_dict()}
    saved = {
        "action_space": action_space, "observation_space": SEEN, "agilerl_version": "2.58.0", **more,
        "network_info": {"modules": modules, "optimizers": optimizers},
    }  # fmt: skip
    with importable(*CLASSES.values()):
        torch.save(saved, path)
    return str(path)


def rows(width: int = OBS) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 2, size=(200, width)).astype(np.float32)


def close(actual: np.ndarray, expected: Any, scale: float = 1.0) -> None:
    expected = expected.detach().numpy() if hasattr(expected, "detach") else expected
    assert np.abs(actual - expected).max() <= 1e-6 * max(scale, np.abs(expected).max())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def dqn(path: Path, **more: Any) -> tuple[Net, str]:
    net = Net("QNetwork", 3)
    return net, write(path / "dqn.pt", {"actor": net, "actor_target": Net("QNetwork", 3)}, CHOICES, **more)


def test_a_q_network_chooses_numbers_from_0(tmp_path: Path) -> None:
    net, path = dqn(tmp_path)
    for backend in ("numpy", "torch"):
        agent = load_agent(path, backend=backend)
        expected = net(torch.from_numpy(rows()))
        close(agent.scores(rows()), expected)
        np.testing.assert_array_equal(agent.act(rows()), expected.argmax(1))
    known = restore_agent(path)
    assert known.binding.layout == "agilerl"
    assert known.known.is_read("activations")
    assert known.known.activations == ["tanh", "tanh", "elu", "relu"]
    assert not known.binding.facts.lacks


def test_statistics_of_the_wrapper_normalise(tmp_path: Path) -> None:
    rms = stand_in("agilerl.wrappers.utils.RunningMeanStd")
    wrapper = stand_in("agilerl.wrappers.agent.RSNorm")
    mean, var = torch.linspace(-1, 1, OBS), torch.linspace(1, 4, OBS)
    statistics = instance(rms, mean=mean, var=var, count=torch.tensor(100.0), epsilon=1e-4, device="cpu")
    with importable(rms, wrapper):
        net, path = dqn(tmp_path, wrapper_cls=wrapper, wrapper_attrs={"obs_rms": statistics})
    close(load_agent(path).scores(rows()), net((torch.from_numpy(rows()) - mean) / (var + 1e-4).sqrt()))
    with importable(rms, wrapper):
        _, path = dqn(tmp_path, wrapper_cls=wrapper, wrapper_attrs={"obs_rms": {"a": statistics}})
    with pytest.raises(UnsupportedError):
        load_agent(path)


@pytest.mark.parametrize("squash", [False, True])
def test_the_mean_of_ppo_is_mapped_as_outside_training(squash: bool, tmp_path: Path) -> None:
    actor, critic = Net("StochasticActor", 2), Net("ValueNetwork", 1)
    actor.head_net.log_std = nn.Parameter(torch.full((1, 2), -0.5))
    # A parameter of the head precedes the wrapped network.
    path = write(
        tmp_path / "a.pt", {"actor": actor, "critic": critic}, BOX, settings={"squash_output": squash}
    )
    mean = actor(torch.from_numpy(rows()))
    low, high = torch.from_numpy(BOX.low), torch.from_numpy(BOX.high)
    expected = low + 0.5 * (mean.tanh() + 1) * (high - low) if squash else mean.clamp(low, high)
    agent = load_agent(path)
    close(agent.act(rows()), expected)
    close(agent.value(rows()), critic(torch.from_numpy(rows()))[:, 0])
    drawn = agent.act(np.zeros((4000, OBS), np.float32), deterministic=False)
    if not squash:
        inside = actor(torch.zeros(1, OBS)).detach().numpy()[0]
        assert abs(np.median(drawn[:, 0]) - np.clip(inside[0], -1, 3)) < 0.1


@pytest.mark.parametrize(
    ("space", "outputs"),
    [(CHOICES, 3), (spaces.MultiDiscrete([3, 2]), 5), (spaces.MultiBinary(3), 3)],
)
def test_the_most_probable_action_of_ppo_is_played(space: Any, outputs: int, tmp_path: Path) -> None:
    actor = Net("StochasticActor", outputs)
    path = write(tmp_path / "a.pt", {"actor": actor, "critic": Net("ValueNetwork", 1)}, space)
    agent, logits = load_agent(path), actor(torch.from_numpy(rows())).detach().numpy()
    if outputs == 5:
        expected = np.stack([logits[:, :3].argmax(1), logits[:, 3:].argmax(1)], 1)
    else:
        expected = logits.argmax(1) if space is CHOICES else (logits > 0).astype(int)
    np.testing.assert_array_equal(agent.act(rows()), expected)
    agent.act(rows(), deterministic=False)


def td3(path: Path, critic: str = "ReLU", **head: Any) -> tuple[dict[str, Net], str]:
    networks = {"actor": Net("DeterministicActor", 2, **{"output_activation": "Tanh", **head})}
    networks["actor_target"] = Net("DeterministicActor", 2, **{"output_activation": "Tanh", **head})
    for name in ("critic_1", "critic_2", "critic_target_1", "critic_target_2"):
        networks[name] = Net("ContinuousQNetwork", 1, 2, plain_norm=False, activation=critic)
    return networks, write(path / "td3.pt", networks, BOX)


@pytest.mark.parametrize("critic", ["ReLU", "ELU"])
def test_td3_maps_its_output_to_the_bounds_and_rates_the_output(critic: str, tmp_path: Path) -> None:
    networks, path = td3(tmp_path, critic)
    agent, obs = load_agent(path), torch.from_numpy(rows())
    output = networks["actor"](obs).detach().numpy()
    close(agent.act(rows()), BOX.low + (BOX.high - BOX.low) * (output + 1) / 2)
    actions = torch.from_numpy(output)
    expected = torch.cat([networks[f"critic_{n}"](obs, actions) for n in (1, 2)], 1)
    close(agent.q_values(rows(), output), expected)


def test_every_tensor_and_moment_has_a_place(tmp_path: Path) -> None:
    for path in (td3(tmp_path)[1], dqn(tmp_path)[1]):
        agent = restore_agent(path)
        left = {agent.checkpoint.tree.names[p] for p, _ in agent.checkpoint.tree.tensors()}
        left -= {agent.checkpoint.tree.names[move.source] for move in agent.binding.moves.moves}
        assert not [name for name in left if "network_info" in name and "space" not in name]


def test_norms_without_parameters_are_converted_as_filled_ones(tmp_path: Path) -> None:
    net, path = dqn(tmp_path)
    for to in ("safetensors", "onnx"):
        target = str(tmp_path / f"out.{to}")
        assert convert(path, target, to=to).written
        close(load_agent(target).scores(rows()), net(torch.from_numpy(rows())))
    assert verify(path, str(tmp_path / "out.safetensors")).within


def _refused(**settings: Any) -> Callable[[Path], str]:
    return lambda path: dqn(path, settings=settings)[1]


def _old(path: Path) -> str:
    networks = {"actor": Net("DeterministicActor", 2, output_activation="Tanh")}
    return write(path / "old.pt", networks, BOX, agilerl_version=None)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_refused(simba=True), "simba"),
        (_refused(recurrent=True), "recurrent"),
        (_refused(encoder_cls="ResNet"), "encoder_cls"),
        (lambda path: td3(path, output_activation="Sigmoid")[1], "Sigmoid"),
        (lambda path: td3(path, activation="PReLU")[1], "PReLU"),
        (_old, "version"),
        (
            lambda path: write(path / "a.pt", {"actor": Net("QNetwork", 5)}, spaces.MultiDiscrete([3, 2])),
            "MultiDiscrete",
        ),
    ],
)
def test_other_networks_are_refused_by_name(make: Callable[[Path], str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        load_agent(make(tmp_path))
    assert reason in str(caught.value.found)


LARGEST = 7.0  # of rainbow's atoms: rounding is that of the terms, which may cancel


def rainbow(path: Path) -> tuple[Callable[[Any], Any], str]:
    """Return networks/custom_modules.py's DuelingDistributionalMLP after an encoder, with noisy layers."""
    atoms, support = 11, torch.linspace(-3, LARGEST, 11)
    net, target = (Net("RainbowQNetwork", atoms) for _ in range(2))
    for item in (net, target):
        item.head_net.advantage_net = part("advantage", (LATENT, 33, 3 * atoms), item.configs["head_config"])

    def scores(obs: Any) -> Any:
        latent = net.encoder.model(obs)
        value = net.head_net.model(latent).view(-1, 1, atoms)
        advantages = net.head_net.advantage_net(latent).view(-1, 3, atoms)
        logits = value + advantages - advantages.mean(1, keepdim=True)
        return (logits.softmax(2).clamp(min=1e-3) * support).sum(2)

    for parameter in [*net.head_net.model[-2].parameters(), *net.head_net.advantage_net[-2].parameters()]:
        parameter.data *= 4  # so that some probabilities are below the limit
    entries = {}
    for name, network in (("actor", net), ("actor_target", target)):
        state_entries = network.entries(name)
        state: dict[str, Any] = {}
        for key, tensor in state_entries[f"{name}_state_dict"].items():
            noisy = "head_net" in key and "linear" in key
            state |= (
                {f"{key}_{end}": tensor for end in ("mu", "sigma", "epsilon")} if noisy else {key: tensor}
            )
        entries |= {**state_entries, f"{name}_state_dict": state}
    saved = {
        "action_space": CHOICES, "observation_space": SEEN, "agilerl_version": "2.58.0", "support": support,
        "network_info": {"modules": entries, "optimizers": {}},
    }  # fmt: skip
    with importable(*CLASSES.values()):
        torch.save(saved, path / "rainbow.pt")
    return scores, str(path / "rainbow.pt")


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_probabilities_of_rainbow_are_limited_from_below(backend: str, tmp_path: Path) -> None:
    scores, path = rainbow(tmp_path)
    expected = scores(torch.from_numpy(rows())).detach().numpy()
    loaded = load_agent(path, backend=backend)
    close(loaded.scores(rows()), expected, LARGEST)
    np.testing.assert_array_equal(loaded.act(rows()), expected.argmax(1))


def test_a_converted_rainbow_acts_the_same(tmp_path: Path) -> None:
    scores, path = rainbow(tmp_path)
    for to in ("safetensors", "onnx"):
        target = str(tmp_path / f"out.{to}")
        assert convert(path, target, to=to).written
        close(load_agent(target).scores(rows()), scores(torch.from_numpy(rows())), LARGEST)
    with pytest.raises(UnsupportedError) as caught:
        convert(path, str(tmp_path / "tianshou.pt"), to="tianshou")
    assert caught.value.found == "dueling_limited_atoms"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TensorDict's, of the library's own calls
@pytest.mark.parametrize("name", ["DQN", "RainbowDQN", "DDPG", "TD3", "PPO", "PPO-discrete"])
def test_the_library_acts_the_same(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("agilerl") is None:
        pytest.skip("the library is not installed")
    with warnings.catch_warnings(action="ignore"):
        from agilerl import algorithms

    kind, discrete = name.partition("-")[0], name in ("DQN", "RainbowDQN", "PPO-discrete")
    playing = {"training": False} if kind == "RainbowDQN" else {}
    config = {
        "latent_dim": 9,
        "encoder_config": {"hidden_size": [17], "activation": "Tanh"},
        "head_config": {"hidden_size": [33], "activation": "ELU"},
    }
    agent = getattr(algorithms, kind)(SEEN, CHOICES if discrete else BOX, net_config=config)
    agent.save_checkpoint(str(tmp_path / "agent.pt"))
    agent.set_training_mode(False)
    loaded = load_agent(str(tmp_path / "agent.pt"))
    with torch.no_grad():
        if kind == "PPO":
            agent.actor.eval()
            output = agent.actor.head_net.wrapped(agent.actor.encoder(torch.from_numpy(rows()))).numpy()
            expected = output.argmax(1) if discrete else output.clip(BOX.low, BOX.high)
        else:
            expected = agent.get_action(rows(), *([] if discrete else [False]), **playing)
    close(loaded.act(rows()), expected)
