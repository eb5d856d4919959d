"""torch's distributed checkpoints: torch.distributed.checkpoint is the referee, in one process and in two."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool.commands.convert import convert
from ckpttool.core import (
    CkpttoolError,
    FormatError,
    Leaf,
    NotFoundError,
    Tree,
    TruncatedError,
    UnsupportedError,
    ValueLeaf,
    dangerous_calls,
    display,
    index,
    key,
)
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import open_checkpoint, torch_dcp
from ckpttool.listing.audit import audit_notes
from ckpttool.testing.formats import WritingContract
from tests import warm
from tests.conftest import TORCH_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.pickles import damaged

pytestmark = pytest.mark.torch

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64", "float8_e5m2")


def saved(value: dict, folder: Path, **more) -> Path:
    """Save with torch in this process alone."""
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(folder, sync_files=False, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, storage_writer=writer, no_dist=True)
    return folder


def loaded(folder: Path) -> dict:
    """Return what torch makes of the folder, nested."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, folder.parent / "whole.pt")
    return torch.load(folder.parent / "whole.pt", weights_only=False)


def bits(tensor) -> bytes:
    import torch

    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def require_same(tree: Tree, value: object, path=()) -> int:
    """Compare what torch loaded with the tree; return the number of leaves."""
    import torch

    if isinstance(value, dict):
        return sum(require_same(tree, v, (*path, key(k))) for k, v in value.items())
    if isinstance(value, list | tuple) and (path not in tree):
        return sum(require_same(tree, v, (*path, index(n))) for n, v in enumerate(value))
    leaf = tree[path]
    if isinstance(value, torch.Tensor):
        assert isinstance(leaf, Leaf)
        assert (leaf.dtype, leaf.shape) == (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        assert bytes(leaf.read()) == bits(value), display(path)
    else:
        assert isinstance(leaf, ValueLeaf)
        assert leaf.value == value
    return 1


def trained() -> dict:
    """Return a small network, its optimizer and what stands beside them."""
    import torch

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": network.state_dict(), "optim": optimizer.state_dict(), "epoch": 3, "note": "x"}


class TestDistributed(WritingContract):
    """The metadata are a pickle, which has no checksum; the shards' archives have their own."""

    module = torch_dcp

    def make(self, folder: Path) -> str:
        return str(saved(trained(), folder / "step-100"))

    def test_an_agent_is_written_whole_or_refused(self, tmp_path: Path) -> None:
        """As in the other formats, but keys of dicts become text, as torch writes them."""
        tree = open_checkpoint(str(TORCH_SAMPLE)).tree
        again = torch_dcp.read(self.put(tree, tmp_path / "agent")).tree
        assert list(again.names.values()) == list(tree.names.values())
        assert again.leaves == torch_dcp.stored(again).leaves
        assert [leaf.role for leaf in again.values()] == [leaf.role for leaf in tree.values()]
        values = {tree.names[path]: leaf.value for path, leaf in tree.plain()}
        assert {again.names[path]: leaf.value for path, leaf in again.plain()} == values

    def test_no_flipped_bit_gets_through(self, path: str) -> None:
        right = digest_checkpoint(open_checkpoint(path)).sha256
        for name in (".metadata", "__0_0.distcp"):
            file = Path(path) / name
            whole = file.read_bytes()
            for data in damaged(whole, 60):
                file.write_bytes(data)
                with contextlib.suppress(CkpttoolError):
                    checkpoint = open_checkpoint(path)
                    for _, leaf in checkpoint.tree.tensors():
                        assert len(leaf.read()) == leaf.nbytes
                    if name != ".metadata":
                        assert digest_checkpoint(checkpoint).sha256 == right
            file.write_bytes(whole)


class TestByRank(TestDistributed):
    """The same with metadata of each rank."""

    def make(self, folder: Path) -> str:
        saved_folder = saved(trained(), folder / "step-100")
        (saved_folder / ".metadata").rename(saved_folder / "__0.metadata")
        return str(saved_folder)

    def test_no_flipped_bit_gets_through(self, path: str) -> None:
        """Shown above."""


def test_torch_loads_what_is_listed(tmp_path, golden: Golden):
    import torch

    value = trained() | {
        "t": torch.randn(3, 4).t(),
        "conj": torch.randn(2, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "list": [1, torch.arange(3), {"a": torch.ones(2, dtype=torch.bfloat16)}, [torch.ones(1)]],
        "tuple": (1, 2.5, torch.ones(2)),
        "none": None,
        "dotted": {"a.b": {"c": 1}},
        "od": OrderedDict(a=1),
        7: torch.zeros(2),
    }
    folder = saved(value, tmp_path / "c")
    checkpoint = open_checkpoint(str(folder))
    assert require_same(checkpoint.tree, loaded(folder)) == len(checkpoint.tree) > 60
    assert checkpoint.integrity == "crc32"
    assert checkpoint.tree.names[key("model"), key("0.weight")] == "model/0/weight"
    leaf = checkpoint.tree[key("optim"), key("state"), key("0"), key("exp_avg")]
    assert (leaf.key, leaf.role, leaf.slot) == ("optim.state.0.exp_avg", "slot", "exp_avg")
    assert leaf.of == (key("model"), key("0.weight"))
    assert checkpoint.tree[key("optim"), key("state"), key("0"), key("step")].role == "counter"
    assert checkpoint.tree[key("model"), key("1.running_mean")].role == "buffer"
    golden(checkpoint.notes[0])


def test_what_torch_before_2_4_flattened_less_is_the_same(tmp_path, monkeypatch):
    from torch.distributed.checkpoint import _version

    # Lists and dicts without tensors were one item each.
    now = open_checkpoint(str(saved(trained(), tmp_path / "new"))).tree
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    folder = saved(trained(), tmp_path / "old")
    then = open_checkpoint(str(folder)).tree
    assert require_same(then, loaded(folder)) == len(then)
    assert set(then) == set(now)
    assert {leaf.of for _, leaf in then.tensors()} == {leaf.of for _, leaf in now.tensors()} != {None}
    sizes = [
        len(pickle.loads((tmp_path / n / ".metadata").read_bytes()).state_dict_metadata)
        for n in ("old", "new")
    ]
    assert sizes[0] < sizes[1]


def test_what_left_no_name_in_a_list_is_none(tmp_path):
    import torch

    # torch flattens an empty dict away, and its own reader then asks for the place in vain.
    checkpoint = open_checkpoint(str(saved({"list": [{}, torch.ones(1)]}, tmp_path / "c")))
    assert checkpoint.tree[key("list"), index(0)] == ValueLeaf(None)


@pytest.mark.parametrize("at", ["", ".metadata", "__0_0.distcp"])
def test_the_folder_or_any_file_of_it_is_the_checkpoint(tmp_path, at):
    folder = saved(trained(), tmp_path / "c")
    checkpoint = open_checkpoint(str(folder / at) if at else str(folder))
    assert (checkpoint.format, checkpoint.path) == ("pytorch_dcp", str(folder))


leaves = st.one_of(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
    st.integers(-5, 5),
    st.text(max_size=3),
    st.none(),
)
values = st.dictionaries(
    st.text("ab.0", min_size=1, max_size=3),
    st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.text("cd1", min_size=1, max_size=2), inner, min_size=1),
        ),
        max_leaves=6,
    ),
    max_size=4,
)


