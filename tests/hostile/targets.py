"""Every parser as a function of bytes, for fuzzing: whatever the bytes are, only CkpttoolError may leave it.

Where a checksum stands before a parser, the target gets what is behind it and the checksum is made right, so
that the parser and not the checksum is tried.
"""

from __future__ import annotations

import base64
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from ckpttool.commands.inspect import summary
from ckpttool.core import Checkpoint, CkpttoolError, File, Inline, Leaf, Span, sidecar
from ckpttool.core.digests import digest_checkpoint
from ckpttool.encodings import archives, npy, pickle_reader, protobuf, sstable, tar_members
from ckpttool.formats import (
    embedded_tree,
    hdf5,
    keras_h5,
    open_checkpoint,
    rllib,
    sb3,
    settings,
    sharded,
    tf_common,
    tf_object_graph,
)
from ckpttool.mapping import user_rules
from tests import bundle_writer, v1_writer
from tests.hostile import crafted_onnx, starts
from tests.hostile.crafted_payloads import zip_bytes
from tests.hostile.mutations import changed
from tests.hostile.room import Room, answering
from tests.hostile.seeds import BY_NAME


class Target(NamedTuple):
    """One parser: what to try it with first, and what calls it with any bytes in a folder of its own."""

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[Room, bytes], None]


def _file(room: Room, data: bytes, name: str = "input") -> File:
    return File.stamp(room.put(name, data))


def _read(checkpoint: Checkpoint) -> None:
    digest_checkpoint(checkpoint)


def _zip(room: Room, data: bytes) -> None:
    archive = archives.read_zip(_file(room, data))
    for name in archive.members:
        with suppress(CkpttoolError):
            archive.source(name).read()


def _tar(room: Room, data: bytes) -> None:
    for span in tar_members.read_tar(_file(room, data)).values():
        span.read()


def _pickle(room: Room, data: bytes) -> None:
    pickle_reader.parse_pickle(data, trailing=True)


def _npy(room: Room, data: bytes) -> None:
    file = _file(room, data)
    array = npy.read_npy(Span(file, 0, file.size))
    if array.source is not None:
        array.source.read()


def _npy_header(room: Room, data: bytes) -> None:
    _npy(room, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(data) & 0xFFFF) + data[:0xFFFF] + bytes(64))


def _sstable(room: Room, data: bytes) -> None:
    sstable.read_table(data)


def _block(room: Room, data: bytes) -> None:
    sstable.read_table(bundle_writer.table_of([data], [b"\xff"]))


def _snappy(room: Room, data: bytes) -> None:
    sstable.read_table(bundle_writer.table_of([data], [b"\xff"], kind=1))


def _protobuf(room: Room, data: bytes) -> None:
    waiting = [data]
    while waiting and len(waiting) < 1000:
        for _, value in protobuf.iter_fields(waiting.pop()):
            protobuf.as_int(value) if isinstance(value, int) else waiting.append(value)
            if not isinstance(value, int):
                with suppress(CkpttoolError):
                    protobuf.as_ints(value)
                with suppress(CkpttoolError):
                    protobuf.as_text(value)


def _tfrecord(room: Room, data: bytes) -> None:
    for _ in protobuf.iter_records(_file(room, data)):
        pass


_TAGS = ("eval/return", "loss")


def _events(room: Room, data: bytes) -> None:
    first = protobuf.event_file_header(1.0)
    for _ in protobuf.iter_scalars(_file(room, first + protobuf.encode_record(data)), _TAGS):
        pass


def _bundle(room: Room, entries: list[tuple[bytes, bytes]], data: bytes = bytes(256)) -> None:
    room.put("b.data-00000-of-00001", data)
    room.put("b.index", bundle_writer.table(sorted(entries)))
    _read(open_checkpoint(str(room.folder / "b")))


def _entry(room: Room, data: bytes) -> None:
    _bundle(room, [(b"", bundle_writer.header()), (b"a", data)])


def _entries(room: Room, data: bytes) -> None:
    """Take the bytes apart into keys and values: a length before each."""
    entries, at = {}, 0
    while at < len(data) and len(entries) < 20:
        key = data[at + 1 : (at := at + 1 + data[at] % 32)]
        length = data[at] if at < len(data) else 0
        entries[key] = data[at + 1 : (at := at + 1 + length)]
    _bundle(room, list(entries.items()))


def _object_graph(room: Room, data: bytes) -> None:
    tf_object_graph.parse_graph(data)
    bundle_writer.bundle(room.folder / "g", {"w/.ATTRIBUTES/VARIABLE_VALUE": bytes(8)}, data)
    _read(open_checkpoint(str(room.folder / "g")))


