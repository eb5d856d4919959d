"""One contract for every backend, against a reference that computes number by number in float64."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from ckpttool.core import UnsupportedError, UsageError, plugins
from ckpttool.core.sidecar import ACTIVATIONS
from ckpttool.networks import (
    Activation,
    Affine,
    Backend,
    Concat,
    Network,
    Node,
    Policy,
    StateSlot,
    Worker,
    assemble,
    stack_networks,
)
from ckpttool.testing.backends import ACTOR, SCALAR, BackendContract, chain, dense, normal


class TestNumpy(BackendContract):
    @pytest.fixture
    def backend(self) -> Any:
        return plugins.find("backends", "numpy").load()

    @pytest.mark.parametrize("batch", [1, 64, 1024])
    @pytest.mark.parametrize("members", [1, 2])
    def test_reused_memory_changes_no_bit(self, backend: Any, batch: int, members: int) -> None:
        network = stack_networks([ACTOR] * members)
        policy, plain = backend.build(network), assemble(network, backend._lower)
        for _ in range(2):
            obs = normal(members * batch, 17)
            blocks = obs if members == 1 else obs.reshape(members, batch, 17)
            np.testing.assert_array_equal(policy.step(obs)[0], plain([blocks])[0].reshape(-1, 6))

    def test_threads_are_limited_inside_the_block(self, backend: Any) -> None:
        library = backend._openblas()
        if library is None:
            pytest.skip("numpy is not linked with OpenBLAS")
        before = library[0]()
        with backend.build(ACTOR).threads(1):
            assert library[0]() == 1
        assert library[0]() == before

    def test_cuda_is_refused(self, backend: Backend) -> None:
        with pytest.raises(UsageError) as caught:
            backend.build(ACTOR, "cuda")
        assert "device 'cuda'" in caught.value.message


def needs(library: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed")


def cuda_is_missing() -> bool:
    import torch

    return not torch.cuda.is_available()


@pytest.mark.torch
@needs("torch")
class TestTorch(BackendContract):
    @pytest.fixture
    def backend(self) -> Any:
        return plugins.find("backends", "torch").load()

    def test_the_callers_precision_is_left_alone(self, backend: Backend) -> None:
        import torch

        # PyTorch 2.9 to 2.12 warn about this setting, once in a process: never because of a step.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_float32_matmul_precision("medium")
            try:
                self.check(backend.build(ACTOR), ACTOR, 64)
                assert torch.get_float32_matmul_precision() == "medium"
            finally:
                torch.set_float32_matmul_precision("highest")

    def test_threads_are_limited_inside_the_block(self, backend: Any) -> None:
        import torch

        before = torch.get_num_threads()
        with backend.build(ACTOR).threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == before

    def test_cuda_without_cuda_is_refused(self, backend: Backend) -> None:
        if not cuda_is_missing():
            pytest.skip("this machine has CUDA")
        with pytest.raises(UsageError) as caught:
            backend.build(ACTOR, "cuda")
        assert "device 'cuda'" in caught.value.message


@pytest.mark.gpu
@pytest.mark.torch
@needs("torch")
class TestTorchCuda(BackendContract):
    @pytest.fixture
    def backend(self) -> Any:
        if cuda_is_missing():
            pytest.skip("PyTorch sees no CUDA device")
        module = plugins.find("backends", "torch").load()

        class OnCuda:
            NAME = "torch"
            versions = staticmethod(module.versions)

            @staticmethod
            def build(network: Network, device: str = "cuda") -> Policy:
                return module.build(network, device)

        return OnCuda


@needs("onnx")
@needs("onnxruntime")
class TestOnnxRuntime(BackendContract):
    @pytest.fixture
    def backend(self) -> Any:
        return plugins.find("backends", "onnxruntime").load()

    def test_other_threads_are_another_session_inside_the_block(self, backend: Any) -> None:
        policy, x = backend.build(ACTOR), normal(64, 17)
        before = policy.step(x)[0]
        with policy.threads(2):
            self.check(policy, ACTOR, 64)
        np.testing.assert_array_equal(policy.step(x)[0], before)

    @pytest.mark.parametrize("name", [activation for activation in ACTIVATIONS if activation != "gelu"])
    def test_what_the_runtime_lacks_in_float64_is_put_together(self, backend: Any, name: Any) -> None:
        x = np.array([[-90, -3, -0.5, 0, 0.5, 3, 90]], np.float64)
        network = chain(7, Affine(np.ones(7), np.zeros(7)), Activation(name, 0.25))
        expected = [[SCALAR[name](float(v)) for v in x[0]]]
        np.testing.assert_allclose(backend.build(network).step(x)[0], expected, rtol=1e-14, atol=1e-15)

    def test_gelu_in_float64_is_refused(self, backend: Any) -> None:
        network = chain(7, Affine(np.ones(7), np.zeros(7)), Activation("gelu"))
        with pytest.raises(UnsupportedError) as caught:
            backend.build(network)
        assert all(word in caught.value.message for word in ("gelu", "float64"))

    def test_a_state_that_is_the_output_is_both(self, backend: Any) -> None:
        nodes = (Node(Concat(), (0, 1)), Node(dense(5, 2), (2,)))
        policy = backend.build(Network((("obs", 3), ("h", 2)), nodes, 3, (StateSlot("h", (2,), 3),)))
        action, state = policy.step(normal(4, 3))
        np.testing.assert_array_equal(action, state[0])


@pytest.mark.tensorflow
@needs("tensorflow")
class TestTensorFlow(BackendContract):
    """TensorFlow is never imported beside PyTorch: it runs in a worker."""

    @pytest.fixture
    def backend(self, workers: Callable[[str], Worker]) -> Worker:
        return workers("tensorflow")

    def test_cuda_is_offered_or_refused(self, backend: Backend) -> None:
        refused: AbstractContextManager[object] = pytest.raises(UsageError, match="'cuda'")
        with refused if "cpu" in backend.build(ACTOR, "auto").device else nullcontext():
            backend.build(ACTOR, "cuda")


def test_seams_import_no_framework() -> None:
    modules = (
        "networks.numpy_backend",
        "networks.torch_backend",
        "networks.tensorflow_backend",
        "networks.onnx_backend",
        "networks.worker",
        "evaluation.environments",
        "evaluation.rollout",
    )
    program = "import sys\n" + "".join(f"import ckpttool.{name}\n" for name in modules)
    heavy = ("torch", "tensorflow", "onnx", "onnxruntime", "gymnasium", "mujoco")
    program += f"print(sorted(set({heavy}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