def tensors(value: object) -> object:
    """Put a tensor where a type and a shape stand."""
    import torch

    if isinstance(value, tuple):
        dtype, shape = getattr(torch, value[0]), value[1]
        tensor = torch.arange(int(np.prod(shape)) * 3).reshape([*shape, 3])[..., 1]
        return tensor.to(dtype)
    if isinstance(value, dict):
        return {k: tensors(v) for k, v in value.items()}
    return [tensors(v) for v in value] if isinstance(value, list) else value


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values, st.integers(1, 3))
def test_any_state_reads_back(tmp_path, value, threads):
    from torch.distributed.checkpoint.api import CheckpointException

    folder = tmp_path / "c"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        saved(tensors(value), folder, thread_count=threads, single_file_per_rank=threads > 1)
    except (ValueError, CheckpointException) as error:
        if "duplicated flatten key" in str(error):
            return  # two names are one, joined with dots
        raise
    tree = open_checkpoint(str(folder)).tree
    assert require_same(tree, loaded(folder)) == len(tree)


RANKS = """
import torch, warnings
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

def work(rank, folder):
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = {"rows": torch.randn(5, 4), "columns": torch.randn(3, 7).bfloat16(), "one": torch.randn(1, 3),
             "same": torch.randn(2), "deep": {"f16": torch.randn(4, 2, 2).half()}}
    cut = {"rows": Shard(0), "columns": Shard(1), "one": Shard(0), "same": Replicate(), "f16": Shard(0)}
    spread = lambda v, n="": ({k: spread(x, k) for k, x in v.items()} if isinstance(v, dict)
                              else distribute_tensor(v, mesh, [cut[n]]))
    state = {**spread(whole), "epoch": 7, f"rank{rank}": rank}
    dcp.save(state, checkpoint_id=f"{folder}/all")
    if rank == 0:
        torch.save(whole | {"epoch": 7, "rank0": 0, "rank1": 1}, f"{folder}/whole.pt")
    dist.barrier()
    dcp.save(state, checkpoint_id=f"{folder}/each", use_collectives=False)
    dist.barrier()
    flavour = SerializationFormat.SAFETENSORS
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/safe", serialization_format=flavour))
    tensors = {name: value for name, value in state.items() if hasattr(value, "placements")}
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/hub", save_distributed=True))
    dist.barrier()
    if rank == 0:
        loaded = {name: torch.zeros_like(value) for name, value in whole.items() if name != "deep"}
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(f"{folder}/hub"), no_dist=True)
        assert all(torch.equal(value, whole[name]) for name, value in loaded.items())
    dist.barrier()
    dist.destroy_process_group()

processes.start_processes(work, (".",), nprocs=2, start_method="fork")
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save from two processes that know of each other."""
    folder = tmp_path_factory.mktemp("ranks")
    status, output = warm.run("torch", RANKS, folder)
    assert status == 0, output
    return folder


