"""The protobuf wire format and varints: laws, limits, and what damaged messages do."""

from __future__ import annotations

import json
import random
import runpy
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import CkpttoolError, FormatError, TruncatedError, source
from ckpttool.encodings import protobuf, sstable
from ckpttool.formats import tf_bundle, tf_object_graph, tf_saved_model_messages, tf_v1
from tests import tensorflow_child
from tests.golden_texts import Golden

W = runpy.run_path(str(Path(__file__).with_name("bundle_writer.py")))

NUMBERS = st.integers(1, (1 << 29) - 1)
VALUES = st.one_of(st.integers(0, (1 << 64) - 1), st.binary(max_size=300))


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=3))
def test_varint_round_trip(value: int, rest: bytes) -> None:
    data = protobuf.encode_varint(value)
    assert data == W["varint"](value)
    assert protobuf.read_varint(data + rest, 0, len(data + rest)) == (value, len(data))


@pytest.mark.parametrize("data", [b"\x80" * 10, b"\x80" * 11, b"\xff" * 10 + b"\x01"])
def test_varint_too_long(data: bytes, golden: Golden) -> None:
    with pytest.raises(FormatError) as caught:
        protobuf.read_varint(data, 0, len(data))
    golden(caught.value)


def test_varint_of_more_than_64_bits(golden: Golden) -> None:
    with pytest.raises(FormatError) as caught:
        protobuf.read_varint(b"\xff" * 9 + b"\x02", 0, 10)
    golden(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9])
def test_varint_cut_off(data: bytes) -> None:
    with pytest.raises(TruncatedError):
        protobuf.read_varint(data, 0, len(data))


def test_varint_respects_stop() -> None:
    with pytest.raises(TruncatedError):
        protobuf.read_varint(b"\x80\x01", 0, 1)


@pytest.mark.parametrize(("stored", "value"), [((1 << 64) - 1, -1), (1 << 63, -(1 << 63)), (5, 5)])
def test_signed(stored: int, value: int) -> None:
    assert protobuf.to_signed(stored) == value


@given(st.lists(st.tuples(NUMBERS, VALUES), max_size=20))
def test_fields_round_trip(fields: list[tuple[int, int | bytes]]) -> None:
    data = b"".join(W["field"](number, value) for number, value in fields)
    assert protobuf.parse_fields(data) == fields
    fields_read = [
        (n, bytes(v) if isinstance(v, memoryview) else v) for n, v in protobuf.parse_fields(memoryview(data))
    ]
    assert fields_read == fields


def test_fixed_widths() -> None:
    data = bytes([1 << 3 | 5, 1, 2, 0, 0, 2 << 3 | 1, 7, 0, 0, 0, 0, 0, 0, 1])
    assert protobuf.parse_fields(data) == [(1, 0x201), (2, (1 << 56) + 7)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x00\x01", id="number"),
        pytest.param(b"\x0b\x0c", id="wire-type"),  # a group
        pytest.param(b"\x0e\x00", id="wire-type-2"),
        pytest.param(b"\x0f\x00", id="wire-type-3"),
        pytest.param(b"\x0a\x05abc", id="long"),
        pytest.param(b"\x0d\x01", id="long-2"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", id="long-3"),
        pytest.param(b"\x08", id="cut"),
        pytest.param(b"\x0a", id="cut-2"),
        pytest.param(b"\x88", id="cut-3"),
        pytest.param(b"\x88\x80\x80\x80\x80\x01\x00", id="number-2"),
    ],
)
def test_broken_messages(data: bytes, golden: Golden) -> None:
    with pytest.raises(FormatError) as caught:
        protobuf.parse_fields(data)
    golden(caught.value)


def test_nesting_costs_nothing(golden: Golden) -> None:
    data = b""
    for _ in range(5000):
        data = W["field"](1, data)
    assert len(protobuf.parse_fields(data)) == 1
    with pytest.raises(FormatError) as caught:
        protobuf.parse_fields(b"\x0b" * 5000 + b"\x0c" * 5000)
    golden(caught.value)


