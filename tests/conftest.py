"""Fixtures that all tests share: the samples, the corpus, and the command run as a process."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.abc
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from ckpttool.cli import app, main
from ckpttool.core import Sidecar
from tests import nightly, refusals, schemas, warm
from tests.warm_frameworks import forked_frameworks, own_framework_process  # noqa: F401  # a fixture
from tests.warm_hdf5 import forked_hdf5, own_hdf5_process  # noqa: F401  # a fixture

if TYPE_CHECKING:
    from ckpttool.core import Plugin, Tree
    from ckpttool.libraries import RecognizedAgent
    from ckpttool.networks import Worker
    from tests.golden_texts import Golden

# The tests start hundreds of processes: compiled files are kept for all of them, which saves a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Threads of OpenBLAS and OpenMP that wait for work must not spin: other tests run beside these. The libraries
# read it when they are imported, here and in all processes that tests begin.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The suite has ten minutes for all laws and tries the same examples in every run, so that a run fails for
# what has changed; `make nightly` draws others. How long an example takes says more of the machine than of
# the law.
settings.register_profile(
    "explore", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("suite", settings.get_profile("explore"), max_examples=25, derandomize=True)
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "sample_ckpts"
CORPUS = ROOT.parent / "shared" / "corpus"

# Keras 2 lies beside the environment (Makefile): pip would miss the full tensorflow, which it asks for.
KERAS_2 = Path(sys.prefix) / "keras2"
if KERAS_2.is_dir():
    sys.path.append(str(KERAS_2))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(KERAS_2))))

TF_SAMPLE = SAMPLES / "td3_pendulum_tf" / "ckpt-15000"
TORCH_SAMPLE = SAMPLES / "td3_pendulum_torch" / "ckpt-15000.pt"


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        """Return the document on stdout."""
        return json.loads(self.out)

    def suggested(self) -> list[list[str]]:
        """Return the words of the commands after `next:`, which a shell reads over several lines."""
        plain = re.sub("\x1b.*?m", "", self.out).replace("\\\n", "")
        lines = (line for line in plain.splitlines() if line.startswith("next: ckpttool "))
        return [shlex.split(line)[2:] for line in lines]


def ckpttool(*arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> Ran:
    """Run the command line in a process of its own, without a terminal."""
    command = [sys.executable, "-m", "ckpttool", *map(str, arguments)]
    # A source checkout is enough: the package need not be installed.
    path = os.pathsep.join((str(ROOT), str(KERAS_2)))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", **(env or {})}
    done = subprocess.run(command, capture_output=True, cwd=cwd, env=environment, timeout=300, check=False)
    printed = done.stdout.decode()
    schemas.require_printed(arguments, printed)
    return Ran(done.returncode, printed, done.stderr.decode())


# Runs command lines in one process: reads them from stdin as JSON, prints for each the exit code and what it
# wrote to stdout and stderr, and at the end the modules that are loaded. It needs no module of the tests.
_COMMAND_LOOP = """
import contextlib, io, json, os, sys
{setup}
from ckpttool.cli import main
ran = []
for line in json.load(sys.stdin):
    sys.argv = ["ckpttool", *line.split()]
    streams = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    streams[0].flush()
    ran.append([status, streams[0].buffer.getvalue().decode(), streams[1].getvalue()])
