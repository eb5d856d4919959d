"""Devices: what graphs and transfers may not change, XLA, threads, and the words where there is no GPU."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.evaluate import evaluate
from ckpttool.core import DeviceError, UnsupportedError, UsageError, plugins
from ckpttool.evaluation.protocol import Protocol
from ckpttool.networks import (
    Activation,
    Add,
    Affine,
    ArgMax,
    AtomMean,
    Concat,
    ConstantRow,
    Convolution,
    Cosines,
    Exp,
    Flatten,
    Multiply,
    Network,
    Node,
    QuantileMean,
    Repeat,
    Slice,
    Softmax,
    StateSlot,
    Transpose,
    stack_networks,
)
from ckpttool.testing.backends import ACTOR, CELL, CRITIC, GATED, chain, dense, normal, renewed
from tests import tensorflow_child
from tests.conftest import TORCH_SAMPLE
from tests.golden_texts import Golden
from tests.test_backends import ACTIVATIONS, cuda_is_missing, needs

# A network of images: channels first as an environment gives them, two convolutions, one of them padded.
IMAGES = Network(
    inputs=(("obs", (3, 9, 10)),),
    nodes=(
        Node(Transpose((1, 2, 0)), (0,)),
        Node(Affine(normal(3), normal(3)), (1,)),
        Node(Convolution(normal(3, 3, 3, 5) / 5, normal(5), (2, 1), ((1, 1), (0, 2))), (2,)),
        Node(Activation("relu"), (3,)),
        Node(Convolution(normal(2, 3, 5, 4) / 5), (4,)),
        Node(Flatten(), (5,)),
        Node(dense(4 * 8 * 4, 2), (6,)),
    ),
    output=7,
)
# A long short-term memory of 4 units: both of its states leave as results.
LSTM = Network(
    inputs=(("obs", 3), ("h", 4), ("c", 4)),
    nodes=(
        Node(Concat(), (0, 1)),
        Node(dense(7, 16), (3,)),
        *(Node(Slice(4 * i, 4 * i + 4), (4,)) for i in range(4)),
        *(Node(Activation("sigmoid"), (5 + i,)) for i in range(3)),
        Node(Activation("tanh"), (8,)),
        Node(Multiply(), (9, 2)),
        Node(Multiply(), (10, 12)),
        Node(Add(), (13, 14)),
        Node(Activation("tanh"), (15,)),
        Node(Multiply(), (11, 16)),
        Node(dense(4, 2), (17,)),
    ),
    output=18,
    states=(StateSlot("h", (4,), 17), StateSlot("c", (4,), 15)),
)
WIDE = chain(3, dense(3, 512), Activation("relu"), dense(512, 2))
NETWORKS = {
    "actor": ACTOR,
    "float64": ACTOR.cast("float64"),
    "critic": CRITIC,
    "gated": GATED,
    "elman": CELL,
    "lstm": LSTM,
    "images": IMAGES,
    "stack of 2": stack_networks([renewed(ACTOR) for _ in range(2)]),
    "stack of 64": stack_networks([renewed(ACTOR) for _ in range(64)]),
    "stacked gates": stack_networks([GATED, renewed(GATED)]),
    **{name: chain(7, Activation(name, 0.25)) for name in ACTIVATIONS},  # type: ignore[arg-type]
}


def observations(network: Network, rows: int) -> Any:
    """Return random inputs of every name that is no state."""
    states = {slot.name for slot in network.states}
    named = {
        name: normal(rows, *((shape,) if isinstance(shape, int) else shape))
        for name, shape in network.inputs
        if name not in states
    }
    return named if len(named) > 1 else next(iter(named.values()))


@pytest.mark.environment
@pytest.mark.parametrize("backend", ["numpy", "torch", "onnxruntime"])
def test_a_missing_gpu_is_one_sentence(backend: str) -> None:
    """TensorFlow's is among the contract's tests, in its worker."""
    pytest.importorskip("gymnasium")
    pytest.importorskip(backend)
    with pytest.raises(UsageError) as caught:
        evaluate(str(TORCH_SAMPLE), protocol=Protocol(1, backend=backend, device="cuda:99"))
    assert "'cuda:99'" in caught.value.message
    assert caught.value.hint


class StandInGraph:
    """Stands in for a CUDA graph: a replay runs what was captured, again."""

    def __init__(self, body: Callable[[], object]) -> None:
        # A graph does not keep the program alive that launched its kernels.
        self._body = weakref.WeakMethod(body) if hasattr(body, "__self__") else lambda: body

    def replay(self) -> None:
        import torch

        body = self._body()
        assert body is not None
        with torch.inference_mode():
            body()


class StandIn:
    """Stands in for an event and a stream: it does at once what a GPU would do later."""

    def __init__(self, *_: object) -> None:
        pass

    def record(self, _stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the code for a GPU run on the CPU: buffers, pieces, shapes, replays that write to one place."""
    import torch

    from ckpttool.networks import torch_programs

    def captured(body: Any, _index: Any, *, pool: Any = None, warm_ups: int = torch_programs.WARM_UPS) -> Any:
        return StandInGraph(body), [body() for _ in range(warm_ups + 1)][-1]

    monkeypatch.setattr(
        torch_programs, "_allocate_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )
    monkeypatch.setattr(torch_programs, "_is_locked", lambda _: True)
    monkeypatch.setattr(torch.cuda, "Event", StandIn)
    monkeypatch.setattr(torch.cuda, "current_stream", StandIn)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 31))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 20)
    monkeypatch.setattr(torch_programs, "capture_graph", captured)
    monkeypatch.setattr(torch_programs, "PIECE_BYTES", 1000)
    return torch_programs


