"""The worker: what crosses to its process, and how its failures come back."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import EnvironmentMismatchError, UnsupportedError, UsageError, WorkerError
from ckpttool.networks import Activation, Concat, Dense, Network, Node, StateSlot, Worker
from ckpttool.networks import worker as module
from ckpttool.networks.messages import list_handlers, remove_generated_files
from ckpttool.networks.model_runner import ModelRequests
from ckpttool.networks.worker import WorkerSession
from tests.golden_texts import Golden

KERNEL = np.arange(6, dtype=np.float32).reshape(3, 2) / 10
NETWORK = Network((("obs", 3),), (Node(Dense(KERNEL), (0,)), Node(Activation("tanh"), (1,))), 2)
CELL = Network(
    (("obs", 1), ("a/b", 1), ("h", 2)),
    (
        Node(Concat(), (0, 1)),
        Node(Dense(np.eye(2, dtype=np.float64)), (3,)),
        Node(Activation("linear"), (2,)),
    ),
    5,
    (StateSlot("h", (2,), 4),),
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("numpy") as running:
        yield running


@pytest.fixture
def fragile() -> Iterator[Worker]:
    with Worker("numpy", timeout=60) as running:
        yield running


def pid(worker: Worker) -> int:
    child = worker._child
    assert child is not None
    return child.pid


def interpreter(tmp_path: Path, body: str) -> str:
    """Return a stand-in for a Python interpreter."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_versions_name_library_and_python(worker: Worker) -> None:
    assert worker.versions() == {"numpy": np.__version__, "python": ".".join(map(str, sys.version_info[:3]))}


def test_a_policy_acts_as_in_process(worker: Worker) -> None:
    x = np.ones((4, 3), np.float32)
    policy = worker.build(NETWORK)
    assert policy.device == "cpu"
    np.testing.assert_array_equal(policy.step(x)[0], np.tanh(x @ KERNEL))


def test_names_and_state_cross(worker: Worker) -> None:
    policy = worker.build(CELL)
    first, state = policy.step({"a/b": np.full((2, 1), 5.0), "obs": np.full((2, 1), 4.0)})
    np.testing.assert_array_equal(first, np.zeros((2, 2)))
    np.testing.assert_array_equal(state[0], [[4, 5], [4, 5]])
    second, _ = policy.step({"a/b": np.zeros((2, 1)), "obs": np.zeros((2, 1))}, state)
    np.testing.assert_array_equal(second, [[4, 5], [4, 5]])


def test_two_policies_live_side_by_side(worker: Worker) -> None:
    negative = Network((("obs", 3),), (Node(Dense(-KERNEL), (0,)),), 1)
    one, other = worker.build(NETWORK), worker.build(negative)
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(one.step(x)[0], np.tanh(-other.step(x)[0]))


def test_our_errors_come_back_as_themselves(worker: Worker, golden: Golden) -> None:
    with pytest.raises(EnvironmentMismatchError) as caught:
        worker.build(NETWORK).step(np.ones((1, 4)))
    assert (caught.value.expected, caught.value.found) == ("[batch, 3]", "[1, 4]")
    with pytest.raises(UsageError) as caught:
        worker.build(NETWORK, "tpu")
    golden(caught.value)
    with pytest.raises(UnsupportedError, match="snake"):
        worker.build(Network((("obs", 3),), (Node(Activation("snake"), (0,)),), 1))


def test_other_errors_name_their_type_and_the_worker_lives_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="KeyError: 'dance'"):
        worker.request("dance")
    assert worker.versions()


def test_a_keyword_that_a_request_does_not_have_is_refused(worker: Worker) -> None:
    """It was ignored: handlers read the keys that they know of a dict."""
    with pytest.raises(WorkerError, match=r"TypeError.*'precision'"):
        worker.request("hello", precision="double")
    assert worker.versions()


@pytest.mark.parametrize("requests", [WorkerSession, ModelRequests])
def test_both_sides_of_a_request_have_types(requests: type) -> None:
    """The type checker compares the parent's calls with the handlers, if these have annotations."""
    handlers = list_handlers(requests)
    assert len(handlers) > 4
    for do, handler in handlers.items():
        session, *values = inspect.signature(handler).parameters.values()
        assert do == "close" or session.name in ("self", "session")
        assert all(value.annotation is not value.empty for value in values), do
        assert inspect.signature(handler).return_annotation != "Any", do


def test_an_unknown_backend_is_named() -> None:
    with Worker("abacus") as worker, pytest.raises(UsageError, match="abacus"):
        worker.versions()


def test_a_stale_answer_is_passed_over(worker: Worker) -> None:
    worker.send(b'{"id": -1, "do": "hello"}\n')
    assert worker.versions()["numpy"] == np.__version__


