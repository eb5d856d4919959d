"""Processes that open a file with a framework: attacks from each are refused, with and without --run-code."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.commands.verify import verify
from ckpttool.core import CkpttoolError, File, UsageError, WorkerError, sandbox
from ckpttool.networks import ModelSpec, worker
from ckpttool.verification import two_models
from ckpttool.verification.sides import ModelSide
from tests import attacks, tensorflow_child, warm
from tests.attacks import Target
from tests.conftest import ROOT

LINUX = sys.platform.startswith("linux")
pytestmark = [
    pytest.mark.skipif(not LINUX, reason="there is no sandbox on this system"),
    pytest.mark.usefixtures("own_framework_process"),
]
# What a process of the user's own code may still do when it loads a file: read, as his code has to.
READS = {"read", "dlopen"}


def _lacks() -> str:
    """Return what this machine lacks, "" if it has all protections."""
    code = "print(sandbox.describe_missing('it', sandbox.restrict(()).missing))"
    return _python(f"from ckpttool.core import sandbox; {code}").strip()


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def system() -> None:
    """Skip where the system has no sandbox: only its lack can be tested there."""
    if lacks := _lacks():
        pytest.skip(lacks)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Target]:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with attacks.target(folder) as target:
        yield target


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where processes have their folders; none is left at the end."""
    folder = tmp_path / "processes"
    folder.mkdir()
    monkeypatch.setattr(worker, "_memory_folder", lambda: str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield folder
    assert list(folder.iterdir()) == []


def test_attacks_succeed_without_a_sandbox(hostile: Target, tmp_path: Path) -> None:
    """The attacks are real: each one is done in a process that is not restricted."""
    there = hostile.paths(own=str(tmp_path))
    code = f"from tests import attacks; print(attacks.outcomes({there!r}))"
    assert ast.literal_eval(_python(code)) == dict.fromkeys(attacks.ATTACKS, "done")
    assert not hostile.untouched


# A probe in the process of each framework, after it has opened a harmless file.

_SAVE_TORCH = """
import torch
model = torch.nn.Linear(3, 2)
torch.jit.script(model).save("model.ts.pt")
torch.save(model.state_dict(), "model.pt")
"""
_SAVE_KERAS = """
import keras
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
model.save("model.keras")
model.save("model.h5")
model.export("saved_model", verbose=False)
"""
_FACTORY = """
import torch
def linear():
    torch.ones(300, 300) @ torch.ones(300, 300)  # starts threads
    return torch.nn.Linear(3, 2)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return harmless models of a framework, saved at the first request."""

    @functools.cache
    def save(framework: str) -> Path:
        tensorflow_child.require(framework)
        folder = tmp_path_factory.mktemp(framework)
        if framework == "onnx":
            _write_onnx(folder / "model.onnx")
            return folder
        status, output = warm.run(framework, _SAVE_TORCH if framework == "torch" else _SAVE_KERAS, folder)
        assert not status, output
        return folder

    return save


def _write_onnx(path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", rows[:1], rows[1:])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))


def _probe(there: dict[str, Any], monkeypatch: pytest.MonkeyPatch, side: ModelSide) -> Any:
    """Open a side as `verify` does and attack from its process; return the outcomes and what is granted."""
    added = (
        "from ckpttool.networks import model_runner; from tests import attacks; "
        "model_runner.HANDLERS['attack'] = lambda session, there: "
        "attacks.outcomes(dict(there, own=str(session.folder))); "
    )
    start, call, end = worker._RESTRICTED.partition("from ckpttool.networks.model_runner import main")
    monkeypatch.setattr(worker, "_RESTRICTED", start + added + call + end)
    with two_models.open_host(side) as host:
        process = two_models.ModelClient(side, host)
        opened = process.open(side.kind, run_code=True)
        declared = opened["inputs"] or [{"name": "x", "shape": [3], "dtype": "float32"}]
        process.ask.prepare(
            inputs=declared,
            batch=1,
            file=side.path if side.like is not None else None,
            part=None,
            run_code=True,
            rounded=None,
        )
        return process.ask.attack(there=there)  # type: ignore[attr-defined]


_FILES = {
    "keras": ("tensorflow", "model.keras"),
    "keras_h5": ("tensorflow", "model.h5"),
    "saved_model": ("tensorflow", "saved_model"),
    "torchscript": ("torch", "model.ts.pt"),
    "factory": ("torch", "model.pt"),
    "onnx": ("onnx", "model.onnx"),
}


_QUICK = ("torchscript", "onnx")
_KINDS = [pytest.param(kind, marks=() if kind in _QUICK else pytest.mark.slow) for kind in _FILES]


@pytest.mark.parametrize("kind", _KINDS)
def test_process_of_each_framework_refuses_all_attacks(
    kind: str,
    hostile: Target,
    models: Callable[[str], Path],
    processes: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del processes
    framework, name = _FILES[kind]
    shutil.copytree(models(framework), hostile.folder, dirs_exist_ok=True)
    path = hostile.folder / name
    there = hostile.paths()
    if (
        kind == "saved_model"
    ):  # a library beside its variables is no part of it, and one of its assets neither
        (path / "assets").mkdir(exist_ok=True)
        (hostile.folder / "planted.so").rename(path / "assets" / "planted.so")
        there["library"] = str(path / "assets" / "planted.so")
    like = None
    if kind == "factory":
        (hostile.folder / "own_model.py").write_text(_FACTORY)
        monkeypatch.chdir(hostile.folder)
        like = ModelSpec("own_model:linear")
    outcomes = _probe(there, monkeypatch, ModelSide("A", str(path), like))
    allowed = READS if kind == "factory" else set()
    assert outcomes.keys() == set(attacks.ATTACKS)
    assert {name for name, outcome in outcomes.items() if outcome == "done"} <= allowed
    assert hostile.untouched


def test_process_that_lists_hdf5_refuses_all_attacks(
    hostile: Target, own_hdf5_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py = pytest.importorskip("h5py")
    from ckpttool.formats import child_process, hdf5

    del own_hdf5_process
    path = hostile.folder / "weights.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["x"] = [1.0]
    code = f"""
import ctypes, socket, subprocess  # the process opens no files later
from ckpttool.formats import hdf5_child
hdf5_child.Hdf5Walk = lambda _: exec({hostile.program()!r})
hdf5_child.main(sys.argv[2:])
"""
    monkeypatch.setattr(hdf5, "_START", child_process.child_program(code))
    with pytest.raises(CkpttoolError) as refused:
        hdf5.read_index(hdf5.whole_file(File.stamp(str(path))))
    assert attacks.parse_done(refused.value.message) == set()
    assert hostile.untouched


def test_process_of_stable_baselines3_refuses_all_attacks(
    hostile: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.formats import sb3

    own = tmp_path / "own"
    own.mkdir()
    program = hostile.program()
    start, separator, _ = sb3._PROGRAM.partition("from ckpttool.formats.sb3_child")
    assert separator
    monkeypatch.setattr(sb3, "_PROGRAM", f"{start}exec({program!r})")
    with pytest.raises(WorkerError) as refused:
        sb3._run_library(str(own))
    assert attacks.parse_done(refused.value.message) == set()
    assert hostile.untouched


# Attacks in files.


def _hostile_keras(target: Target) -> Path:
    armed = target.folder / "armed"
    is_armed = f"__import__('os').path.exists({str(armed)!r})"
    code = f"lambda x: (exec({target.program()!r}) if {is_armed} else None, x)[1]"
    program = (
        "import keras\n"
        f"layers = [keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Lambda(eval({code!r}))]\n"
        "keras.Sequential(layers).save('model.keras')\n"
    )
    status, output = warm.run("tensorflow", program, target.folder)
    assert not status, output
    armed.touch()
    return target.folder / "model.keras"


def _hostile_saved_model(target: Target) -> Path:
    program = f"""
import tensorflow as tf
class Program(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((None, 3), name="x")])
    def __call__(self, x):
        size = tf.strings.length(tf.io.read_file({str(target.folder / "secret.txt")!r}))
        with tf.control_dependencies([tf.io.write_file({str(target.folder / "written")!r}, "x")]):
            return {{"y": x + tf.cast(size, tf.float32)}}
model = Program()
tf.saved_model.save(model, "saved_model", signatures=model.__call__.get_concrete_function())
"""
    status, output = warm.run("tensorflow", program, target.folder)
    assert not status, output
    return target.folder / "saved_model"


class _Exec:
    def __init__(self, program: str) -> None:
        self.program = program

    def __reduce__(self) -> Any:
        return exec, (self.program,)


def _hostile_pickle(target: Target) -> Path:
    torch = pytest.importorskip("torch")
    path = target.folder / "model.pt"
    torch.save({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": _Exec(target.program())}, path)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("keras", marks=pytest.mark.slow),
        "saved_model",
        pytest.param("pickle", marks=pytest.mark.slow),
    ],
)
def test_hostile_file_is_refused_before_and_inside_the_process(
    kind: str, hostile: Target, processes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --run-code the audit refuses; with it, the sandbox refuses what the file does."""
    del processes
    options: dict[str, Any] = {"input_shapes": ("3",)}
    if kind == "pickle":
        path = _hostile_pickle(hostile)
        (hostile.folder / "own_model.py").write_text(_FACTORY)
        monkeypatch.chdir(hostile.folder)
        options |= {"like_a": ModelSpec("own_model:linear"), "like_b": ModelSpec("own_model:linear")}
    else:
        tensorflow_child.require("tensorflow", "keras")
        path = _hostile_keras(hostile) if kind == "keras" else _hostile_saved_model(hostile)
    with pytest.raises(UsageError) as audited:
        verify(str(path), str(path), **options)
    assert "--run-code" in (audited.value.hint or "")
    with pytest.raises(CkpttoolError) as refused:
        verify(str(path), str(path), run_code=True, **options)
    assert isinstance(refused.value, UsageError | WorkerError)
    if kind != "saved_model":
        done = attacks.parse_done(refused.value.message)
        assert done <= (READS if kind == "pickle" else set())
    assert hostile.untouched


# The rules themselves.


@pytest.mark.parametrize("files", [None, ()])
def test_threads_that_run_already_are_restricted(
    files: tuple[str, ...] | None, hostile: Target, tmp_path: Path
) -> None:
    """User code has started threads before the file is opened; they meet the same refusals."""
    own = tmp_path / "own"
    own.mkdir()
    code = f"""
import threading
from ckpttool.core import sandbox
from tests import attacks
start, found = threading.Event(), []
def old():
    start.wait()
    found.append(attacks.outcomes({hostile.paths(own=str(own))!r}))
threads = [threading.Thread(target=old) for _ in range(3)]
[each.start() for each in threads]
sandbox.begin({str(own)!r}, sandbox.settings({files!r}, 1 << 32, now=False))
before = sandbox.protections()
sandbox.confine()
start.set()
[each.join() for each in threads]
print((before, found, sandbox.protections().missing))
"""
    before, outcomes, missing = ast.literal_eval(_python(code))
    assert before is None
    assert len(outcomes) == 3
    done = {name for row in outcomes for name, outcome in row.items() if outcome == "done"}
    assert done <= (READS if files is None else set()) or missing
    assert hostile.untouched or missing


def test_memory_is_limited(tmp_path: Path) -> None:
    code = f"""
from ckpttool.core import sandbox
sandbox.begin({str(tmp_path)!r}, sandbox.settings((), 1 << 28, now=True))
try:
    bytearray(1 << 29)
except MemoryError:
    print("refused")
"""
    assert _python(code).strip() == "refused"


@pytest.mark.parametrize("change", ["_CREATE = 100_000", "_ARCHITECTURES = {}", "ctypes = None"])
def test_missing_protection_is_named(change: str, tmp_path: Path) -> None:
    """A kernel without Landlock or a machine without a table: the process runs, what it lacks is named."""
    code = f"""
from ckpttool.core import sandbox
sandbox.{change}
sandbox.begin({str(tmp_path)!r}, sandbox.settings((), 1 << 32, now=True))
print((list(sandbox.protections().active), sandbox.protections().missing))
"""
    active, missing = ast.literal_eval(_python(code))
    files, calls = {sandbox.WRITES, sandbox.READS}, {sandbox.NETWORK, sandbox.PROGRAMS}
    lacking = {"_CREATE": files, "_ARCHITECTURES": calls, "ctypes": files | calls}
    assert missing.keys() == lacking[change.split()[0]]
    assert {*active} == {sandbox.MEMORY, *files, *calls} - missing.keys()
    assert all(name in sandbox.describe_missing("it", missing) for name in missing)


def test_missing_protection_is_a_note_of_the_comparison(
    models: Callable[[str], Path], processes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del processes
    start, call, end = worker._RESTRICTED.partition("from ckpttool.core.sandbox import begin")
    changed = "import ckpttool.core.sandbox as rules; rules._CREATE = 100_000; "
    monkeypatch.setattr(worker, "_RESTRICTED", start + changed + call + end)
    path = str(models("onnx") / "model.onnx")
    verification = verify(path, path, input_shapes=("3",))
    assert verification.models is not None
    named = [note for note in verification.models.notes if sandbox.WRITES in note]
    assert [note[:2] for note in named] == ["A:", "B:"]


def test_links_of_a_saved_model_lead_to_its_own_files_alone(tmp_path: Path) -> None:
    own, sibling = tmp_path / "model", tmp_path / "model-secrets"
    for folder in (own / "assets", own / "variables", sibling):
        folder.mkdir(parents=True)
    for file in (own / "saved_model.pb", own / "variables/variables.index", sibling / "key"):
        file.touch()
    (own / "assets/same").symlink_to(own / "saved_model.pb")
    (own / "assets/key").symlink_to(sibling / "key")
    names = {str(Path(path).relative_to(own)) for path in sandbox.iter_saved_model_files(str(own))}
    assert names == {"saved_model.pb", "variables/variables.index", "assets/same"}


def test_other_systems_name_all_protections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    missing = sandbox.restrict(())
    assert missing.missing.keys() == {sandbox.NETWORK, sandbox.PROGRAMS, sandbox.WRITES, sandbox.READS}
    assert missing.active == ()


def _run_filter(program: bytes, call: tuple[int, int, tuple[int, ...]]) -> int:
    """Interpret a filter as the kernel does; `call` is the architecture, the number and the arguments."""
    audit, number, arguments = call
    data = struct.pack("=IIQ6Q", number, audit, 0, *(*arguments, *[0] * (6 - len(arguments))))
    code = list(struct.iter_unpack("=HBBI", program))
    position, value = 0, 0
    while True:
        operation, yes, no, constant = code[position]
        if operation == sandbox._RETURN:
            return int(constant)
        if operation == sandbox._LOAD:
            (value,) = struct.unpack_from("=I", data, constant)
            position += 1
            continue
        tests = {
            sandbox._EQUAL: value == constant,
            sandbox._GREATER: value > constant,
            sandbox._ANY_BIT: bool(value & constant),
        }
        position += 1 + (yes if tests[operation] else no)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_judges_calls_and_arguments(machine: str) -> None:
    column, audit, _ = sandbox._ARCHITECTURES[machine]
    program = sandbox.filter_program(machine, 77)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096  # BPF_MAXINSNS

    def judge(name: str, *arguments: int) -> int:
        number = {**sandbox.REFUSED, **sandbox.CONDITIONAL}[name][column]
        assert number is not None
        return _run_filter(program, (audit, number, arguments))

    refused, absent, allowed = sandbox._ERRNO | 1, sandbox._ERRNO | 38, sandbox._ALLOW
    for name, numbers in sandbox.REFUSED.items():
        assert numbers[column] is None or judge(name) == refused
    assert [judge("clone", 0x11), judge("clone", 0x3D0F00), judge("clone3")] == [refused, allowed, absent]
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        assert [judge(name, 77), judge(name, 1), judge(name, 0)] == [allowed, refused, refused]
    assert [judge("prlimit64", 0, 7, 0), judge("prlimit64", 0, 7, 1), judge("prlimit64", 0, 7, 1 << 40)] == [
        allowed,
        refused,
        refused,
    ]
    assert [judge("ioctl", 0, 0x5412), judge("ioctl", 0, 0x541C), judge("ioctl", 0, 0x5401)] == [
        refused,
        refused,
        allowed,
    ]
    assert [judge("sched_setaffinity", 0), judge("sched_setaffinity", 1)] == [allowed, refused]
    verdicts = [judge("fcntl", 3, command) for command in (1, 3, 8, 10, 15)]
    assert verdicts == [allowed, allowed, refused, refused, refused]
    read = {"x86_64": 0, "aarch64": 63}[machine]
    assert _run_filter(program, (audit, read, ())) == allowed
    assert _run_filter(program, (audit, sandbox._LAST_NUMBER + 1, ())) == absent
    assert _run_filter(program, (audit, 0x40000000 + read, ())) == absent  # x32
    assert _run_filter(program, (0x40000003, read, ())) == sandbox._KILL  # i386


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_numbers_of_calls_are_those_of_the_kernel(column: int, header: str) -> None:
    if not Path(header).is_file():
        pytest.skip("the kernel's headers are not installed")
    definitions = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", Path(header).read_text())
    numbers = {name: int(number) for name, number in definitions}
    own = {name: row[column] for name, row in {**sandbox.REFUSED, **sandbox.CONDITIONAL}.items()}
    assert {name: number for name, number in own.items() if name in numbers} == {
        name: number for name, number in numbers.items() if name in own
    }
    assert len(numbers.keys() & own.keys()) > 90


# Functions of frameworks that open a file.
_OPENING = re.compile(
    r"(torch|jit|saved_model|onnx)\.load|.*\.(load_model|load_weights|InferenceSession)|load_file"
)
# The process of a user's model opens what ckpttool wrote (model_child); the backend gets its own graph.
_OPENS = {"model_child.py", "model_runner.py", "model_training.py", "onnx_backend.py"}


def test_frameworks_open_files_in_their_processes_alone() -> None:
    sources = {
        file.name: text
        for file in Path(sandbox.__file__).parent.parent.rglob("*.py")
        if re.search(r"\.load\(|load_model|load_weights|InferenceSession|load_file", text := file.read_text())
    }
    names = {
        name
        for name, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and _OPENING.fullmatch(ast.unparse(node.func).replace("self._", "").replace("tensorflow.", ""))
    }
    assert names == _OPENS
