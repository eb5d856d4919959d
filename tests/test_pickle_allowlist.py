"""Pickles with functions and classes of other libraries: what no allow list names fails the gate."""

from __future__ import annotations

import base64
import bz2
import gzip
import importlib
import inspect
import io
import json
import pickle
import types
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.check import CheckOptions, check
from ckpttool.commands.doctor import diagnose
from ckpttool.core import worst_verdict
from ckpttool.core.code_references import CLASSES, CODE, PLAIN, UNKNOWN, UNSAFE
from ckpttool.encodings import dumps, parse_pickle, pickle_audit, pickle_reader
from ckpttool.formats import open_checkpoint, pickles, torch_tensors
from tests.conftest import TORCH_SAMPLE, in_process
from tests.hostile.crafted_payloads import zip_bytes
from tests.hostile.crafted_pickle import beside
from tests.pickles import short
from tests.sarif_schema import SCHEMA
from tests.test_format_pytorch import archive, floats, tensor


def name(full: str) -> bytes:
    module, _, last = full.rpartition(".")
    return short(module) + short(last) + b"\x93"


def call(full: str, *args: bytes) -> bytes:
    return name(full) + b"(" + b"".join(args) + b"tR"


def new(full: str, *args: bytes) -> bytes:
    return name(full) + b"(" + b"".join(args) + b"t\x81"


def inst(full: str) -> bytes:
    module, _, last = full.rpartition(".")
    return f"i{module}\n{last}\n".encode()


