"""Weight norm folded: torch's own modules say what the weight is."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import ckpttool
from ckpttool.core import Inline, Leaf, Tree, key
from ckpttool.mapping import weight_norm
from tests import conftest

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")]

# Each: how the module is made, which tensor is normed, along which axis (None: one length for all).
OLD = [("linear", "weight", 0), ("linear", "weight", 1), ("linear", "weight", None), ("conv", "weight", 0)]
CASES = [(how, *case) for how in ("old", "new") for case in (*OLD, ("lstm", "weight_hh_l0", 0))]


def normed_module(how: str, kind: str, name: str, dim: int | None):
    """Return a module under weight norm whose lengths are not those of its directions, and its weight."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    module = {"linear": nn.Linear(37, 19), "conv": nn.Conv2d(5, 7, 3), "lstm": nn.LSTM(6, 9)}[kind]
    normed = nn.utils.weight_norm if how == "old" else nn.utils.parametrizations.weight_norm
    module = normed(module, name, dim)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= torch.rand_like(parameter) * 3
    for hook in module._forward_pre_hooks.values():
        hook(module, None)
    return module, getattr(module, name).detach()


def ulps(one: np.ndarray, other: np.ndarray) -> int:
    """Return the largest distance in units of the last place; the signs must agree."""
    bits = f"i{one.itemsize}"
    return int(np.abs(one.view(bits).astype(object) - other.view(bits).astype(object)).max())


@pytest.mark.parametrize(("how", "kind", "name", "dim"), CASES)
def test_the_weight_is_that_of_torch(tmp_path, how, kind, name, dim):
    import torch

    module, weight = normed_module(how, kind, name, dim)
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    torch.save({"model": module.state_dict()}, source)
    done = ckpttool.convert(source, target, fold_weight_norm=True)
    state = torch.load(target)["model"]
    assert [line.rule for line in done.report.mapped].count("fold weight norm") == 1
    # torch rounds the norm, the quotient and the product; here the result alone is rounded.
    assert ulps(state[name].numpy(), weight.numpy()) <= 2
    exact, _ = normed_module(how, kind, name, dim)
    exact.double()
    for hook in exact._forward_pre_hooks.values():
        hook(exact, None)
    assert ulps(state[name].numpy(), getattr(exact, name).detach().float().numpy()) == 0
    bare = {"linear": torch.nn.Linear(37, 19), "conv": torch.nn.Conv2d(5, 7, 3), "lstm": torch.nn.LSTM(6, 9)}
    bare[kind].load_state_dict(state)
    assert not [n for n in state._metadata if "parametrizations" in n]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_types_are_rounded_once(dtype):
    import torch

    g, v = (torch.rand(4, 1).to(getattr(torch, dtype)), torch.randn(4, 6).to(getattr(torch, dtype)))
    leaves = {
        (key(name),): Leaf(dtype, tuple(t.shape), Inline(t.view(torch.uint8).numpy().tobytes()), name)
        for name, t in (("l.weight_g", g), ("l.weight_v", v))
    }
    ((path, leaf),) = weight_norm.merge_weight_norm(Tree(leaves)).tree.tensors()
    assert (path, leaf.key, leaf.shape) == ((key("l.weight"),), "l.weight", (4, 6))
    expected = (v.double() * (g.double() / v.double().norm(dim=1, keepdim=True))).to(g.dtype)
    values = torch.frombuffer(bytearray(leaf.read()), dtype=g.dtype).reshape(4, 6)
    assert (values.double() - expected.double()).abs().max() <= (0 if dtype != "float64" else 1e-15)


def test_spectral_norm_is_another_thing(tmp_path, golden):
    import torch
    from torch import nn

    network = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(3, 3)), nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    )
    torch.save(network.state_dict(), tmp_path / "a.pt")
    done = ckpttool.convert(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), fold_weight_norm=True)
    golden("\n".join(done.report.notes))
    assert torch.load(tmp_path / "b.pt").keys() == network.state_dict().keys()


def test_both_norms_on_one_weight_are_left_alone(tmp_path):
    import torch
    from torch import nn

    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    network = nn.utils.parametrizations.weight_norm(normed)
    torch.save({"m": network.state_dict()}, tmp_path / "a.pt")
    tree = ckpttool.open(str(tmp_path / "a.pt")).tree
    assert list(weight_norm.merge_weight_norm(tree).tree) == list(tree)


@pytest.mark.parametrize("stepped", [True, False])
def test_the_optimizer_of_what_is_folded_stays_unmapped(tmp_path, stepped):
    import torch
    from torch import nn

    network = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 1))
    other = nn.Linear(4, 4)
    optimizers = [torch.optim.Adam(network.parameters()), torch.optim.Adam(other.parameters())]
    (network(torch.randn(4, 3)).sum() + other(torch.randn(2, 4)).sum()).backward()
    for optimizer in optimizers if stepped else optimizers[1:]:
        optimizer.step()
    value = {"n": network.state_dict(), "o": other.state_dict()}
    torch.save(
        value | {"n_opt": optimizers[0].state_dict(), "o_opt": optimizers[1].state_dict()}, tmp_path / "a.pt"
    )
    ran = conftest.in_process("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--fold-weight-norm", "--json")
    assert ran.status == 1
    unused = ran.json()["unused"]
    assert "n_opt/param_groups/0/lr" in unused
    assert ("n_opt/state/0/exp_avg" in unused) is stepped
    assert not [name for name in unused if not name.startswith("n_opt/")]
    ran = conftest.in_process(
        "convert", tmp_path / "a.pt", tmp_path / "b.pt", "--fold-weight-norm", "--allow-missing"
    )
    assert ran.status == 0
    contents = torch.load(tmp_path / "b.pt")
    assert contents.keys() == {"n", "o", "o_opt"}
    assert contents["n"].keys() == nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).state_dict().keys()


def leaf(*shape: int, dtype: str = "float32") -> Leaf:
    return Leaf(dtype, shape, Inline(bytes(4 * int(np.prod(shape)))), "")


@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        (("w_g", "w_v"), ((3, 2), (3, 2))),  # lengths along two axes
        (("w_g", "w_v"), ((4, 1), (3, 2))),
        (("w_g", "w_v"), ((3,), (3, 2))),
        (("w_g", "w_v"), ((), ())),
        (("w_v", "w_u"), ((3,), (2,))),
        (("w_g", "w_v", "w"), ((3, 1), (3, 2), (3, 2))),
        (("parametrizations.w.original0", "parametrizations.w.original2"), ((3, 1), (3, 2))),
        (
            ("parametrizations.w.original0", "parametrizations.w.original1", "parametrizations.w.original2"),
            ((3, 1), (3, 2), (1,)),
        ),
    ],
)
def test_what_only_looks_like_weight_norm_stays(names, shapes):
    tree = Tree({(key(name),): leaf(*shape) for name, shape in zip(names, shapes, strict=True)})
    folded = weight_norm.merge_weight_norm(tree)
    assert list(folded.tree) == list(tree)
    assert not folded.merged


@pytest.mark.parametrize("how", ["old", "new"])
def test_the_parts_in_a_program_are_folded(tmp_path, how):
    import torch

    module, _ = normed_module(how, "conv", "weight", 0)
    inputs, file = torch.randn(2, 5, 8, 8), tmp_path / "script.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(module, inputs).save(file)
    plain = torch.nn.Conv2d(5, 7, 3)
    done = ckpttool.load_into(plain, file, shapes=[(5, 8, 8)], fold_weight_norm=True)
    assert done.complete
    assert torch.allclose(plain(inputs), module(inputs), atol=1e-6)