@pytest.mark.parametrize("name", ["all", "each", "safe"])
def test_tensors_of_two_ranks_are_put_together(ranks, name):
    import torch

    checkpoint = open_checkpoint(str(ranks / name))
    assert require_same(checkpoint.tree, torch.load(ranks / "whole.pt")) == len(checkpoint.tree) == 8
    assert [Path(file.path).suffix for file in checkpoint.files].count(".distcp") == 2


@pytest.mark.parametrize("name", ["shard-00001-model-00001-of-00001", "shard-00002-model-00001-of-00001"])
def test_slices_of_a_rank_are_not_taken_for_tensors(ranks, name):
    with pytest.raises(UnsupportedError):
        open_checkpoint(str(ranks / "hub" / f"{name}.safetensors"))


@pytest.mark.parametrize(
    "shard",
    [
        "hub/shard-00001-model-00001-of-00001.safetensors",
        "hub/shard-00002-model-00001-of-00001.safetensors",
        "safe/__0_0.distcp",
        "all/__0_0.distcp",
    ],
)
def test_a_renamed_shard_of_a_rank_is_refused(ranks, tmp_path, shard):
    for name in ("a.safetensors", "a.pt", "a", "model-1.safetensors"):
        shutil.copy(ranks / shard, tmp_path / name)
        with pytest.raises(CkpttoolError):
            open_checkpoint(str(tmp_path / name))


def test_whole_tensors_that_torch_wrote_as_safetensors_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {"w": torch.arange(6.0).reshape(2, 3)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "hub"), {"w": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, no_dist=True)
    (file,) = (tmp_path / "hub").glob("*.safetensors")
    for path in (file, tmp_path / "hub"):
        assert require_same(open_checkpoint(str(path)).tree, state) == 1


def test_a_chunk_that_safetensors_lack_is_not_read(ranks, tmp_path):
    folder = shutil.copytree(ranks / "safe", tmp_path / "c")

    def swap(metadata) -> None:
        parts = [item for at, item in metadata.storage_data.items() if at.fqn == "rows"]
        parts[0].__dict__, parts[1].__dict__ = parts[1].__dict__, parts[0].__dict__

    changed(folder, swap)
    with pytest.raises(CkpttoolError):
        open_checkpoint(str(folder)).tree[(key("rows"),)].read()


def test_items_of_torch_save_do_not_share_bytes(ranks, tmp_path):
    folder = shutil.copytree(ranks / "all", tmp_path / "c")

    def share(metadata) -> None:
        one(metadata, "same").__dict__ = dict(one(metadata, "one").__dict__)

    changed(folder, share)
    with pytest.raises(FormatError):
        open_checkpoint(str(folder))