TEXT = short("x")
# Functions and classes of installed libraries that read, write, connect or run what they are given.
GADGETS = """
IPython.core.interactiveshell.InteractiveShell IPython.utils.capture.run_cell PIL.ImageFont.truetype
aiohttp.client.request ansible.module_utils.basic.run_command asyncssh.connect boto3.client
bs4.BeautifulSoup click.launch click.termui.edit click.termui.launch click.utils.open_file cloudpickle.loads
cv2.imwrite dask.compute dill.loads django.utils.module_loading.import_string docutils.core.publish_file
fsspec.open fsspec.core.open_files git.Repo.clone_from google.cloud.storage.Client
gym.envs.registration.load gym.make gymnasium.envs.registration.load_env_creator gymnasium.make h5py.File
h5py._hl.files.File httpx.get huggingface_hub.hf_hub_download hydra.utils.instantiate imageio.imwrite
jax.numpy.load jax.numpy.save jinja2.Template jinja2.environment.Environment jinja2.nodes.Impossible
jinja2.sandbox.SandboxedEnvironment joblib.Memory joblib.dump joblib.load joblib.parallel.Parallel
keras.models.load_model keras.src.saving.saving_lib.load_model keras.utils.get_file lightgbm.Booster
llvmlite.binding.load_library_permanently mako.template.Template matplotlib.pyplot.savefig
mlflow.pyfunc.load_model networkx.read_gpickle networkx.read_yaml
numba.core.serialize._unpickle__CustomPickled numexpr.evaluate numpy.DataSource numpy.ctypeslib.load_library
numpy.fromfile numpy.genfromtxt numpy.lib.npyio.load numpy.load numpy.loadtxt numpy.memmap numpy.save
numpy.savetxt numpy.savez numpy.testing.measure numpy.testing.rundocs numpy.testing.runstring
numpy.lib._npyio_impl.loadtxt nltk.data.load onnx.load omegaconf.OmegaConf.load onnxruntime.InferenceSession
opcua.Client orbax.checkpoint.PyTreeCheckpointer pandas.eval pandas.read_csv pandas.read_pickle
pandas.io.common.get_handle pandas.core.computation.eval.eval paramiko.SSHClient patsy.dmatrix pip.main
pkg_resources.run_script psutil.Popen psutil._psposix.pid_exists psycopg2.connect pyarrow.plasma.connect
pydantic.v1.utils.import_string pygments.formatters.load_formatter_from_file pymysql.connect pytest.main
ray.cloudpickle.loads ray.get redis.Redis requests.get scipy.io.loadmat scipy.io.savemat scipy.weave.inline
selenium.webdriver.Chrome setuptools.setup sh.Command sklearn.datasets.fetch_openml sqlalchemy.create_engine
stable_baselines3.PPO.load stable_baselines3.common.save_util.load_from_pkl
statsmodels.iolib.smpickle.load_pickle sympy.parsing.sympy_parser.parse_expr sympy.sympify
sympy.utilities.lambdify.lambdify tensorflow.io.write_file tensorflow.load_op_library
tensorflow.python.ops.gen_io_ops.write_file tensorflow.raw_ops.ReadFile tensorflow.saved_model.load
tf_keras.src.saving.pickle_utils.deserialize_model_from_bytecode torch._C._jit_get_operation
torch._dynamo.guards.GuardBuilder.get torch._inductor.codecache.PyCodeCache.load torch.classes.load_library
torch.fx.graph_module._exec_with_source torch.fx.graph_module._forward_from_src torch.hub._import_module
torch.hub.load torch.jit._script.script torch.jit.load torch.jit.unsupported_tensor_ops.execWrapper
torch.load torch.ops.load_library torch.package.PackageImporter
torch.package.package_importer._patched_getattr torch.save torch.serialization.load
torch.utils._config_module.load_config torch.utils.cpp_extension.load_inline torch.utils.data.DataLoader
torch.utils.tensorboard.SummaryWriter torch.utils.model_dump.main torchvision.datasets.utils.download_url
tqdm.contrib.telegram.tqdm traitlets.import_item transformers.AutoModel.from_pretrained
transformers.dynamic_module_utils.get_class_in_module triton.compile twisted.internet.process.Process
typer.launch urllib3.PoolManager uvicorn.run wandb.init watchdog.tricks.ShellCommandTrick
webdriver_manager.chrome.ChromeDriverManager werkzeug.utils.import_string xgboost.Booster yaml.load
yaml.unsafe_load zarr.open zmq.Context
""".split()  # noqa: SIM905
CALLS: dict[str, Callable[[str], bytes]] = {
    "REDUCE": lambda full: call(full, TEXT),
    "NEWOBJ with arguments": lambda full: new(full, TEXT),
    "NEWOBJ_EX": lambda full: name(full) + b")}" + TEXT + b"K\x01s\x92",
    "OBJ": lambda full: b"(" + name(full) + TEXT + b"o",
    "INST": lambda full: b"(" + TEXT + inst(full),
    "INST without arguments": lambda full: b"(" + inst(full),
    "copyreg.__newobj__": lambda full: call("copyreg.__newobj__", name(full), TEXT),
    "copyreg.__newobj_ex__": lambda full: call("copyreg.__newobj_ex__", name(full), b"(" + TEXT + b"t", b"}"),
    "a partial": lambda full: call("functools.partial", name(full)) + b"(" + TEXT + b"tR",
    "an attribute": lambda full: call("builtins.getattr", new(full), TEXT) + b")R",
}


@pytest.mark.parametrize("kind", CALLS)
def test_no_library_function_is_called_unseen(kind: str) -> None:
    for full in GADGETS:
        data = CALLS[kind](full) + b"."
        for builders in (pickles.BUILDERS, torch_tensors.BUILDERS):
            references = parse_pickle(data, builders=builders).code_references
            unsafe = {reference.name for reference in references if reference.verdict == CODE}
            assert unsafe & {full, "builtins.getattr"}, (kind, full)
        assert any(reference.verdict == CODE for reference in pickle_reader.scan_pickle(data).code_references)


def test_an_instance_of_an_unknown_class_is_a_verdict_of_its_own() -> None:
    for full in {*GADGETS, "my.net.Policy", "__main__.Net"} - pickle_audit._INSTANCES:
        for content in (
            new(full),
            new(full) + b"}" + TEXT + b"K\x01sb",
            call("copyreg.__newobj__", name(full)),
        ):
            references = parse_pickle(content + b".").code_references
            assert worst_verdict(references) == UNKNOWN, full
        assert worst_verdict(parse_pickle(name(full) + b".").code_references) == CLASSES


