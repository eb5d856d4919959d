"""What a pickle asks for: every name with a verdict, at little cost; and values as CPython has them."""

from __future__ import annotations

import collections
import pickle
import random
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import (
    CkpttoolError,
    CodeReference,
    FormatError,
    LimitError,
    Limits,
    dangerous_calls,
    limits,
    merge_references,
    relocate_references,
    worst_verdict,
)
from ckpttool.encodings import OpaqueKey, Set, dumps, parse_pickle
from ckpttool.formats import open_checkpoint, torch_tensors
from ckpttool.formats.pickles import BUILDERS
from tests.conftest import TORCH_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.hostile.crafted_pickle import beside
from tests.pickles import ACTING, short
from tests.test_format_pytorch import archive, floats, tensor

PLAIN, CLASSES, UNKNOWN, CODE = "plain data", "needs classes", "unknown class", "would run code"


def code_references_of(data: bytes, **options: Any) -> dict[str, CodeReference]:
    return {reference.name: reference for reference in parse_pickle(data, **options).code_references}


def named(full: str, module: str | None = None) -> bytes:
    module = module or full.rpartition(".")[0]
    return short(module) + short(full[len(module) + 1 :]) + b"\x93"


# ------------------------------------------------------------------ verdicts

# What scanners of pickles missed or had to add to their lists of what is dangerous: picklescan's advisories
# (tests/init_data_files.py in github.com/mmaitre314/picklescan, whose files are named by GHSA id), fickling's
# (test/test_bypasses.py in github.com/trailofbits/fickling), and others' lists of names.
ELSEWHERE = """
_aix_support:_read_cmd_output _functools:partial _io:FileIO _io:open _operator:methodcaller
_osx_support:_read_output _posixsubprocess:fork_exec _pyrepl.pager:pipe_pager _xxsubinterpreters:run_string
argparse:FileType asyncio.unix_events:_UnixSubprocessTransport._start atexit:register bdb:Bdb.run
builtins:__import__ builtins:breakpoint builtins:compile builtins:delattr builtins:eval builtins:exec
builtins:filter builtins:getattr builtins:globals builtins:map builtins:open builtins:setattr builtins:vars
cProfile:run cProfile:runctx code:InteractiveInterpreter code:InteractiveInterpreter.runcode codecs:open
collections:eval contextvars:Context.run copyreg:add_extension ctypes:CDLL dataclasses:_create_fn
dill:load dill:loads distutils.file_util:write_file doctest:debug_script dotenv:set_key ensurepip:_run_pip
faulthandler:_sigsegv functools:reduce gc:get_objects http.client:HTTPSConnection
idlelib.autocomplete:AutoComplete.get_entity idlelib.calltip:get_entity
idlelib.debugobj:ObjectTreeItem.SetText idlelib.pyshell:ModifiedInterpreter.runcode
idlelib.run:Executive.runcode importlib:import_module io:FileIO
itertools:starmap itertools:takewhile joblib:load lib2to3.pgen2.grammar:Grammar.loads
lib2to3.pgen2.pgen:ParserGenerator.make_label linecache:getline logging:FileHandler logging.config:dictConfig
mailcap:findmatch marshal:loads multiprocessing.util:spawnv_passfds numpy:load
numpy.f2py.crackfortran:getlincoef numpy.testing._private.utils:runstring operator:methodcaller os:system
pathlib:Path.write_text pathlib:PosixPath.open pickle:loads pip:main pip._internal:main pkgutil:resolve_name
posix:system profile:Profile.run pty:spawn pydoc:locate pydoc:pipepager requests:get runpy:_run_code
runpy:run_path setuptools._distutils.spawn:spawn shutil:rmtree site:addpackage site:os.system
socket:create_connection sqlite3:connect ssl:get_server_certificate string:Formatter.get_field subprocess:run
sys:exit sysconfig:prefix.os.system tempfile:NamedTemporaryFile
timeit:timeit torch:load torch._dynamo.guards:GuardBuilder.get torch._inductor.codecache:compile_file
torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_guards_expression torch.hub:load
torch.jit.unsupported_tensor_ops:execWrapper torch.serialization:load torch.storage:_load_from_bytes
torch.utils._config_module:ConfigModule.load_config torch.utils.bottleneck.__main__:run_cprofile
torch.utils.collect_env:run torch.utils.data.datapipes.utils.decoder:basichandlers trace:Trace.run
types:CodeType types:FunctionType types:FrameType.f_globals.__get__ typing:_eval_type typing:get_type_hints
unittest.mock:_get_target uuid:_get_command_stdout uuid:_popen uuid:getnode venv:create weakref:finalize
webbrowser:open yaml:unsafe_load zipfile:ZipFile
"""


