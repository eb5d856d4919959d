"""Hugging Face's shards: an index beside several files, whole, incomplete and hostile."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as referee

from ckpttool.commands.convert import convert
from ckpttool.core import CkpttoolError, FormatError, Tree, TruncatedError, UsageError, key
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, open_checkpoint, sharded
from ckpttool.testing.formats import WritingContract
from tests.conftest import in_process, refused
from tests.golden_texts import Golden


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{n}.weight": torch.randn(2, n + 1, generator=generator) for n in range(8)}


def put(folder: Path, end: str = "safetensors", shards: int = 3, **changed: Any) -> Path:
    """Write tensors in shards as transformers names them; `changed` replaces parts of the index."""
    folder.mkdir(exist_ok=True)
    stem = "model" if end == "safetensors" else "pytorch_model"
    names = [f"{stem}-{n + 1:05}-of-{shards:05}.{end}" for n in range(shards)]
    everything = tensors()
    places: dict[str, str] = {}
    for number, name in enumerate(names):
        part = {t: value for at, (t, value) in enumerate(everything.items()) if at % shards == number}
        write(part, folder / name)
        places |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 4}, "weight_map": dict(sorted(places.items())), **changed}
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps(index, indent=2))
    return folder / f"{stem}.{end}.index.json"


def write(part: Mapping[str, torch.Tensor], file: Path) -> None:
    if file.suffix == ".safetensors":
        referee.save_file(dict(part), file, {"format": "pt"})
    else:
        torch.save(dict(part), file)


class TestSharded(WritingContract):
    module = sharded

    def put(self, tree: Tree, target: Path) -> str:
        target.mkdir()
        for piece in self.module.pieces(tree, shard_bytes=10_000):
            if not piece.extra:
                with open(target / f"model{piece.suffix}", "wb") as stream:
                    piece.write(stream)
        return str(target / "model.safetensors.index.json")

    def make(self, folder: Path) -> str:
        # Shards of torch.save have checksums; a damaged index does not fit to them.
        return str(put(folder, "bin"))


@pytest.mark.parametrize("end", ["safetensors", "bin"])
@pytest.mark.parametrize("by", ["index", "folder"])
def test_all_shards_are_one_checkpoint(tmp_path: Path, end: str, by: str) -> None:
    index = put(tmp_path / "model", end)
    named = str(index if by == "index" else index.parent)
    checkpoint = open_checkpoint(named)
    assert (checkpoint.format, checkpoint.path) == ("sharded", named)
    assert checkpoint.files[0].path == str(index)
    assert checkpoint.integrity == ("none" if end == "safetensors" else "crc32")
    assert len(checkpoint.files) == 4
    expected = tensors()
    assert {leaf.key: path for path, leaf in checkpoint.tree.tensors()} == {
        name: (key(name),) for name in expected
    }
    for _, leaf in checkpoint.tree.tensors():
        assert torch.equal(torch.from_numpy(leaf.array().copy()), expected[leaf.key])


def test_shards_of_the_form_before_the_zip_file(tmp_path: Path) -> None:
    index = put(tmp_path, "bin")
    for file in tmp_path.glob("*.bin"):
        torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    assert len(digest_checkpoint(open_checkpoint(str(index))).tensors) == 8


@pytest.mark.parametrize("target", ["whole.pt", "whole.safetensors"])
def test_shards_become_one_file(tmp_path: Path, target: str) -> None:
    put(tmp_path / "m")
    assert convert(str(tmp_path / "m"), str(tmp_path / target)).written
    read = torch.load if target.endswith("pt") else referee.load_file
    loaded = read(tmp_path / target)  # type: ignore[operator]
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], value) for name, value in tensors().items())


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_one_file_of_weights_stands_for_it(tmp_path: Path, name: str) -> None:
    write(tensors(), tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.path == str(tmp_path / name)
    assert checkpoint.format == ("safetensors" if name.startswith("model") else "pytorch")
    assert len(checkpoint.tree) == 8


def test_a_missing_shard_is_named(tmp_path: Path, golden: Golden) -> None:
    index = put(tmp_path)
    gone = "model-00002-of-00003.safetensors"
    os.unlink(tmp_path / gone)
    checkpoint = open_checkpoint(str(index))
    assert len(checkpoint.tree) == 8
    golden("\n".join(checkpoint.notes))
    lost = [leaf for _, leaf in checkpoint.tree.tensors() if leaf.dtype == "unknown"]
    assert {leaf.key for leaf in lost} == {"layers.1.weight", "layers.4.weight", "layers.7.weight"}
    with pytest.raises(TruncatedError, match=gone):
        lost[0].read()
    assert gone in refused(in_process("digest", index))
    ran = in_process("inspect", index)
    assert ran.status == 0
    assert gone in ran.out
    golden(refused(in_process("convert", index, tmp_path / "x.safetensors")))


def test_what_the_index_does_not_name_is_listed_and_noted(tmp_path: Path, golden: Golden) -> None:
    index = put(tmp_path)
    file = tmp_path / "model-00001-of-00003.safetensors"
    # One tensor more, and one that the index gives to another shard.
    write({**referee.load_file(file), "extra": torch.ones(1), "layers.1.weight": torch.zeros(2, 2)}, file)
    saved = open_checkpoint(str(index))
    assert len(saved.tree) == 9
    golden("\n".join(saved.notes))
    assert torch.equal(
        torch.from_numpy(saved.tree[key("layers.1.weight"),].array().copy()), tensors()["layers.1.weight"]
    )


def test_names_that_share_a_tensor_in_a_shard_are_aliases(tmp_path: Path) -> None:
    index = put(tmp_path, "bin")
    file = tmp_path / "pytorch_model-00001-of-00003.bin"
    part = torch.load(file)
    torch.save({**part, "tied": part["layers.0.weight"]}, file)
    document = json.loads(index.read_text())
    document["weight_map"]["tied"] = file.name
    index.write_text(json.dumps(document))
    checkpoint = open_checkpoint(str(index))
    assert checkpoint.notes == ()
    assert [alias.key for alias in checkpoint.tree.aliases[key("layers.0.weight"),]] == ["tied"]


def test_a_tensor_that_its_shard_lacks(tmp_path: Path, golden: Golden) -> None:
    index = put(tmp_path)
    document = json.loads(index.read_text())
    document["weight_map"]["lost"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(index))
    golden(caught.value)


SHARD = "model-00001-of-00003.safetensors"
NAMES = ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0b", 3, None, ["x"]]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_only_files_beside_the_index_are_shards(tmp_path: Path, name: Any, golden: Golden) -> None:
    index = put(tmp_path, weight_map={"layers.0.weight": SHARD, "w": name})
    golden(refused(in_process("inspect", index)))


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": NaN}}',
        f'{{"weight_map": {{"layers.0.weight": "{SHARD}", "layers.0.weight": "{SHARD}"}}}}',
        '{"weight_map": ' + "[" * 100_000,
    ],
    ids=range(8),
)  # fmt: skip
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    index = put(tmp_path)
    index.write_text(text)
    with pytest.raises(CkpttoolError) as caught:
        open_checkpoint(str(index))
    assert len(str(caught.value)) < 400


def test_a_shard_that_is_something_else(tmp_path: Path) -> None:
    index = put(tmp_path)
    (tmp_path / SHARD).write_text("hello")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(index))
    assert caught.value.file == str(tmp_path / SHARD)


def test_an_index_is_no_shard_of_its_own(tmp_path: Path) -> None:
    index = put(tmp_path, weight_map={"a": "model.safetensors.index.json"})
    with pytest.raises(FormatError):
        open_checkpoint(str(index))


def test_of_both_forms_the_one_that_transformers_takes(tmp_path: Path, golden: Golden) -> None:
    put(tmp_path, "bin")
    index = put(tmp_path, "safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.files[0].path == str(index)
    golden("\n".join(checkpoint.notes))


def test_several_indexes_are_named(tmp_path: Path) -> None:
    index = put(tmp_path)
    (tmp_path / "other.safetensors.index.json").write_bytes(index.read_bytes())
    with pytest.raises(UsageError, match=r"other\.safetensors\.index\.json"):
        sharded.claims(Probe(str(tmp_path)))


def test_folders_of_others_are_not_claimed(tmp_path: Path) -> None:
    assert sharded.claims(Probe(str(tmp_path))) is None
    (tmp_path / "model.safetensors").mkdir()
    assert sharded.claims(Probe(str(tmp_path))) is None
    (tmp_path / "x.index.json").write_text("[]")
    assert sharded.claims(Probe(str(tmp_path))) is None
    assert sharded.claims(Probe(str(tmp_path / "x.index.json"))) is None
