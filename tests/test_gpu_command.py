"""`python -m benchmarks.gpu`: its parts on the CPU, the same parts with faults, and parts that die."""

from __future__ import annotations

import importlib.util
import json
import math
import mmap
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, contract, groups, limits, networks, parts, report, speed, start, transfers
from benchmarks.gpu.parts import ABSENT, FAILED, MEASURED, PASSED, Check, Context, Part, run_part
from ckpttool.core import DeviceError
from ckpttool.networks import Network
from docs.blocks import DOCS, ROOT
from tests.golden_texts import Golden

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
pytestmark = [pytest.mark.torch, needs_torch]

BOTH_NEED_CUDA = {
    *("captured graphs", "a capture that fails", "out of memory", "two devices"),
    *("a call with arrays of the host", "memcheck, kernel by kernel", "memcheck, captured graphs"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores would be most of these tests' time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("cpu", quick=True, folder=str(tmp_path))


def part(module: Any, name: str) -> Part:
    return next(part for part in module.PARTS if part.name == name)


def failed(record: dict[str, Any]) -> list[str]:
    assert record["error"] is None, record
    return [check["name"] for check in record["checks"] if check["status"] == FAILED]


IN_PROCESS = [
    *(part for module in (limits, checks, transfers) for part in module.PARTS if not part.fresh),
    *contract.SANITIZERS,
    *(part(checks, f"backend {name}") for name in ("numpy", "onnxruntime")),
    *(part(speed, name) for name in ("actor 256x256", "steps of Pendulum-v1", "64 checkpoint files")),
    *(part(speed, name) for name in ("64 policies", "steps on the host", "calls of numpy")),
]


@pytest.mark.parametrize("item", IN_PROCESS, ids=lambda part: part.name)
def test_a_part_is_green_on_the_cpu(item: Part, context: Context) -> None:
    record = run_part(item, context)
    if item.name in BOTH_NEED_CUDA:
        assert (record["status"], "CUDA" in record["error"]) == (ABSENT, True)
    elif record["status"] == ABSENT:
        assert importlib.util.find_spec("gymnasium") is None or "installed" in record["error"]
    else:
        assert record["status"] in (PASSED, MEASURED), record
        json.dumps(record, allow_nan=False)


def test_every_layer_of_the_backend_is_checked() -> None:
    from ckpttool.networks import torch_backend

    layers = [node.layer for network in networks.every_layer().values() for node in network.nodes]
    assert {type(layer) for layer in layers} == set(torch_backend.LAYERS)
    assert {layer.name for layer in layers if hasattr(layer, "slope")} == set(torch_backend.ACTIVATIONS)


# Faults: what a policy may do wrong, and the parts that must find it.


class Faulty:
    """A policy with a fault in its observations, its actions or its states."""

    def __init__(self, policy: Any, **faults: Callable[..., Any]) -> None:
        self._policy, self._faults = policy, faults
        self.device, self.act = policy.device, policy.act

    def step(self, obs: Any, state: Any = ()) -> Any:
        change = self._faults.get("obs", lambda arguments: arguments)
        action, after = self._policy.step(change(obs), self._faults.get("state", lambda args: args)(state))
        return self._faults.get("action", lambda arguments: arguments)(action), after


def with_fault(context: Context, **faults: Callable[..., Any]) -> Context:
    def make(network: Network, device: str, **options: Any) -> Faulty:
        return Faulty(parts.torch_policy(network, device, **options), **faults)

    return replace(context, make=make)


def with_network(context: Context, change: Callable[[str, np.ndarray], np.ndarray]) -> Context:
    def make(network: Network, device: str, **options: Any) -> Any:
        return parts.torch_policy(network.with_arrays(change), device, **options)

    return replace(context, make=make)


def as_tf32(array: Any) -> Any:
    """Keep ten bits of the fraction, as a product in TF32 does with its factors."""
    if isinstance(array, dict):
        return {name: as_tf32(array) for name, array in array.items()}
    if array.dtype != np.float32:
        return array
    return ((array.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def last_bit(array: np.ndarray) -> np.ndarray:
    return np.nextafter(array, np.float32(np.inf))


class Kept:
    """Returns every action in one buffer."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, array: np.ndarray) -> np.ndarray:
        buffer = self.buffers.setdefault(array.shape, array)
        buffer[...] = array
        return buffer


class Late:
    """Is right for the first calls, and wrong after more shapes than are kept."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, array: np.ndarray) -> np.ndarray:
        self.shapes.add(array.shape)
        return array + (len(self.shapes) > 8)


FAULTS: list[tuple[str, str, Callable[[Context], Context]]] = [
    ("every layer", "TF32", lambda c: with_fault(c, obs=as_tf32)),
    ("actors", "TF32", lambda c: with_fault(c, obs=as_tf32)),
    ("TF32", "TF32", lambda c: with_fault(c, obs=as_tf32)),
    ("recurrent policies", "no state", lambda c: with_fault(c, state=lambda _: ())),
    ("stacked policies", "order", lambda c: with_fault(c, action=lambda a: np.roll(a, 1, 0))),
    ("batch shapes", "one buffer", lambda c: with_fault(c, action=Kept())),
    ("batch shapes", "eviction", lambda c: with_fault(c, action=Late())),
    (
        "a busy device",
        "noise",
        lambda c: with_fault(c, action=lambda a: a + np.random.default_rng().random()),
    ),
    ("tensors that stay on the device", "step", lambda c: with_fault(c, action=lambda a: a + 1e-3)),
    *(
        (name, "no bias", lambda c: with_network(c, lambda field, a: a * (field != "bias")))
        for name in ("every layer", "actors", "recurrent policies", "image policies", "stacked policies")
    ),
    (
        "rollouts of environments on the host",
        "no bias",
        lambda c: with_network(c, lambda field, a: a * (field != "bias")),
    ),
    ("rollouts of Pendulum-v1", "no bias", lambda c: with_network(c, lambda f, a: a * (f != "bias"))),
]


@pytest.mark.parametrize(("name", "fault", "change"), FAULTS, ids=[f"{f[0]}, {f[1]}" for f in FAULTS])
def test_a_fault_is_found(
    name: str, fault: str, change: Callable[[Context], Context], context: Context
) -> None:
    assert failed(run_part(part(checks, name), change(context)))


def test_a_leak_is_found(context: Context) -> None:
    kept = []

    def make(network: Network, device: str, **options: Any) -> Any:
        # Memory of its own: what NumPy allocates may lie in what earlier tests have freed.
        kept.append(mmap.mmap(-1, 2 << 20))
        kept[-1].write(b"x" * (2 << 20))
        return parts.torch_policy(network, device, **options)

    assert failed(run_part(part(checks, "memory after evaluations"), replace(context, make=make)))


def test_other_returns_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(*arguments: Any, **how: Any) -> Any:
        return tuple(replace(rollout, returns=rollout.returns + 1) for rollout in rollouts(*arguments, **how))

    rollouts = checks.rollouts
    monkeypatch.setattr(checks, "rollouts", more)
    assert failed(run_part(part(checks, "known returns"), context))


def test_another_backends_fault_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = parts.backend("numpy")

    def build(network: Network, device: str = "cpu") -> Any:
        return whole.build(network.with_arrays(lambda field, a: a * (field != "bias")), device)

    monkeypatch.setattr(checks, "backend", lambda _: SimpleNamespace(build=build))
    assert failed(run_part(part(checks, "backend numpy"), context))


# Copies in the loop.


def acting(context: Context, extra: Callable[[Any], Any]) -> Context:
    """Let the policy do something more in every step of a rollout."""

    def make(network: Network, device: str, **options: Any) -> Any:
        policy = parts.torch_policy(network, device, **options)
        act = policy.act
        policy.act = lambda obs: (extra(obs), act(obs))[1]
        return policy

    return replace(context, make=make)


def copies_up(_: Any) -> None:
    import torch

    torch.tensor([1.0])


@pytest.mark.parametrize(
    ("extra", "direction"),
    [
        (copies_up, "to the device"),
        (lambda obs: obs.sum().item(), "to the host"),
        pytest.param(lambda obs: obs.tolist(), "to the host", marks=pytest.mark.slow),
        pytest.param(lambda obs: obs.cpu(), "to the host", marks=pytest.mark.slow),
        (lambda obs: obs.to("cpu"), "to the device"),
    ],
    ids=["tensor", "item", "tolist", "cpu", "to"],
)
def test_an_extra_copy_in_the_loop_is_found(
    extra: Callable[[Any], Any], direction: str, context: Context
) -> None:
    failures = failed(run_part(part(transfers, "Pendulum-v1 in the loop"), acting(context, extra)))
    assert any(direction in name for name in failures)


def test_more_uploads_are_found(context: Context, golden: Golden) -> None:
    import torch

    def make(network: Network, device: str, **options: Any) -> Any:
        for _ in range(network.members):
            torch.tensor([1.0])
        return parts.torch_policy(network, device, **options)

    failures = failed(run_part(part(transfers, "uploads of an evaluation"), replace(context, make=make)))
    golden("\n".join(failures))
    failures = failed(run_part(part(transfers, "uploads of an evaluation"), acting(context, copies_up)))
    golden("\n".join(failures))


def test_blind_counting_is_no_proof(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "counted", lambda *_: transfers.Counts(0, 0, 0))
    assert len(failed(run_part(part(transfers, "the counting itself"), context))) == 3


def test_the_profilers_names_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    events = {"Memcpy HtoD (Pinned -> Device)": 3, "Memcpy DtoH (Device -> Pageable)": 2, "Memcpy DtoD": 9}
    events |= {
        "cudaStreamSynchronize": 4,
        "cudaDeviceSynchronize": 1,
        "cudaLaunchKernel": 7,
        "aten::copy_": 5,
    }

    class Profile:
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def key_averages(self) -> list[Any]:
            return [SimpleNamespace(key=key, count=count) for key, count in events.items()]

    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Profile())
    done = []
    assert transfers._profiled(Context("cpu"), lambda: done.append(1)) == (3, 2, 5)
    assert done == [1]


# What needs a CUDA device, with a pretended one.


class Pretended(Context):
    """A context whose device is a GPU by its name, and the CPU in truth."""

    @property
    def cuda(self) -> bool:
        return True

    @property
    def workspace(self) -> Any:
        import torch

        return torch.device("cpu")

    def wait(self) -> None:
        pass

    def current(self) -> Any:
        return nullcontext()


def pretended(make: Callable[..., Any]) -> Context:
    return Pretended("cpu", quick=True, make=make)


def test_a_graph_with_another_bit_is_found() -> None:
    def make(wrong: bool) -> Callable[..., Any]:
        def build(network: Network, device: str, graphs: bool = True) -> Any:
            return Faulty(
                parts.torch_policy(network, device), **({"action": last_bit} if graphs and wrong else {})
            )

        return build

    assert not failed(run_part(part(checks, "captured graphs"), pretended(make(wrong=False))))
    assert len(failed(run_part(part(checks, "captured graphs"), pretended(make(wrong=True))))) == 2


@pytest.mark.parametrize("fault", [None, "no exception", "other numbers"])
def test_a_capture_that_fails(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ckpttool.networks import torch_programs

    after: list[int] = []

    def captured(body: Callable[[], Any], _position: Any) -> Any:
        after.append(1)
        if fault != "no exception":
            raise RuntimeError("capture failed")
        return body

    def make(network: Network, device: str, **_: Any) -> Any:
        wrong = {"action": lambda a: a + bool(after)} if fault == "other numbers" else {}
        return Faulty(parts.torch_policy(network, device), **wrong)

    monkeypatch.setattr(torch_programs, "capture_graph", captured)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    failures = failed(run_part(part(checks, "a capture that fails"), pretended(make)))
    kinds = {None: 0, "no exception": 2, "other numbers": 4}
    assert len(failures) == kinds[fault]


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (DeviceError("out of memory", expected="at most 1,000 rows", hint="--num-envs 1000"), 0),
        (DeviceError("out of memory"), 1),
        (RuntimeError("CUDA out of memory. Tried to allocate 4.00 GiB"), 2),
        (None, 2),
    ],
)
def test_out_of_memory(error: Exception | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Small(Faulty):
        def step(self, obs: Any, state: Any = ()) -> Any:
            if len(obs) > 10_000:
                if error is None:
                    return np.zeros((len(obs), networks.ACTION_DIM), np.float32), ()
                raise error
            return super().step(obs, state)

    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share)
    )
    failures = failed(
        run_part(part(checks, "out of memory"), pretended(lambda n, d, **_: Small(parts.torch_policy(n, d))))
    )
    assert len(failures) == count
    assert fractions[-1] == 1.0


def test_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def make(wrong: bool) -> Callable[..., Any]:
        def build(network: Network, device: str, **_: Any) -> Any:
            policy = Faulty(parts.torch_policy(network, "cpu"))
            policy.device = "cuda:0" if wrong else device
            return policy

        return build

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run_part(part(checks, "two devices"), pretended(make(wrong=False)))["status"] == ABSENT
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert not failed(run_part(part(checks, "two devices"), pretended(make(wrong=False))))
    (wrong,) = failed(run_part(part(checks, "two devices"), pretended(make(wrong=True))))
    assert wrong.startswith("cuda:1 ")


JUNIT = """<?xml version="1.0"?><testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="{}">{}
</testsuite></testsuites>"""


def test_the_counts_of_pytest() -> None:
    skipped = '<testcase name="s"><skipped message="no GPU"/></testcase>'
    broken = '<testcase name="b"><failure message="assert 1 == 2"/></testcase>'
    good = contract.counted(JUNIT.format(3, 0, 1, skipped), 0)
    assert all(check.passed for check in good if isinstance(check, Check))
    bad = contract.counted(JUNIT.format(3, 1, 0, broken), 1)
    assert [check.passed for check in bad if isinstance(check, Check)] == [False, True, True]
    assert isinstance(bad[0], Check)
    assert "assert 1 == 2" in bad[0].note
    assert not contract.counted(JUNIT.format(3, 0, 0, ""), 3)[2].passed  # type: ignore[union-attr]
    for status in (0, 5):
        with pytest.raises(parts.Absent):
            contract.counted(JUNIT.format(1, 0, 1, skipped), status)


def test_the_summary_of_memcheck(golden: Golden) -> None:
    log = "========= Invalid __global__ read\n========= ERROR SUMMARY: {} errors\n"
    assert all(check.passed for check in contract.summary(log.format(0), 0, ""))  # type: ignore[union-attr]
    bad = contract.summary(log.format(2), 9, "")
    assert [check.passed for check in bad] == [False, False]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError) as caught:
        contract.summary("", 1, "cannot open libcuda")
    golden(str(caught.value))
    for sanitized in contract.SANITIZED:
        assert run_part(sanitized, Context("cpu"))["status"] == PASSED