def code(names: bytes, constants: bytes = b"(Nt") -> bytes:
    """Return the call that creates the code of a function, as cloudpickle stores it under Python 3.8."""
    numbers = b"K\x00" * 6
    kind = call("cloudpickle.cloudpickle._builtin_type", short("CodeType"))
    return (
        kind
        + b"("
        + numbers
        + b"C\x01d"
        + constants
        + names
        + b")"
        + short("f.py")
        + short("f")
        + b"K\x01C\0))tR"
    )


FUNCTION = "cloudpickle.cloudpickle._make_function"
SYMPIFY = name("sympy.sympify")
TENSOR = name("torch.Tensor")
ARGUMENTS = b"(" + TEXT + b"t"
NONE = b"N"
INNER = b"\x80\x04" + call("sympy.sympify", TEXT) + b"."
BYTES = b"B" + len(INNER).to_bytes(4, "little") + INNER
MODULE_NAME = "cloudpickle.cloudpickle.subimport"
SKELETON = "cloudpickle.cloudpickle._make_skeleton_class"
FROM_TYPE = "torch._tensor._rebuild_from_type"


def function(*names: str, constants: bytes = b"(Nt") -> bytes:
    """Return a function by value whose code uses these names."""
    used = b"(" + b"".join(map(short, names)) + b"t"
    return call(FUNCTION, code(used, constants), b"}", NONE, NONE, NONE)


# Listed functions that would call or instantiate what the pickle gives them, and functions by value.
DETOURS = {
    "tensor of a type": call(f"{FROM_TYPE}_v2", SYMPIFY, TENSOR, ARGUMENTS, b"}"),
    "tensor of a type of a type": call(
        f"{FROM_TYPE}_v2", name(f"{FROM_TYPE}_v2"), TENSOR, b"(" + SYMPIFY + TENSOR + ARGUMENTS + b"}t", b"}"
    ),
    "tensor of an old type": call(FROM_TYPE, SYMPIFY, TENSOR, ARGUMENTS, b"}"),
    "JAX array": call("jax._src.array._reconstruct_array", SYMPIFY, ARGUMENTS, NONE, b"}"),
    "dill array": call("dill._dill._create_array", SYMPIFY, ARGUMENTS, b")", b"}"),
    "random state": call("numpy.random._pickle.__randomstate_ctor", TEXT, SYMPIFY),
    "bit generator": call("numpy.random._pickle.__bit_generator_ctor", name("h5py.File")),
    "masked array": call("numpy.ma.core._mareconstruct", name("my.Array"), name("my.Base"), b")", b"C\x01b"),
    "universal function": call("numpy.core._ufunc_reconstruct", short("os"), short("system")),
    "base class": call("copyreg._reconstructor", name("my.A"), name("h5py.File"), TEXT),
    "metaclass": call(SKELETON, SYMPIFY, TEXT, b")", b"}", NONE, NONE),
    "module by name": call(MODULE_NAME, short("os")),
    "module of a module": call("builtins.getattr", call(MODULE_NAME, short("subprocess")), short("run")),
    "endless list": call("builtins.list", call("itertools.count")),
    "list of a size": call("builtins.list", call("builtins.range", b"\x8a\x05\0\0\0\0\x10")),
    "code that imports": function("os", "system"),
    "code that evaluates": function("eval"),
    "code that loads": function("np", "load"),
    "code that walks": function("__subclasses__"),
    "code in code": function(constants=b"(" + code(b"(" + short("exec") + b"t") + b"t"),
    "code of another form": call("cloudpickle.cloudpickle._builtin_type", short("CodeType")) + b"(K\x01tR",
    "dill code": call(
        "dill._dill._create_code", *[b"K\x00"] * 6, b"C\x01d", b"(Nt", b"(" + short("exec") + b"t", b")"
    ),
    "bytes of a storage": call("torch.storage._load_from_bytes", BYTES),
    "dotted name": call("torch.nn.modules.module.torch.hub.load", TEXT),
    "imported by a listed module": short("torch.nn.modules.module") + short("warnings.warn") + b"\x93)R",
    "subclass of an array": call(
        "numpy.core.multiarray._reconstruct", name("my.Array"), b"K\x00\x85", b"C\x01b"
    ),
    "a wrapper class": call("torch._utils._rebuild_wrapper_subclass", name("my.Tensor")),
}