Build = Callable[..., Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def build(request: pytest.FixtureRequest) -> Build:
    """Return what builds a policy that runs as on a GPU: on one, or on the CPU with stand-ins."""
    pytest.importorskip("torch")
    import torch

    module: Any = plugins.find("backends", "torch").load()
    if request.param == "cuda":
        if cuda_is_missing():
            pytest.skip("PyTorch sees no CUDA device")

        def on_gpu(network: Network, **how: Any) -> Any:
            return module.build(network, "cuda", **how)

        return on_gpu
    cuda = request.getfixturevalue("stand_ins")

    def output(network: Network, graphs: bool = True, **how: Any) -> Any:
        policy = module.build(network, **how)
        policy._on_host = cuda.CudaRunner(policy._run, torch.device("cpu"), graphs=graphs)
        return policy

    return output


def is_real(build: Build) -> bool:
    return build.__name__ == "on_gpu"


def assert_same(build: Build, actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare bit for bit on a GPU; on a CPU buffers lie elsewhere, and a BLAS may add in another order."""
    tolerance = 0.0 if is_real(build) else 2e-6
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def held_memory(build: Build) -> list[int]:
    """Return the memory of live tensors: as the device's allocator counts it, or Python's collector."""
    import torch

    gc.collect()
    if is_real(build):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
    tensors = [object_ for object_ in gc.get_objects() if type(object_) is torch.Tensor]
    return [sum(tensor.nbytes for tensor in tensors), len(tensors)]


@pytest.mark.torch
@needs("torch")
class TestOnAGpu:
    """On a GPU, and on the CPU with stand-ins: results equal those of plain steps, memory is returned."""

    @pytest.mark.parametrize("name", NETWORKS)
    def test_graphs_change_no_bit_and_agree_with_the_cpu(self, build: Build, name: str) -> None:
        network = NETWORKS[name]
        rows = 3 * network.members
        policy, plain = build(network), build(network, graphs=False)
        cpu = plugins.find("backends", "torch").load().build(network)
        near = 1e-5 if name != "images" else 5e-5  # cuDNN may convolve by transforms
        state: Any = ()
        plain_state: Any = ()
        for _ in range(4):  # kernel by kernel, captured, replayed
            x = observations(network, rows)
            expected = cpu.step(x, state)
            output, ours_next = policy.step(x, state)
            same, plain_state = plain.step(x, plain_state)
            assert_same(build, output, same)
            for mine, other, third in zip(ours_next, plain_state, expected[1], strict=True):
                assert_same(build, mine, other)
                np.testing.assert_allclose(mine, third, rtol=near, atol=near)
            np.testing.assert_allclose(output, expected[0], rtol=near, atol=near)
            state = ours_next
        assert policy._on_host.captured_shapes == 1
        assert plain._on_host.captured_shapes == 0

    @pytest.mark.parametrize("batch", [1, 64, 20_000])
    def test_transfers_of_any_size(self, build: Build, batch: int) -> None:
        policy, plain = build(ACTOR), build(ACTOR, graphs=False)
        for _ in range(3):
            x = normal(batch, 17)
            assert_same(build, policy.step(x)[0], plain.step(x)[0])

    def test_shapes_come_and_go(self, build: Build) -> None:
        policy, plain = build(ACTOR), build(ACTOR, graphs=False)
        kept = []
        for batch in (1, 1, 3, 64, 3, *range(1, 12), *range(1, 12), 11, 10, 11, 10, 1, 5, 5):
            x = normal(batch, 17)
            kept.append((policy.step(x)[0], plain.step(x)[0]))
        for output, expected in kept:
            assert_same(build, output, expected)
        assert 1 <= policy._on_host.captured_shapes <= 8

    def test_inputs_in_any_memory_order(self, build: Build) -> None:
        policy, plain = build(ACTOR), build(ACTOR, graphs=False)
        for batch in (3, 70):
            x = normal(batch, 17)
            frozen = x.copy()
            frozen.flags.writeable = False
            swapped = x.astype(x.dtype.newbyteorder())
            for same in (np.asfortranarray(x), x[::-1][::-1], frozen, swapped, x.astype(np.float64), x):
                assert_same(build, policy.step(same)[0], plain.step(x)[0])

    def test_no_rows_and_no_layers(self, build: Build) -> None:
        policy, same = build(ACTOR), build(chain(3, Activation("linear")))
        for _ in range(3):
            assert policy.step(normal(0, 17))[0].shape == (0, 6)
            x = normal(4, 3)
            assert_same(build, same.step(x)[0], x)

    def test_threads_share_a_policy(self, build: Build) -> None:
        policy, plain = build(ACTOR), build(ACTOR, graphs=False)
        normals = [normal(1 + number % 3, 17) for number in range(24)]
        expected = [plain.step(x)[0] for x in normals]
        wrong: list[int] = []

        def play(numbers: range) -> None:
            wrong.extend(
                n
                for n in numbers
                if not np.allclose(policy.step(normals[n])[0], expected[n], rtol=1e-6, atol=1e-6)
            )

        threads = [threading.Thread(target=play, args=(range(start, 24, 4),)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_memory_is_returned(self, build: Build) -> None:
        """Two hundred evaluations, a tenth of them with batches of many shapes, leave nothing behind."""

        network = chain(3, dense(3, 5), Activation("tanh"))

        def evaluation(number: int) -> None:
            policy = build(network)
            for batch in (4, 4, 4) if number % 10 else (*range(1, 12), *range(1, 12)):
                policy.step(normal(batch, 3))

        evaluation(0)
        before = held_memory(build)
        for number in range(200):
            evaluation(number)
        assert all(after <= most for after, most in zip(held_memory(build), before, strict=True))

    def test_no_cycle_keeps_a_policy_alive(self, build: Build) -> None:
        policy = build(ACTOR)
        for _ in range(3):
            policy.step(normal(4, 17))
        left = weakref.ref(policy._on_host)
        gc.disable()
        try:
            del policy
            assert left() is None
        finally:
            gc.enable()

    def test_out_of_memory_names_the_rows_that_fit(self, build: Build) -> None:
        import torch

        policy = build(stack_networks([renewed(WIDE) for _ in range(2)]))
        run = policy._run

        def limited(arguments: Any) -> Any:
            if arguments[0].shape[1] > 700:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
            return run(arguments)

        policy._on_host._run = policy._run = limited
        if not is_real(build):
            # fitting_rows measures on a GPU alone.
            policy.torch_device = SimpleNamespace(type="cuda")
            policy._fits = lambda rows: rows <= 700
        before = policy.step(normal(6, 3))[0].shape
        with pytest.raises(DeviceError) as refusal:
            policy.step(normal(2_000_000, 3))
        most = int(refusal.value.hint.split()[-1])
        assert 0.9 * 700 < most <= 700
        assert refusal.value.expected == f"at most {2 * most:,} rows"
        assert refusal.value.__context__ is None
        assert policy.step(normal(6, 3))[0].shape == before

    def test_graphs_make_room_for_a_step(self, build: Build) -> None:
        """Memory of other shapes is freed before a step is refused."""
        import torch

        policy = build(ACTOR)
        run, host = policy._run, policy._on_host
        for _ in range(2):
            policy.step(normal(3, 17))

        def limited(arguments: Any) -> Any:
            if arguments[0].shape[0] > 10 and host.captured_shapes:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return run(arguments)

        host._run = limited
        policy.torch_device = torch.device("cuda", 0)
        assert policy.step(normal(11, 17))[0].shape == (11, 6)
        assert host.captured_shapes == 0

    def test_a_shape_that_cannot_be_captured_runs_kernel_by_kernel(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        from ckpttool.networks import torch_programs

        def refused(*_: object, **__: object) -> None:
            raise next(errors)

        errors = iter(
            [
                UnsupportedError("x"),
                torch.OutOfMemoryError("CUDA out of memory. "),
                RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
            ]
        )
        monkeypatch.setattr(torch_programs, "capture_graph", refused)
        policy, plain = build(ACTOR), build(ACTOR, graphs=False)
        for batch in (3, 4, 5):
            for number in range(3):
                x = normal(batch, 17)
                with pytest.warns(RuntimeWarning) if number == 1 else nullcontext():
                    output = policy.step(x)[0]
                assert_same(build, output, plain.step(x)[0])

    def test_pageable_memory_serves_without_graphs(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        from ckpttool.networks import torch_programs

        empty = torch.empty

        def refused(*shape: Any, pin_memory: bool = False, **how: Any) -> Any:
            if pin_memory:
                raise RuntimeError("CUDA error: out of memory")
            return empty(*shape, **how)

        monkeypatch.undo()  # _page_locked as it is
        monkeypatch.setattr(torch, "empty", refused)
        assert torch_programs._allocate_pinned((3,), torch.float32).shape == (3,)
        monkeypatch.setattr(torch_programs, "_is_locked", lambda _: False)
        if is_real(build):
            policy, plain = build(ACTOR), build(ACTOR, graphs=False)
            for batch in (3, 20_000) * 3:
                x = normal(batch, 17)
                assert_same(build, policy.step(x)[0], plain.step(x)[0])
            assert policy._on_host.captured_shapes == 0


@pytest.mark.gpu
@pytest.mark.torch
@needs("torch")
class TestCuda:
    """What only a GPU can show."""

    @pytest.fixture
    def backend(self) -> Any:
        if cuda_is_missing():
            pytest.skip("PyTorch sees no CUDA device")
        return plugins.find("backends", "torch").load()

    def test_float32_products_keep_all_bits(self, backend: Any) -> None:
        import torch

        for setting in ("highest", "high"):
            with older_setting(setting):
                assert backend.build(ACTOR, "cuda").product_bits() == 23
        if torch.cuda.get_device_capability() >= (8, 0):
            assert backend.build(ACTOR, "cuda", tf32=True).product_bits() <= 12

    def test_tf32_is_only_used_when_asked_for(self, backend: Any) -> None:
        x = normal(512, 17)
        exact = backend.build(ACTOR.cast("float64")).step(x)[0]
        off, on = (abs(backend.build(ACTOR, "cuda", tf32=t).step(x)[0] - exact).max() for t in (False, True))
        assert off < 1e-5
        assert on >= off

    def test_convolutions_are_exact(self, backend: Any) -> None:
        x = observations(IMAGES, 64)
        exact = backend.build(IMAGES.cast("float64")).step(x)[0]
        np.testing.assert_allclose(backend.build(IMAGES, "cuda").step(x)[0], exact, rtol=2e-5, atol=2e-5)

    def test_an_exception_in_a_capture_leaves_the_device_usable(self, backend: Any) -> None:
        import torch

        from ckpttool.networks import capture_graph

        device, stream = torch.device("cuda", 0), torch.cuda.current_stream()
        x = torch.ones(4, device=device)

        def reads() -> float:
            return float((x + 1).sum())

        def raises() -> None:
            x.add_(0)
            if torch.cuda.is_current_stream_capturing():
                raise KeyError("in the body")

        for body, error in ((reads, UnsupportedError), (raises, KeyError)) * 2:
            with pytest.raises(error):
                capture_graph(body, device)
            assert torch.cuda.current_stream() == stream
            torch.cuda.empty_cache()
            graph, result = capture_graph(lambda: x * 2, device)
            x.fill_(5)
            graph.replay()
            assert result.tolist() == [10.0] * 4
        policy = backend.build(ACTOR, "cuda")
        for _ in range(3):
            policy.step(normal(3, 17))
        assert policy._on_host.captured_shapes == 1

    def test_a_device_that_is_really_full(self, backend: Any) -> None:
        import torch

        policy = backend.build(WIDE, "cuda")
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
        try:
            with pytest.raises(DeviceError) as refusal:
                policy.step(normal(200_000, 3))
            most = int(refusal.value.hint.split()[-1])
            assert 1_000 < most < 200_000
            assert policy.step(normal(most, 3))[0].shape == (most, 2)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def test_other_threads_use_the_device_during_captures(self, backend: Any) -> None:
        import torch

        stop, sums = threading.Event(), []

        def work() -> None:
            while not stop.is_set():
                size = 1 << (10 + len(sums) % 8)
                sums.append(float(torch.ones(size, device="cuda").sum()) / size)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            policy, plain = backend.build(ACTOR, "cuda"), backend.build(ACTOR, "cuda", graphs=False)
            for batch in (*range(1, 9), *range(1, 9)):
                x = normal(batch, 17)
                np.testing.assert_array_equal(policy.step(x)[0], plain.step(x)[0])
        finally:
            stop.set()
            thread.join()
        assert set(sums) == {1.0}
        assert policy._on_host.captured_shapes == 8

    def test_on_the_callers_stream(self, backend: Any) -> None:
        import torch

        policy, plain = backend.build(ACTOR, "cuda"), backend.build(ACTOR, "cuda", graphs=False)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(4):
                x = normal(5, 17)
                np.testing.assert_array_equal(policy.step(x)[0], plain.step(x)[0])

    def test_devices_by_index(self, backend: Any) -> None:
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("there is one GPU")
        first, second = (backend.build(ACTOR, f"cuda:{n}") for n in range(2))
        for batch in (3, 3, 3, 20_000, 20_000, 20_000):
            x = normal(batch, 17)
            np.testing.assert_allclose(first.step(x)[0], second.step(x)[0], rtol=1e-5, atol=1e-5)
            assert torch.cuda.current_device() == 0


class StandInCapture:
    """Stands in for torch.cuda's streams, graphs and pools, and for an operation that ends a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.stream, self.pools, self.calls = "caller's", [], []
        self.invalid = self.capturing = False
        recorder = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                recorder.pools.append(pool)
                recorder.capturing = True

            def capture_end(self) -> None:
                recorder.capturing, invalid, recorder.invalid = False, recorder.invalid, False
                if invalid:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                recorder.pools.pop()

            def replay(self) -> None:
                pass

        class Stream:
            def wait_stream(self, _: object) -> None:
                pass

        class Entered:
            def __init__(self, stream: object) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                self.before, recorder.stream = recorder.stream, self.stream

            def __exit__(self, *_: object) -> None:
                recorder.stream = self.before

        def empty_cache() -> None:
            assert not recorder.pools, "INTERNAL ASSERT: captures_underway.empty()"

        def end(_index: int, pool: Any) -> None:
            recorder.calls.append("end")
            recorder.pools.remove(pool)

        for name, value in {
            "CUDAGraph": Graph,
            "Stream": lambda _position: Stream(),
            "stream": Entered,
            "current_stream": lambda _position=None: Stream(),
            "device": nullcontext,
            "synchronize": lambda _position=None: None,
            "empty_cache": empty_cache,
            "graph_pool_handle": lambda: (0, 7),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda *_: self.calls.append("release"), raising=False
        )

    def reads(self) -> float:
        if self.capturing:
            self.invalid = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return 1.0


@pytest.mark.torch
@needs("torch")
class TestCapture:
    """How a capture ends, whatever happens in it."""

    def test_an_operation_that_cannot_be_captured(
        self, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        import torch

        from ckpttool.networks import torch_programs

        cuda, device = StandInCapture(monkeypatch), torch.device("cuda", 0)
        monkeypatch.setattr(torch_programs, "_streams", {})
        monkeypatch.setattr(torch_programs, "_failed_graphs", [])
        for _ in range(2):
            with pytest.raises(UnsupportedError) as refusal:
                torch_programs.capture_graph(cuda.reads, device)
            golden(refusal.value)
            assert (cuda.stream, cuda.pools, cuda.capturing) == ("caller's", [], False)
            assert torch_programs.capture_graph(lambda: 5, device)[1] == 5
        assert cuda.calls == ["end", "release"] * 2
        assert len(torch_programs._streams) == 1

    def test_an_exception_passes_and_the_capture_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from ckpttool.networks import torch_programs

        cuda, device = StandInCapture(monkeypatch), torch.device("cuda", 0)
        monkeypatch.setattr(torch_programs, "_streams", {})

        def fails() -> None:
            if cuda.capturing:
                try:
                    raise RuntimeError("first")
                except RuntimeError as error:
                    raise failure from error

        for failure in (ValueError("x"), RuntimeError("y"), torch.OutOfMemoryError("z"), KeyboardInterrupt()):
            with pytest.raises(type(failure)):
                torch_programs.capture_graph(fails, device)
            assert (cuda.stream, cuda.pools, cuda.calls, gc.isenabled()) == ("caller's", [], [], True)


def rows_of_layers() -> dict[str, Network]:
    choices = {
        "choice": chain(4, dense(4, 9), QuantileMean(3), ArgMax((3,), (1,))),
        "atoms": chain(4, dense(4, 12), AtomMean(np.linspace(-1, 1, 6, dtype=np.float32))),
        "limited atoms": chain(4, dense(4, 12), AtomMean(np.linspace(-1, 1, 6, dtype=np.float32), 0.1)),
        "deviation": chain(4, ConstantRow(np.linspace(-1, 1, 3, dtype=np.float32)), Exp()),
        "fractions": chain(4, dense(4, 3), Softmax(), Cosines(5), dense(5, 2), Flatten(), Repeat(2)),
    }
    return NETWORKS | {"one": chain(4, dense(4, 3)), "wide": WIDE} | choices


@pytest.mark.torch
@needs("torch")
class TestDevicePrograms:
    """Every network as a program of a CUDA device, run on tensors without memory."""

    @pytest.mark.parametrize("name", rows_of_layers())
    def test_nothing_is_read_by_the_host_or_lies_elsewhere(self, name: str) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        from ckpttool.networks import InputAdapter, assemble, torch_backend

        class OnDevice(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                results = function(*args, **(kwargs or {}))
                for leaf in tree_leaves((args, results)):
                    assert not isinstance(leaf, torch.Tensor) or leaf.device.type == "cuda", function
                return results

        network, device = rows_of_layers()[name], torch.device("cuda", 0)
        arrays = InputAdapter(network)(observations(network, 4 * network.members))
        plain = assemble(network, torch_backend._layer_lowering(torch.device("cpu")))(
            list(map(torch.from_numpy, arrays))
        )
        with FakeTensorMode():
            run = assemble(network, torch_backend._layer_lowering(device))
            inputs = [
                torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=device)
                for array in arrays
            ]
            with torch.inference_mode(), OnDevice():
                results = run(inputs)
        assert [(tuple(r.shape), r.dtype) for r in results] == [(tuple(r.shape), r.dtype) for r in plain]

    def test_every_layer_is_among_them(self) -> None:
        from ckpttool.networks.torch_backend import LAYERS

        kinds = {type(node.layer) for network in rows_of_layers().values() for node in network.nodes}
        assert kinds == set(LAYERS)


class older_setting:  # noqa: N801  # reads as a function
    """Set the older precision of matrix products inside the block; ignore that PyTorch calls it old."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __enter__(self) -> None:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_float32_matmul_precision(self.value)

    def __exit__(self, *_: object) -> None:
        self.value = "highest"
        self.__enter__()


def precision_settings() -> dict[str, Any]:
    """Return every setting of PyTorch that may round the factors of products."""
    import torch

    values: dict[str, Any] = {"cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)}
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")
        values["older"] = torch.get_float32_matmul_precision()
    get = torch._C._get_fp32_precision_getter
    keys = [("generic", "all")] + [
        (b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn")
    ]
    return values | {key: get(*key) for key in keys}  # type: ignore[misc]


def set_precision(backend: str, operation: str, value: str) -> Callable[[], None]:
    import torch

    return lambda: torch._C._set_fp32_precision_setter(backend, operation, value)


@pytest.mark.torch
@needs("torch")
class TestFloat32Products:
    """Whatever the caller has set, in the older way and in the new one, a policy multiplies exactly."""

    @pytest.fixture(autouse=True)
    def _restored(self) -> Iterator[None]:
        import torch

        if not hasattr(torch._C, "_get_fp32_precision_getter"):
            pytest.skip("PyTorch before 2.9 has one set of settings")
        before = precision_settings()
        yield
        older_setting("highest").__enter__()
        for key, value in before.items():
            if isinstance(key, tuple):
                set_precision(*key, value)()

    @pytest.mark.parametrize("tf32", [False, True])
    @pytest.mark.parametrize("kind", ["cpu", "cuda"])
    @pytest.mark.parametrize(
        "settings",
        [
            "",
            "older:high",
            "older:medium",
            "generic.all=tf32",
            "generic.all=bf16",
            "cuda.all=tf32",
            "cuda.matmul=tf32",
            "cuda.conv=ieee",
            "cuda.conv=none generic.all=tf32",
            "mkldnn.matmul=bf16 mkldnn.conv=bf16",
            "older:high generic.all=tf32",
            "older:high cuda.conv=ieee mkldnn.matmul=bf16",
        ],
    )
    def test_settings_are_enforced_and_restored(self, settings: str, kind: str, tf32: bool) -> None:
        import torch

        from ckpttool.networks import Float32Precision

        for item in settings.split():
            if item.startswith("older:"):
                older_setting(item.removeprefix("older:")).__enter__()
            else:
                name, value = item.split("=")
                set_precision(*name.split("."), value)()
        before = precision_settings()
        products = Float32Precision(kind, tf32=tf32)
        get, backend = torch._C._get_fp32_precision_getter, "cuda" if kind == "cuda" else "mkldnn"
        for _ in range(2):
            with products():
                assert products.in_force()
                expected = {"tf32"} if tf32 and kind == "cuda" else {"ieee", "none"}
                assert get(backend, "matmul") in expected
                assert get(backend, "conv") in {"ieee", "none"}
            assert precision_settings() == before
        # What inherited its setting still does.
        set_precision("generic", "all", "ieee")()
        after = precision_settings()
        with products():
            pass
        assert precision_settings() == after

    def test_steps_of_dense_layers_change_no_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The defaults serve for them: a step costs two readings."""
        import torch

        from ckpttool.networks import Float32Precision

        set_precision("cuda", "conv", "tf32")()  # PyTorch's default
        for kind in ("cpu", "cuda"):
            assert Float32Precision(kind, convolutions=False).in_force()
        assert not Float32Precision("cuda").in_force()
        module: Any = plugins.find("backends", "torch").load()
        with monkeypatch.context() as patch:  # undone before the settings are restored
            patch.setattr(torch._C, "_set_fp32_precision_setter", None)
            assert module.build(ACTOR).step(normal(2, 17))[0].shape == (2, 6)

    @pytest.mark.parametrize(
        "setting", ["generic.all=tf32", "cuda.matmul=tf32", "cuda.conv=ieee", "mkldnn.conv=bf16"]
    )
    def test_steps_work_under_any_setting(self, setting: str) -> None:
        module: Any = plugins.find("backends", "torch").load()
        cases = [(network, observations(network, 6)) for network in (ACTOR, IMAGES)]
        expected = [module.build(network).step(x)[0] for network, x in cases]
        name, value = setting.split("=")
        set_precision(*name.split("."), value)()
        for (network, x), numbers in zip(cases, expected, strict=True):
            np.testing.assert_allclose(module.build(network).step(x)[0], numbers, rtol=2e-6, atol=2e-6)

    def test_the_bits_of_products_are_measured(self) -> None:
        policy: Any = plugins.find("backends", "torch").load().build(ACTOR)
        assert policy.product_bits() == 23
        import torch

        kept, exact = 10, torch.Tensor.__matmul__

        def tf32(a: Any, b: Any) -> Any:
            whole = a.view(torch.int32) + (1 << (22 - kept))
            return exact((whole >> (23 - kept) << (23 - kept)).view(torch.float32), b)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.Tensor, "__matmul__", tf32)
            assert policy.product_bits() == kept


CUDA_ERRORS = {
    "out of memory": "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB",
    "no memory on the host": "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 131072000000 bytes. Error code 12 (Cannot allocate memory)",
    "cublas without memory": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "busy": "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for `cudaErrorDevices'",
    "no kernel": "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors",
    "old driver": "The NVIDIA driver on your system is too old (found version 12040). Please update",
    "old runtime": "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    "no driver": "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    "hidden": "No CUDA GPUs are available",
    "broken": "CUDA error: an illegal memory access was encountered\n\x1b[31mSearch for",
    "assert": "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
    "other": "CUDA error: invalid device ordinal",
    "cudnn": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
}


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.torch
@needs("torch")
class TestDeviceErrors:
    @pytest.mark.parametrize("name", CUDA_ERRORS)
    def test_an_error_is_one_sentence_with_a_hint(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from ckpttool.networks import device_error, is_out_of_memory

        error = device_error(RuntimeError(CUDA_ERRORS[name]), "cuda:0")
        assert error is not None
        assert error.hint
        assert str(error).isprintable()
        assert (error.kind, "memory" in name) == ("device", is_out_of_memory(error))

    def test_other_errors_are_left_alone(self) -> None:
        from ckpttool.networks import device_error

        for error in (
            RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
            KeyError("cuda"),
            ValueError(),
        ):
            assert device_error(error, "cuda:0") is None

    @pytest.mark.parametrize("name", ["busy", "no kernel", "broken"])
    def test_a_step_and_a_build_raise_it(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from ckpttool.networks import torch_backend

        def fails(*_: object) -> None:
            raise RuntimeError(CUDA_ERRORS[name])

        policy = torch_backend.build(ACTOR)
        monkeypatch.setattr(policy, "_on_host", fails)
        with pytest.raises(DeviceError):
            policy.step(normal(3, 17))
        monkeypatch.setattr(torch_backend, "_layer_lowering", fails)
        with pytest.raises(DeviceError):
            torch_backend.build(ACTOR)

    def test_weights_that_do_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ckpttool.networks import torch_backend

        def fails(*_: object) -> None:
            raise RuntimeError(CUDA_ERRORS["out of memory"])

        monkeypatch.setattr(torch_backend, "_layer_lowering", fails)
        with pytest.raises(DeviceError) as refusal:
            torch_backend.build(ACTOR)
        assert "--num-envs" not in refusal.value.hint

    def test_a_rollout_on_the_device_raises_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from ckpttool.evaluation import torch_rollout
        from ckpttool.evaluation.rollout import RolloutSpec

        def fails(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        policy: Any = plugins.find("backends", "torch").load().build(ACTOR)
        envs: Any = SimpleNamespace(num_envs=64, spec=SimpleNamespace(obs_dim=17))

        def play() -> None:
            torch_rollout.play_on_device(policy, envs, RolloutSpec(1), 2, lambda *_: None)

        monkeypatch.setattr(torch_rollout, "play_members", fails)
        before = torch.get_num_threads()
        with pytest.raises(DeviceError) as refusal:
            play()
        assert refusal.value.hint.split()[-2:] == ["--num-envs", "16"]
        assert torch.get_num_threads() == before
        for error in (KeyError("x"), RuntimeError("shapes")):
            monkeypatch.setattr(torch_rollout, "play_members", lambda *_, error=error, **__: raise_(error))
            with pytest.raises(type(error)):
                play()

    @pytest.mark.parametrize(
        ("visible", "error"),
        [
            pytest.param("", "No CUDA GPUs are available", id="hidden"),
            pytest.param(None, CUDA_ERRORS["old driver"], id="old driver"),
            pytest.param(None, CUDA_ERRORS["no driver"], id="no driver"),
            pytest.param(None, "something new", id="unknown"),
        ],
    )
    def test_the_reason_why_there_is_no_gpu(
        self, monkeypatch: pytest.MonkeyPatch, visible: str | None, error: str, golden: Golden
    ) -> None:
        import torch

        def init() -> None:
            raise RuntimeError(error)

        def available() -> bool:
            warnings.warn("CUDA initialization: " + error, UserWarning, stacklevel=1)
            return False

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", available)
        monkeypatch.setattr(torch.cuda, "init", init)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        module: Any = plugins.find("backends", "torch").load()
        with pytest.raises(UsageError) as refusal:
            module.build(ACTOR, "cuda")
        golden(str(refusal.value.hint))

    def test_the_memory_of_the_host(self) -> None:
        """Under a real limit: the rows that the error names fit, and the process goes on."""
        import resource

        policy: Any = plugins.find("backends", "torch").load().build(WIDE)
        policy.step(normal(10, 3))
        sizes = Path("/proc/self/statm")
        if not sizes.exists():
            pytest.skip("the size of a process is read on Linux")
        before = resource.getrlimit(resource.RLIMIT_AS)
        used = int(sizes.read_text().split()[0]) * resource.getpagesize()
        x = np.ones((600_000, 3), np.float32)
        # Threads that start reserve a part of it: 128 MiB for each one's heap.
        resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), before[1]))
        try:
            with pytest.raises(DeviceError) as refusal:
                policy.step(x)
            most = int(refusal.value.hint.split()[-1])
            assert policy.step(x[:most])[0].shape == (most, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert 10_000 < most < 600_000
        assert policy.step(x[:10])[0].shape == (10, 2)


@pytest.mark.torch
@needs("torch")
def test_rollouts_as_graphs(stand_ins: Any) -> None:
    pytest.importorskip("gymnasium")
    import torch

    from ckpttool.evaluation import environments
    from ckpttool.evaluation.rollout import RolloutSpec
    from ckpttool.evaluation.torch_rollout import _DeviceRollout

    policy: Any = plugins.find("backends", "torch").load().build(chain(3, dense(3, 1)))
    vector: Any = environments.make_vector_env("Pendulum-v1", 2, engine="device")
    with torch.inference_mode(), vector:
        games = [_DeviceRollout(policy.act, torch.device("cpu"), vector, RolloutSpec(3), 1) for _ in range(2)]
        ticks = (games[0].tick, games[1].graph())
        for _ in range(450):
            for tick in ticks:
                tick()
        plain, replayed = (game.result(0, 1.0, False) for game in games)
    np.testing.assert_array_equal(plain.returns, replayed.returns)
    assert (len(plain.returns), plain.steps) == (3, replayed.steps) == (3, 600)


@pytest.mark.torch
@needs("torch")
def test_the_device_side_function_is_the_step() -> None:
    import torch

    module: Any = plugins.find("backends", "torch").load()
    for network in (ACTOR, ACTOR.cast("float64"), stack_networks([renewed(ACTOR), renewed(ACTOR)])):
        policy = module.build(network)
        x = normal(6, 17)
        actions = policy.act(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(actions, policy.step(x)[0], rtol=1e-6, atol=1e-6)


def in_tensorflow(_: Path) -> dict[str, Any]:
    import tensorflow as tf

    module: Any = plugins.find("backends", "tensorflow").load()
    largest = 0.0
    for network, rows in ((ACTOR, 3), (stack_networks([ACTOR, renewed(ACTOR)]), 6), (ACTOR, 1)):
        plain, compiled = module.build(network), module.build(network, xla=True)
        for _ in range(2):
            x = normal(rows, 17)
            largest = max(largest, float(abs(plain.step(x)[0] - compiled.step(x)[0]).max()))
    return {"largest": largest, "threads": tf.config.threading.get_intra_op_parallelism_threads()}


@pytest.mark.tensorflow
@needs("tensorflow")
def test_xla_computes_the_same_and_the_policy_has_one_thread(tmp_path: Path) -> None:
    record = tensorflow_child.run(__file__, "in_tensorflow", tmp_path)
    assert record["largest"] < 1e-5
    assert record["threads"] == 1