def test_the_start_is_timed_in_fresh_processes(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(start, "_run", lambda program, arguments: started.append(program))
    record = run_part(start.PARTS[0], context)
    assert record["status"] == MEASURED
    assert len(started) == 3 * 4
    names = {figure["name"]: figure for figure in record["figures"]}
    assert set(names[start.FIRST]["beside"]) == {
        f"{other} / this" for other in (start.IMPORT, start.READY, start.PLAIN)
    }


# Timing.


def test_ways_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = [0.0]

    def work(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    monkeypatch.setattr(limits.time, "perf_counter", lambda: now[0])
    calls = {"slow": lambda: work("slow", 0.004), "fast": lambda: work("fast", 0.0002)}
    times = limits.in_turn(calls, lambda: None, 0.05)
    assert 3 <= len(times["slow"]) == len(times["fast"]) <= 15
    assert limits.ratio(times["slow"], times["fast"]) > 10
    # Rounds alternate: the machine's drift meets both.
    assert re.fullmatch(r"(slow(fast)+)+", "".join(order[6:]))


def test_a_rate_leaves_out_what_precedes_the_loop(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    now = [0.0]

    def play(_policy: Any, _envs: Any, _play: Any, progress: Any) -> None:
        now[0] += 50  # starts, captures
        for steps in (100, 200, 300):
            now[0] += 1
            progress(0, 1, steps)

    monkeypatch.setattr(speed, "rollouts", play)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    assert speed.loop_rate(None, None, 1, 10.0) == (100.0, 200)
    monkeypatch.setattr(speed, "rollouts", lambda *_, progress: progress(0, 1, 100))
    with pytest.raises(RuntimeError) as caught:
        speed.loop_rate(None, None, 1, 10.0)
    golden(str(caught.value))


def test_sizes_that_take_too_long_are_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SLOWEST_TASK_S", 0.0)
    record = run_part(part(speed, "steps of Pendulum-v1"), context)
    assert [figure["value"] is None for figure in record["figures"]] == [False, True]
    assert "not measured" in record["figures"][1]["note"]
    monkeypatch.setattr(speed, "SLOWEST_CALL_S", 0.0)
    record = run_part(part(speed, "actor 256x256"), context)
    assert {figure["value"] for figure in record["figures"]} == {None}


# Parts in child processes.


def test_what_dies_is_recorded_and_the_others_run(tmp_path: Path, golden: Golden) -> None:
    context = Context("cpu", quick=True, folder=str(tmp_path))
    start_s = time.perf_counter()
    records = {r["part"]: r for r in groups.run_group("tests.gpu_parts", context, start_s + 600)}
    assert time.perf_counter() - start_s < 600, "a part hangs for 1000 s"
    status = {name: record["status"] for name, record in records.items()}
    assert status == {
        **dict.fromkeys(("first", "after", "alone", "last"), PASSED),
        **dict.fromkeys(("raises", "crashes", "beyond", "hangs", "leaves"), FAILED),
        "absent": ABSENT,
    }
    assert "SIGSEGV" in records["crashes"]["error"]
    golden(records["hangs"]["error"])
    assert records["raises"]["error"].split(": ")[::2] == ["FileNotFoundError", "weights.pt"]
    assert records["beyond"]["error"] is None
    assert records["leaves"]["error"]


def test_no_part_begins_after_the_runs_time(tmp_path: Path) -> None:
    late = time.perf_counter() - 1
    records = list(groups.run_group("tests.gpu_parts", Context("cpu", folder=str(tmp_path)), late))
    assert {record["status"] for record in records} == {FAILED}
    assert len(records) == 10
    optional = groups.GROUPS["sanitizer"]
    records = list(groups.run_group(optional, Context("cpu", folder=str(tmp_path)), late))
    assert [record["status"] for record in records] == [ABSENT, ABSENT]


def test_a_group_that_cannot_be_imported_is_recorded(tmp_path: Path) -> None:
    end = time.perf_counter() + 600
    for module in ("tests.no_such_parts", "tests.gpu_parts:NO_SUCH"):
        (record,) = groups.run_group(module, Context("cpu", folder=str(tmp_path)), end)
        assert (record["status"], record["checks"]) == (FAILED, [])


def test_the_command_itself_imports_no_framework() -> None:
    program = (
        "import sys; from benchmarks.gpu import __main__, groups; "
        "[groups.parts_of(module) for module in groups.GROUPS.values()]; "
        "print(sorted({'torch', 'tensorflow', 'gymnasium', 'jax'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert ran.stdout == "[]\n"


def run(tmp_path: Path, *arguments: str, **modules: str) -> tuple[int, dict[str, Any]]:
    """Run the command with other groups; return its status and its result."""
    words = ("--device", "cpu", "--out", str(tmp_path / "out"), *arguments)
    status = command.main(
        words, {name: f"tests.gpu_parts:{attribute}" for name, attribute in modules.items()}
    )
    files = list((tmp_path / "out").glob("*")) if (tmp_path / "out").is_dir() else []
    return status, json.loads(files[0].read_text()) if files else {}


def test_a_green_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests import gpu_parts

    status, result = run(tmp_path, limits="FACTS", correctness="GREEN")
    assert status == 0
    assert {"schema", "date", "seconds", "command", "device", "versions", "absent", "goals"} <= set(result)
    assert result["command"].split() == ["python", "-m", "benchmarks.gpu", "--device", "cpu"]
    assert [record["part"] for record in result["checks"]] == ["fine", "absent"]
    assert [record["part"] for record in result["speed"]] == ["device", "fine"]
    assert (tmp_path / "out" / "cpu-test-device.json").is_file()
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("\n\n", 1)[1].splitlines()[:-1])) <= 80
    assert gpu_parts.NOT_INSTALLED in printed


def test_a_run_with_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import gpu_parts

    monkeypatch.setattr(gpu_parts, "PARTS", gpu_parts.PARTS[:3])
    status, result = run(tmp_path, limits="FACTS", correctness="PARTS")
    assert status == 1
    assert str(tmp_path) not in json.dumps(result)
    assert [r["status"] for r in result["checks"]] == [PASSED, FAILED, PASSED]


def test_a_missing_device_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests import gpu_parts

    assert run(tmp_path, limits="MISSING", correctness="PARTS") == (2, {})
    assert capsys.readouterr().err == f"{gpu_parts.NO_DEVICE}\n"
    absent = run_part(limits.PARTS[0], Context("cuda:99"))
    assert absent["status"] == ABSENT
    assert "cuda:99" in absent["error"]
    for wrong in ("gpu", "cuda:", "cpu:0", "cuda:1;x"):
        with pytest.raises(SystemExit) as refused:
            command.main(["--device", wrong])
        assert refused.value.code == 2


def test_a_partial_run_replaces_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    modules = {"limits": "tests.gpu_parts:FACTS", "correctness": "tests.gpu_parts:GREEN"}
    for more in (["--quick"], ["--only", "correctness"]):
        assert command.main(["--device", "cpu", *more], modules) == 0
        assert list(tmp_path.iterdir()) == []
    assert command.main(["--device", "cpu"], modules) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["cpu-test-device.json"]


# The report.


def figure(
    name: str, value: float, unit: str, beside: dict[str, float] | None = None, **settings: Any
) -> Any:
    return parts.Figure(name, value, unit, settings, beside or {}).document()


def made_up(factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Return a result of an H100 whose goals are kept, or missed by a factor below 1."""
    figures = []
    for network in networks.HIDDEN:
        for rows in speed.ROWS:
            where = {"network": network, "rows": rows}
            figures.append(figure("host arrays", 20.0 + rows, "us", {report.EAGER: 3.5 * factor}, **where))
            figures.append(figure("host arrays, eager PyTorch", 70.0 + rows, "us", **where))
            beside = {report.EAGER: 2.0, report.GEMM: 0.8 * factor}
            figures.append(figure("tensors on the device", 10.0 + rows, "us", beside, **where))
    for task in checks.TASKS:
        figures += [
            figure(
                "steps on the device",
                200 * factor * rows,
                "steps/s",
                {report.EAGER: 9.0},
                task=task,
                rows=rows,
            )
            for rows in speed.TASK_ROWS
        ]
    figures.append(
        figure("a sweep of checkpoint files", 0.5, "s", {"one by one": 25 * factor}, checkpoints=64)
    )
    figures.append(figure("from file to first action", 2.0, "s", {"import torch / this": 0.75 * factor}))
    record = {
        "group": "speed",
        "part": "all",
        "status": MEASURED,
        "error": None,
        "checks": [],
        "seconds": 1.0,
    }
    check = {
        "group": "correctness",
        "part": "TF32",
        "status": PASSED,
        "error": None,
        "figures": [],
        "seconds": 1.0,
    }
    result = {
        "schema": 1,
        "date": "2026-01-02T03:04:05Z",
        "command": "python -m benchmarks.gpu --device cuda",
        "quick": False,
        "only": None,
        "seconds": 321.0,
        "device": {
            "kind": "cuda",
            "name": "NVIDIA H100 80GB HBM3",
            "driver": "580.1",
            "hopper": True,
            "cores": 16,
        },
        "versions": {"torch": "2.11.0", "cuda": "13.0", "numpy": "2.5.0", "python": "3.12.1"},
        "absent": {"gymnasium": "not installed"},
        "checks": [{**check, "checks": [Check("dense | <b>", 0.0, 0.0).document()]}],
        "residency": [],
        "speed": [{**record, "figures": figures}],
        **changes,
    }
    return {**result, "goals": report.goals(result)}


@pytest.mark.parametrize(("factor", "status", "code"), [(1.0, report.KEPT, 0), (0.5, report.BROKEN, 1)])
def test_goals_on_an_h100(factor: float, status: str, code: int) -> None:
    result = made_up(factor)
    assert [goal["status"] for goal in result["goals"]] == [status] * 5
    assert command.status(result) == code
    table = report.table(result)
    assert max(map(len, table.splitlines())) <= 80
    assert table.count(status) >= 5


def test_goals_bind_on_their_class_alone() -> None:
    for device in (
        {"kind": "cpu", "name": "AMD EPYC"},
        {"kind": "cuda", "name": "Tesla T4", "hopper": False},
    ):
        slow = made_up(0.5, device=device)
        assert {goal["status"] for goal in slow["goals"]} == {report.NOT_APPLICABLE}
        assert command.status(slow) == 0
    missing = made_up(speed=[])
    assert {goal["status"] for goal in missing["goals"]} == {report.NOT_MEASURED}


def test_a_check_without_a_number_fails() -> None:
    for measured in (math.nan, math.inf):
        assert not Check("x", measured, 1.0).passed
        assert Check("x", measured, 1.0).document()["measured"] is None
    assert not Check("x", math.nan, 0.0, "at least").passed
    assert parts.difference(np.array([math.nan]), np.array([math.nan])) == math.inf
    assert parts.difference(np.zeros(3), np.zeros(2)) == math.inf
    assert parts.unlike(np.float32([0.0]), np.float32([-0.0])) == 1
    assert run_part(Part("empty", lambda _: []), Context())["status"] == FAILED


def test_failures_come_first_in_the_report() -> None:
    bad = {**made_up()["checks"][0], "status": FAILED, "checks": [Check("dense", 0.5, 0.0).document()]}
    crashed = {**bad, "part": "graphs", "checks": [], "error": "the process ended with signal SIGSEGV"}
    result = made_up(checks=[bad, crashed])
    troubles = report.troubles(result)
    assert [line.startswith("failed") for line in troubles] == [True, True, False]
    assert command.status(result) == 1
    for text in (report.table(result), report.page([result])):
        assert "SIGSEGV" in text


def test_what_was_not_measured_is_named_with_its_reason() -> None:
    missing = parts.Figure(
        "steps on the device", None, "steps/s", {"rows": 262144}, note="too slow"
    ).document()
    record = {**made_up()["speed"][0], "figures": [missing]}
    record["figures"][0]["settings"]["task"] = "Pendulum-v1"
    result = made_up(speed=[record])
    assert any("262,144" in line and "too slow" in line for line in report.troubles(result))
    assert "too slow" in report.table(result)


def test_the_page_of_a_gpu() -> None:
    gpu, cpu = made_up(), made_up(device={"kind": "cpu", "name": "AMD EPYC", "threads": 1, "cores": 2})
    assert report.measured_on_cuda([cpu, gpu])
    page = report.page([gpu, cpu])
    assert report.NOT_YET not in page
    assert report.NOT_YET in report.page([cpu])
    assert {"## NVIDIA H100 80GB HBM3", "## AMD EPYC"} <= set(page.splitlines())
    assert f"({report.plot_name(gpu)})" in page
    assert "580.1" in page
    # What only a part of a run measured is no measurement of the device.
    assert not report.measured_on_cuda([made_up(quick=True), made_up(only=["speed"])])
    # Nor is a run that could not even describe its device.
    assert not report.measured_on_cuda([made_up(device={"kind": "cuda", "name": "cuda"})])


def test_the_plot_is_an_image_and_the_same_each_time() -> None:
    drawn = report.plot(made_up())
    assert drawn is not None
    assert drawn == report.plot(json.loads(json.dumps(made_up())))
    picture = ElementTree.fromstring(drawn)
    width, height = float(picture.get("width", "0")), float(picture.get("height", "0"))
    circles = list(picture.iter("{http://www.w3.org/2000/svg}circle"))
    # Ours and eager PyTorch for three actors at four sizes, two tasks at five.
    assert len(circles) == 2 * 3 * 4 + 2 * 5
    for circle in circles:
        assert 0 < float(circle.get("cx", "0")) < width
        assert 0 < float(circle.get("cy", "0")) < height
    assert report.plot(made_up(speed=[])) is None


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1234567.0, "1,230,000"), (0.04567, "0.0457"), (1e-7, "1.0e-07")]
)
def test_numbers(value: float, text: str) -> None:
    assert report.number(value) == text


def test_paths_are_left_out(golden: Golden) -> None:
    text = "OSError: [Errno 2] '/home/someone/x/weights.pt' and /usr/lib/libcuda.so.1, 1/2 of http://a.b/c"
    clean = parts.scrubbed(text)
    assert "someone" not in clean
    golden(clean)
    assert "\x1b" not in parts.scrubbed("a\x1b[31m\nb")
    assert len(parts.scrubbed("x" * 10_000)) == 400


def test_documents_claim_nothing_that_was_not_measured() -> None:
    results = report.kept_results(ROOT / "benchmarks" / "results")
    claims = {page.name: page.read_text("utf-8") for page in (ROOT / "README.md", DOCS / "performance.md")}
    for name, text in claims.items():
        unmeasured = "not yet measured on a GPU" in " ".join(text.split())
        assert unmeasured != report.measured_on_cuda(results), f"{name} and benchmarks/results disagree"
    for result in results:
        assert result["device"]["kind"] == "cpu" or result["device"]["driver"]
        assert "/" not in json.dumps(result["device"])
        # The goals of a result are those of the program.
        assert [goal["name"] for goal in result["goals"]] == [goal.name for goal in report.GOALS]
