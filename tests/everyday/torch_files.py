"""Makers of the PyTorch files of the matrix, as users' programs make them.

Each function writes into a folder and returns the network and the optimizer whose behaviour must be kept.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.everyday import torch_nets as nets
from tests.everyday.cases import CASES, INPUTS, Case

Made = tuple[nn.Module, torch.optim.Optimizer | None]


def make(names: Sequence[str], folder: str) -> None:
    """Make files and the references of what they compute, each in a folder of its name."""
    for case in CASES:
        if case.side == "torch" and case.name in names:
            home = Path(folder, case.name)
            home.mkdir(parents=True)
            torch.manual_seed(7)
            _refer(case, home, *_maker(case.name)(home))


def _maker(name: str) -> Callable[[Path], Made]:
    return globals()[name]  # type: ignore[no-any-return]


def _refer(case: Case, home: Path, net: nn.Module, tool: torch.optim.Optimizer | None) -> None:
    """Record what the source computes, also after two more updates."""
    facts = {
        "outputs": nets.outputs(net.float(), case.net),
        "parameters": np.array(sum(p.numel() for p in net.parameters())),
    }
    state = net.state_dict()
    if case.path.endswith(".onnx"):  # a graph has no count of batches
        state = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    facts |= {f"weight:{name}": value.float().numpy().copy() for name, value in state.items()}
    if case.policy:
        facts["returns"] = nets.returns(net, case.net)
    if tool is not None and case.optimizer:
        facts["continued"] = nets.continued(net, case.net, tool)
    np.savez(home / "reference.npz", **facts)


def _trained(case: str) -> Made:
    """Return the network of a case after some training, and its optimizer."""
    (row,) = (c for c in CASES if c.name == case)
    net = nets.build(row.net, row.layers)
    tool = nets.optimizer(row.optimizer, net.parameters()) if row.optimizer else None
    nets.train(net, row.net, tool)
    if row.policy:
        with torch.no_grad():
            list(net.parameters())[-2].mul_(3)
    return net, tool


# --- As people save -------------------------------------------------------------------------------------


def state_dict(folder: Path) -> Made:
    net, _ = _trained("state_dict")
    torch.save(net.state_dict(), folder / "model.pt")
    return net, None


def sequential(folder: Path) -> Made:
    net, _ = _trained("sequential")
    torch.save(net.state_dict(), folder / "model.pt")
    return net, None


def _saved(name: str, folder: Path, **rest: Any) -> Made:
    """Save `model` and `optimizer` beside other entries."""
    net, tool = _trained(name)
    assert tool is not None
    torch.save({"model": net.state_dict(), "optimizer": tool.state_dict(), **rest}, folder / "model.pt")
    return net, tool


def tutorial(folder: Path) -> Made:
    net, tool = _trained("tutorial")
    assert tool is not None
    torch.save(
        {
            "epoch": 5,
            "model_state_dict": net.state_dict(),
            "optimizer_state_dict": tool.state_dict(),
            "loss": torch.tensor(0.4),
        },
        folder / "model.pt",
    )
    return net, tool


def model_epoch(folder: Path) -> Made:
    net, _ = _trained("model_epoch")
    torch.save({"model": net.state_dict(), "epoch": 3}, folder / "model.pt")
    return net, None


def model_optimizer_args(folder: Path) -> Made:
    args = argparse.Namespace(lr=1e-2, layers=[24, 24], env="Pendulum-v1", resume=None, amp=False)
    return _saved("model_optimizer_args", folder, args=args, epoch=12, best_acc=71.5)


def nested_settings(folder: Path) -> Made:
    cfg = {"model": {"hidden": [24, 24], "act": "relu"}, "optim": {"lr": 1e-2}, "seed": 1, "tags": ["a", "b"]}
    return _saved("nested_settings", folder, cfg=cfg, step=100)


def schedulers(folder: Path) -> Made:
    net, tool = _trained("schedulers")
    assert tool is not None
    first = torch.optim.lr_scheduler.StepLR(tool, 30)
    second = torch.optim.lr_scheduler.ReduceLROnPlateau(tool)
    torch.save(
        {
            "model": net.state_dict(),
            "optimizer": tool.state_dict(),
            "scheduler": first.state_dict(),
            "plateau": second.state_dict(),
            "scaler": {
                "scale": 65536.0,
                "growth_factor": 2.0,
                "backoff_factor": 0.5,
                "growth_interval": 2000,
                "_growth_tracker": 3,
            },
        },
        folder / "model.pt",
    )
    return net, tool


def random_states(folder: Path) -> Made:
    return _saved(
        "random_states",
        folder,
        torch_rng=torch.get_rng_state(),
        numpy_rng=np.random.get_state(),  # what people save
        python_rng=random.getstate(),
        iteration=1000,
    )


def old_format(folder: Path) -> Made:
    net, _ = _trained("old_format")
    torch.save(net.state_dict(), folder / "model.pt", _use_new_zipfile_serialization=False)
    return net, None


def safetensors(folder: Path) -> Made:
    from safetensors.torch import save_file

    net, _ = _trained("safetensors")
    save_file(net.state_dict(), str(folder / "model.safetensors"))
    return net, None


def two_networks(folder: Path) -> Made:
    pi, pi_opt = _trained("two_networks")
    qf = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1))
    qf_opt = torch.optim.Adam(qf.parameters(), 1e-3)
    qf(torch.randn(6, 4)).pow(2).sum().backward()
    qf_opt.step()
    assert pi_opt is not None
    torch.save(
        {
            "pi": pi.state_dict(),
            "qf": qf.state_dict(),
            "pi_opt": pi_opt.state_dict(),
            "qf_opt": qf_opt.state_dict(),
            "steps": 9000,
        },
        folder / "model.pt",
    )
    return pi, pi_opt


def history(folder: Path) -> Made:
    net, tool = _trained("history")
    assert tool is not None
    torch.save(
        {
            "net": net.state_dict(),
            "opt": tool.state_dict(),
            "losses": [0.5, 0.25],
            "returns": np.array([-900.0, -300.0]),
            "best": np.float64(-120.5),
            "date": "2024-05-01",
            "done": False,
            "note": None,
        },
        folder / "model.pt",
    )
    return net, tool


def half(folder: Path) -> Made:
    net, _ = _trained("half")
    torch.save(net.half().state_dict(), folder / "model.pt")
    return net, None


def bfloat16(folder: Path) -> Made:
    net, _ = _trained("bfloat16")
    torch.save(net.bfloat16().state_dict(), folder / "model.pt")
    return net, None


# --- Whole modules and TorchScript ----------------------------------------------------------------------


def _whole(name: str, folder: Path) -> Made:
    net, _ = _trained(name)
    torch.save(net, folder / "model.pt")
    return net, None


def whole_sequential(folder: Path) -> Made:
    return _whole("whole_sequential", folder)


def whole_module(folder: Path) -> Made:
    return _whole("whole_module", folder)


def whole_cnn(folder: Path) -> Made:
    return _whole("whole_cnn", folder)


def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Do what a user's hook does: look."""


