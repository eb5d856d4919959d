"""Modules, agents and optimizers pickled whole, in every form: torch itself says which tensors they hold."""

from __future__ import annotations

import collections
import copy
import dataclasses
import hashlib
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.commands.digest import digest
from ckpttool.core import FormatError
from ckpttool.formats import Probe, open_checkpoint, torch_legacy
from tests.golden_texts import Golden
from tests.pickles import importable, stand_in

cloudpickle = pytest.importorskip("cloudpickle")

FORMS: dict[str, Callable[[Any, Path], None]] = {
    "zip": torch.save,
    "zip, protocol 5": lambda value, path: torch.save(value, path, pickle_protocol=5),
    "stream": lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
    "cloudpickle in a zip": lambda value, path: torch.save(value, path, pickle_module=cloudpickle),
    "cloudpickle in a stream": lambda value, path: torch.save(
        value, path, pickle_module=cloudpickle, _use_new_zipfile_serialization=False
    ),
    "pickle": lambda value, path: path.write_bytes(pickle.dumps(value)),
    "pickle, protocol 0": lambda value, path: path.write_bytes(pickle.dumps(value, 0)),
    "pickle, protocol 2": lambda value, path: path.write_bytes(pickle.dumps(value, 2)),
    "cloudpickle": lambda value, path: path.write_bytes(cloudpickle.dumps(value)),
}


@dataclasses.dataclass
class Config:
    noise: torch.Tensor
    bounds: np.ndarray


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 5, 2, bidirectional=True))
        self.heads = nn.ModuleDict({"pi": nn.utils.spectral_norm(nn.Linear(5, 2)), "v": nn.Embedding(3, 5)})
        self.attention = nn.MultiheadAttention(4, 2)
        self.bounds = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (1, 2)])
        self.scales = nn.ParameterDict({"low": nn.Parameter(torch.randn(2), requires_grad=False)})
        self.register_buffer("kept", torch.arange(5))
        self.register_buffer("passing", torch.randn(2), persistent=False)
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = self.heads["v"].weight
        self.plain = torch.randn(2, 2)
        self.config = Config(torch.randn(3), np.arange(4.0))


class Agent:
    def __init__(self) -> None:
        self.actor = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        self.target = copy.deepcopy(self.actor)
        self.optimizer = torch.optim.Adam(self.actor.parameters())
        self.actor(torch.randn(2, 3)).sum().backward()
        self.optimizer.step()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.replay = collections.deque([np.arange(3), torch.randn(2)], maxlen=5)
        self.log_alpha = torch.zeros(1, requires_grad=True)


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, tuple[str, tuple[int, ...], str]]]:
    """Give the tensors and arrays below a value by the names that torch lists."""
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        result = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        yield name, (str(value.dtype), value.shape, result)
        return
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    elif isinstance(value, Agent | Config):
        value = vars(value)
    elif isinstance(value, list | tuple | collections.deque):
        value = dict(enumerate(value))
    for step, child in value.items() if isinstance(value, dict) else ():
        yield from tensors(child, f"{name}.{step}".lstrip("."))


VALUES: dict[str, Callable[[], Any]] = {
    "module": Net,
    "agent": Agent,
    "optimizer": lambda: Agent().optimizer,
    "dict of objects": lambda: {"model": Net(), "optimizer": Agent().optimizer, "epoch": 3},
    "tuple": lambda: (nn.Linear(2, 1), [nn.Conv2d(1, 2, 1)]),
    "traced graph": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU())),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    "bare tensor": lambda: torch.randn(3, 4).t(),
    "views": lambda: (lambda t: {"a": t[2:9], "b": t[::3], "c": t.expand(2, 20)})(torch.randn(20)),
    "sparse": lambda: {"values": torch.eye(3).to_sparse().values()},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", VALUES)
def test_every_tensor_of_an_object_has_torchs_name(kind: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    value = VALUES[kind]()
    FORMS[form](value, tmp_path / "whole.pkl")
    listed = {t.key: (t.dtype, t.shape, t.sha256) for t in digest(str(tmp_path / "whole.pkl")).tensors}
    expected = dict(tensors(value))
    assert expected
    assert {name: listed.get(name) for name in expected} == expected


def test_an_optimizer_as_an_object_has_slots_and_a_counter(tmp_path: Path) -> None:
    torch.save(Agent().optimizer, tmp_path / "optimizer")
    leaves = {leaf.key: leaf for _, leaf in open_checkpoint(str(tmp_path / "optimizer")).tree.tensors()}
    assert (leaves["state.3.exp_avg"].role, leaves["state.3.exp_avg"].slot) == ("slot", "exp_avg")
    assert leaves["state.3.step"].role == "counter"
    assert leaves["param_groups.0.params.3"].role == "parameter"


def test_slots_of_parameters_that_no_group_has_keep_their_labels(tmp_path: Path) -> None:
    optimizer = Agent().optimizer
    optimizer.param_groups[0]["params"].pop()
    torch.save(optimizer, tmp_path / "optimizer")
    keys = [t.key for t in digest(str(tmp_path / "optimizer")).tensors]
    assert "state.<Tensor 0>.exp_avg" in keys
    assert len([key for key in keys if key.startswith("state.")]) == 12


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_damage_inside_a_storage_kept_as_text_names_the_place_in_the_file(tmp_path: Path) -> None:
    data = pickle.dumps(torch.ones(3), 2)
    at = data.index(b"storageq")
    (tmp_path / "bad").write_bytes(data.replace(b"storageq", b"stockadeq"[:8]))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(tmp_path / "bad"))
    assert caught.value.offset is not None
    assert at < caught.value.offset < len(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["cloudpickle in a zip", "cloudpickle in a stream", "cloudpickle"])