@pytest.mark.parametrize("pair", ELSEWHERE.split())
def test_what_others_missed_is_named(pair: str) -> None:
    module, _, name = pair.partition(":")
    for builders in (BUILDERS, torch_tensors.BUILDERS):
        references = code_references_of(
            named(f"{module}.{name}", module) + b"C\x01ahR.".replace(b"h", b"\x85"), builders=builders
        )
        [reference] = references.values()
        assert reference.calls == 1
        assert reference.verdict == CODE


@pytest.mark.torch
def test_what_torch_allows_is_plain_data() -> None:
    torch = pytest.importorskip("torch")
    known = torch._weights_only_unpickler._get_allowed_globals()
    verdicts = {
        name: code_references_of(named(name) + b".", builders=torch_tensors.BUILDERS)[name].verdict
        for name in known
    }
    assert {name for name, verdict in verdicts.items() if verdict != PLAIN} == set()


def test_data_of_numpy_is_plain() -> None:
    np = pytest.importorskip("numpy")
    value = [
        np.zeros(3),
        np.float32(1),
        np.dtype("i8"),
        np.float64,
        np.int64(3),
        np.array([None]),
        {1},
        {2: 3j},
    ]
    value += [
        bytearray(b"a"),
        collections.OrderedDict(a=1),
        collections.deque([1]),
        Path("x"),
        range(3),
        KeyError,
    ]
    for protocol in range(6):
        result = parse_pickle(pickle.dumps(value, protocol), builders=BUILDERS).code_references
        assert result
        assert worst_verdict(result) == PLAIN, [item for item in result if item.verdict != PLAIN]


CLASSES_BY_VALUE = b"ccloudpickle.cloudpickle\n_make_skeleton_class\n)R"
VERDICTS = {
    "nothing": (b"K\x01.", PLAIN),
    "a class that is named": (named("my.net.Policy") + b".", CLASSES),
    "a class of which one is made": (named("my.net.Policy") + b")\x81.", UNKNOWN),
    "a class that is called": (named("my.net.Policy") + b")R.", CODE),
    "a known class of which one is made": (named("gymnasium.spaces.box.Box") + b")\x81.", CLASSES),
    "os named": (named("os.getcwd") + b".", CODE),
    "os in a partial that is not called": (named("functools.partial") + named("os.getcwd") + b"\x85R.", CODE),
    "a function in a partial": (named("functools.partial") + named("my.net.f") + b"\x85R.", CODE),
    "a class in a partial": (named("functools.partial") + named("builtins.dict") + b"\x85R.", PLAIN),
    "a partial that is called": (named("functools.partial") + named("my.net.f") + b"\x85R)R.", CODE),
    "getattr of an object": (
        named("builtins.getattr") + named("my.A") + b")\x81" + short("m") + b"\x86R.",
        CODE,
    ),
    "that is called": (named("builtins.getattr") + named("my.A") + b")\x81" + short("m") + b"\x86R)R.", CODE),
    "getattr named": (named("builtins.getattr") + b".", CODE),
    "typing named": (named("typing.Any") + b".", PLAIN),
    "typing called": (named("typing.Any") + b")R.", CODE),
    "a class by value": (CLASSES_BY_VALUE + b".", CLASSES),
    "one of a class by value": (CLASSES_BY_VALUE + b")\x81.", CODE),
    "one of it by copyreg": (b"ccopyreg\n__newobj__\n" + CLASSES_BY_VALUE + b"\x85R.", CODE),
    "code by value": (
        named("cloudpickle.cloudpickle._builtin_type")
        + short("CodeType")
        + b"\x85R(C\x01d)("
        + short("exp")
        + b"t)tR.",
        CLASSES,
    ),
    "another builtin": (named("cloudpickle.cloudpickle._builtin_type") + short("exec") + b"\x85R)R.", CODE),
    "a function by value that is called": (named("cloudpickle.cloudpickle._make_function") + b")R)R.", CODE),
    "bytearray of a size": (named("builtins.bytearray") + b"\x8a\x05\0\0\0\0\x10\x85R.", CODE),
    "bytearray of bytes": (named("builtins.bytearray") + b"C\x01a\x85R.", PLAIN),
    "source code of a graph": (named("torch.fx.graph_module.reduce_graph_module") + b"})\x86R.", CODE),
    "a dunder": (named("my.net.Policy.__subclasses__", "my.net") + b")R.", CODE),
    "an exception": (named("builtins.ValueError") + b")R.", PLAIN),
}