def space(**attributes: bytes) -> bytes:
    """Return a namespace with these attributes."""
    entries = b"".join(short(key) + value for key, value in attributes.items())
    return call("types.SimpleNamespace") + b"}(" + entries + b"ub"


PARTIAL = call("functools.partial", SYMPIFY, TEXT)
METHOD = call("builtins.getattr", call("argparse.Namespace"), short("_get_kwargs"))
NAMED = b"}" + TEXT + SYMPIFY + b"s"
SUMS = b"}" + short("sum") + SYMPIFY + b"s"
LINEAR = new("torch.nn.modules.linear.Linear")
MODULES = new("torch.nn.modules.container.ModuleList")
# Loading looks up methods on what a pickle has made: an attribute of that name is called.
DETOURS |= {
    "append of a namespace": space(append=SYMPIFY) + TEXT + b"a",
    "extend of a namespace": space(extend=SYMPIFY) + b"(" + TEXT + b"e",
    "add of a namespace": space(add=SYMPIFY) + b"(" + TEXT + b"\x90",
    "append of slots": call("argparse.Namespace") + b"N" + NAMED + b"\x86b" + TEXT + b"a",
    "append of an exception": call("builtins.ValueError") + NAMED + b"b" + TEXT + b"a",
    "items after attributes": MODULES + b"}b" + TEXT + b"a",
    "entries after attributes": MODULES + b"}b" + TEXT + b"Ns",
    "a second state": call("types.SimpleNamespace") + (b"}" + TEXT + b"Nsb") * 2,
    "keys of a namespace": call("builtins.dict", space(keys=PARTIAL)),
    "array of a namespace": call("numpy.float64", space(__array__=PARTIAL)),
    "namespace as a state": LINEAR + space(keys=PARTIAL) + b"b",
    "pop of a state": new("sklearn.preprocessing._data.StandardScaler") + space(pop=PARTIAL) + b"b",
    "partial in a partial": call("functools.partial", PARTIAL),
    "attribute of a method": call("builtins.getattr", METHOD, short("__builtins__")),
    "attribute of a module": call("builtins.getattr", call(MODULE_NAME, short("torch")), short("os")),
    "globals of a function": call(FUNCTION, code(b"(" + short("sum") + b"t"), SUMS, NONE, NONE, NONE),
    "default of a function": call(FUNCTION, code(b")"), b"}", NONE, b"(" + SYMPIFY + b"t", NONE),
    "cell of a function": call("cloudpickle.cloudpickle._make_cell", SYMPIFY),
    "attribute of a class": call(SKELETON, name("builtins.type"), TEXT, b")", NAMED, NONE, NONE),
    "module with attributes": call("cloudpickle.cloudpickle.dynamic_subimport", TEXT, NAMED),
    "generator": call("numpy.random._pickle.__generator_ctor", TEXT, SYMPIFY),
    "class of a bit generator": call("numpy.random._pickle.__bit_generator_ctor", space()),
    "class of an index": call("pandas.core.indexes.base._new_Index", name("h5py.File"), b"}" + TEXT + b"Ns"),
    "another function of NumPy": call("numpy.core._ufunc_reconstruct", short("numpy"), short("savetxt")),
    "attribute of a parameter": call("torch._utils._rebuild_parameter", NONE, b"\x89", NAMED),
    "hook of a layer": LINEAR + b"}" + short("_forward_hooks") + b"}K\x00" + SYMPIFY + b"ssb",
    "static method": call("builtins.staticmethod", SYMPIFY),
}