def test_a_class_by_value_has_its_instances_tensors(form: str, tmp_path: Path) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 2)
            self.act = lambda x: x.relu()

    net = Local()
    FORMS[form](net, tmp_path / "whole.pkl")
    listed = {t.key: (t.dtype, t.shape, t.sha256) for t in digest(str(tmp_path / "whole.pkl")).tensors}
    assert listed == dict(tensors(net))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_dills_arrays_are_arrays(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    call = stand_in("dill._dill._create_array")

    class Dilled:
        def __reduce__(self) -> Any:
            return call, (*array.__reduce__(), None)

    with importable(call):
        (tmp_path / "net.pkl").write_bytes(pickle.dumps({"w": Dilled(), "t": torch.ones(2)}))
    digests = {t.key: t.sha256 for t in digest(str(tmp_path / "net.pkl")).tensors}
    assert digests["w"] == hashlib.sha256(array.tobytes()).hexdigest()
    assert len(digests) == 2


OLD = {
    "(dp0": True, "]q\0.": True, "}q\0.": True, ").": True, "ccollections\nOrderedDict\np0\n(t.": True,
    "(no pickle": False, "version https://git-lfs.": False, "words.": False,
}  # fmt: skip


@pytest.mark.parametrize("text", OLD)
@pytest.mark.parametrize("name", ["w.pkl", "w.PICKLE", "w.p", "w.txt", "w"])
def test_pickles_that_do_not_name_their_protocol_are_recognised_whatever_their_name(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text.encode() + (b"\n." if text == "(dp0" else b""))
    claimed = torch_legacy.pickle_claims(Probe(str(tmp_path / name)))
    # A name and no more is a pickle only where the file's name ends like one.
    named = "." in name and not name.endswith(".txt")
    assert (claimed is not None) == (OLD[text] and (named or not text.startswith("c")))


def python2(array: np.ndarray) -> bytes:
    """Return what Python 2's cPickle wrote of an array, protocol 2: its bytes are a str."""
    dtype = (
        b"cnumpy\ndtype\nU\x02"
        + array.dtype.str[1:].encode()
        + b"K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xff"
    )
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    raw = array.tobytes()
    shape = b"".join(b"K" + bytes([extent]) for extent in array.shape)
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01("
        + shape + b"t" + dtype + b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb."
    )  # fmt: skip


@pytest.mark.parametrize("array", [np.zeros((2, 3)), np.arange(3), np.array([1e300, -2.0])], ids=str)
def test_an_array_that_python_2_pickled_is_read_whether_its_bytes_are_text_or_not(
    array: np.ndarray, tmp_path: Path
) -> None:
    (tmp_path / "old.pkl").write_bytes(python2(array))
    assert np.array_equal(pickle.loads(python2(array), encoding="latin1"), array)
    (row,) = digest(str(tmp_path / "old.pkl")).tensors
    assert (row.dtype, row.shape) == (str(array.dtype), array.shape)
    assert row.sha256 == hashlib.sha256(array.tobytes()).hexdigest()


# Hostile files.


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_one_storage_is_not_taken_apart_again_and_again(tmp_path: Path, golden: Golden) -> None:
    """Each call of `_load_from_bytes` reads pickles; a hundred thousand of one storage must not."""
    storage = torch.ones(3).storage().__reduce__()[1][0]
    head = b"\x80\x04]ctorch.storage\n_load_from_bytes\n\x940\x8e" + len(storage).to_bytes(8, "little")
    data = head + storage + b"\x940(" + b"h\x00h\x01\x85R0" * 100_000 + b"e."
    (tmp_path / "many.pkl").write_bytes(data)
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(tmp_path / "many.pkl"))
    golden(caught.value)


@pytest.mark.parametrize(
    ("of", "form"), [(torch.ones(2), "zip"), (np.ones(2), "pickle")], ids=["tensor", "array"]
)
def test_150000_paths_of_one_tensor_take_linear_time(of: Any, form: str, tmp_path: Path) -> None:
    FORMS[form]([of] * 150_000, tmp_path / "aliases.pkl")
    start = time.process_time()
    tree = open_checkpoint(str(tmp_path / "aliases.pkl")).tree
    # Some two seconds; if each alias were copied with all before it, more than twenty.
    assert time.process_time() - start < 10
    assert sum(map(len, tree.aliases.values())) == 149_999


def test_an_array_at_two_places_beside_tensors_is_an_alias(tmp_path: Path) -> None:
    array = np.arange(3.0)
    torch.save({"a": array, "b": [array], "t": torch.ones(2)}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(str(tmp_path / "x.pt"))
    assert {alias.key for others in checkpoint.tree.aliases.values() for alias in others} == {"b.0"}
    assert {t.key for t in digest(str(tmp_path / "x.pt")).tensors} == {"a", "b.0", "t"}


def test_attributes_that_shadow_the_readers_own_are_attributes(tmp_path: Path) -> None:
    names = (
        "__class__",
        "__reduce__",
        "__dict__",
        "state",
        "items",
        "entries",
        "function",
        "name",
        "args",
        "read",
    )
    kind = stand_in("gone.Thing", __reduce__=lambda _: (kind, (), {n: torch.ones(2) for n in names}))
    with importable(kind):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps(kind()))
    assert [t.key for t in digest(str(tmp_path / "x.pkl")).tensors] == list(names)