def whole_hooked(folder: Path) -> Made:
    net, _ = _trained("whole_hooked")
    net.eval().register_forward_hook(hook)
    torch.save(net, folder / "model.pt")
    return net, None


def script_mlp(folder: Path) -> Made:
    net, _ = _trained("script_mlp")
    torch.jit.trace(net.eval(), torch.zeros(1, 3)).save(str(folder / "model.pt"))
    return net, None


def script_cnn(folder: Path) -> Made:
    net, _ = _trained("script_cnn")
    torch.jit.trace(net.eval(), torch.zeros(1, 3, 6, 10)).save(str(folder / "model.pt"))
    return net, None


def _exported(name: str, folder: Path, **options: Any) -> Made:
    net, _ = _trained(name)
    (case,) = (c for c in CASES if c.name == name)
    shape, _ = INPUTS[case.net]
    example = torch.zeros(1, *shape)
    axes = {"input_names": ["obs"], "dynamic_axes": {"obs": {0: "batch"}}}
    torch.onnx.export(net.eval(), example, str(folder / "model.onnx"), dynamo=False, **axes, **options)
    return net, None


def onnx_mlp(folder: Path) -> Made:
    return _exported("onnx_mlp", folder)


def onnx_layernorm(folder: Path) -> Made:
    return _exported("onnx_layernorm", folder, opset_version=11)


def onnx_cnn(folder: Path) -> Made:
    # An export for inference joins a batch norm to its convolution: another network with the same outputs.
    return _exported("onnx_cnn", folder, training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False)


def onnx_lstm(folder: Path) -> Made:
    return _exported("onnx_lstm", folder)


# --- Wrappers -------------------------------------------------------------------------------------------


def _prefixed(prefix: str, net: nn.Module) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in net.state_dict().items()}


def data_parallel(folder: Path) -> Made:
    net, _ = _trained("data_parallel")
    torch.save(nn.DataParallel(net).state_dict(), folder / "model.pt")
    return net, None


def distributed(folder: Path) -> Made:
    net, tool = _trained("distributed")
    assert tool is not None
    torch.save(
        {
            "epoch": 90,
            "arch": "mlp",
            "state_dict": _prefixed("module.", net),
            "best_acc1": torch.tensor(76.1),
            "optimizer": tool.state_dict(),
            "scheduler": torch.optim.lr_scheduler.StepLR(tool, 30).state_dict(),
            "args": argparse.Namespace(lr=0.1, world_size=8),
        },
        folder / "model.pt",
    )
    return net, tool