@pytest.mark.parametrize("payload", DETOURS.values(), ids=DETOURS)
def test_no_listed_function_is_a_detour(payload: bytes) -> None:
    for builders in (pickles.BUILDERS, torch_tensors.BUILDERS):
        assert worst_verdict(parse_pickle(payload + b".", builders=builders).code_references) in UNSAFE
    assert worst_verdict(pickle_reader.scan_pickle(payload + b".").code_references) in UNSAFE


# ------------------------------------------------------------------ the same in every container

CALL = call("sympy.sympify", TEXT)
NETWORK = new("my.net.Policy") + b"}b"


def _sb3(payload: bytes) -> bytes:
    setting = {":type:": "", ":serialized:": base64.b64encode(b"\x80\x04" + payload + b".").decode()}
    state = archive(dumps({"w": tensor()}, 2), {"0": floats(1, 2, 3, 4)})
    members = {"data": json.dumps({"lr_schedule": setting}).encode(), "policy.pth": state}
    return zip_bytes({**members, "_stable_baselines3_version": b"2.3.0"})


def _objects(payload: bytes) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return stream.getvalue() + b"\x80\x04" + payload + b"."


def _tensors(payload: bytes) -> bytes:
    return archive(beside(payload, dumps(tensor(), 2)[2:-1]), {"0": floats(1, 2, 3, 4)})


CONTAINERS: dict[str, Callable[[bytes], bytes]] = {
    "agent.pkl": beside,
    "agent.pt": _tensors,
    "agent.zip": _sb3,
    "agent.npy": _objects,
    "agent.npz": lambda payload: zip_bytes({"x.npy": _objects(payload)}),
    "agent.pkl.gz": lambda payload: gzip.compress(beside(payload)),
    "agent.pkl.bz2": lambda payload: bz2.compress(beside(payload)),
    "agent.joblib": beside,
    "agent.dill": beside,
    "agent.bin": beside,
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("payload", "named"), [(CALL, "sympy.sympify"), (NETWORK, "my.net.Policy")])
def test_check_doctor_and_inspect_agree(container: str, payload: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / container
    path.write_bytes(CONTAINERS[container](payload))
    [checkpoint] = check([str(path)]).checkpoints
    [finding] = [finding for finding in checkpoint.findings if finding.topic == "loading"]
    assert named in finding.sentence
    if checkpoint.error is not None:
        return
    assert any(named in item.sentence for item in diagnose(str(path)).findings if item.topic == "loading")
    shown = in_process("inspect", path)
    assert shown.out.startswith(("RUNS CODE: ", "NEEDS CLASSES: ", "NOT CHECKED: "))
    assert in_process("inspect", path, "--strict").status == 1
    assert in_process("check", path, "--no-numbers", "--quiet").status == 1


def test_the_sarif_of_such_files_is_valid(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for container, write in CONTAINERS.items():
        (tmp_path / container).write_bytes(write(CALL))
    assert in_process("check", tmp_path, "--sarif", tmp_path / "found.sarif").status in (1, 2)
    log = json.loads((tmp_path / "found.sarif").read_text())
    jsonschema.validate(log, SCHEMA)
    rules = [result["ruleId"] for result in log["runs"][0]["results"]]
    assert rules.count("ckpttool/loading") == len(CONTAINERS)


# ------------------------------------------------------------------ the user's own names


def test_allowed_names_widen_the_gate(tmp_path: Path) -> None:
    path = tmp_path / "agent.pkl"
    path.write_bytes(beside(b"](" + CALL + NETWORK + b"e"))
    names = tmp_path / "allowed.toml"
    names.write_text('[allow]\n"sympy.sympify" = "parses our own expressions"\nmy = "our package"\n')
    (tmp_path / ".ckpttool.toml").write_text('allow = ["sympy", "my"]')

    def status(command: str, *options: object) -> int:
        return in_process(command, path, *options, cwd=tmp_path).status

    assert status("check") == 1
    assert status("check", "--allow", "sympy") == 1
    assert status("check", "--allow", "sympy.sympif", "--allow", "m") == 1
    assert status("check", "--allow", "sympy", "--allow", "my.net") == 0
    assert status("check", "--allow-file", names) == 0
    (tmp_path / "walk.pkl").write_bytes(short("my.net") + short("os.system") + b"\x93(" + TEXT + b"tR.")
    assert in_process("check", tmp_path / "walk.pkl", "--allow", "my").status == 1
    assert status("check", "--allow-file", names, "--strict") == 1
    assert check([str(path)], CheckOptions(allowed=frozenset(("sympy", "my")))).clean
    topics = diagnose(str(path)).findings
    assert [topic.topic for topic in topics].count("loading") == 2
    assert not in_process("inspect", path, "--allow", "sympy", "--allow", "my").out.startswith(
        ("RUNS CODE: ", "NOT CHECKED: ")
    )
    verdicts = {
        row["name"]: row["verdict"] for row in in_process("inspect", path, "--json").json()["asks"]["names"]
    }
    assert (verdicts["sympy.sympify"], verdicts["my.net.Policy"]) == (CODE, UNKNOWN)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (None, "not_found"),
        ("allow = 3", "format"),
        ("[[", "format"),
        ('allow = ["a b"]', "usage"),
        ("", "format"),
        ("[allow]\nmy.net = 'why'", "format"),
        ("[allow]\n'my.net' = ' '", "format"),
        ("allow = " + "1" * 5000, "format"),
    ],
)
def test_a_file_of_names_that_is_none_is_refused(text: str | None, kind: str, tmp_path: Path) -> None:
    names = tmp_path / "names.toml"
    if text is not None:
        names.write_text(text)
    ran = in_process("check", TORCH_SAMPLE, "--allow-file", names, "--json")
    assert ran.status == 2
    assert ran.json()["error"]["kind"] == kind


