"""Live modules of PyTorch: their own `state_dict`, `torch.save` and `load_state_dict` are the referees."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.core import (
    Checkpoint,
    Leaf,
    MappingError,
    PathStep,
    Tree,
    UnsupportedError,
    UsageError,
    ValueLeaf,
    attr,
    display,
    index,
    key,
)
from ckpttool.core.digests import digest_checkpoint
from ckpttool.networks import audit, compare_names, copy_values, flatten_with_path, state_dict, submodules
from tests.conftest import ROOT
from tests.golden_texts import Golden

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch

_FLOATS = ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"]
_INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
_EIGHT = [f"float8_{kind}" for kind in ("e5m2", "e4m3fn", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")]
DTYPES = [*_FLOATS, *_INTEGERS, *_EIGHT]


def shown(tree: Tree) -> list[str]:
    return [display(path) for path in tree]


def further(tree: Tree) -> dict[str, list[str]]:
    return {display(path): [display(a.path) for a in rest] for path, rest in tree.aliases.items()}


class Net(nn.Module):  # type: ignore[misc,name-defined]
    """Everything that a module can hold: registered and not."""

    def __init__(self) -> None:
        super().__init__()
        self.l2 = nn.Linear(4, 2)
        self.l1 = nn.Linear(3, 4)
        self.stack = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("scale", torch.ones(3))
        self.tied = self.l1
        self.named = nn.ParameterDict({"z": nn.Parameter(torch.zeros(1))})
        self.heads = nn.ModuleDict({"q": nn.Linear(1, 1)})
        self.listed = nn.ParameterList([torch.zeros(2), torch.ones(1)])
        self.frozen = nn.Parameter(torch.randn(2, 3).t(), requires_grad=False)


def leaf_of(tree: Tree, name: str) -> Leaf:
    leaf = next(leaf for path, leaf in tree.tensors() if display(path) == name)
    assert isinstance(leaf, Leaf)
    return leaf


def keys(tree: Tree) -> list[str]:
    aliases = [alias.key for rest in tree.aliases.values() for alias in rest if alias.key is not None]
    return sorted([leaf.key for _, leaf in tree.tensors()] + aliases)


def same(array: np.ndarray, tensor: Any) -> bool:
    expected = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return bool(array.tobytes() == expected.tobytes() and array.shape == tuple(tensor.shape))


def test_own_leaves_come_before_modules_and_names_are_sorted() -> None:
    tree = flatten_with_path(Net())
    assert shown(tree)[:2] == ["frozen", "mask"]
    assert shown(tree)[2:6] == ["scale", "heads/q/bias", "heads/q/weight", "l1/bias"]
    stack = [name for name in shown(tree) if name.startswith("stack/")]
    assert [int(name.split("/")[1]) for name in stack] == sorted([*range(11), *range(11)])
    paths = {display(path): path for path in tree}
    assert paths["stack/10/bias"] == (attr("stack"), index(10), attr("bias"))
    assert paths["heads/q/bias"] == (attr("heads"), key("q"), attr("bias"))
    assert paths["listed/1"] == (attr("listed"), index(1))
    assert paths["named/z"] == (attr("named"), key("z"))
    assert further(tree) == {"l1/bias": ["tied/bias"], "l1/weight": ["tied/weight"]}


def test_roles_say_what_is_trained_and_what_is_kept() -> None:
    tree = flatten_with_path(Net())
    roles = {display(path): (leaf.role, leaf.trainable) for path, leaf in tree.tensors()}
    assert roles["l1/weight"] == ("parameter", True)
    assert roles["frozen"] == ("parameter", False)
    assert roles["scale"] == ("buffer", False)
    assert roles["norm/running_mean"] == ("buffer", False)
    assert roles["mask"] == ("other", False)


def test_keys_are_those_of_state_dict() -> None:
    net = Net()
    expected = net.state_dict()
    assert keys(state_dict(net)) == sorted(expected)
    assert [leaf.key for _, leaf in state_dict(net).tensors()] == [k for k in expected if "tied" not in k]
    assert set(keys(flatten_with_path(net))) - {"mask"} == set(expected)
    for _, leaf in state_dict(net).tensors():
        assert same(leaf.array(), expected[leaf.key])


def test_what_is_kept_twice_has_the_key_of_state_dict() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        normed = nn.utils.weight_norm(nn.Linear(2, 2))
    pruned = pytest.importorskip("torch.nn.utils.prune").l1_unstructured(nn.Linear(2, 2), "weight", amount=1)
    for module in (nn.LSTM(2, 3, num_layers=2), normed, pruned):
        tree = flatten_with_path(module)
        assert keys(tree) == sorted(module.state_dict())
        assert audit(module).complete
    assert further(flatten_with_path(nn.LSTM(1, 1)))["weight_ih_l0"] == ["_flat_weights/0"]
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert keys(flatten_with_path(parametrized)) == sorted(parametrized.state_dict())


def test_a_leaf_is_the_value_of_the_moment_in_which_it_is_read() -> None:
    net = nn.Linear(2, 1)
    leaf = leaf_of(flatten_with_path(net), "bias")
    before = leaf.array()
    kept = pickle.loads(pickle.dumps(leaf.source))
    with torch.no_grad():
        net.bias += 1
    assert np.array_equal(leaf.array(), before + 1)
    assert kept.read() == before.tobytes()
    assert not leaf.array().flags.writeable


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_is_read_as_torch_has_it(name: str) -> None:
    kind = getattr(torch, name)
    raw = torch.arange(24 * kind.itemsize, dtype=torch.uint8)
    tensor = (raw % 2).bool()[:24] if name == "bool" else raw.view(kind)
    views = {"plain": tensor, "turned": tensor.reshape(4, 6).t(), "part": tensor[3:9:2], "one": tensor[5]}
    tree = flatten_with_path({**views, "none": tensor[:0]})
    for step, view in views.items():
        leaf = leaf_of(tree, step)
        assert leaf.dtype == name
        assert same(leaf.array(), view)
    assert leaf_of(tree, "none").read() == b""


def test_lazy_conjugates_are_read_as_what_they_mean() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert same(leaf_of(flatten_with_path([tensor]), "0").array(), tensor)
    assert same(leaf_of(flatten_with_path([tensor.imag]), "0").array(), tensor.imag)


def test_what_has_no_value_is_said_when_it_is_read(golden: Golden) -> None:
    meta = flatten_with_path(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedError) as caught:
        leaf_of(meta, "weight").read()
    golden(caught.value)
    with pytest.raises(UnsupportedError, match="sparse_coo"):
        leaf_of(flatten_with_path([torch.eye(2).to_sparse()]), "0").read()
    lazy = flatten_with_path(nn.LazyLinear(3))
    assert all(isinstance(leaf, ValueLeaf) for leaf in lazy.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_tensor_on_a_gpu_is_read() -> None:
    net = nn.Linear(2, 3).cuda()
    assert same(leaf_of(flatten_with_path(net), "weight").array(), net.weight.cpu())


def test_a_state_dict_is_a_container_of_tensors() -> None:
    net = Net()
    tree = flatten_with_path(net.state_dict())
    assert further(tree) == {"l1/weight": ["tied/weight"], "l1/bias": ["tied/bias"]}
    assert compare_names(tree, state_dict(net)).equal


def test_the_state_of_an_optimizer_belongs_to_parameters() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = flatten_with_path({"net": net, "optimizer": optimizer})
    stored = optimizer.state_dict()["state"]
    slots = {path: leaf for path, leaf in tree.tensors() if path[0] == key("optimizer")}
    assert {path[2:] for path in slots} == {(key(n), key(k)) for n in stored for k in stored[n]}
    for path, leaf in slots.items():
        number, kind = path[2].value, path[3].value
        assert same(leaf.array(), stored[number][kind])
        if kind != "step":
            assert (leaf.role, leaf.slot) == ("slot", kind)
            assert leaf.of == (key("net"), attr(["weight", "bias"][number]))
        else:
            assert leaf.role == "counter"
    assert audit({"net": net, "optimizer": optimizer}).complete


def test_a_live_module_is_digested_and_saved(tmp_path: Path) -> None:
    net = Net()
    target = tmp_path / "net.pt"
    written = ckpttool.save(state_dict(net), str(target))
    loaded = torch.load(target, weights_only=True)
    assert net.load_state_dict(loaded)
    other = Net()
    other.load_state_dict(loaded)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    # The live module, its file by torch and its file by us have one digest.
    torch.save(net.state_dict(), tmp_path / "theirs.pt")
    live = digest_checkpoint(Checkpoint("net", "live", state_dict(net), ()))
    assert live.sha256 == ckpttool.digest(str(tmp_path / "theirs.pt")).sha256 == written.sha256
    nested = tmp_path / "nested.pt"
    ckpttool.save(flatten_with_path({"l": nn.Linear(1, 1)}), str(nested))
    assert list(torch.load(nested, weights_only=True)["l"]) == ["bias", "weight"]


def test_what_was_not_registered_is_told_with_its_reason(golden: Golden) -> None:
    class Held:
        def __init__(self) -> None:
            self.layer = nn.Linear(1, 1, bias=False)

    captured, default = torch.zeros(4), torch.zeros(5)
    net = Net()
    net.plain = torch.zeros(2)
    net.layers = [nn.Linear(1, 1, bias=False)]
    net.held, net.some = Held(), {torch.zeros(3)}
    net.act = lambda x, d=default: x + captured + d
    net.again = [net.l1]
    net.mean = np.zeros(7)
    reasons = {display(row.path): row.reason for row in audit(net).unsaved}
    golden("\n".join(f"{path}: {reason}" for path, reason in sorted(reasons.items())))
    row = next(row for row in audit(net).unsaved if row.path[-1] == attr("plain"))
    assert (row.dtype, row.shape) == ("float32", (2,))
    assert row.document()["keys"] == [{"attr": "plain"}]


def test_an_agent_that_is_no_module_is_saved_by_its_parts() -> None:
    class Agent:
        def __init__(self) -> None:
            self.actor = nn.Linear(2, 2)
            self.log_alpha = torch.zeros(1, requires_grad=True)
            self._inputs = [nn.Linear(1, 1, bias=False)]
            self.optimizer = torch.optim.SGD([self.log_alpha, *self.actor.parameters()], lr=0.1)

    agent = Agent()
    names = ["log_alpha", "_inputs/0/weight", "actor/bias", "actor/weight"]
    assert shown(flatten_with_path(agent)) == names
    assert [display(row.path) for row in audit(agent).unsaved] == ["log_alpha"]


@settings(deadline=None)
@given(st.data())
def test_a_restore_reaches_what_load_state_dict_reports(data: st.DataObject) -> None:
    sizes = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from([1, 2]), max_size=4)

    def module(depth: int) -> Any:
        net = nn.Module()
        for name, size in data.draw(sizes).items():
            if depth and size == 2:
                setattr(net, name, module(depth - 1))
            elif data.draw(st.booleans()):
                net.register_buffer(name, torch.zeros(size), persistent=data.draw(st.booleans()))
            else:
                setattr(net, name, nn.Parameter(torch.zeros(size)))
        return net

    live, other = module(2), module(2)
    stored = {name: tensor for name, tensor in other.state_dict().items() if tensor.ndim == 1}
    fits = {n: t for n, t in stored.items() if live.state_dict().get(n, t).shape == t.shape}
    keys = live.load_state_dict(fits, strict=False)
    missing = sorted(set(keys.missing_keys) - (stored.keys() - fits.keys()))
    report = audit(live, state_dict(other))
    assert sorted(".".join(str(s.value) for s in path) for path in report.unfilled) == missing
    assert sorted(str(path[0].value) for path in report.unused) == sorted(keys.unexpected_keys)
    assert sorted(str(row.path[0].value) for row in report.different) == sorted(stored.keys() - fits.keys())
    by_trees = compare_names(state_dict(live), state_dict(other))
    assert sorted(str(path[0].value) for path in by_trees.unfilled) == missing
    assert sorted(str(path[0].value) for path in by_trees.unused) == sorted(keys.unexpected_keys)


def test_a_live_module_is_the_skeleton_of_its_checkpoint(tmp_path: Path, golden: Golden) -> None:
    net, other = Net(), Net()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    stored = ckpttool.open(str(tmp_path / "net.pt")).tree
    assert audit(other, stored).unfilled == ()
    assert audit(other, ckpttool.open(str(tmp_path / "net.pt"))).unused == ()
    tree = copy_values(state_dict(other), stored)
    assert list(tree) == list(state_dict(other))
    assert same(leaf_of(tree, "frozen").array(), net.frozen)
    back = copy_values(stored, flatten_with_path(other))
    assert list(back) == list(stored)
    assert same(leaf_of(back, "frozen").array(), other.frozen)
    with pytest.raises(MappingError) as caught:
        copy_values(flatten_with_path(other), stored)
    golden(caught.value)
    narrow = Net()
    narrow.l2 = nn.Linear(5, 2)
    with pytest.raises(MappingError) as caught:
        copy_values(state_dict(narrow), stored)
    golden(caught.value)
    assert [row.document() for row in compare_names(state_dict(narrow), stored).different] == [
        {
            "path": "l2/weight",
            "live": {"dtype": "float32", "shape": [2, 5]},
            "stored": {"dtype": "float32", "shape": [2, 4]},
        }
    ]


def test_cycles_and_many_paths_end() -> None:
    class Pair(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, below: Any) -> None:
            super().__init__()
            self.x, self.y = below, below

    net = nn.Linear(1, 1)
    for _ in range(40):  # 2 ** 40 paths
        net = Pair(net)
    tree = flatten_with_path(net, most=1000)
    assert [len(path) for path in tree] == [41, 41]
    assert all(step == attr("x") for path in tree for step in path[:-1])
    assert len(submodules(net)) == 40
    assert audit(net).complete
    ring = nn.Linear(1, 1)
    ring.__dict__["me"] = [ring]
    assert further(flatten_with_path(ring)) == {"bias": ["me/0/bias"], "weight": ["me/0/weight"]}
    loop: list[Any] = [torch.zeros(1)]
    loop.append(loop)
    assert shown(flatten_with_path(loop)) == ["0"]
    deep = nn.Linear(1, 1)
    for _ in range(1500):
        deep = nn.Sequential(deep)
    assert {len(path) for path in flatten_with_path(deep)} == {1501}


def test_predicate_recursion_and_order_are_the_callers() -> None:
    net = Net()
    trained = flatten_with_path(net, predicate=lambda v: isinstance(v, nn.Parameter) and v.requires_grad)
    assert {leaf.trainable for _, leaf in trained.tensors()} == {True}
    assert shown(flatten_with_path(net, recursive=False)) == ["frozen", "mask", "scale"]
    backwards = flatten_with_path(net, recursive=False, attribute_traversal_key=lambda name: name[::-1])
    assert shown(backwards) == ["scale", "mask", "frozen"]
    everything = flatten_with_path(net, recursive=False, predicate=lambda _: True)
    assert everything[attr("training"),] == ValueLeaf(True)
    assert "torch.nn.modules.linear.Linear" in {
        leaf.value.name for _, leaf in everything.plain() if hasattr(leaf.value, "name")
    }
    only = flatten_with_path(net, enter=lambda value: isinstance(value, nn.ModuleDict | nn.Linear))
    assert {path[0].value for path in only if len(path) > 1} == {"heads", "l1", "l2"}


def test_no_property_is_asked() -> None:
    class Touchy(nn.Linear):  # type: ignore[misc,name-defined]
        @property
        def alarm(self) -> Any:
            raise AssertionError("a property was asked")

        def state_dict(self, *args: Any, **options: Any) -> Any:
            raise AssertionError("state_dict was called")

    net = Touchy(1, 1)
    assert keys(state_dict(net)) == keys(flatten_with_path(net)) == ["bias", "weight"]
    assert audit(net, state_dict(net)).complete


def test_steps_are_typed() -> None:
    tree = flatten_with_path(
        [nn.Linear(1, 1, bias=False), {"a.b": nn.Linear(1, 1, bias=False), (1, 2): torch.zeros(1)}]
    )
    assert list(tree) == [
        (index(1), PathStep("key", "(1, 2)")),
        (index(0), attr("weight")),
        (index(1), key("a.b"), attr("weight")),
    ]


def test_a_tensor_has_no_path_and_numbers_hold_nothing(golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        flatten_with_path(torch.zeros(1))
    golden(caught.value)
    assert len(flatten_with_path(5)) == 0
    arrays = flatten_with_path({"mean": np.arange(3.0)}, predicate=lambda _: True)
    assert np.array_equal(leaf_of(arrays, "mean").array(), np.arange(3.0))
    assert len(flatten_with_path({"mean": np.arange(3.0)})) == 0


def test_looking_at_a_live_object_imports_no_framework() -> None:
    code = """
import sys, ckpttool
from ckpttool.networks.live import audit
from ckpttool.networks.live_trees import state_dict, submodules
class Agent:
    def __init__(self):
        self.name, self.parts = "a", [1, {"x": None}]
tree = ckpttool.flatten_with_path(Agent(), predicate=lambda _: True)
assert [leaf.value for leaf in tree.values()] == ["a", 1, None]
assert audit(Agent()).complete and not submodules(Agent()) and not len(state_dict(Agent()))
print(sorted(name for name in sys.modules if "." not in name))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not set(ast.literal_eval(ran.stdout)) & {"torch", "tensorflow", "keras", "jax", "numpy"}