def _v1(room: Room, data: bytes) -> None:
    """A header, and a record of values of it."""
    cut = 2 + int.from_bytes(data[:2], "little")
    entries = [(b"", data[2:cut]), (v1_writer.slice_key(b"x", [(0, -1)]), data[cut:])]
    room.put("v1.ckpt", bundle_writer.table(entries))
    _read(open_checkpoint(str(room.folder / "v1.ckpt")))


def _text_proto(room: Room, data: bytes) -> None:
    tf_common.read(room.put("specs.pbtxt", data))


def _state(room: Room, data: bytes) -> None:
    tf_common.read_state(room.put("checkpoint", data))


def _safetensors(room: Room, data: bytes) -> None:
    path = room.put("a.safetensors", len(data).to_bytes(8, "little") + data + bytes(200))
    _read(open_checkpoint(path))


def _sharded(room: Room, data: bytes) -> None:
    room.put("model-00001.safetensors", BY_NAME["safetensors"].contents()["model.safetensors"])
    _read(sharded.read(room.put("model.safetensors.index.json", data)))


@cache
def _stored_torch() -> dict[str, bytes]:
    with zipfile.ZipFile(BY_NAME["torch zip"].home / "model.pt") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _torch(room: Room, data: bytes) -> None:
    path = room.put("a.pt", zip_bytes({**_stored_torch(), "model/data.pkl": data}))
    _read(open_checkpoint(path))
    summary(path)


def _script(room: Room, data: bytes) -> None:
    """TorchScript: constants before the first NUL, code after it."""
    constants, _, code = data.partition(b"\0CODE\0")
    more = {"data.pkl": constants, "constants.pkl": b"\x80\x02).", "code/__torch__/m.py": code}
    members = _stored_torch() | {f"model/{name}": content for name, content in more.items()}
    _read(open_checkpoint(room.put("a.pt", zip_bytes(members))))


def _whole(name: str) -> Callable[[Room, bytes], None]:
    def run(room: Room, data: bytes) -> None:
        _read(open_checkpoint(room.put(name, data)))

    return run


def _dcp(room: Room, data: bytes) -> None:
    room.put("d/__0_0.distcp", BY_NAME["torch DCP"].contents()["__0_0.distcp"])
    room.put("d/.metadata", data)
    _read(open_checkpoint(str(room.folder / "d")))


def _saved_model(room: Room, data: bytes) -> None:
    for name, content in BY_NAME["SavedModel graph"].contents().items():
        room.put(f"s/{name}", content)
    room.put("s/saved_model.pb", data)
    _read(open_checkpoint(str(room.folder / "s")))


def _keras_metadata(room: Room, data: bytes) -> None:
    for name, content in BY_NAME["SavedModel graph"].contents().items():
        room.put(f"k/{name}", content)
    room.put("k/keras_metadata.pb", data)
    _read(open_checkpoint(str(room.folder / "k")))


def _hdf5(room: Room, data: bytes) -> None:
    path = room.put("a.weights.h5", BY_NAME["HDF5 plain"].contents()["model.weights.h5"])
    with answering(data):
        hdf5.read_index(hdf5.whole_file(File.stamp(path)))
        _read(keras_h5.read(path))


def _keras(room: Room, data: bytes) -> None:
    weights = BY_NAME["HDF5 plain"].contents()["model.weights.h5"]
    members = {
        "metadata.json": b'{"keras_version": "3.15.1"}',
        "config.json": data,
        "model.weights.h5": weights,
    }
    path = room.put("a.keras", zip_bytes(members))
    with answering(starts.listing("HDF5 plain")):
        _read(keras_h5.read_archive(path))


def _keras_map(room: Room, data: bytes) -> None:
    room.put("m_00000.weights.h5", BY_NAME["HDF5 plain"].contents()["model.weights.h5"])
    path = room.put("m.weights.json", data)
    with answering(starts.listing("HDF5 plain")):
        _read(keras_h5.read(path))


def _yaml(room: Room, data: bytes) -> None:
    settings.read_yaml(room.put("args.yml", data))


def _sidecar(room: Room, data: bytes) -> None:
    room.put("x.pt.ckpttool.json", data)
    sidecar.load_sidecar(str(room.folder / "x.pt"))


def _rules(room: Room, data: bytes) -> None:
    user_rules.load_rules(room.put("rules.toml", data))


