"""The pickle machine reads every protocol as data, runs nothing, and is linear in its input."""

from __future__ import annotations

import argparse
import collections
import contextlib
import pickle
import random
import struct
import sys
import time
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import CkpttoolError, FormatError, LimitError, TruncatedError
from ckpttool.encodings import (
    Dict,
    Global,
    OpaqueKey,
    PersistentId,
    PickleObject,
    Set,
    StoredBytes,
    dumps,
    parse_pickle,
    pickle_array,
)


def load(data, **options):
    return parse_pickle(data, **options).value


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(-(1 << 63), (1 << 64) - 1), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("protocol", range(6))
@given(value=values)
def test_what_python_writes_is_read(protocol, value):
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4])
@given(value=values)
def test_what_is_written_python_reads(protocol, value):
    data = dumps(value, protocol)
    assert pickle.loads(data) == value
    assert load(data) == value
    assert dumps(load(data), protocol) == data


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_array_that_is_written_is_one_of_numpys(protocol):
    np = pytest.importorskip("numpy")
    array = np.arange(6, dtype="f4").reshape(2, 3)
    data = dumps(
        [pickle_array("f4", (2, 3), array.tobytes()), Global("collections", "OrderedDict")], protocol
    )
    read_back, named = pickle.loads(data)
    assert read_back.dtype == array.dtype
    assert (read_back == array).all()
    assert named is collections.OrderedDict
    # Protocol 4 reads nothing to the end of a line.
    assert (b"ccollections\n" in data) is (protocol == 2)