# ------------------------------------------------------------------ no false alarms

Pair = namedtuple("Pair", "a b")


@pytest.mark.filterwarnings("ignore")
def test_the_lists_name_what_they_say() -> None:
    """Every listed name of an installed library exists; a listed layer has a reviewed `__setstate__`."""
    checked = 0
    for full in pickle_audit._INSTANCES:
        module, _, last = full.rpartition(".")
        if module.partition(".")[0] not in ("torch", "numpy", "gymnasium", "stable_baselines3"):
            continue
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue
        checked += hasattr(loaded, last)
    assert checked > 200


@pytest.mark.torch
def test_listed_layers_only_set_attributes() -> None:
    torch = pytest.importorskip("torch")
    reviewed = {
        "torch.nn.modules.module.Module",
        "torch.nn.modules.activation.MultiheadAttention",
        "torch.nn.modules.activation.Softmin",
        "torch.nn.modules.activation.Softmax",
        "torch.nn.modules.activation.LogSoftmax",
        "torch.nn.modules.conv._ConvNd",
        "torch.nn.modules.pooling.AvgPool3d",
        "torch.nn.modules.rnn.RNNBase",
        "torch.nn.modules.transformer.TransformerEncoderLayer",
        "torch.nn.modules.transformer.TransformerDecoderLayer",
        "torch.nn.modules.upsampling.Upsample",
        "torch.nn.modules.module._WrappedHook",
    }
    for full in pickle_audit._INSTANCES:
        module, _, last = full.rpartition(".")
        if not module.startswith("torch.nn.modules."):
            continue
        result = getattr(importlib.import_module(module), last, None)
        if result is None:
            continue  # of another version
        assert inspect.isclass(result), full
        assert issubclass(result, torch.nn.Module) or last == "_WrappedHook", full
        setter = next(item for item in result.__mro__ if "__setstate__" in vars(item))
        assert f"{setter.__module__}.{setter.__qualname__}" in reviewed, full