def _sb3(room: Room, data: bytes) -> None:
    with zipfile.ZipFile(BY_NAME["SB3 zip"].home / "agent.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    path = room.put("agent.zip", zip_bytes({**members, "data": data}))
    _read(sb3.read(path))
    summary(path)


def _sb3_pickle(room: Room, data: bytes) -> None:
    coded = base64.b64encode(data).decode()
    _sb3(room, json.dumps({"policy_class": {":type:": "t", ":serialized:": coded}, "gamma": 0.9}).encode())


def _sb2(room: Room, data: bytes) -> None:
    _read(sb3.read_sb2(room.put("agent.pkl", data)))


def _rllib(room: Room, data: bytes) -> None:
    _read(rllib.read(room.put("checkpoint-7", data)))


def _recorded(room: Room, data: bytes) -> None:
    leaves = {n: Leaf("float32", (2,), Inline(bytes(8)), n) for n in ("actor/w", "actor/b")}
    embedded_tree.decode_tree(data, leaves)


def _agent(room: Room, data: bytes) -> None:
    """A pickle of weights, as `inspect` meets it: every layout looks at the names."""
    summary(room.put("agent.pkl", data))


TARGETS = (
    Target("zip", starts.seed("torch zip", "npz deflated", "torch zip, no CRCs"), _zip),
    Target("tar", starts.seed("torch tar"), _tar),
    Target("pickle", starts.pickles, _pickle),
    Target("npy", starts.arrays, _npy),
    Target("npy_header", starts.array_headers, _npy_header),
    Target("sstable", starts.tables, _sstable),
    Target("sstable_block", starts.blocks, _block),
    Target("snappy_block", starts.compressed, _snappy),
    Target("protobuf", starts.graphs, _protobuf),
    Target("tfrecord", starts.records, _tfrecord),
    Target("summary_events", starts.events_seeds, _events),
    Target("bundle_entry", starts.shapes, _entry),
    Target("bundle_entries", starts.keyed, _entries),
    Target("object_graph", starts.graphs, _object_graph),
    Target("tensorflow_v1", starts.v1_seeds, _v1),
    Target("text_proto", lambda: [starts.SPECS], _text_proto),
    Target("checkpoint_state", lambda: [starts.STATE], _state),
    Target("saved_model", starts.seed("SavedModel graph"), _saved_model),
    Target("keras_metadata", starts.keras_metadata_seeds, _keras_metadata),
    Target("onnx", lambda: [crafted_onnx.agent()], _whole("a.onnx")),
    Target("safetensors_header", starts.headers, _safetensors),
    Target("sharded_index", starts.shard_maps, _sharded),
    Target("torch_pickle", starts.members("torch zip", "data.pkl"), _torch),
    Target("torch_script", starts.scripts, _script),
    Target("torch_legacy", starts.seed("torch legacy"), _whole("a.pt")),
    Target("torch_tar", starts.seed("torch tar"), _whole("a.tar")),
    Target("dcp_metadata", lambda: [BY_NAME["torch DCP"].contents()[".metadata"]], _dcp),
    Target("sb3_settings", starts.settings, _sb3),
    Target("sb3_pickle", starts.serialized, _sb3_pickle),
    Target("sb2_pickle", starts.seed("SB2 pickle"), _sb2),
    Target("rllib_pickle", starts.seed("RLlib pickle"), _rllib),
    Target("d3rlpy", starts.seed("d3rlpy"), _whole("a.d3")),
    Target("npz", starts.seed("npz stored", "npz deflated"), _whole("a.npz")),
    Target("recorded_tree", starts.recorded_seeds, _recorded),
    Target("hdf5_answer", lambda: [starts.listing("HDF5 plain"), starts.listing("HDF5 gzip")], _hdf5),
    Target("keras_config", starts.keras_seeds, _keras),
    Target("keras_map", lambda: [starts.MAP], _keras_map),
    Target("yaml_settings", lambda: [starts.YAML], _yaml),
    Target("sidecar", starts.sidecars, _sidecar),
    Target("rule_file", lambda: [starts.RULES], _rules),
    Target("agent", starts.agents, _agent),
)
BY_TARGET = {target.name: target for target in TARGETS}


def mutants(seeds: Sequence[bytes], count: int, name: str) -> Iterator[bytes]:
    """Give `count` variations of the seeds, the same for the same name: a fuzzer that sees no coverage."""
    choose = random.Random(name)
    for _ in range(count):
        data = choose.choice(seeds)
        for _ in range(choose.randint(1, 4)):
            if data:
                data = changed(data, choose.randrange(len(data)), choose)
        if data and choose.randrange(4) == 0:
            other = choose.choice(seeds)
            at, start = choose.randrange(len(data)), choose.randrange(max(1, len(other)))
            data = data[:at] + other[start : start + choose.randint(1, 64)] + data[at:]
        yield data


def attempt(target: Target, room: Room, data: bytes) -> bool:
    """Run a target; return whether the bytes were accepted."""
    try:
        target.run(room, data)
    except CkpttoolError as error:
        str(error)  # made of the file's bytes
        return False
    return True