def test_python_s_own_pickler_in_python(monkeypatch):
    value = {"a": [1, (2.5, None)], "b": b"\xff" * 300, "c": "x" * 70_000}
    for protocol in range(6):
        assert load(pickle._dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_known_containers(protocol):
    ordered = collections.OrderedDict(a=1)
    values = load(pickle.dumps([ordered, {1, 2}, frozenset((3,)), bytearray(b"x"), 1j], protocol))
    assert isinstance(values[0], Dict)
    assert (values[0].name, dict(values[0])) == ("collections.OrderedDict", {"a": 1})
    assert isinstance(values[1], Set)
    assert sorted(values[1]) == [1, 2]
    assert list(values[2]) == [3]
    assert values[3:] == [b"x", 1j]


def test_unknown_objects_are_inert():
    record = load(pickle.dumps(argparse.Namespace(lr=0.5, names=["a"]), 2))
    assert isinstance(record, PickleObject)
    assert record.name == "argparse.Namespace"
    assert record.state == {"lr": 0.5, "names": ["a"]}


def test_unknown_call_keeps_its_arguments():
    call = load(b"cgym.spaces.box\nBox\n(K\x01X\x01\x00\x00\x00atR.")
    assert (call.name, call.args) == ("gym.spaces.box.Box", (1, "a"))


BROKEN = {
    "empty": (b"", TruncatedError),
    "no STOP": (b"K\x01", TruncatedError),
    "argument cut": (b"K", TruncatedError),
    "float cut": (b"G\x00", FormatError),
    "bytes after STOP": (b"N.N", FormatError),
    "protocol 99": (b"\x80\x63N.", FormatError),
    "unknown opcode": (b"\xff.", FormatError),
    "stack underflow": (b".", FormatError),
    "underflow below a mark": (b"N(\x85.", FormatError),
    "two values": (b"NN.", FormatError),
    "mark left": (b"(N.", FormatError),
    "no mark": (b"Nt.", FormatError),
    "BINGET never put": (b"h\x07.", FormatError),
    "text 2 GiB": (b"X\xff\xff\xff\x7fa.", TruncatedError),
    "bytes 4 EiB": (b"\x8e\x00\x00\x00\x00\x00\x00\x00\x40a.", TruncatedError),
    "negative LONG4": (b"\x8b\xff\xff\xff\xff.", FormatError),
    "24 Mbit LONG": (b"\x8b" + struct.pack("<i", 3 << 20) + bytes(3 << 20) + b".", LimitError),
    "negative string": (b"T\xff\xff\xff\xff.", FormatError),
    "not UTF-8": (b"X\x01\x00\x00\x00\xff.", FormatError),
    "not a number": (b"Iabc\n.", FormatError),
    "20,000 digits": (b"L" + b"9" * 20_000 + b"\n.", FormatError),
    "argument crosses its frame": (b"\x95" + struct.pack("<Q", 2) + b"X\x01\x00\x00\x00a.", FormatError),
    "frame in a frame": (b"\x95" + struct.pack("<Q", 10) + b"\x95" + bytes(8) + b"NNN.", FormatError),
    "frame too long": (b"\x95" + struct.pack("<Q", 1 << 62) + b"N.", TruncatedError),
    "extension registry": (b"\x82\x01.", FormatError),
    "out-of-band buffer": (b"\x97.", FormatError),
    "persistent id": (b"NQ.", FormatError),
    "persistent text": (b"Pabc\n.", FormatError),
    "call of a number": (b"K\x01)R.", FormatError),
    "call with a list": (b"ccollections\nOrderedDict\n]R.", FormatError),
    "BUILD of a name": (b"cmodule\nClass\n}b.", FormatError),
    "BUILD of a dict": (b"}}b.", FormatError),
    "SETITEM on a list": (b"]K\x01K\x02s.", FormatError),
    "SETITEMS of three": (b"}(K\x01K\x02K\x03u.", FormatError),
    "APPEND to a dict": (b"}K\x01a.", FormatError),
    "a list as a key": (b"}]Ns.", FormatError),
    "a name that is no text": (b"K\x01K\x02\x93.", FormatError),
}  # fmt: skip


@pytest.mark.parametrize(("data", "error"), BROKEN.values(), ids=BROKEN)
def test_broken_pickles_are_refused(data, error):
    with pytest.raises(error):
        load(data)


@pytest.mark.parametrize("code", [b"I", b"L", b"F"])
def test_a_text_that_is_no_number_is_not_quoted_at_length(code):
    with pytest.raises(FormatError) as caught:
        load(code + b"x" * 5000 + b"\n.")
    assert len(caught.value.message) < 200


def test_trailing_bytes_are_the_caller_s_choice():
    assert load(b"N.more", trailing=True) is None


def test_dup_and_pop_are_legal():
    assert load(b"K\x0120.") == 1
    assert load(b"(N0K\x01t0K\x02.") == 2


def test_memo_numbers_are_those_of_a_pickler():
    assert load(b"Nr\x00\x80\x00\x000j\x00\x80\x00\x00.") is None
    for data in (b"Nr\x00\x28\x6b\xee.", b"Np4000000000\n.", b"Np-1\n."):
        with pytest.raises(FormatError) as caught:
            load(data)
        assert caught.value.offset == 1


def test_bytearray_of_a_size_is_not_made():
    value = load(b"cbuiltins\nbytearray\n(\x8a\x05\x00\x00\x00\x00\x10tR.")
    assert isinstance(value, PickleObject)


def test_self_reference():
    items = load(b"]q\x00h\x00a.")
    assert items[0] is items


def test_shared_lists_take_no_more_than_the_file():
    data = b"]q\x00" + b"".join(b"0](h" + bytes((n,)) + b"h" + bytes((n,)) + b"e" + b"q" + bytes((n + 1,))
                                 for n in range(30)) + b"."  # fmt: skip
    items = load(data)
    assert items[0] is items[1]


def test_hash_bomb_is_not_hashed():
    bomb = b"K\x01q\x00" + b"".join(
        b"0(" + (b"h" + bytes((n,))) * 4 + b"tq" + bytes((n + 1,)) for n in range(30)
    )
    began = time.process_time()
    mapping = load(b"}" + bomb + b"Ns.")
    assert time.process_time() - began < 10
    assert isinstance(next(iter(mapping)), OpaqueKey)


def test_integers_that_collide_are_not_hashed():
    prime = (1 << 61) - 1
    data = pickle.dumps({prime * (n << 8): None for n in range(2)}, 2)
    assert len(load(data)) == 2
    large = b"".join(
        b"\x8a\x10" + (prime * (1 << 10) * n).to_bytes(16, "little") + b"N" for n in range(20_000)
    )
    began = time.process_time()
    assert len(load(b"}(" + large + b"u.")) >= 19_000
    assert time.process_time() - began < 2


@pytest.mark.long
def test_200000_levels_deep():
    assert load(b"]" * 200_000 + b"a" * 199_999 + b".") is not None
    assert load(b")" + b"\x85" * 200_000 + b".") is not None


def test_copies_of_one_long_text_are_bounded(golden):
    text = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)
    repeat = b"(h\x00h\x01tq\x020" + b"c_codecs\nencode\nh\x02R0" * 1000
    data = text + b"q\x000X\x06\x00\x00\x00latin1q\x010" + repeat + b"N."
    with pytest.raises(FormatError) as caught:
        load(data)
    golden(caught.value)