def test_every_builder_is_listed() -> None:
    """What is rebuilt here as data is on a list as well: a scan without builders gives the same verdict."""
    for full in (*pickles.BUILDERS, *torch_tensors.BUILDERS):
        if full == "torch.fx.graph_module.reduce_graph_module":
            continue
        assert full in pickle_audit._DATA | pickle_audit._LIBRARIES | pickle_audit._CALLED, full


@pytest.mark.filterwarnings("ignore")
def test_ordinary_values_pass() -> None:
    random = [
        np.random.default_rng(1),
        np.random.RandomState(3),
        np.random.PCG64(2),
        np.random.SeedSequence(4),
    ]
    values = {
        "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
        "random": random,
        "masked": np.ma.masked_array([1.0, 2.0], mask=[0, 1]),
        "matrix": np.matrix([[1, 2]]),
        "record": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        "function": np.add,
        "objects": np.array([1, None, "x"], object),
        "settings": types.SimpleNamespace(a=1),
    }
    for label, value in values.items():
        for protocol in (2, 4, 5):
            references = parse_pickle(
                pickle.dumps(value, protocol), builders=pickles.BUILDERS
            ).code_references
            assert worst_verdict(references) in (PLAIN, CLASSES), (label, references)


def test_arrays_of_any_order_keep_their_numbers() -> None:
    """NumPy 2.4 stores an array whose axes are permuted with the permutation (numpy/_core/numeric.py)."""
    arrays = [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(1, 0, 2),
        np.arange(120, dtype=np.uint8).reshape(1, 4, 5, 6).transpose(0, 3, 1, 2),
        np.zeros((0, 3, 2)).transpose(1, 0, 2),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ]
    for array in arrays:
        parts = parse_pickle(pickle.dumps(array, 5), builders=pickles.BUILDERS).value.parts()
        order = "F" if parts.fortran else "C"
        read = np.frombuffer(bytes(parts.data), array.dtype).reshape(parts.shape, order=order)
        np.testing.assert_array_equal(read, array)


@pytest.mark.torch
def test_ordinary_modules_and_optimizers_pass(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn
    layers = [
        nn.Linear(3, 4),
        nn.LayerNorm(4),
        nn.GELU(),
        nn.LSTM(3, 4),
        nn.BatchNorm2d(2),
        nn.Conv2d(1, 2, 3),
    ]
    whole = nn.ModuleList(
        [*layers, nn.TransformerEncoderLayer(8, 2), nn.MultiheadAttention(8, 2), nn.Embedding(2, 3)]
    )
    optimizers = [
        getattr(torch.optim, kind)(layers[0].parameters())
        for kind in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "LBFGS")
    ]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers[:2]]
    for label, value in {"whole": whole, "optimizers": optimizers, "schedules": schedules}.items():
        for legacy in (False, True):
            path = tmp_path / f"{label}-{legacy}.pt"
            torch.save(value, path, _use_new_zipfile_serialization=not legacy)
            assert worst_verdict(open_checkpoint(str(path)).code_references) == CLASSES
            assert not [
                item for item in check([str(path)]).checkpoints[0].findings if item.topic == "loading"
            ]


@pytest.mark.environment
def test_files_of_stable_baselines_pass(tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    model = sb3.PPO(
        "MlpPolicy", "Pendulum-v1", n_steps=8, batch_size=8, learning_rate=lambda left: left * 3e-4
    )
    model.save(tmp_path / "ppo.zip")
    model.policy.save(tmp_path / "policy.pth")
    other = sb3.TD3("MlpPolicy", "Pendulum-v1", buffer_size=10)
    other.save(tmp_path / "td3.zip")
    other.save_replay_buffer(tmp_path / "replay.pkl")
    for checkpoint in check([str(tmp_path)]).checkpoints:
        assert not [finding for finding in checkpoint.findings if finding.topic == "loading"], checkpoint
