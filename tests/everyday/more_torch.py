"""Ordinary PyTorch files beyond the matrix, and what every tensor of theirs is in TensorFlow's axes.

Each maker returns what a program saves and the modules and optimizers whose numbers must arrive.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

# What is saved, and the modules with the optimizers that trained them.
Made = tuple[Any, list[tuple[nn.Module, torch.optim.Optimizer | None]]]
MAKERS: dict[str, Callable[[], Made]] = {}
WRITERS: dict[str, Callable[[Any, Path], Path]] = {}


def maker(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Register a maker."""

    def keep(function: Callable[[], Made]) -> Callable[[], Made]:
        MAKERS[name] = function
        return function

    return keep


def update(net: nn.Module, tool: torch.optim.Optimizer | None, steps: int = 2) -> None:
    """Give every parameter that trains a gradient and the optimizer some updates."""
    for _ in range(steps if tool is not None else 0):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        assert tool is not None
        tool.step()


def both(net: nn.Module, make: Callable[[Any], torch.optim.Optimizer] | None = None, **rest: Any) -> Made:
    """Return `model`, `optimizer` and other entries after updates."""
    tool = (make or (lambda p: torch.optim.Adam(p, 1e-2)))(net.parameters())
    update(net, tool)
    return {"model": net.state_dict(), "optimizer": tool.state_dict(), **rest}, [(net, tool)]