@pytest.mark.long
def test_time_is_linear():
    def duration_s(count: int) -> float:
        data = pickle.dumps([{"name": str(n), "value": (n, n + 1)} for n in range(count)], 2)
        began = time.process_time()
        load(data)
        return time.process_time() - began

    duration_s(1000)
    assert duration_s(100_000) < 40 * max(duration_s(10_000), 0.01)


def test_bit_flips_raise_only_our_errors():
    seed = pickle.dumps({"a": [1.5, (2, "x")], "o": collections.OrderedDict(k=argparse.Namespace(v=1))}, 2)
    choose = random.Random(2)
    for _ in range(2000):
        flipped = bytearray(seed)
        for _ in range(choose.randint(1, 3)):
            flipped[choose.randrange(len(seed))] ^= 1 << choose.randrange(8)
        with contextlib.suppress(CkpttoolError):
            load(bytes(flipped))


@given(st.binary(max_size=200))
def test_any_bytes_raise_only_our_errors(data):
    with contextlib.suppress(CkpttoolError):
        load(data)


def test_persistent_ids_and_names():
    data = dumps([PersistentId(("storage", Global("torch", "FloatStorage"), "0", "cpu", 3))])
    assert load(data, persistent=lambda pid: pid[2]) == ["0"]
    assert data == dumps([PersistentId(("storage", Global("torch", "FloatStorage"), "0", "cpu", 3))])


def test_written_sets_and_ordered_dicts_are_python_s():
    ordered = Dict("collections.OrderedDict")
    ordered["a"] = Set("builtins.set", [1, 2])
    ordered.state = {"_metadata": {"": 1}}
    read_back = pickle.loads(dumps(ordered))
    assert type(read_back) is collections.OrderedDict
    assert read_back == {"a": {1, 2}}
    assert read_back._metadata == {"": 1}


def test_long_bytes_may_stay_where_they_are():
    values = [b"a" * 100, b"b" * 101, bytearray(b"c" * 200)]
    for protocol in (3, 4, 5):
        data = pickle.dumps(values, protocol)
        short, *long = load(data, inline=100)
        assert short == values[0]
        assert [bytes(item) for item in long] == values[1:]
        assert all(
            isinstance(item, StoredBytes) and data[item.at :][: item.length] == bytes(item) for item in long
        )
    with pytest.raises(TruncatedError):
        load(b"B\xff\xff\xff\x7fabc.", inline=100)


class Named(collections.namedtuple("Named", "a b")):
    @property
    def half(self):
        return self.a / 2

    @classmethod
    def one(cls):
        return cls(1, 2)

    @staticmethod
    def two():
        return 2


def test_classes_by_value_are_inert():
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        for value in (Named, Named(1, 2), Named.one, type(None), typing.Optional[int], lambda x: x):  # noqa: UP045
            assert isinstance(load(cloudpickle.dumps(value)), PickleObject)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