def compiled(folder: Path) -> Made:
    net, _ = _trained("compiled")
    torch.save(_prefixed("_orig_mod.", net), folder / "model.pt")
    return net, None


def compiled_distributed(folder: Path) -> Made:
    net, tool = _trained("compiled_distributed")
    assert tool is not None
    saved = {"model": _prefixed("module._orig_mod.", net), "optimizer": tool.state_dict(), "iter_num": 2000}
    torch.save(saved, folder / "model.pt")
    return net, tool


def lightning(folder: Path) -> Made:
    net, tool = _trained("lightning")
    assert tool is not None
    torch.save(
        {
            "epoch": 2,
            "global_step": 300,
            "pytorch-lightning_version": "2.4.0",
            "state_dict": _prefixed("model.", net),
            "loops": {
                "fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3, "completed": 2}}},
                "validate_loop": {"state_dict": {}},
            },
            "callbacks": {
                "ModelCheckpoint{'monitor': 'loss', 'mode': 'min'}": {
                    "monitor": "loss",
                    "best_model_score": torch.tensor(0.12),
                    "best_model_path": "epoch=2.ckpt",
                    "kth_value": torch.tensor(0.12),
                }
            },
            "optimizer_states": [tool.state_dict()],
            "lr_schedulers": [torch.optim.lr_scheduler.StepLR(tool, 10).state_dict()],
            "hparams_name": "kwargs",
            "hyper_parameters": {"lr": 1e-2, "hidden": 24},
        },
        folder / "last.ckpt",
    )
    return net, tool


def accelerate(folder: Path) -> Made:
    from safetensors.torch import save_file

    net, tool = _trained("accelerate")
    assert tool is not None
    checkpoint = folder / "step_100"
    checkpoint.mkdir()
    save_file(net.state_dict(), str(checkpoint / "model.safetensors"), metadata={"format": "pt"})
    torch.save(tool.state_dict(), checkpoint / "optimizer.bin")
    torch.save(torch.optim.lr_scheduler.StepLR(tool, 10).state_dict(), checkpoint / "scheduler.bin")
    states = {
        "step": 100,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),  # as accelerate does
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, checkpoint / "random_states_0.pkl")
    return net, tool


def trainer(folder: Path) -> Made:
    from safetensors.torch import save_file

    net, tool = _trained("trainer")
    assert tool is not None
    checkpoint = folder / "checkpoint-500"
    checkpoint.mkdir()
    save_file(net.state_dict(), str(checkpoint / "model.safetensors"), metadata={"format": "pt"})
    torch.save(tool.state_dict(), checkpoint / "optimizer.pt")
    torch.save(torch.optim.lr_scheduler.StepLR(tool, 10).state_dict(), checkpoint / "scheduler.pt")
    torch.save({"python": random.getstate(), "cpu": torch.get_rng_state()}, checkpoint / "rng_state.pth")
    torch.save({"lr": 5e-5, "output_dir": "out"}, checkpoint / "training_args.bin")
    (checkpoint / "config.json").write_text(
        '{"architectures": ["Block"], "hidden_size": 8, "model_type": "block"}'
    )
    (checkpoint / "trainer_state.json").write_text('{"epoch": 1.0, "global_step": 500, "log_history": []}')
    return net, tool


def timm(folder: Path) -> Made:
    net, tool = _trained("timm")
    assert tool is not None
    averaged = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in averaged.parameters():
            parameter.mul_(0.5)
    torch.save(
        {
            "epoch": 10,
            "arch": "small_cnn",
            "state_dict": net.state_dict(),
            "optimizer": tool.state_dict(),
            "version": 2,
            "args": argparse.Namespace(model="small_cnn", lr=0.1),
            "amp_scaler": {"scale": 65536.0},
            "state_dict_ema": averaged.state_dict(),
            "metric": 71.2,
        },
        folder / "model.pt",
    )
    return net, tool


def averaged(folder: Path) -> Made:
    net, _ = _trained("averaged")
    ema = torch.optim.swa_utils.AveragedModel(net)
    with torch.no_grad():
        for parameter in ema.parameters():
            parameter.mul_(0.5)
    torch.save({"model": net.state_dict(), "ema": ema.state_dict(), "step": 5}, folder / "model.pt")
    return net, None


# --- Optimizers and networks ----------------------------------------------------------------------------


def adamw_groups(folder: Path) -> Made:
    net = nets.build("mlp")
    kernels = [p for p in net.parameters() if p.ndim > 1]
    biases = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": kernels, "weight_decay": 0.02}, {"params": biases, "weight_decay": 0.0, "lr": 1e-3}]
    tool = torch.optim.AdamW(groups, 1e-2)
    nets.train(net, "mlp", tool)
    torch.save({"model": net.state_dict(), "optimizer": tool.state_dict(), "epoch": 1}, folder / "model.pt")
    return net, tool