def test_a_missing_shard_is_named_and_the_rest_is_read(ranks, tmp_path, golden: Golden):
    folder = shutil.copytree(ranks / "all", tmp_path / "c")
    (folder / "__1_0.distcp").unlink()
    checkpoint = open_checkpoint(str(folder))
    assert any("__1_0.distcp" in note for note in checkpoint.notes)
    with pytest.raises(TruncatedError) as caught:
        checkpoint.tree[(key("rows"),)].read()
    golden(caught.value)
    assert len(checkpoint.tree[(key("one"),)].read()) == 12
    ran = in_process("digest", folder)
    assert ran.status == 2
    assert "__1_0.distcp" in ran.err


def test_shards_without_metadata_are_explained(ranks, tmp_path, golden: Golden):
    folder = shutil.copytree(ranks / "all", tmp_path / "c")
    (folder / ".metadata").unlink()
    with pytest.raises(NotFoundError) as caught:
        open_checkpoint(str(folder / "__1_0.distcp"))
    golden(caught.value)


def changed(folder: Path, change) -> None:
    """Rewrite the metadata after `change` did something to them."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata, 4))


def one(stated, name: str):
    return next(item for at, item in stated.storage_data.items() if at.fqn == name)


def _beyond(metadata):
    one(metadata, "rows").offset = 1 << 40


def _negative(metadata):
    one(metadata, "rows").offset = -1


def _outside(metadata):
    one(metadata, "rows").relative_path = "../whole.pt"


def _absolute(metadata):
    one(metadata, "rows").relative_path = "/etc/passwd"


def _unknown(metadata):
    metadata.storage_data = {at: item for at, item in metadata.storage_data.items() if at.fqn != "rows"}


def _overlapping(metadata):
    import torch

    chunks = metadata.state_dict_metadata["rows"].chunks
    chunks[1].offsets, chunks[1].sizes = torch.Size([1, 0]), torch.Size([4, 4])
    metadata.storage_data |= {
        type(at)("rows", (1, 0)): item for at, item in metadata.storage_data.items() if at.fqn == "rows"
    }


def _outgrown(metadata):
    import torch

    metadata.state_dict_metadata["rows"].chunks[0].sizes = torch.Size([6, 4])


def _huge(metadata):
    import torch

    entry = metadata.state_dict_metadata["same"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 50])


def _one_place(metadata):
    metadata.planner_data["rows"] = metadata.planner_data["same"] = ("x",)


def _below(metadata):
    metadata.planner_data["rows"] = ("same", "x")


def _gaps(metadata):
    metadata.planner_data["rows"] = ("l", 1 << 60)


def _both(metadata):
    metadata.planner_data["rows"], metadata.planner_data["same"] = ("l", 1), ("l", "a")


def _deep(metadata):
    metadata.planner_data["rows"] = ("a",) * 1000


@pytest.mark.parametrize(
    "change",
    [
        _beyond,
        _negative,
        _outside,
        _absolute,
        _unknown,
        _overlapping,
        _outgrown,
        _huge,
        _one_place,
        _below,
        _gaps,
        _both,
        _deep,
    ],
)
def test_metadata_that_make_no_sense_are_refused(ranks, tmp_path, change, golden: Golden):
    folder = shutil.copytree(ranks / "all", tmp_path / "c")
    changed(folder, change)
    ran = in_process("inspect", folder)
    assert (ran.status, ran.out) == (2, "")
    assert len(ran.err.splitlines()) <= 2  # a hint may follow
    message = in_process("inspect", folder, "--json").json()["error"]["message"]
    golden(re.sub(r"\d+(,\d+)*", "N", message.partition(": ")[2]))  # sizes depend on torch's version


def test_chunks_that_leave_a_hole_are_listed_and_not_read(ranks, tmp_path, golden: Golden):
    folder = shutil.copytree(ranks / "all", tmp_path / "c")
    changed(folder, lambda metadata: metadata.state_dict_metadata["rows"].chunks.pop())
    leaf = open_checkpoint(str(folder)).tree[(key("rows"),)]
    assert leaf.shape == (5, 4)
    with pytest.raises(FormatError) as caught:
        leaf.read()
    golden(caught.value)


def test_an_item_that_holds_another_tensor_is_not_read(ranks, tmp_path):
    folder = shutil.copytree(ranks / "all", tmp_path / "c")

    def swap(metadata) -> None:
        here, there = one(metadata, "same"), one(metadata, "one")
        here.__dict__, there.__dict__ = there.__dict__, here.__dict__

    changed(folder, swap)
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(folder)).tree[(key("same"),)].read()
    assert caught.value.file == str(folder / "__0_0.distcp")
    assert (caught.value.expected, caught.value.found) == ("float32[2]", "float32[1, 3]")


def test_a_transformed_item_is_listed_and_says_what_it_went_through(ranks, tmp_path, golden: Golden):
    folder = shutil.copytree(ranks / "all", tmp_path / "c")
    changed(folder, lambda facts: setattr(one(facts, "same"), "transform_descriptors", ["stream.zstd/1"]))
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(str(folder)).tree[(key("same"),)].read()
    golden(caught.value)


def test_pipes_are_not_opened(ranks, tmp_path, golden: Golden):
    folder = shutil.copytree(ranks / "each", tmp_path / "c")
    (folder / "__1.metadata").unlink()
    os.mkfifo(folder / "__1.metadata")
    assert (key("rank1"),) not in open_checkpoint(str(folder)).tree
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(folder))
    golden(caught.value)


class Payload:
    def __reduce__(self):
        return os.getcwd, ()


def test_a_payload_is_named_and_not_run(tmp_path, golden: Golden):
    folder = saved({"a": 1}, tmp_path / "c")
    changed(folder, lambda metadata: setattr(metadata, "storage_meta", Payload()))
    checkpoint = open_checkpoint(str(folder))
    assert dangerous_calls(checkpoint.code_references) == [f"{os.getcwd.__module__}.getcwd"]
    golden("\n".join(audit_notes(checkpoint.code_references)))


@st.composite
def boxes(draw):
    """Cut a tensor's box again and again; return its shape and the parts."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    parts = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        offsets, sizes = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[axis]))
        for start, length in ((0, at), (at, sizes[axis] - at)):
            parts.append(
                (
                    tuple(o + start * (n == axis) for n, o in enumerate(offsets)),
                    tuple(length if n == axis else s for n, s in enumerate(sizes)),
                )
            )
    return shape, parts


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(boxes(), st.sampled_from(("float32", "bfloat16")), st.randoms())
def test_any_cut_is_put_together(tmp_path, cut, dtype, order):
    import torch
    from torch.distributed.checkpoint import metadata as dcp_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    shape, parts = cut
    order.shuffle(parts)
    whole = torch.randn(shape).to(getattr(torch, dtype))
    (tmp_path / "c").mkdir(exist_ok=True)
    items, chunks = {}, []
    with open(tmp_path / "c" / "__0_0.distcp", "wb") as shard:
        for offsets, sizes in parts:
            if 0 in sizes:
                continue
            stream = io.BytesIO()
            torch.save(
                whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone(), stream
            )
            at = dcp_metadata.MetadataIndex("w", offsets)
            items[at] = _StorageInfo("__0_0.distcp", shard.tell(), len(stream.getvalue()))
            chunks.append(dcp_metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            shard.write(stream.getvalue())
    entry = dcp_metadata.TensorStorageMetadata(
        dcp_metadata.TensorProperties(whole.dtype), whole.shape, chunks
    )
    metadata = dcp_metadata.Metadata({"w": entry}, storage_data=items)
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    leaf = open_checkpoint(str(tmp_path / "c")).tree[(key("w"),)]
    assert bytes(leaf.read()) == bits(whole)


def test_it_becomes_one_torch_file(ranks, tmp_path):
    import torch

    done = convert(str(ranks / "all"), str(tmp_path / "whole.pt"))
    assert done.written
    expected, converted = torch.load(ranks / "whole.pt"), torch.load(tmp_path / "whole.pt", weights_only=True)
    assert converted.keys() == expected.keys()
    assert torch.equal(converted["rows"], expected["rows"])
    assert torch.equal(converted["deep"]["f16"], expected["deep"]["f16"])


def test_a_distributed_optimizer_by_names_is_joined_by_names(tmp_path):
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(1, 2)).sum().backward()
    optimizer.step()
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, state = get_state_dict(network, optimizer, options=options)
        folder = saved({"model": model, "optim": state}, tmp_path / f"c{flat}")
        slots = [leaf for _, leaf in open_checkpoint(str(folder)).tree.tensors() if leaf.role == "slot"]
        assert len(slots) == 8
        for leaf in slots:
            assert leaf.key.endswith(f"{leaf.of[-1].value}.{leaf.slot}")