def test_kinds_are_checked() -> None:
    assert protobuf.as_int((1 << 64) - 4) == -4
    assert protobuf.as_text(b"a\xffb") == "a\udcffb"
    for call, value in ((protobuf.as_int, b"x"), (protobuf.as_message, 1), (protobuf.as_text, 1)):
        with pytest.raises(FormatError):
            call(value)


@given(st.binary(max_size=200))
def test_any_bytes_give_fields_or_our_error(data: bytes) -> None:
    try:
        protobuf.parse_fields(data)
    except CkpttoolError:
        return


def test_bit_flips_stay_inside_the_family() -> None:
    fields = [(1, 300), (2, b"x" * 200), (300, b"abc"), (4, (1 << 64) - 1)]
    seed = b"".join(W["field"](n, v) for n, v in fields)
    dice = random.Random(1)
    for _ in range(2000):
        data = bytearray(seed)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        test_any_bytes_give_fields_or_our_error.hypothesis.inner_test(bytes(data))


D, N = protobuf.DELIMITED, protobuf.NUMBER


@pytest.mark.parametrize(
    ("data", "schema", "fields"),
    [
        (W["field"](1, 5) + W["field"](9, b"new"), {1: N}, [(1, 5)]),
        (W["field"](1, b"\x05\x06"), {1: protobuf.NUMBERS}, [(1, b"\x05\x06")]),
        (b"\x0d\x01\x02\x00\x00", {1: protobuf.WORD}, [(1, 0x201)]),
        (b"\x09" + bytes(8), {1: protobuf.LONGS}, [(1, 0)]),
        (b"\x88\x80\x00\x05", {1: N}, [(1, 5)]),
    ],
)
def test_only_the_fields_of_the_schema(data: bytes, schema: protobuf.Schema, fields: list[object]) -> None:
    assert protobuf.parse_fields(data, schema) == list(protobuf.iter_fields(data, schema)) == fields


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (W["field"](1, 5), D),
        (W["field"](1, b"x"), N),
        (b"\x0d" + bytes(4), N),
        (b"\x0d" + bytes(4), protobuf.LONGS),
        (b"\x09" + bytes(8), protobuf.WORD),
        (b"\x88\x80\x80\x80\x80\x00\x05", N),
    ],
)
def test_another_wire_type_is_refused(data: bytes, kind: int) -> None:
    for call in (protobuf.parse_fields, lambda *arguments: list(protobuf.iter_fields(*arguments))):
        with pytest.raises(FormatError):
            call(data, {1: kind})


def test_numbers_of_32_bits_and_merged_messages() -> None:
    assert [protobuf.as_int32(n) for n in (5, 1 << 32 | 5, (1 << 64) - 1, 1 << 31)] == [5, 5, -1, -(1 << 31)]
    assert protobuf.merge_messages([], b"") == b""
    assert protobuf.merge_messages([b"a"], b"") == b"a"
    assert bytes(protobuf.merge_messages([memoryview(b"a"), memoryview(b"b")], memoryview(b""))) == b"ab"


def test_a_shape_in_two_parts_is_one_shape() -> None:
    one, four = (W["field"](2, W["field"](2, W["field"](1, extent))) for extent in (1, 4))
    assert tf_bundle.parse_entry(W["field"](1, 1) + one + four).shape == (1, 4)
    assert tf_bundle.parse_entry(one + W["field"](1, 3) + four + W["field"](1, 1))[:2] == (1, (1, 4))


# What TensorFlow's own messages make of the same bytes.

SEEDS = Path(__file__).parent / "hostile" / "seed_files"


def messages(count: int) -> list[tuple[str, bytes]]:
    """Return variations of real messages, with the kind of each."""
    from tests.hostile.mutations import protobuf as changed

    entries = sstable.read_table((SEEDS / "bundle" / "ckpt-1.index").read_bytes())
    data = (SEEDS / "bundle" / "ckpt-1.data-00000-of-00001").read_bytes()
    entry = tf_bundle.parse_entry(bytes(entries[1][1]))
    length, at = protobuf.read_varint(data, entry.offset, len(data))
    v1 = sstable.read_table((SEEDS / "tensorflow_v1" / "model.ckpt").read_bytes())
    seeds = [
        ("header", bytes(entries[0][1])),
        ("entry", bytes(entries[2][1])),
        ("graph", data[at + 4 : at + 4 + length]),
        ("slices", bytes(v1[0][1])),
        ("model", (SEEDS / "saved_model" / "saved_model.pb").read_bytes()),
        (
            "event",
            b"".join(W["field"](5, W["field"](1, field)) for field in (EVENT, EVENT)) + W["field"](2, 7),
        ),
    ]
    choose = random.Random(3)
    messages = []
    for number in range(count):
        kind, message = seeds[number % len(seeds)]
        for _ in range(choose.choice((0, 1, 1, 2, 3))):
            message = changed(message, choose)
        messages.append((kind, message))
    return messages


