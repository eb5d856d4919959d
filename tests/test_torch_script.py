"""TorchScript's archives: parameters, buffers, attributes and constants are listed, code is not run."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path

import pytest

from ckpttool.commands.doctor import diagnose
from ckpttool.core import ChecksumError, Container, NotACheckpointError, attr, index, key
from ckpttool.formats import open_checkpoint, torch_zip
from tests.test_torch_tensors import bytes_of, named

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def net(torch):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
            self.memory = torch.nn.Linear(3, 4)
            self.register_buffer("mean", torch.ones(2))
            self.extra = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))])
            self.scale = 0.5
            self.names = ["a", "b"]
            self.table = {"x": 1.5}
            self.loose = torch.arange(3)

        def forward(self, x):
            y = self.body(x - self.mean) * self.scale + self.loose
            return self.memory(y) + torch.tensor([1.0, 2.0, 3.0, 4.0])

    return Net().eval()


@pytest.fixture(scope="module")
def folder(torch, net, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("script")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _save(torch, net, folder)
    return folder


def _save(torch, net, folder: Path) -> None:
    scripted = torch.jit.script(net)
    scripted.save(str(folder / "script.pt"), _extra_files={"about.txt": b"hello"})
    scripted._save_for_lite_interpreter(str(folder / "mobile.ptl"))
    torch.jit.trace(net, torch.ones(4, 2)).save(str(folder / "trace.pt"))
    torch.jit.freeze(scripted).save(str(folder / "frozen.pt"))


@pytest.mark.parametrize("name", ["script.pt", "trace.pt", "mobile.ptl"])
def test_names_and_bytes_are_those_of_the_state_dict(torch, net, folder, name):
    tree = open_checkpoint(str(folder / name)).tree
    leaves = named(tree)
    for native, value in net.state_dict().items():
        assert bytes(leaves[native].read()) == bytes_of(torch, value), native
    trained = {native: leaf for native, leaf in leaves.items() if leaf.role == "parameter"}
    assert trained.keys() >= {native for native, _ in net.named_parameters()}
    assert all(leaf.trainable for leaf in trained.values())
    buffers = {native for native, leaf in leaves.items() if leaf.role in ("buffer", "counter")}
    assert buffers == {native for native, _ in net.named_buffers()}


def test_attributes_are_values(folder):
    tree = open_checkpoint(str(folder / "script.pt")).tree
    assert tree[attr("scale"),].value == 0.5
    assert tree[attr("names"), index(1)].value == "b"
    assert tree[attr("table"), key("x")].value == 1.5
    assert tree[attr("loose"),].role == "other"
    assert tree[attr("body"), attr("0"), attr("weight")].shape == (3, 2)


def test_code_is_named_with_its_sizes(folder, golden):
    checkpoint = open_checkpoint(str(folder / "script.pt"))
    members = {info.filename: info.file_size for info in zipfile.ZipFile(folder / "script.pt").infolist()}
    code = {f"script/{file['name']}": file["nbytes"] for file in checkpoint.details["code"]}
    assert code == {name: size for name, size in members.items() if name.startswith("script/code/")}
    assert checkpoint.details["extra"] == [{"name": "extra/about.txt", "nbytes": 5}]
    files = sum(name.endswith(".py") for name in code)
    golden("\n".join(checkpoint.notes).replace(f" {files} ", " N "))
    assert str(checkpoint.writer).startswith("TorchScript ")
    json.dumps(dict(checkpoint.details))


def test_findings_name_each_file_that_is_compiled(folder, golden):
    """The others are positions in the source, for messages of errors: no finding is about them."""
    file = folder / "script.pt"
    with zipfile.ZipFile(file) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    code = {name for name in names if name.startswith("code/") and name.endswith(".py")}
    assert code < {name for name in names if name.startswith("code/")}
    sentences = [finding.sentence for finding in diagnose(str(file)).findings if finding.topic == "loading"]
    assert {sentence.rpartition(" ")[2] for sentence in sentences} == code
    golden(sentences[0])


def test_constants_have_the_names_of_the_code(torch, net, folder):
    traced = open_checkpoint(str(folder / "trace.pt")).tree
    module = torch.jit.load(str(folder / "trace.pt"))
    constants = {leaf.key: leaf for _, leaf in traced.tensors() if leaf.key.startswith("CONSTANTS.")}
    assert set(constants) == {name for name in constants if name in module.code}
    assert any(leaf.array().tolist() == [1, 2, 3, 4] for leaf in constants.values())
    assert {leaf.role for leaf in constants.values()} == {"other"}


def test_a_frozen_module_is_its_constants(torch, net, folder):
    tree = open_checkpoint(str(folder / "frozen.pt")).tree
    assert all(path[0] == attr("CONSTANTS") for path in tree)
    assert tree.containers[()].name.endswith("Net")
    assert tree.containers[attr("CONSTANTS"),] == Container("record", "CONSTANTS")
    contents = {bytes(leaf.read()) for _, leaf in tree.tensors()}
    assert bytes_of(torch, net.memory.weight) in contents


def test_bytecode_is_told(folder, golden):
    [_, note] = open_checkpoint(str(folder / "mobile.ptl")).notes
    golden(note)


def test_code_that_lies_changes_no_bytes(folder, tmp_path):
    """A class whose code says nothing, or says wrong names, has its tensors listed all the same."""
    with zipfile.ZipFile(folder / "script.pt") as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            # A process that has scripted other Linears before writes `linear/___torch_mangle_0.py`.
            if info.filename.endswith(".py") and "/linear" in info.filename:
                data = data.replace(b"weight", b"nothing") + b"\xff\xfe class Linear(Module):\n"
            new.writestr(info.filename, data)
    tree = torch_zip.read(str(tmp_path / "x.pt")).tree
    leaf = named(tree)["body.0.weight"]
    assert (leaf.role, leaf.shape) == ("other", (3, 2))


def test_damaged_code_is_a_checksum_error(folder, tmp_path):
    with zipfile.ZipFile(folder / "script.pt") as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[data.index(b"class Net(Module)") + 6] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ChecksumError):
        torch_zip.read(str(tmp_path / "x.pt"))


def test_archives_that_are_programs_are_named(tmp_path, golden):
    # torch.export is slow to import: its archive is made of the one name that torch 2.13's tells itself by.
    others = (
        "e/archive_format",
        "serialized_exported_program.json",
        "m/model.json",
        "m/.data/extern_modules",
    )
    for number, name in enumerate(others):
        with zipfile.ZipFile(tmp_path / f"{number}.pt", "w") as archive:
            archive.writestr(name, "{}")
        with pytest.raises(NotACheckpointError) as caught:
            open_checkpoint(str(tmp_path / f"{number}.pt"))
        golden(caught.value)


def test_mobile_flatbuffers_are_named(tmp_path, golden):
    for name in (b"PTMF", b"ET12"):
        (tmp_path / "x.ptl").write_bytes(b"\x28\0\0\0" + name + bytes(64))
        with pytest.raises(NotACheckpointError) as caught:
            open_checkpoint(str(tmp_path / "x.ptl"))
        golden(caught.value)
