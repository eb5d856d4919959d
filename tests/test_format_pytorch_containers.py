"""Every container of torch's files holds the same tree; PyTorch writes them, and reads them as referee."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool.core import CkpttoolError, File, FormatError, Leaf, Tree, UnsupportedError, ValueLeaf
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import open_checkpoint, torch_legacy, torch_zip
from ckpttool.testing.formats import FormatContract
from tests.conftest import CORPUS, in_process, refused
from tests.golden_texts import Golden
from tests.pickles import damaged
from tests.test_format_pytorch import NAMES, make, raw
from tests.torch_forms import FORMS, big, plain, state, unpacked


class WithoutChecksums(FormatContract):
    """No checksum covers these bytes: a flipped bit may be another value, never another kind of failure."""

    damages = 300

    def test_no_flipped_bit_gets_through(self, checkpoint: Any, path: str) -> None:
        for file in checkpoint.files:
            whole = Path(file.path).read_bytes()
            for data in damaged(whole, self.damages):
                Path(file.path).write_bytes(data)
                try:
                    for _, leaf in open_checkpoint(path).tree.tensors():
                        assert len(leaf.read()) == leaf.nbytes
                except CkpttoolError as error:
                    assert str(error).isprintable()  # noqa: PT017  # both outcomes are right
            Path(file.path).write_bytes(whole)


def tree_contents(tree: Tree) -> dict[str, Any]:
    """Return all that a tree says, with the bytes of its tensors."""
    return {
        "leaves": [
            (path, leaf.key, leaf.dtype, leaf.shape, leaf.role, leaf.slot, leaf.trainable, bytes(leaf.read()))
            if isinstance(leaf, Leaf)
            else (path, leaf)
            for path, leaf in tree.items()
        ],
        "aliases": dict(tree.aliases),
        "containers": dict(tree.containers),
    }


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.torch
class TestUnpacked(WithoutChecksums):
    module, damages = torch_zip, 30

    def make(self, folder: Path) -> str:
        import torch

        # One storage is larger than the pickle, which is read only once; none is below 47 bytes.
        value = {**state(torch), "large": torch.zeros(2000)}
        kept = {name: tensor for name, tensor in value.items() if name not in ("small", "empty")}
        unpacked_folder = unpacked(torch, kept, folder)
        (folder / "plain.pt").unlink()
        # Files before torch 2.1 had no byte order; a version is read and decides nothing.
        (unpacked_folder / "byteorder").unlink()
        (unpacked_folder / "version").unlink()
        return str(unpacked_folder)


@pytest.mark.torch
@pytest.mark.parametrize("form", FORMS)
def test_every_container_gives_the_same_tree(torch: Any, form: str, tmp_path: Path) -> None:
    value = {name: tensor for name, tensor in state(torch).items() if form != "big" or name != "untyped"}
    expected = tree_contents(open_checkpoint(str(plain(torch, value, tmp_path))).tree)
    assert expected["aliases"]
    checkpoint = open_checkpoint(str(FORMS[form](torch, value, tmp_path)))
    assert checkpoint.format == ("pytorch_legacy" if form.startswith("stream") else "pytorch")
    assert tree_contents(checkpoint.tree) == expected


LEAVES = st.builds(
    lambda name, shape, seed: (name, tuple(shape), seed),
    st.sampled_from(NAMES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99),
)  # fmt: skip
LOOKS = ["as it is", "transposed", "part", "expanded", "parameter", "frozen", "again"]


def looked_at(torch: Any, tensor: Any, look: str, before: list[Any]) -> Any:
    """Return the tensor, a view of it, a parameter, or (`again`) one that came before."""
    if look == "again":
        return before[-1] if before else tensor
    if look in ("parameter", "frozen"):
        learns = look == "parameter" and (tensor.is_floating_point() or tensor.is_complex())
        return torch.nn.Parameter(tensor, requires_grad=learns)
    if look == "expanded":
        return tensor.expand(2, *tensor.shape)
    if not tensor.dim():
        return tensor
    return tensor.transpose(0, -1) if look == "transposed" else tensor[1:] if look == "part" else tensor


@pytest.mark.torch
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_random_states_in_every_container(torch: Any, data: Any, tmp_path: Path) -> None:
    built: list[Any] = []

    def tensor(drawn: tuple[tuple[str, tuple[int, ...], int], str]) -> Any:
        (name, shape, seed), look = drawn
        built.append(looked_at(torch, make(torch, name, shape, seed), look, built))
        return built[-1]

    values = st.tuples(LEAVES, st.sampled_from(LOOKS)).map(tensor) | st.none() | st.integers() | st.text()
    value = data.draw(
        st.recursive(
            values,
            lambda inner: (
                st.dictionaries(st.text(max_size=4) | st.integers(0, 99), inner, max_size=3)
                | st.lists(inner, max_size=3)
                | st.tuples(inner, inner)
            ),
            max_leaves=8,
        )
    )
    expected = tree_contents(open_checkpoint(str(plain(torch, value, tmp_path))).tree)
    kinds = {leaf[2] for leaf in expected["leaves"] if not isinstance(leaf[1], ValueLeaf)}
    typed = ("big",) if kinds.isdisjoint(("uint16", "uint32", "uint64")) else ()
    for form in ("stream", "unrecorded", *typed, "unpacked"):
        assert tree_contents(open_checkpoint(str(FORMS[form](torch, value, tmp_path))).tree) == expected, form


@pytest.mark.torch
def test_torch_reads_the_big_endian_file_alike(torch: Any, tmp_path: Path) -> None:
    value = {"f": torch.arange(6.0).reshape(2, 3).t(), "i": torch.arange(5), "c": torch.tensor([1 + 2j])}
    path = big(torch, value, tmp_path)
    back = torch.load(path, weights_only=True)
    leaves = {leaf.key: leaf for _, leaf in open_checkpoint(str(path)).tree.tensors()}
    for name, tensor in value.items():
        assert bytes(leaves[name].read()) == raw(torch, back[name]) == raw(torch, tensor)


@pytest.mark.torch
def test_big_endian_storages_that_torch_misreads_are_refused(torch: Any, tmp_path: Path) -> None:
    value = {"u": torch.tensor([1, 2], dtype=torch.uint16), "i": torch.arange(5)}
    path = big(torch, value, tmp_path)
    assert torch.load(path, weights_only=True)["u"].tolist() == [256, 512]
    leaves = {leaf.key: leaf for _, leaf in open_checkpoint(str(path)).tree.tensors()}
    assert leaves["i"].array().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UnsupportedError) as caught:
        leaves["u"].read()
    assert caught.value.file == str(path)


@pytest.mark.torch
@pytest.mark.parametrize("form", ["plain", "unrecorded", "piped", "stream", "stream4"])
def test_what_stands_in_the_middle_of_another_file(torch: Any, form: str, tmp_path: Path) -> None:
    value = state(torch)
    path = {"plain": plain, **FORMS}[form](torch, value, tmp_path)
    data = path.read_bytes()
    (tmp_path / "around").write_bytes(b"x" * 1001 + data + b"PK\x05\x06 and more")
    file = File.stamp(str(tmp_path / "around"))
    listing = torch_legacy.list_embedded(file, 1001, len(data))
    assert tree_contents(listing.tree) == tree_contents(open_checkpoint(str(path)).tree)
    for offset, length in ((1000, len(data)), (1001, len(data) - 1), (1001, 0), (1001, 3), (0, 900)):
        with pytest.raises(FormatError):
            digest_checkpoint(
                type("C", (), {"tree": torch_legacy.list_embedded(file, offset, length).tree})()
            )


NAMED = ["a b.c.pt", "ünïcode", "模型.pt", "new\nline.pt", "....", "data.pt", "per%cent#.pth", "x" * 200]


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMED)
def test_files_of_any_name(torch: Any, name: str, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5.0)}, tmp_path / name)
    tree = open_checkpoint(str(tmp_path / name)).tree
    assert [leaf.array().tolist() for _, leaf in tree.tensors()] == [[0, 1, 2, 3, 4]]


# ------------------------------------------------------------------ unpacked archives


def folder_of(torch: Any, folder: Path) -> Path:
    return unpacked(torch, {"w": torch.arange(5.0), "b": torch.ones(2)}, folder)


@pytest.mark.torch
def test_only_what_was_read_belongs_to_an_unpacked_archive(torch: Any, tmp_path: Path) -> None:
    folder = folder_of(torch, tmp_path)
    (folder / "data" / "unused").write_bytes(bytes(1000))
    names = {os.path.relpath(file.path, folder) for file in open_checkpoint(str(folder)).files}
    assert names == {"data.pkl", "byteorder", "version", "data/0", "data/1"}


@pytest.mark.torch
def test_links_lead_nowhere_outside(torch: Any, tmp_path: Path, golden: Golden) -> None:
    folder = folder_of(torch, tmp_path)
    expected = tree_contents(open_checkpoint(str(folder)).tree)
    storage = folder / "data" / "0"
    storage.rename(folder / "data" / "kept")
    storage.symlink_to("kept")
    assert tree_contents(open_checkpoint(str(folder)).tree) == expected
    (tmp_path / "secret").write_bytes((folder / "data" / "kept").read_bytes())
    for target in (
        tmp_path / "secret",
        "../../../secret",
        tmp_path / "nothing",
        "/dev/zero",
        folder / "data",
    ):
        storage.unlink()
        storage.symlink_to(target)
        golden(refused(in_process("digest", folder)))


@pytest.mark.torch
def test_a_linked_folder_inside_is_refused(torch: Any, tmp_path: Path, golden: Golden) -> None:
    folder = folder_of(torch, tmp_path)
    (folder / "data").rename(tmp_path / "elsewhere")
    (folder / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(folder))
    golden(caught.value)


@pytest.mark.torch
def test_a_folder_may_itself_be_reached_by_a_link(torch: Any, tmp_path: Path) -> None:
    folder = folder_of(torch, tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert len(open_checkpoint(str(tmp_path / "link")).tree) == 2


@pytest.mark.torch
def test_a_storage_that_is_missing_short_or_no_file(torch: Any, tmp_path: Path, golden: Golden) -> None:
    folder = folder_of(torch, tmp_path)
    storage = folder / "data" / "0"
    storage.write_bytes(bytes(3))
    golden(refused(in_process("inspect", folder)))
    storage.unlink()
    golden(refused(in_process("inspect", folder)))
    os.mkfifo(storage)
    golden(refused(in_process("inspect", folder)))


@pytest.mark.torch
def test_two_unpacked_archives_in_one_folder_are_two_checkpoints(torch: Any, tmp_path: Path) -> None:
    folder = folder_of(torch, tmp_path)
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        archive.extractall(folder.parent / "second")
    ran = in_process("inspect", folder.parent, "--json")
    assert ran.status == 0, ran.err
    assert "2 checkpoints" in in_process("inspect", folder.parent).out


@pytest.mark.corpus
def test_text_that_is_called_a_checkpoint_is_told_so(golden: Golden) -> None:
    (broken,) = CORPUS.rglob("broken.pt")
    golden(refused(in_process("inspect", broken)).replace(str(CORPUS), "CORPUS"))


@pytest.mark.torch
def test_looking_into_every_container_loads_neither_numpy_nor_torch(torch: Any, tmp_path: Path) -> None:
    import subprocess
    import sys

    paths = [str(FORMS[form](torch, {"w": torch.ones(3)}, tmp_path)) for form in ("unpacked", "stream")]
    code = (
        "import sys; from ckpttool.formats.detect import open_checkpoint\n"
        f"for path in {paths!r}: open_checkpoint(path)\n"
        "sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'zipfile', 'tarfile', 'pickle')))"
    )
    root = Path(torch_zip.__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