EVENT = W["field"](1, b"tag") + W["field"](8, W["field"](1, 3) + W["field"](2, b"") + W["field"](7, 5))


def our_reading(kind: str, data: bytes) -> object:
    if kind == "header":
        return tf_bundle.parse_header(data)
    if kind == "entry":
        entry = tf_bundle.parse_entry(data)
        return [*entry[:5], source.mask_crc(entry.checksum), entry.slices]
    if kind == "graph":
        return [
            [node.children, node.attributes, node.slots, node.saver]
            for node in tf_object_graph.parse_graph(data)
        ]
    if kind == "slices":
        metas, producer = tf_v1._parse_metas(data)
        return [producer, [[meta.name.decode("utf-8", "replace"), *meta[1:]] for meta in metas]]
    if kind == "event":
        return [
            [scalar.tag, scalar.step, scalar.value]
            for scalar in protobuf._iter_event_scalars(data, {b"tag": "tag"})
        ]
    meter = tf_saved_model_messages.FieldMeter()
    rows = []
    for graph in tf_saved_model_messages.parse_saved_model(memoryview(data), meter):
        inner = tf_saved_model_messages.parse_object_graph(graph.objects or memoryview(b""), meter)
        signatures = {
            name: [
                one.method,
                *(
                    {n: [list(map(bytes.decode, t.names)), t.shape] for n, t in tables.items()}
                    for tables in one[1:]
                ),
            ]
            for name, one in graph.signatures.items()
        }
        variables = {str(at): [item.name, item.shape, item.trainable] for at, item in inner.variables.items()}
        slots = sorted([*key, value] for key, value in inner.slots.items())
        nodes_found = tf_saved_model_messages.parse_graph_def(graph.nodes or memoryview(b""), meter)
        count = [nodes_found.count, nodes_found.functions]
        rows.append(
            [graph.tags, graph.version, signatures, inner.children, variables, slots, inner.captures, count]
        )
    return rows


def tensorflows(folder: Path) -> list[object]:
    """Decode the messages in a child that has TensorFlow."""
    answers: list[object] = []
    for kind, data in json.loads((folder / "messages.json").read_text()):
        try:
            answers.append(_reference_value(kind, bytes.fromhex(data)))
        except Exception as error:  # noqa: BLE001  # DecodeError of whichever protobuf there is
            answers.append({"refused": str(error)})
    return answers


def _shape(proto: Any) -> Any:
    return None if proto.unknown_rank else [dim.size for dim in proto.dim]


def _extents(proto: Any) -> Any:
    return [[extent.start, extent.length if extent.HasField("length") else -1] for extent in proto.extent]


