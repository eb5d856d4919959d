"""The names whose pickles are data: an allow list, for lists of what is dangerous keep losing.

What of the standard library is not in it can act on the world (os, subprocess, builtins.eval, uuid.getnode,
...): that it is only named makes no difference, since a pickle can have a name called by what it is given to.
What is outside of the standard library and not in it is a class or function of whatever is installed; those
of its functions that are known to load, run or install things count as acting.
"""

from __future__ import annotations

import sys
from typing import Any

from ckpttool.wire.asked import CLASSES, CODE, PLAIN, Verdict
from ckpttool.wire.pickle_values import RENAMED, Global, Object, Stored


def _names(module: str, names: str) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for name in names.split())


_DATA = frozenset().union(
    _names("_codecs", "encode"),
    _names("_collections", "_tuplegetter"),
    _names("_io", "BytesIO StringIO"),
    _names("_random", "Random"),
    _names("_weakrefset", "WeakSet"),
    _names("argparse", "Namespace"),
    _names("array", "array _array_reconstructor"),
    _names(
        "builtins",
        "bool bytearray bytes classmethod complex dict float frozenset int list object property range "
        "reversed set slice staticmethod str tuple NotImplemented Ellipsis long unicode xrange",
    ),
    _names("collections", "ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque"),
    _names("copyreg", "__newobj__ __newobj_ex__ _reconstructor"),
    _names("dataclasses", "Field _DataclassParams _FIELD _MISSING_TYPE"),
    _names("datetime", "date datetime time timedelta timezone tzinfo"),
    _names("decimal", "Decimal"),
    _names("fractions", "Fraction"),
    _names("functools", "partial"),
    _names("io", "BytesIO StringIO"),
    _names(
        "ipaddress", "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network"
    ),
    _names("itertools", "chain combinations count cycle islice permutations product repeat zip_longest"),
    _names("logging", "getLogger"),
    _names("operator", "attrgetter itemgetter"),
    _names("pathlib", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"),
    _names("pathlib._local", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"),
    _names("random", "Random"),
    _names("re", "_compile"),
    _names("time", "struct_time"),
    _names("types", "SimpleNamespace"),
    _names("uuid", "SafeUUID UUID"),
    _names("zoneinfo", "ZoneInfo"),
)  # fmt: skip
# Classes that a pickle may name, as bases and annotations of classes by value; calling them is another thing.
_NAMED = frozenset().union(
    _names("abc", "ABC ABCMeta"),
    _names("builtins", "type super"),
    _names("collections.abc", "Callable Iterable Iterator Mapping MutableMapping Sequence Set Hashable"),
    _names("enum", "Enum IntEnum Flag IntFlag EnumMeta EnumType"),
    _names("numbers", "Complex Integral Number Rational Real"),
    _names("types", "FunctionType CodeType MethodType NoneType"),
    _names(
        "typing",
        "Any Callable ClassVar Dict Final FrozenSet Generic Iterable Iterator List Literal Mapping "
        "NamedTuple Optional Protocol Sequence Set Tuple Type TypeVar Union",
    ),
)  # fmt: skip
_BUILTIN_ERRORS = ("Error", "Exception", "Warning", "Interrupt", "Iteration")

# What numpy and torch name in the pickles that they write themselves: types of elements, classes of storages
# (torch/_weights_only_unpickler.py, _get_allowed_globals, has torch's).
_NUMBERS = (
    "bool float16 float32 float64 complex64 complex128 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
)
_TYPED = "BFloat16 Bool Byte Char Double Float Half Int Long Short"
_LIBRARIES = frozenset().union(
    _names("numpy", f"{_NUMBERS} bool_ float_ int_ str_ bytes_"),
    _names("numpy", "dtype ndarray number floating integer generic"),
    _names("numpy.dtypes", " ".join(f"{n.capitalize()}DType" for n in _NUMBERS.split()).replace("Ui", "UI")),
    _names("torch", f"{_NUMBERS} complex32 bfloat16 Size Tensor device"),
    _names("torch", " ".join(f"int{n} uint{n}" for n in range(1, 8))),
    _names("torch", "bits8 bits16 bits1x8 bits2x4 bits4x2 qint8 qint32 quint8 quint2x4 quint4x2"),
    _names("torch", "float4_e2m1fn_x2 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"),
    _names("torch", "float8_e8m0fnu"),
    _names("torch", "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc contiguous_format"),
    _names("torch", "per_tensor_affine per_tensor_symmetric"),
    _names("torch", "per_channel_affine per_channel_symmetric per_channel_affine_float_qparams"),
    _names("torch", "QInt8Storage QInt32Storage QUInt8Storage QUInt4x2Storage QUInt2x4Storage"),
    _names("torch", "ComplexFloatStorage ComplexDoubleStorage UntypedStorage"),
    _names("torch.cuda", "ComplexFloatStorage ComplexDoubleStorage"),
    _names("torch.storage", "TypedStorage UntypedStorage _UntypedStorage _TypedStorage"),
    *(
        _names(module, " ".join(f"{each}{kind}" for each in _TYPED.split()))
        for module in ("torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse")
        for kind in ("Tensor", "Storage")
    ),
    _names("torch.nn.parameter", "Parameter Buffer"),
    _names("torch._tensor", "_rebuild_from_type_v2 _rebuild_from_type"),
    _names(
        "torch._utils",
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
        "_rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor _rebuild_nested_tensor "
        "_rebuild_wrapper_subclass "
        "_rebuild_meta_tensor_no_storage _rebuild_device_tensor_from_numpy "
        "_rebuild_device_tensor_from_cpu_tensor",
    ),
)  # fmt: skip
# Rebuilt here as data; loading compiles and runs the source code that stands beside the data
# (torch/fx/graph_module.py, reduce_graph_module).
_RUNS = frozenset(("torch.fx.graph_module.reduce_graph_module",))

# Functions of libraries that unpickle, run or install what they are given.
_LOADS = frozenset().union(
    _names("torch", "load"),
    _names("torch.hub", "load load_state_dict_from_url download_url_to_file"),
    _names("torch.serialization", "load"),
    _names("torch.jit", "load"),
    _names("torch.jit._serialization", "load"),
    _names("numpy", "load fromfile"),
    _names("numpy.lib.npyio", "load"),
    _names("numpy.lib._npyio_impl", "load"),
    _names("numpy.testing", "runstring"),
    _names("numpy.testing._private.utils", "runstring"),
    _names("joblib", "load"),
    _names("joblib.numpy_pickle", "load"),
    _names("pandas", "eval read_pickle"),
    _names("pandas.io.pickle", "read_pickle"),
    *(
        _names(f"{module}.saving.pickle_utils", "deserialize_model_from_bytecode")
        for module in ("keras", "keras.src", "tf_keras.src", "tensorflow.python.keras")
    ),
    *(
        _names(module, "load loads")
        for module in (
            "cloudpickle",
            "cloudpickle.cloudpickle",
            "cloudpickle.cloudpickle_fast",
            "dill",
            "dill._dill",
            "ray.cloudpickle",
            "ray.cloudpickle.cloudpickle",
        )
    ),
)
# Modules, with all below them, whose functions install packages, run code, or connect for a living.
_ACTING = frozenset(
    (
        *(
            "IPython",
            "dotenv",
            "fabric",
            "invoke",
            "pip",
            "pkg_resources",
            "requests",
            "setuptools",
            "sh",
            "yaml",
        ),
        *(
            "numpy.distutils",
            "numpy.f2py",
            "torch._dynamo",
            "torch._inductor",
            "torch.jit.unsupported_tensor_ops",
        ),
        *("torch.fx.experimental", "torch.utils._config_module", "torch.utils.bottleneck"),
        *("torch.utils.collect_env", "torch.utils.cpp_extension", "torch.utils.data.datapipes"),
    )
)
_STEPS = 4  # of the longest of these names
# torch/storage.py: torch.load of the bytes that it is given; torch pickles every storage so.
_EMBEDDED = "torch.storage._load_from_bytes"
_PICKLES, _WINDOW = 5, 1 << 16  # what stands before the numbers of such a storage (torch/serialization.py)

# Builtin types that cloudpickle makes by name, whose making runs nothing (cloudpickle.py, _builtin_type).
_MADE = frozenset(
    (
        "CellType",
        "CodeType",
        "FunctionType",
        "GenericAlias",
        "LambdaType",
        "MappingProxyType",
        "MethodType",
        "ModuleType",
        "SimpleNamespace",
    )
)


# Modules of Pythons older and newer than the one that reads (the standard library's, by its release notes).
_OLD_AND_NEW = (
    "__builtin__ _interpreters _pyrepl _xxsubinterpreters asynchat asyncore audioop binhex cgi cgitb crypt "
    "distutils httplib imghdr imp lib2to3 macpath mailcap msilib nis nntplib ossaudiodev pipes popen2 smtpd "
    "sndhdr spwd sunau telnetlib urllib2 uu xdrlib"
)
_OTHER_VERSIONS = frozenset(_OLD_AND_NEW.split())


def is_standard(target: Global) -> bool:
    """Say whether a name is of the standard library, whichever machine's and version's."""
    top = target.module.partition(".")[0]
    return top in sys.stdlib_module_names or top in RENAMED or top in _OTHER_VERSIONS


def named(target: Global, *, rebuilt: bool) -> Verdict:
    """Return the verdict on a name that is not called; `rebuilt`: calls of it become data here."""
    full = target.full
    if _acts(target) or _leads_on(target.name):
        return CODE
    if rebuilt or full in _DATA or full in _LIBRARIES:
        return PLAIN
    if not is_standard(target):
        return CLASSES
    return PLAIN if full in _NAMED or _is_error(target) else CODE


def called(target: Global, args: tuple[Any, ...]) -> Verdict:
    """Return the verdict on a call that was not made."""
    full = target.full
    if _acts(target) or _leads_on(target.name) or (full == _EMBEDDED and _holds_code(args)):
        return CODE
    if not is_standard(target):
        return PLAIN if full in _LIBRARIES else CLASSES
    if full in _DATA:
        return CODE if _takes_more(full, args) else PLAIN
    return PLAIN if _is_error(target) or _looks(full, args) else CODE


def _acts(target: Global) -> bool:
    if target.full in _RUNS or target.full in _LOADS:
        return True
    steps = target.module.split(".")
    return any(".".join(steps[:end]) in _ACTING for end in range(1, min(len(steps), _STEPS) + 1))


def _holds_code(args: tuple[Any, ...]) -> bool:
    """Say whether the pickles at the start of a storage's own bytes act, or cannot be judged."""
    from ckpttool.wire.pickle_reader import scan

    data = bytes(args[0]) if len(args) == 1 and isinstance(args[0], bytes | Stored) else b""
    at = 0
    for _ in range(_PICKLES):
        found = scan(data[at : at + _WINDOW])
        found = scan(data[at:]) if found.cut else found
        if found.end is None or any(each.verdict == CODE for each in found.asked):
            return True
        at += found.end
    return False


def _is_error(target: Global) -> bool:
    # Classes of exceptions are data too; builtins keeps them beside eval and open.
    return target.module == "builtins" and target.name.endswith(_BUILTIN_ERRORS) and "." not in target.name


def _leads_on(name: str) -> bool:
    """Say whether a dotted name walks to where it does not say: `os.system` of any module that imports os."""
    steps = name.split(".")
    if len(steps) < 2:
        return False
    inner = any(step in sys.stdlib_module_names for step in steps[:-1])
    return inner or any(step.startswith("__") and step.endswith("__") for step in steps)


def _takes_more(full: str, args: tuple[Any, ...]) -> bool:
    """Say whether a call of a data class asks for what no file holds, or goes on to a third party.

    `bytearray(2**36)` is so many zeros; what copyreg makes of a class by value is then given its state by it.
    """
    if not args:
        return False
    if full in ("builtins.bytes", "builtins.bytearray"):
        return type(args[0]) is int
    return full.startswith("copyreg.") and isinstance(args[0], Object)


def led_to(target: Object) -> Global | None:
    """Return what calling the result of a call would run; None where that makes a value and runs nothing.

    Such a result is no data any more: `functools.partial(os.system, "...")()`, `attrgetter("system")(...)()`,
    a function or class by value. A result of a result was told when the first was called.
    """
    made_by = target.function
    if not isinstance(made_by, Global):
        return None
    if made_by.name == "_builtin_type" and "cloudpickle" in made_by.module and target.args:
        kind = target.args[0]
        if len(target.args) == 1 and type(kind) is str and kind in _MADE:
            return None
    inner = target.args[0] if made_by.full == "functools.partial" and target.args else None
    return inner if isinstance(inner, Global) and target.state is None else made_by


def _looks(name: str, args: tuple[Any, ...]) -> bool:
    """Say whether a call only looks something up, in a way that leads nowhere else.

    Pickler.save_type (Lib/pickle.py) stores the type of None as a call of `type`; cloudpickle stores classes
    by value, and with them `tuple.__new__` of named tuples and the annotation `Optional[int]` (by getitem).
    """
    if not args:
        return False
    first = args[0]
    if name == "builtins.getattr":
        # How bound methods are stored; of a module or class it would be a way to anything.
        return isinstance(first, Object) or args in _MAKERS
    if name == "builtins.type":
        return len(args) == 1 and (first is None or isinstance(first, Global))
    return name == "_operator.getitem" and isinstance(first, Global) and first.module == "typing"


_MAKERS = tuple((Global("builtins", kind), "__new__") for kind in ("object", "tuple", "int", "str", "float"))
