"""Devices: what graphs and transfers may not change, XLA, threads, and the words where there is no GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import plugins
from ckpttool.agents.stacking import stack
from ckpttool.errors import UsageError
from ckpttool.ops.evaluate import evaluate
from ckpttool.ops.evaluation import Protocol
from tests import tensorflow_child
from tests.conftest import TORCH_SAMPLE
from tests.test_backends import ACTOR, CELL, chain, cuda_is_missing, dense, needs, normal, renewed


@pytest.mark.environment
@pytest.mark.parametrize("backend", ["numpy", "torch", "onnxruntime"])
def test_a_missing_gpu_is_one_sentence(backend: str) -> None:
    """TensorFlow's is among the contract's tests, in its worker."""
    pytest.importorskip("gymnasium")
    pytest.importorskip(backend)
    with pytest.raises(UsageError, match="has no device 'cuda:99'") as caught:
        evaluate(str(TORCH_SAMPLE), protocol=Protocol(1, backend=backend, device="cuda:99"))
    assert caught.value.hint


@pytest.mark.torch
@needs("torch")
class TestCuda:
    """The same numbers with and without graphs, at every shape, and close to the CPU's."""

    @pytest.fixture
    def backend(self) -> Any:
        if cuda_is_missing():
            pytest.skip("PyTorch sees no CUDA device")
        return plugins.find("backends", "torch").load()

    @pytest.mark.parametrize("batch", [1, 64, 20_000])
    def test_graphs_change_no_bit_and_agree_with_the_cpu(self, backend: Any, batch: int) -> None:
        with_graphs, without = backend.build(ACTOR, "cuda"), backend.build(ACTOR, "cuda", graphs=False)
        cpu = backend.build(ACTOR)
        for _ in range(3):
            x = normal(batch, 17)
            found = with_graphs.step(x)[0]
            np.testing.assert_array_equal(found, without.step(x)[0])
            np.testing.assert_allclose(found, cpu.step(x)[0], rtol=1e-5, atol=1e-5)

    def test_shapes_come_and_go(self, backend: Any) -> None:
        policy, plain = backend.build(ACTOR, "cuda"), backend.build(ACTOR, "cuda", graphs=False)
        for batch in (*range(1, 12), 1, 5):
            x = normal(batch, 17)
            np.testing.assert_array_equal(policy.step(x)[0], plain.step(x)[0])

    def test_stacked_policies_equal_each_alone(self, backend: Any) -> None:
        actors = [renewed(ACTOR) for _ in range(4)]
        x = normal(4 * 16, 17)
        found = backend.build(stack(actors), "cuda").step(x)[0]
        alone = [backend.build(a, "cuda").step(x[16 * i :][:16])[0] for i, a in enumerate(actors)]
        np.testing.assert_allclose(found, np.concatenate(alone), rtol=1e-5, atol=1e-5)

    def test_state_goes_through_graphs(self, backend: Any) -> None:
        gpu, cpu = backend.build(CELL, "cuda"), backend.build(CELL)
        ours: Any = ()
        theirs: Any = ()
        for x in normal(5, 3, 3):
            found, ours = gpu.step(x, ours)
            expected, theirs = cpu.step(x, theirs)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

    def test_tf32_is_only_used_when_asked_for(self, backend: Any) -> None:
        x = normal(512, 17)
        exact = backend.build(ACTOR.cast("float64")).step(x)[0]
        off, on = (abs(backend.build(ACTOR, "cuda", tf32=t).step(x)[0] - exact).max() for t in (False, True))
        assert off < 1e-5
        assert on >= off


class Recorded:
    """Stands in for an event, a stream and a graph: it does at once what a GPU would do later."""

    def __init__(self, replay: Any = None) -> None:
        self.replay, self.done = replay, 0

    def record(self) -> None:
        self.done += 1

    def synchronize(self) -> None:
        self.done += 1


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the code for a GPU run on the CPU: buffers, pieces, shapes, replays that write to one place."""
    import torch

    from ckpttool.agents.backends import torch_cuda

    empty = torch.empty

    def captured(body: Any, _place: Any) -> Any:
        results = [body() for _ in range(torch_cuda.WARM_UPS + 1)][-1]

        def replay() -> None:
            for kept, new in zip(results or (), body() or (), strict=True):
                kept.copy_(new)

        return Recorded(replay), results

    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", Recorded)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch_cuda, "captured", captured)
    monkeypatch.setattr(torch_cuda, "PIECE_BYTES", 100)
    return torch_cuda


@pytest.mark.torch
@needs("torch")
class TestPretendedGpu:
    """A GPU's bookkeeping, where there is none: what it computes must be what the plain way computes."""

    @pytest.mark.parametrize("graphs", [True, False])
    def test_steps(self, pretended_gpu: Any, graphs: bool) -> None:
        import torch

        policy: Any = plugins.find("backends", "torch").load().build(ACTOR)
        on_gpu = pretended_gpu.CudaRun(policy._run, torch.device("cpu"), graphs=graphs)
        kept = []
        with torch.inference_mode():
            for batch in (1, 3, 64, 3, *range(4, 14), 1):
                x = normal(batch, 17)
                kept.append((on_gpu([x])[0], policy.step(x)[0]))
        for found, expected in kept:
            # Buffers lie elsewhere, and a BLAS may add up in another order there.
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

    def test_rollouts(self, pretended_gpu: Any) -> None:
        pytest.importorskip("gymnasium")
        import torch

        from ckpttool.agents import envs
        from ckpttool.agents.backends.torch_rollout import _Game
        from ckpttool.agents.rollout import Play

        policy: Any = plugins.find("backends", "torch").load().build(chain(3, dense(3, 1)))
        vector: Any = envs.make("Pendulum-v1", 2, engine="device")
        with torch.inference_mode(), vector:
            games = [_Game(policy.act, torch.device("cpu"), vector, Play(3), 1) for _ in range(2)]
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
    for network in (ACTOR, ACTOR.cast("float64"), stack([renewed(ACTOR), renewed(ACTOR)])):
        policy = module.build(network)
        x = normal(6, 17)
        found = policy.act(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(found, policy.step(x)[0], rtol=1e-6, atol=1e-6)


def in_tensorflow(_: Path) -> dict[str, Any]:
    import tensorflow as tf

    module: Any = plugins.find("backends", "tensorflow").load()
    largest = 0.0
    for network, rows in ((ACTOR, 3), (stack([ACTOR, renewed(ACTOR)]), 6), (ACTOR, 1)):
        plain, compiled = module.build(network), module.build(network, xla=True)
        for _ in range(2):
            x = normal(rows, 17)
            largest = max(largest, float(abs(plain.step(x)[0] - compiled.step(x)[0]).max()))
    return {"largest": largest, "threads": tf.config.threading.get_intra_op_parallelism_threads()}


@pytest.mark.tensorflow
@needs("tensorflow")
def test_xla_computes_the_same_and_the_policy_has_one_thread(tmp_path: Path) -> None:
    found = tensorflow_child.run(__file__, "in_tensorflow", tmp_path)
    assert found["largest"] < 1e-5
    assert found["threads"] == 1