def test_a_request_that_was_begun_is_sent_once_and_answered_later(worker: Worker) -> None:
    first = worker._requests
    for _ in range(2):
        worker.begin("hello")
    assert worker.request("hello")["versions"]["numpy"] == np.__version__
    assert worker._requests == first + 1
    # A request that was not begun has a separate answer.
    worker.begin("hello")
    with pytest.raises(WorkerError, match="dance"):
        worker.request("dance")
    assert worker.versions()["numpy"] == np.__version__


def test_a_process_whose_answer_nobody_needs_is_not_waited_for(tmp_path: Path) -> None:
    start = time.monotonic()
    with Worker("numpy", python=interpreter(tmp_path, "exec sleep 60")) as worker:
        worker.begin("hello")
    assert time.monotonic() - start < module.GRACE_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_a_killed_worker_names_the_signal(fragile: Worker, number: signal.Signals, golden: Golden) -> None:
    os.kill(pid(fragile), number)
    with pytest.raises(WorkerError, match=number.name):
        fragile.versions()
    with pytest.raises(WorkerError) as caught:
        fragile.versions()
    golden(caught.value)


def test_the_last_words_are_told_without_control_characters(tmp_path: Path, golden: Golden) -> None:
    dying = interpreter(tmp_path, "printf 'first\\n\\033[31mred\\033[0m\\007 alert\\n' >&2; exit 3")
    with Worker("numpy", python=dying) as worker, pytest.raises(WorkerError) as caught:
        worker.versions()
    golden(caught.value)


def test_a_silent_worker_is_not_waited_for(tmp_path: Path) -> None:
    start = time.monotonic()
    asleep = interpreter(tmp_path, "exec sleep 60")
    with Worker("numpy", python=asleep, timeout=0.3) as worker, pytest.raises(WorkerError, match=r"0\.3 s"):
        worker.versions()
    assert time.monotonic() - start < 40  # it sleeps for 60


def test_a_missing_interpreter_is_named(tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(UsageError) as caught, Worker("numpy", str(tmp_path / "nowhere")):
        pass
    golden(caught.value)


def test_nothing_remains(tmp_path: Path, golden: Golden) -> None:
    with Worker("numpy") as worker:
        worker.build(NETWORK).step(np.ones((1, 3)))
        folder, number = worker.folder, pid(worker)
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    with pytest.raises(WorkerError) as caught:
        worker.versions()
    golden(caught.value)
    assert Path(module.__file__).is_file()  # the link to the package was removed, not the package


def test_an_error_in_the_block_ends_the_worker_at_once() -> None:
    numbers = []

    def interrupted() -> None:
        with Worker("numpy") as worker:
            numbers.append(pid(worker))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ProcessLookupError):
        os.kill(numbers[0], 0)


def test_modules_in_the_users_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('a stranger ran')")
    monkeypatch.chdir(tmp_path)
    with Worker("numpy") as worker:
        assert worker.versions()["numpy"] == np.__version__


def test_what_a_framework_prints_does_not_disturb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "class Loud:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.endswith('numpy_backend'): print('noise', flush=True)\n"
        "sys.meta_path.insert(0, Loud())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Worker("numpy") as worker:
        assert worker.versions()
        assert "noise" in (worker.folder / "stderr.txt").read_text()


def test_threads_and_log_level_reach_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker("numpy", threads=1) as worker:
        worker.versions()
        environment = Path(f"/proc/{pid(worker)}/environ")
        if not environment.exists():
            pytest.skip("no /proc here")
        values = environment.read_bytes().split(b"\0")
    assert {b"OMP_NUM_THREADS=1", b"TF_NUM_INTRAOP_THREADS=1", b"TF_CPP_MIN_LOG_LEVEL=3"} <= set(values)


def test_generated_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "__autograph_generated_filex.py", tmp_path / "model.py"
    for path in (file, other):
        path.write_text("", encoding="utf-8")
        built = types.ModuleType(path.stem)
        built.__file__ = str(path)
        monkeypatch.setitem(sys.modules, path.stem, built)
    monkeypatch.setitem(sys.modules, "__autograph_generated_file", types.ModuleType("x"))
    remove_generated_files()
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize(
    "answer", ["nonsense", "[]", '{"id": 1}', '{"id": 1, "ok": 3}', '{"id": 1, "error": {}}', "[" * 100_000]
)
def test_invalid_answer_is_an_error_of_the_process(answer: str, tmp_path: Path) -> None:
    """Code in a file can write to every descriptor of its process, and so to the answers."""
    (tmp_path / "answer").write_text(answer)
    code = f"import sys; sys.stdin.readline(); print(open({str(tmp_path / 'answer')!r}).read(), flush=True)"
    python = interpreter(tmp_path, f'exec {sys.executable} -c "{code}"')
    with Worker("numpy", python=python) as running, pytest.raises(WorkerError):
        running.versions()


def test_endless_answer_is_an_error_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LINE", 1 << 20)
    python = interpreter(tmp_path, "exec cat /dev/zero")
    with Worker("numpy", python=python, timeout=60) as running, pytest.raises(WorkerError):
        running.versions()