def alone(net: nn.Module) -> Made:
    return net.state_dict(), [(net, None)]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first, last in itertools.pairwise(sizes):
        layers += [nn.Linear(first, last), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Named(nn.Module):
    """A module with these attributes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def linear(first: int = 3, last: int = 4, **rest: Any) -> nn.Linear:
    return nn.Linear(first, last, **rest)


# --- Containers of modules ------------------------------------------------------------------------------

NETS: dict[str, Callable[[], nn.Module]] = {
    "module_dict": lambda: Named(heads=nn.ModuleDict({"left": linear(), "right": linear(3, 5)})),
    "module_list": lambda: Named(layers=nn.ModuleList([linear(3, 4), linear(4, 5)]), out=linear(5, 2)),
    "lists_in_lists": lambda: Named(
        blocks=nn.ModuleList([nn.ModuleList([linear(3, 3), linear(3, 4)]), nn.ModuleList([linear(4, 2)])])
    ),
    "dict_of_lists": lambda: Named(
        nets=nn.ModuleDict({"a": nn.ModuleList([linear(), linear(4, 2)]), "b": mlp(3, 5, 2)})
    ),
    "deep": lambda: Named(encoder=Named(body=Named(stage=Named(block=Named(fc=linear()))))),
    "parameter_alone": lambda: Named(fc=linear(), scale=nn.Parameter(torch.randn(4))),
    "scalar_parameter": lambda: Named(fc=linear(), temperature=nn.Parameter(torch.tensor(0.7))),
    "log_std": lambda: Named(mu=mlp(3, 8, 2), log_std=nn.Parameter(torch.randn(1, 2))),
    "buffers": lambda: _buffered(),
    "shared_layer": lambda: _shared(),
    "tied": lambda: _tied(),
    "conv1d": lambda: nn.Sequential(nn.Conv1d(3, 4, 5), nn.ReLU(), nn.Conv1d(4, 2, 3)),
    "conv3d": lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.BatchNorm3d(3)),
    "conv_transpose": lambda: Named(
        conv=nn.Conv2d(3, 4, 3), up=nn.ConvTranspose2d(4, 5, 3), up1=nn.ConvTranspose1d(5, 6, 4)
    ),
    "depthwise": lambda: Named(
        conv=nn.Conv2d(3, 6, 3), dw=nn.Conv2d(6, 6, 3, groups=6), pw=nn.Conv2d(6, 4, 1)
    ),
    "grouped": lambda: Named(conv=nn.Conv2d(4, 6, 3), grouped=nn.Conv2d(6, 8, 3, groups=2)),
    "conv_no_bias": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
    "group_norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
    "instance_norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)),
    "norm_without_affine": lambda: nn.Sequential(linear(), nn.LayerNorm(4, elementwise_affine=False)),
    "rms_norm": lambda: Named(fc=linear(), norm=nn.RMSNorm(4)),
    "prelu": lambda: nn.Sequential(linear(), nn.PReLU(), linear(4, 2)),
    "no_bias": lambda: Named(q=linear(3, 4, bias=False), k=linear(3, 5, bias=False)),
    "lstm_stacked": lambda: Named(rnn=nn.LSTM(3, 4, 2), fc=linear(4, 2)),
    "lstm_bidirectional": lambda: Named(rnn=nn.LSTM(3, 4, bidirectional=True), fc=linear(8, 2)),
    "gru_stacked": lambda: Named(rnn=nn.GRU(3, 4, 2), fc=linear(4, 2)),
    "rnn": lambda: Named(rnn=nn.RNN(3, 4), fc=linear(4, 2)),
    "lstm_cell": lambda: Named(cell=nn.LSTMCell(3, 4), fc=linear(4, 2)),
    "gru_cell": lambda: Named(cell=nn.GRUCell(3, 4), fc=linear(4, 2)),
    "multihead": lambda: Named(attn=nn.MultiheadAttention(8, 2), norm=nn.LayerNorm(8), fc=linear(8, 2)),
    "embedding_bag": lambda: Named(bag=nn.EmbeddingBag(11, 5), fc=linear(5, 2)),
    "embeddings": lambda: Named(user=nn.Embedding(11, 5), item=nn.Embedding(13, 5), fc=linear(10, 1)),
    "bilinear": lambda: Named(mix=nn.Bilinear(3, 4, 5), fc=linear(5, 2)),
    "weight_norm": lambda: Named(fc=nn.utils.parametrizations.weight_norm(linear()), out=linear(4, 2)),
    "old_weight_norm": lambda: Named(fc=nn.utils.weight_norm(linear()), out=linear(4, 2)),
    "spectral_norm": lambda: Named(fc=nn.utils.parametrizations.spectral_norm(linear()), out=linear(4, 2)),
    "square": lambda: Named(a=linear(4, 4), b=linear(4, 4), c=linear(4, 4)),
    "one_layer": lambda: linear(),
    "unusual_words": lambda: Named(Actor_Net=mlp(3, 4, 2), v2=linear(), x__y=linear(3, 6)),
    "keyword_names": lambda: _keyword(),
    "unicode_names": lambda: Named(schicht_ä=linear(), слой=linear(3, 5)),
    "large_numbers": lambda: nn.Sequential(*(linear(3, 3) for _ in range(12))),
    "vgg": lambda: Named(
        features=nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3)), classifier=mlp(5, 7, 2)
    ),
    "residual": lambda: Named(
        layer1=nn.Sequential(
            Named(conv1=nn.Conv2d(3, 3, 3, bias=False), bn1=nn.BatchNorm2d(3), down=nn.Conv2d(3, 3, 1))
        ),
        fc=linear(3, 2),
    ),
    "float64": lambda: mlp(3, 4, 2).double(),
    "mixed": lambda: Named(a=linear().half(), b=linear(4, 5), c=linear(5, 2).double()),
    "actor_critic": lambda: Named(actor=mlp(3, 8, 2), critic=mlp(3, 8, 1)),
    "twin_critics": lambda: Named(q1=mlp(4, 8, 1), q2=mlp(4, 8, 1)),
    "dueling": lambda: Named(body=mlp(3, 8, 8), value=linear(8, 1), advantage=linear(8, 4)),
    "ensemble": lambda: Named(members=nn.ModuleList([mlp(3, 4, 1) for _ in range(3)])),
}


def _buffered() -> nn.Module:
    net = Named(fc=linear())
    net.register_buffer("mean", torch.randn(3))
    net.register_buffer("count", torch.tensor(7))
    net.register_buffer("mask", torch.ones(4, dtype=torch.bool))
    return net


def _shared() -> nn.Module:
    layer = linear(4, 4)
    return Named(first=linear(), a=layer, b=layer, out=linear(4, 2))


def _tied() -> nn.Module:
    net = Named(decoder=linear(4, 11, bias=False), fc=linear(4, 4), embed=nn.Embedding(11, 4))
    net.decoder.weight = net.embed.weight
    return net


def _keyword() -> nn.Module:
    net = nn.Module()
    for name in ("class", "lambda", "import"):
        net.add_module(name, linear())
    return net


for _name, _make in NETS.items():
    MAKERS[f"{_name}"] = lambda make=_make: alone(make())  # type: ignore[misc]
    MAKERS[f"{_name}+adam"] = lambda make=_make: both(make(), epoch=3)  # type: ignore[misc]


# --- Optimizers -----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1),
    "sgd_decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-4),
    "centered": lambda p: torch.optim.RMSprop(p, 1e-3, centered=True),
    "rmsprop_momentum": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
    "adam_decay": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-2),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "maximize": lambda p: torch.optim.Adam(p, 1e-3, maximize=True),
    "fused": lambda p: torch.optim.Adam(p, 1e-3, foreach=True),
    "tensor_rate": lambda p: torch.optim.Adam(p, torch.tensor(1e-3)),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-3),
    "radam": lambda p: torch.optim.RAdam(p, 1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}
for _name, _tool in OPTIMIZERS.items():
    MAKERS[f"optimizer:{_name}"] = lambda tool=_tool: both(mlp(3, 4, 2), tool)  # type: ignore[misc]


@maker("optimizer:before_first_step")
def _() -> Made:
    net = mlp(3, 4, 2)
    tool = torch.optim.Adam(net.parameters())
    return {"model": net.state_dict(), "optimizer": tool.state_dict()}, [(net, None)]


@maker("optimizer:reversed_groups")
def _() -> Made:
    net = Named(body=mlp(3, 4, 5), head=linear(5, 2))
    tool = torch.optim.Adam(
        [{"params": net.head.parameters()}, {"params": net.body.parameters(), "lr": 1e-4}]
    )
    update(net, tool)
    return {"model": net.state_dict(), "optimizer": tool.state_dict()}, [(net, tool)]


@maker("optimizer:decay_groups")
def _() -> Made:
    net = Named(fc1=linear(), norm=nn.LayerNorm(4), fc2=linear(4, 2))
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    tool = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], 1e-3)
    update(net, tool)
    return {"model": net.state_dict(), "optimizer": tool.state_dict()}, [(net, tool)]


@maker("optimizer:frozen_part")
def _() -> Made:
    net = Named(body=mlp(3, 4, 5), head=linear(5, 2))
    net.body.requires_grad_(False)
    tool = torch.optim.Adam(p for p in net.parameters() if p.requires_grad)
    update(net, tool)
    return {"model": net.state_dict(), "optimizer": tool.state_dict()}, [(net, tool)]


@maker("optimizer:frozen_but_listed")
def _() -> Made:
    net = Named(body=mlp(3, 4, 5), head=linear(5, 2))
    net.body.requires_grad_(False)
    tool = torch.optim.Adam(net.parameters())
    update(net, tool)
    return {"model": net.state_dict(), "optimizer": tool.state_dict()}, [(net, tool)]


@maker("optimizer:two_of_one_network")
def _() -> Made:
    net = Named(actor=mlp(3, 4, 2), critic=mlp(3, 5, 1))
    tools = [torch.optim.Adam(part.parameters()) for part in (net.actor, net.critic)]
    for part, tool in zip((net.actor, net.critic), tools, strict=True):
        update(part, tool)
    states = {"actor_opt": tools[0].state_dict(), "critic_opt": tools[1].state_dict()}
    return {"model": net.state_dict(), **states}, [(net.actor, tools[0]), (net.critic, tools[1])]


@maker("optimizer:list_of_optimizers")
def _() -> Made:
    nets = [mlp(3, 4, 2), mlp(3, 5, 1)]
    tools = [torch.optim.Adam(net.parameters()) for net in nets]
    for net, tool in zip(nets, tools, strict=True):
        update(net, tool)
    saved = {"models": [n.state_dict() for n in nets], "optimizers": [t.state_dict() for t in tools]}
    return saved, list(zip(nets, tools, strict=True))


@maker("optimizer:one_for_two_networks")
def _() -> Made:
    nets = mlp(3, 4, 2), mlp(3, 5, 1)
    tool = torch.optim.Adam([*nets[0].parameters(), *nets[1].parameters()])
    for net in nets:
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
    tool.step()
    saved = {"pi": nets[0].state_dict(), "vf": nets[1].state_dict(), "optimizer": tool.state_dict()}
    return saved, [(net, tool) for net in nets]


@maker("optimizer:param_names")
def _() -> Made:
    net = mlp(3, 4, 4, 2)
    tool = torch.optim.Adam(net.named_parameters())
    update(net, tool)
    return {"model": net.state_dict(), "optimizer": tool.state_dict()}, [(net, tool)]


@maker("optimizer:sparse_adam")
def _() -> Made:
    net = nn.Embedding(11, 4, sparse=True)
    tool = torch.optim.SparseAdam(net.parameters())
    net(torch.tensor([1, 2])).sum().backward()
    tool.step()
    return {"model": net.state_dict(), "optimizer": tool.state_dict()}, [(net, None)]


# --- What is saved around networks ----------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    """Settings as a dataclass."""

    hidden: int = 24
    rate: float = 1e-3


def _around(name: str, wrap: Callable[[dict[str, Any]], Any]) -> None:
    def maker() -> Made:
        net = mlp(3, 4, 2)
        return wrap(net.state_dict()), [(net, None)]

    MAKERS[f"around:{name}"] = maker


_around("tuple_with_step", lambda sd: (sd, 100))
_around("list_alone", lambda sd: [sd])
_around("default_dict", lambda sd: collections.defaultdict(dict, model=sd))
_around("plain_dict", dict)
_around("namespace", lambda sd: {"model": sd, "config": types.SimpleNamespace(lr=1, layers=[1, 2])})
_around("dataclass", lambda sd: {"model": sd, "config": Config()})
_around("dataclass_dict", lambda sd: {"model": sd, "config": dataclasses.asdict(Config())})
_around("path", lambda sd: {"model": sd, "folder": Path("runs/1")})
_around("numpy_numbers", lambda sd: {"model": sd, "best": np.float32(3.5), "step": np.int64(7)})
_around("numpy_history", lambda sd: {"model": sd, "losses": np.arange(4.0), "dates": ["a", "b"]})
_around("none_and_bools", lambda sd: {"model": sd, "scaler": None, "amp": False})
_around("empty_optimizer", lambda sd: {"model": sd, "optimizer": {}})
_around("nested_three", lambda sd: {"state": {"agent": {"policy": sd}}, "epoch": 1})
_around("agents", lambda sd: {"agents": {"0": {"actor": sd}, "1": {"actor": _fresh(sd)}}})
_around("int_keys", lambda sd: {0: sd, 1: _fresh(sd)})
_around("hyphens", lambda sd: {"my-model": sd, "run/name": "x", "a.b": 3})
_around("tensors_beside", lambda sd: {**sd, "epoch": torch.tensor(3), "mean": torch.randn(3)})
_around("empty_tensor", lambda sd: {"model": sd, "empty": torch.zeros(0, 4)})
_around("list_of_tensors", lambda sd: {"model": sd, "history": [torch.tensor(1.0), torch.tensor(2.0)]})
_around("complex_tensor", lambda sd: {"model": sd, "spectrum": torch.randn(3, dtype=torch.complex64)})
_around("slash_names", lambda sd: {f"net/{k}": v for k, v in sd.items()})
_around("metadata", lambda sd: {"model": sd, "_metadata": {"version": 1}, "git": "abc", "time": 1.5})
_around("classes", lambda sd: {"state_dict": sd, "classes": ["cat", "dog"], "class_to_idx": {"cat": 0}})
_around("parameters", lambda sd: {k: nn.Parameter(v) for k, v in sd.items()})
_around("scheduler", lambda sd: {"model": sd, "sched": {"last_epoch": 3, "_last_lr": [0.1], "T_max": 5}})
_around("replay", lambda sd: {"model": sd, "buffer": [(np.zeros(3), 0.5, True)] * 3})


def _fresh(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.randn_like(value) for name, value in state.items()}


@maker("around:list_of_two")
def _() -> Made:
    nets = mlp(3, 4, 2), mlp(3, 5, 1)
    return [net.state_dict() for net in nets], [(net, None) for net in nets]


@maker("around:ema_and_optimizer")
def _() -> Made:
    net = mlp(3, 4, 2)
    saved, pairs = both(net)
    return {**saved, "ema": _fresh(net.state_dict()), "decay": 0.999}, pairs


@maker("around:flat_agent")
def _() -> Made:
    pi, q = mlp(3, 4, 2), mlp(5, 4, 1)
    flat = {f"pi.{k}": v for k, v in pi.state_dict().items()} | {
        f"q.{k}": v for k, v in q.state_dict().items()
    }
    return flat, [(pi, None), (q, None)]


def _whole(name: str, make: Callable[[], nn.Module]) -> None:
    def maker() -> Made:
        net = make()
        return net, [(net, None)]

    MAKERS[f"whole:{name}"] = maker


_whole("linear", linear)
_whole("sequential", lambda: mlp(3, 4, 2))
_whole("module_list", lambda: nn.ModuleList([linear(), linear(4, 2)]))
_whole("module_dict", lambda: nn.ModuleDict({"a": linear(), "b": linear(4, 2)}))
_whole("eval_mode", lambda: nn.Sequential(linear(), nn.Dropout(0.1), nn.BatchNorm1d(4)).eval())
_whole("data_parallel", lambda: nn.DataParallel(mlp(3, 4, 2)))
_whole("lstm", lambda: nn.LSTM(3, 4))
_whole("in_dict", lambda: mlp(3, 4, 2))
_whole("frozen", lambda: mlp(3, 4, 2).requires_grad_(False))


# --- Other containers of arrays -------------------------------------------------------------------------


def _arrays(state: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in state.items()}


def _npz(saved: Any, folder: Path) -> Path:
    np.savez(folder / "model.npz", **_arrays(saved))
    return folder / "model.npz"


def _npz_packed(saved: Any, folder: Path) -> Path:
    np.savez_compressed(folder / "model.npz", **_arrays(saved))
    return folder / "model.npz"


def _pickle(saved: Any, folder: Path) -> Path:
    (folder / "model.pkl").write_bytes(pickle.dumps(_arrays(saved)))
    return folder / "model.pkl"


def _pickle_nested(saved: Any, folder: Path) -> Path:
    content = {"weights": _arrays(saved), "epoch": 3, "config": {"hidden": 4}}
    (folder / "model.pkl").write_bytes(pickle.dumps(content))
    return folder / "model.pkl"


def _pickle_torch(saved: Any, folder: Path) -> Path:
    (folder / "model.pkl").write_bytes(pickle.dumps(saved))
    return folder / "model.pkl"


def _safetensors(saved: Any, folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file({k: v.clone() for k, v in saved.items()}, str(folder / "model.safetensors"), {"format": "pt"})
    return folder / "model.safetensors"


def _bin(saved: Any, folder: Path) -> Path:
    (folder / "hub").mkdir()
    torch.save(saved, folder / "hub" / "pytorch_model.bin")
    (folder / "hub" / "config.json").write_text('{"model_type": "custom", "hidden_size": 4}')
    return folder / "hub"


def _tar(saved: Any, folder: Path) -> Path:
    torch.save(saved, folder / "model.pth.tar")
    return folder / "model.pth.tar"


for _title, _writer in {
    "npz": _npz,
    "npz_packed": _npz_packed,
    "pickle": _pickle,
    "pickle_nested": _pickle_nested,
    "pickle_torch": _pickle_torch,
    "safetensors": _safetensors,
    "hub_folder": _bin,
    "pth_tar": _tar,
}.items():
    for _kind, _form in {"mlp": lambda: mlp(3, 4, 2), "square": NETS["square"]}.items():
        MAKERS[f"file:{_title}:{_kind}"] = lambda form=_form: alone(form())  # type: ignore[misc]
        WRITERS[f"file:{_title}:{_kind}"] = _writer


# --- Truth ----------------------------------------------------------------------------------------------

# Parts of a weight that is made of several.
_PARTS = frozenset(("original", "original0", "original1", "weight_g", "weight_v", "weight_orig"))


def turned(module: nn.Module, name: str, value: torch.Tensor) -> np.ndarray | None:
    """Return a parameter or moment in TensorFlow's axes, None where a layer's form decides."""
    array = value.detach().double().numpy()
    if name in _PARTS:
        return None
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None if name == "weight" else array
    if isinstance(module, nn.Linear) and name == "weight":
        return array.T
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d):
        if name != "weight":
            return array
        if getattr(module, "groups", 1) > 1:
            return None
        return np.moveaxis(array, (0, 1), (-1, -2))
    if isinstance(module, nn.modules.rnn.RNNBase | nn.modules.rnn.RNNCellBase | nn.MultiheadAttention):
        return None
    if isinstance(module, nn.Bilinear) or hasattr(module, "parametrizations") or hasattr(module, "weight_g"):
        return None
    return array


def truth(pairs: list[tuple[nn.Module, torch.optim.Optimizer | None]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every parameter in both frameworks' axes, and the moments that belong to it."""
    for number, (net, tool) in enumerate(pairs):
        rows = {id(m.weight) for m in net.modules() if isinstance(m, nn.Embedding)}
        for prefix, module in net.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                # A layer that shares an embedding's weight is one with it in the target.
                shared = isinstance(module, nn.Linear) and id(parameter) in rows
                expected = None if shared else turned(module, name, parameter)
                if expected is None:
                    continue
                title = f"{number}|{prefix}.{name}"
                yield f"weight|{title}", parameter.detach().double().numpy()
                yield f"turned|{title}", expected
                state = tool.state.get(parameter, {}) if tool is not None else {}
                for slot in ("exp_avg", "exp_avg_sq", "square_avg", "sum", "momentum_buffer"):
                    if slot in state and isinstance(state[slot], torch.Tensor):
                        yield f"{slot}|{title}", state[slot].detach().double().numpy()
                        moment = turned(module, name, state[slot])
                        assert moment is not None
                        yield f"turned:{slot}|{title}", moment


def make(names: list[str], folder: str) -> None:
    """Write files with their truths, each in a folder of its own."""
    for name in names:
        torch.manual_seed(len(name))
        home = Path(folder, name.replace(":", "_").replace("+", "_"))
        home.mkdir(parents=True)
        saved, pairs = MAKERS[name]()
        facts = dict(truth(pairs))
        if name in WRITERS:
            path = WRITERS[name](saved, home)
        else:
            path = home / "model.pt"
            torch.save({"model": saved, "epoch": 1} if name == "whole:in_dict" else saved, path)
        np.savez(home / "truth.npz", **{f"{n}": value for n, value in facts.items()})
        (home / "path").write_text(str(path))