def sgd_momentum(folder: Path) -> Made:
    return _saved("sgd_momentum", folder, epoch=1)


def sgd_plain(folder: Path) -> Made:
    return _saved("sgd_plain", folder, epoch=1)


def rmsprop(folder: Path) -> Made:
    return _saved("rmsprop", folder, epoch=1)


def adagrad(folder: Path) -> Made:
    return _saved("adagrad", folder, epoch=1)


def amsgrad(folder: Path) -> Made:
    return _saved("amsgrad", folder, epoch=1)


def cnn(folder: Path) -> Made:
    return _saved("cnn", folder, epoch=1)


def lstm(folder: Path) -> Made:
    return _saved("lstm", folder, epoch=1)


def gru(folder: Path) -> Made:
    return _saved("gru", folder, epoch=1)


def block(folder: Path) -> Made:
    return _saved("block", folder, epoch=1)


def encoder(folder: Path) -> Made:
    return _saved("encoder", folder, epoch=1)


def embedding(folder: Path) -> Made:
    return _saved("embedding", folder, epoch=1)


def tied(folder: Path) -> Made:
    net, _ = _trained("tied")
    torch.save(net.state_dict(), folder / "model.pt")
    return net, None


def layernorm(folder: Path) -> Made:
    return _saved("layernorm", folder, epoch=1)


# --- RL libraries ---------------------------------------------------------------------------------------


class QNetwork(nn.Module):
    """The critic of CleanRL's td3_continuous_action.py."""

    def __init__(self, names: Sequence[str] = ("fc1", "fc2", "fc3")) -> None:
        super().__init__()
        for name, sizes in zip(names, ((4, 24), (24, 24), (24, 1)), strict=True):
            self.add_module(name, nn.Linear(*sizes))


def cleanrl_td3(folder: Path) -> Made:
    net, _ = _trained("cleanrl_td3")
    actor = copy.deepcopy(net)
    actor.register_buffer("action_scale", torch.tensor([2.0]))
    actor.register_buffer("action_bias", torch.tensor([0.0]))
    saved = (actor.state_dict(), QNetwork().state_dict(), QNetwork().state_dict())
    torch.save(saved, folder / "td3.cleanrl_model")
    return net, None


def authors_td3(folder: Path) -> Made:
    net, tool = _trained("authors_td3")
    assert tool is not None
    critic = QNetwork(("l1", "l2", "l3"))
    for name, size in (("l4", (4, 24)), ("l5", (24, 24)), ("l6", (24, 1))):
        critic.add_module(name, nn.Linear(*size))
    critic_tool = torch.optim.Adam(critic.parameters(), 3e-4)
    sum(p.pow(2).sum() for p in critic.parameters()).backward()
    critic_tool.step()
    prefix = str(folder / "TD3_Pendulum-v1_0")
    torch.save(critic.state_dict(), prefix + "_critic")
    torch.save(critic_tool.state_dict(), prefix + "_critic_optimizer")
    torch.save(net.state_dict(), prefix + "_actor")
    torch.save(tool.state_dict(), prefix + "_actor_optimizer")
    return net, tool


def authors_actor(folder: Path) -> Made:
    net, _ = _trained("authors_actor")
    torch.save(net.state_dict(), folder / "actor.pth")
    return net, None


def _sb3(name: str, folder: Path, kind: str, layers: Callable[[Any], list[nn.Linear]]) -> Made:
    import stable_baselines3

    algorithm = getattr(stable_baselines3, kind)
    rest: dict[str, Any] = {} if kind == "PPO" else {"buffer_size": 100}
    agent = algorithm(
        "MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": [24, 24]}, seed=3, device="cpu", **rest
    )
    (case,) = (c for c in CASES if c.name == name)
    net = nets.build(case.net)
    with torch.no_grad():
        for index, layer in enumerate(layers(agent.policy)):
            if index == 2:
                layer.weight.mul_(30 if kind == "PPO" else 3)
            net[index].load_state_dict(layer.state_dict())
    agent.save(folder / case.path)
    return net, None


def sb3_td3(folder: Path) -> Made:
    return _sb3("sb3_td3", folder, "TD3", lambda p: [p.actor.mu[0], p.actor.mu[2], p.actor.mu[4]])


def sb3_ppo(folder: Path) -> Made:
    return _sb3(
        "sb3_ppo", folder, "PPO", lambda p: [*(p.mlp_extractor.policy_net[i] for i in (0, 2)), p.action_net]
    )


def sb3_sac(folder: Path) -> Made:
    return _sb3("sb3_sac", folder, "SAC", lambda p: [p.actor.latent_pi[0], p.actor.latent_pi[2], p.actor.mu])