@pytest.mark.parametrize(("data", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts(data: bytes, expected: str) -> None:
    for builders in (BUILDERS, torch_tensors.BUILDERS):
        assert worst_verdict(parse_pickle(data, builders=builders).code_references) == expected


@pytest.mark.parametrize(("data", "name"), ACTING.values(), ids=ACTING)
def test_what_acts_is_told_with_its_calls_and_place(data: bytes, name: str) -> None:
    reference = code_references_of(data)[name]
    # The second call is that of the result.
    assert reference.verdict == CODE
    assert reference.calls in (1, 2)
    assert reference.offset is not None
    assert 0 <= reference.offset < len(data)


def test_records_are_counted_and_joined() -> None:
    references = code_references_of(
        b"(" + b"cmy.net\nA\nq\x00" + b"0h\x00)\x81" * 3 + b"cos\ngetcwd\nt.", base=100
    )
    assert references["my.net.A"] == CodeReference("my.net.A", UNKNOWN, 3, 101)
    assert (references["os.getcwd"].calls, references["os.getcwd"].verdict) == (0, CODE)
    here, there = (
        [CodeReference("a", PLAIN, 2, 5)],
        [CodeReference("a", CODE, 1, 7), CodeReference("b", CLASSES)],
    )
    whole = merge_references(
        relocate_references(here, "x.pkl"), relocate_references(relocate_references(there, "in"), "out")
    )
    assert whole == (CodeReference("a", CODE, 3, 7, "out/in"), CodeReference("b", CLASSES, 0, None, "out/in"))
    assert (worst_verdict(whole), worst_verdict([])) == (CODE, PLAIN)
    assert dangerous_calls([*whole, CodeReference("c", CODE), CodeReference("d", CODE, 1, by="keras")]) == [
        "a"
    ]


# ------------------------------------------------------------------ where it is shown


def test_inspect_tells_names_and_exits(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(beside(b"](cos\ngetcwd\n)Rcmy.net\nA\x1b\n)\x81e"))
    process = in_process("inspect", path, "--names", "--strict")
    assert process.status == 1
    golden("\n".join(line for line in process.out.splitlines() if "os.getcwd" in line or "my.net" in line))
    document = in_process("inspect", path, "--json").json()
    assert document["asks"]["verdict"] == CODE
    assert document["details"]["calls"] == ["os.getcwd"]
    [acting] = [name for name in document["asks"]["names"] if name["verdict"] == CODE]
    assert path.read_bytes()[acting["offset"] :].startswith(b"cos\ngetcwd\n")
    plain = in_process("inspect", TORCH_SAMPLE, "--strict")
    assert plain.status == 0
    golden("\n".join(line for line in plain.out.splitlines() if "load" in line))
    assert in_process("inspect", tmp_path, "--strict").status in (1, 2)


def test_a_member_is_told_as_the_place(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    pickled = beside(b"cos\ngetcwd\n)R", dumps(tensor(), 2)[2:-1])
    path.write_bytes(archive(pickled, {"0": floats(1, 2, 3, 4)}))
    references = {reference.name: reference for reference in open_checkpoint(str(path)).code_references}
    assert references["os.getcwd"].where == "archive/data.pkl"
    assert path.read_bytes()[references["os.getcwd"].offset or 0 :].startswith(b"cos\ngetcwd\n")
    assert worst_verdict([row for name, row in references.items() if name != "os.getcwd"]) == PLAIN


# ------------------------------------------------------------------ limits


def test_limits_are_the_users_to_change(golden: Golden) -> None:
    long = b"cos\n" + b"a" * 5000 + b"\n."
    with pytest.raises(LimitError) as caught:
        parse_pickle(long)
    golden(caught.value)
    with limits.using(Limits(pickle_name=6000)):
        assert parse_pickle(long).code_references
    with limits.using(Limits(pickle_integer=3)), pytest.raises(LimitError):
        parse_pickle(b"\x8a\x04\0\0\0\x01.")


@pytest.mark.parametrize("depth", [150, 900])
def test_depth_is_a_limit_and_no_recursion(depth: int, tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(b"\x80\x02" + b"]" * depth + b"K\x07a" + b"a" * (depth - 1) + b".")
    with limits.using(Limits(pickle_depth=2000)):
        assert [leaf.value for _, leaf in open_checkpoint(str(path)).tree.plain()] == [7]
    if depth > 200:
        with pytest.raises(LimitError) as caught:
            open_checkpoint(str(path))
        golden(caught.value)


@pytest.mark.parametrize("inside", [(), ("policy", "data")])
def test_the_depth_that_a_refusal_names_is_enough_for_every_command(
    inside: tuple[str, ...], tmp_path: Path
) -> None:
    """The deepest value is behind another one that exceeds the limit, and in a file with keys above it."""
    deep: Any = 7
    for _ in range(330):
        deep = [deep]
    other: Any = 7
    for _ in range(230):
        other = [other]
    content: Any = {"weight": np.ones((2, 3), "f4"), "near": other, "far": deep}
    for name in inside:
        content = {name: content}
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(content))
    refused = in_process("inspect", path, "--json")
    assert refused.status == 2
    (limit,) = re.findall(r"--limit (\S+)", refused.json()["error"]["hint"])
    for words in (("inspect", path), ("stats", path), ("convert", path, tmp_path / "x.npz")):
        ran = in_process("--limit", limit, *words)
        assert ran.status == 0, ran.err


def test_a_second_state_adds_to_the_first(golden: Golden) -> None:
    value = parse_pickle(
        named("my.A") + b")\x81}" + short("a") + b"K\x01sb}" + short("b") + b"K\x02sb."
    ).value
    assert value.state == {"a": 1, "b": 2}
    with pytest.raises(FormatError) as caught:
        parse_pickle(named("my.A") + b")\x81}b]b.")
    golden(caught.value)


KEY = b"X" + struct.pack("<I", 100_000) + b"k" * 100_000 + b"q\x00"
REPEATS = {
    "long names in each other": KEY + b"0" + b"}h\x00" * 150 + b"K\x01" + b"s" * 150,
    "a long text in a list": KEY + b"0](" + b"h\x00" * 50_000 + b"e",
    "long tuples as keys": KEY + b"0}(" + b"".join(b"(h\x00h\x00h\x00M%btK\x01" % struct.pack("<H", n)
                                                    for n in range(4000)) + b"u",
    "one call's arguments in others": b"(" + b"N" * 20_000 + b"tq\x010cmy.net\nA\nq\x020"
    + b"](" + b"h\x02h\x01R" * 10_000 + b"e",
    "results of results": b"](cmy.net\nA\n" + b")R2" * 10_000 + b"e",
    "sets of one list": b"](" + b"N" * 50_000 + b"eq\x010cbuiltins\nset\nq\x020"
    + b"](" + b"h\x02h\x01\x85R" * 20_000 + b"e",
}  # fmt: skip


@pytest.mark.parametrize("data", REPEATS.values(), ids=REPEATS)
def test_what_is_repeated_costs_no_more_than_the_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(b"\x80\x02" + data + b".")
    began = time.process_time()
    text = ""
    try:
        open_checkpoint(str(path))
    except FormatError as error:
        text = f"{error} {error.hint}"
    assert time.process_time() - began < 3
    assert not text or "--limit pickle_" in text


# ------------------------------------------------------------------ as CPython reads it

WORDS = [
    *(b"K\x01", b"K\x02", b"N", b"\x88", b"\x8c\x01a", b"C\x01b", b"J\xff\xff\xff\xff", b"I01\n", b"I7\n"),
    *(b"L-3L\n", b"G\x3f\xf0" + bytes(6), b"F1.5\n", b"S'x'\n", b"Vy\n", b"\x8a\x01\x05"),
    *(b"\x8b\x01\0\0\0\xff", b"T\x01\0\0\0z", b"U\x01z", b"B\x01\0\0\0q", b"\x96\x01" + bytes(7) + b"q"),
    *(bytes((code,)) for code in b"(((tld012]})aesub\x8f\x85\x86\x87\x90\x91\x94R\x81"),
    *(b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"p1\n", b"g1\n", b"\x80\x04", b"\x80\x63"),
    b"\x95\x03" + bytes(7),
]  # fmt: skip


# A bytearray is bytes here.
_NO_ARRAY = re.compile(r"bytearray\((b'[^']*')\)")


def real(value: Any, output: dict[int, Any]) -> Any:
    """Return what an inert value of plain data is in Python; TypeError where Python cannot hash it."""
    if type(value) is OpaqueKey:
        return real(value.value, output)
    if id(value) in output:
        return output[id(value)]
    if type(value) is list:
        result: list[Any] = output.setdefault(id(value), [])
        result.extend(real(item, output) for item in value)
        return result
    if type(value) is dict:
        table: dict[Any, Any] = output.setdefault(id(value), {})
        table.update((real(key, output), real(item, output)) for key, item in value.items())
        return table
    if type(value) is Set:
        items = (real(item, output) for item in value)
        return set(items) if value.name == "builtins.set" else frozenset(items)
    return tuple(real(item, output) for item in value) if type(value) is tuple else value


def test_what_is_accepted_is_what_python_reads() -> None:
    choose = random.Random(7)
    alike = refused = unhashable = 0
    for _ in range(30_000):
        data = b"".join(choose.choices(WORDS, k=choose.randint(1, 12))) + b"."
        try:
            own_value = parse_pickle(data, trailing=True).value
        except CkpttoolError:
            continue
        try:
            reference = pickle.loads(data)
        except TypeError as error:
            unhashable += "unhashable" in str(error)
            refused += 1
            continue
        assert repr(real(own_value, {})) == _NO_ARRAY.sub(r"\1", repr(reference)), data
        alike += 1
    assert alike > 1000
    # Nothing is hashed here.
    assert refused == unhashable