def _reference_value(kind: str, data: bytes) -> object:
    from tensorflow.core.protobuf import saved_model_pb2, tensor_bundle_pb2, trackable_object_graph_pb2
    from tensorflow.core.util import event_pb2, saved_tensor_slice_pb2

    if kind == "header":
        m = tensor_bundle_pb2.BundleHeaderProto.FromString(data)
        version = m.version
        return [
            m.num_shards,
            bool(m.endianness),
            version.producer,
            version.min_consumer,
            [*version.bad_consumers],
        ]
    if kind == "entry":
        m = tensor_bundle_pb2.BundleEntryProto.FromString(data)
        slices = [_extents(slice_) for slice_ in m.slices]
        return [m.dtype, _shape(m.shape), m.shard_id, m.offset, m.size, m.crc32c, slices]
    if kind == "graph":
        m = trackable_object_graph_pb2.TrackableObjectGraph.FromString(data)
        return [
            [
                {child.local_name: child.node_id for child in node.children},
                [[item.name, item.full_name, item.checkpoint_key] for item in node.attributes],
                [
                    [s.original_variable_node_id, s.slot_name, s.slot_variable_node_id]
                    for s in node.slot_variables
                ],
                node.registered_saver.name,
            ]
            for node in m.nodes
        ]
    if kind == "slices":
        m = saved_tensor_slice_pb2.SavedTensorSlices.FromString(data).meta
        return [
            m.versions.producer,
            [[t.name, _shape(t.shape), t.type, [_extents(part) for part in t.slice]] for t in m.tensor],
        ]
    if kind == "event":
        m = event_pb2.Event.FromString(data)
        values = m.summary.value if m.WhichOneof("what") == "summary" else ()
        pairs = [(value.tag, _scalar(value)) for value in values]
        return [[tag, m.step, number] for tag, number in pairs if tag == "tag" and number is not None]
    return [_meta_graph(graph) for graph in saved_model_pb2.SavedModel.FromString(data).meta_graphs]


def _scalar(value: Any) -> float | None:
    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    proto = value.tensor
    values = {1: proto.float_val, 2: proto.double_val, 3: proto.int_val, 9: proto.int64_val}.get(proto.dtype)
    if value.WhichOneof("value") != "tensor" or values is None or proto.tensor_shape.dim:
        return None
    if proto.tensor_content:
        form = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}[proto.dtype]
        return float(struct.unpack(form, proto.tensor_content)[0])
    return float(values[0]) if values else 0.0


def _meta_graph(graph: Any) -> object:
    def info(tensors: Any) -> Any:
        return {name: [names(tensor), _shape(tensor.tensor_shape)] for name, tensor in tensors.items()}

    def names(tensor: Any) -> list[str]:
        return [tensor.name] if tensor.WhichOneof("encoding") == "name" else []

    skipped = ("__saved_model_init_op", "__saved_model_train_op")
    signatures = {
        name: [signature.method_name, info(signature.inputs), info(signature.outputs)]
        for name, signature in graph.signature_def.items()
        if name not in skipped
    }
    object_graph = graph.object_graph_def
    children, variables, slots = [], {}, []
    for at, node in enumerate(object_graph.nodes):
        children.append({child.local_name: child.node_id for child in reversed(node.children)})
        if node.WhichOneof("kind") == "variable":
            variables[str(at)] = [node.variable.name, _shape(node.variable.shape), node.variable.trainable]
        slots += [
            [at, variable.original_variable_node_id, variable.slot_name, variable.slot_variable_node_id]
            for variable in node.slot_variables
        ]
    captures = {name: list(item.bound_inputs) for name, item in object_graph.concrete_functions.items()}
    counts = [len(graph.graph_def.node), len(graph.graph_def.library.function)]
    information = graph.meta_info_def
    return [
        [*information.tags], information.tensorflow_version, signatures, children, variables, sorted(slots),
        captures, counts,
    ]  # fmt: skip


@pytest.mark.tensorflow
def test_messages_mean_what_they_mean_to_tensorflow(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow")
    cases = messages(1200)
    (tmp_path / "messages.json").write_text(json.dumps([(kind, data.hex()) for kind, data in cases]))
    reference = tensorflow_child.run(__file__, "tensorflows", tmp_path)
    read: Counter[str] = Counter()
    for (kind, data), other in zip(cases, reference, strict=True):
        try:
            mine = json.loads(json.dumps(our_reading(kind, data)))
        except CkpttoolError:
            continue
        # TensorFlow refuses damage in parts that are not read here, and strings that are not UTF-8.
        if isinstance(other, dict):
            continue
        if kind == "model":
            # Python's protobuf drops a map's entry with an unknown field in it, and C++'s does not.
            for graph, its in zip(mine, other, strict=True):
                for maps in (2, 6):
                    graph[maps] = {name: entry for name, entry in graph[maps].items() if name in its[maps]}
        assert mine == other, (kind, data.hex())
        read[kind] += 1
    assert min(read[kind] for kind in ("header", "entry", "graph", "slices", "model", "event")) > 20, read