print(json.dumps([ran, sorted(sys.modules)]))
"""


def command_loop(setup: str = "") -> str:
    """Return a program that runs command lines in one process, after the statements of `setup`."""
    return _COMMAND_LOOP.format(setup=setup)


class Terminal(io.TextIOWrapper):
    """A stdout that says that a person watches."""

    def isatty(self) -> bool:
        return True


# Every run would make the parser of its command: the tests run thousands of commands.
_parser = functools.cache(app.CommandEntry.parser)


def in_process(
    *arguments: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    kind: type[io.TextIOWrapper] = io.TextIOWrapper,
) -> Ran:
    """Run the command line in this process, where all that it imports has been imported already.

    What it prints is what a process prints (test_cli.py compares the two for every command). `kind` is what
    its stdout is.
    """
    out, err = kind(io.BytesIO(), encoding="utf-8"), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ckpttool", *map(str, arguments)])
        patch.setattr(app.CommandEntry, "parser", _parser)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(sys, "path", list(sys.path))
        # What the command itself sets, so that it is put back.
        own = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONSAFEPATH": "1", "PATH": os.environ["PATH"]}
        for name, value in {"COLUMNS": "80", **own, **(env or {})}.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        try:
            with pytest.raises(SystemExit) as left:
                main()
        finally:
            gc.enable()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]  # a BytesIO
    assert isinstance(left.value.code, int)
    schemas.require_printed(arguments, texts[0])
    if left.value.code:
        refusals.require_stated(arguments, "".join(texts))
    ran = Ran(left.value.code, *texts)
    if ran.status == 2 and refusals.FOLLOWED:
        refusals.follow(ran.err, cwd, in_process)
    return ran


def in_framework(framework: str, *arguments: object, cwd: Path | None = None) -> Ran:
    """Run the command line in a child of the process that has imported the framework (tests/warm.py)."""
    line = " ".join(map(str, arguments))
    assert len(line.split()) == len(arguments), "a word of the command contains a blank"
    program = command_loop(f"sys.stdin = io.StringIO(json.dumps([{line!r}]))")
    status, printed = warm.run(framework, program, cwd or Path.cwd(), {**os.environ, "COLUMNS": "80"})
    assert status == 0, printed
    ((ran,), _) = json.loads(printed.splitlines()[-1])
    schemas.require_printed(arguments, ran[1])
    return Ran(*ran)


def refused(ran: Ran) -> str:
    """Assert that a command refused bad input as it should; return its sentence."""
    assert ran.status == 2, (ran.out, ran.err)
    lines = ran.err.strip().splitlines()
    assert lines, "nothing was said"
    assert lines[0].startswith("ckpttool: ")
    assert len(lines) <= 2, ran.err
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert "Traceback" not in ran.err
    assert "unexpected" not in lines[0], ran.err
    assert ran.err.replace("\n", "").isprintable()
    assert not ran.out
    return lines[0]


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing."""


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive as Python's own module writes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def pytest_configure() -> None:
    """Let the tests' programs start with the signals that a terminal starts them with.

    `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT in its background jobs. Programs
    inherit what is ignored, but not what is handled. This process goes on to ignore them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, _ignore)
    _own_temporary_folder()
    # Commands that install something name the program that would be found first.
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    # Nothing that is collected becomes garbage, and each collection would look at all of it.
    gc.disable()


def _own_temporary_folder() -> None:
    """Give the frameworks a temporary folder that is removed at the end; the programs of xdist share it.

    AutoGraph leaves modules and torch.compile a cache in it. The tests' own folders stay where they are.
    """
    if "PYTEST_DEBUG_TEMPROOT" in os.environ:
        return
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="ckpttool-tests-")
    tempfile.tempdir = None
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)

    atexit.register(remove)


def pytest_xdist_auto_num_workers() -> int:
    """Return one and a half times the number of cores: many tests wait for a program or a clock."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + min(cores // 2, 4)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--golden`, which writes the golden texts instead of comparing them."""
    parser.addoption("--golden", action="store_true", help="write tests/golden and run only its tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what only `make nightly` runs; with `--golden`, run only the tests that have golden texts."""
    nightly.mark(config, items)
    for item in items:
        layouts = item.path.name.startswith(("test_layout", "test_recognise"))
        # The cases of a function share this list.
        if layouts and (names := getattr(item, "fixturenames", [])) and names[0] != _BEHIND_ROWS:
            names.insert(0, _BEHIND_ROWS)
    if config.getoption("--golden"):
        items[:] = [item for item in items if "golden" in getattr(item, "fixturenames", ())]


def pytest_collection_finish() -> None:
    """Leave the collected tests out of all later collections of garbage, each of which would look at them."""
    gc.freeze()
    # A syntax tree, a large file's listing: with the usual 700, most of the time would go into collections.
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


# Random numbers are the same in every run, whichever tests ran before in this process: a module that is
# imported, a fixture and a test have each a seed of their own, by their names.


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Seed the numbers that a module draws while it is imported."""
    _seed(module_path.name)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Seed the numbers of a fixture, which any of the tests that use it may set up."""
    _seed(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', '')}]")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Seed the numbers of a test."""
    _seed(item.nodeid)


def _seed(name: str) -> None:
    warm.seed_random_numbers(zlib.crc32(name.encode()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs the shared corpus of real checkpoints, or a framework, where that is absent."""
    if item.get_closest_marker("corpus") and not CORPUS.is_dir():
        pytest.skip("the shared corpus is not beside the project")
    for marker, library in _LIBRARIES.items():
        if item.get_closest_marker(marker) and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


# Hooks and not fixtures: pytest takes a millisecond to set up five fixtures of each of 13,000 tests.
@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Fork the processes of frameworks and of HDF5 files, and compare sidecars, while tests run."""
    with forked_frameworks(), forked_hdf5(), described_sidecars(), pytest.MonkeyPatch.context() as patch:
        # No test pulls the plug, and a disk that others use takes its time.
        patch.setattr(os, "fsync", lambda _: None)
        return (yield)


ALONE = "CKPTTOOL_TEST_ALONE"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the mark `alone` in a process of its own; its result is that of the process."""
    if pyfuncitem.get_closest_marker("alone") is None or os.environ.get(ALONE):
        return None
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-q",
            "-m",
            "",
            "-p",
            "no:cacheprovider",
            pyfuncitem.nodeid,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, ALONE: "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    if " skipped" in done.stdout.splitlines()[-1] and " passed" not in done.stdout.splitlines()[-1]:
        pytest.skip(done.stdout.splitlines()[-2])
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Collect what the test left behind: an unclosed file fails this test, and not a later one.

    The young generations hold nearly all of that, and take a few milliseconds.
    """
    gc.collect(1)


class _Absent(importlib.abc.MetaPathFinder):
    """Skips a test, or all of a module, that imports a library which is not there; the last to be asked.

    What ckpttool itself imports is left alone: that it lacks something is its own to say.
    """

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Raise what pytest takes for a skip, if a file of the tests asked."""
        if name not in _LIBRARIES.values():
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(str(ROOT / "tests")):
            raise pytest.skip.Exception(f"{name} is not installed", allow_module_level=True)


_LIBRARIES = {"torch": "torch", "tensorflow": "tensorflow", "environment": "gymnasium"}
sys.meta_path.append(_Absent())


@contextmanager
def described_sidecars() -> Iterator[None]:
    """Compare every sidecar that a test has written with its schema, as commands compare what they print."""
    encode = Sidecar.encode

    def compared(sidecar: Sidecar) -> bytes:
        encoded = encode(sidecar)
        schemas.require("sidecar", json.loads(encoded))
        return encoded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sidecar, "encode", compared)
        yield


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[str], Worker]]:
    """Give the running process of a framework, which all tests here share: a start takes seconds."""
    from ckpttool.networks import Worker

    with ExitStack() as running:
        yield functools.cache(lambda name: running.enter_context(Worker(name, threads=1)))


@pytest.fixture
def shared_workers(workers: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` run its two sides in these processes instead of its own."""
    from ckpttool.commands import verify

    monkeypatch.setattr(verify, "Worker", lambda name, **_: nullcontext(workers(name)))


_BEHIND_ROWS = "libraries_behind_their_rows"


@pytest.fixture
def libraries_behind_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that no library's row excludes a tree that the library recognises."""
    from ckpttool.libraries import recognize

    allowed = recognize._collect_claims

    def asked_all(rows: Iterable[Plugin], tree: Tree, name: str) -> list[RecognizedAgent]:
        rows, names = tuple(rows), tuple(recognize.list_display_names(tree))
        for row in rows:
            if not recognize.may_recognize(row, names, name):
                assert row.load().recognise(tree, name) is None, row.name
        return allowed(rows, tree, name)

    monkeypatch.setattr(recognize, "_collect_claims", asked_all)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with the one recorded for this test; paths of this run are replaced."""
    from tests.golden_texts import Golden

    replaced = {}
    if "tmp_path" in request.fixturenames:
        replaced[str(request.getfixturevalue("tmp_path"))] = "TMP"
    replaced[str(ROOT)] = "ROOT"
    update = bool(request.config.getoption("--golden"))
    return Golden(request.module.__name__, request.node.name, replaced=replaced, update=update)


@pytest.fixture
def corpus() -> Path:
    """The shared corpus of real checkpoints; the test is skipped where it is absent."""
    if not CORPUS.is_dir():
        pytest.skip("the shared corpus is not beside the project")
    return CORPUS
