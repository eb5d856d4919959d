"""The numerical tests once more, as an older processor computes them, and with other numbers of threads.

A result must not depend on which instructions NumPy, BLAS and PyTorch find, nor on how many cores there are.
Libraries read these settings when they are imported, so pytest runs again in a child.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.conftest import ROOT

# Where arrays of one backend, engine or batch are compared with another's, or with recorded numbers.
NUMERICAL = [
    *("test_backends", "test_devices", "test_device_rollout", "test_envs_pendulum", "test_envs_mujoco"),
    *("test_evaluate", "test_network", "test_onnx_model", "test_returns", "test_rollout", "test_strips"),
]
# Of these, the ones that compare in seconds; the others play episodes by the same arrays.
FEW = ("test_backends", "test_network", "test_onnx_model", "test_strips", "test_envs_pendulum")
# These wait for seconds, or play thousands of steps that shorter tests play as well.
LEFT_OUT = "not ctrl_c and not whole_episodes and not never_makes_code_run and not threads_change_nothing"
# Of devices these compare no numbers: errors, settings, captures, tensors without memory.
LEFT_OUT += " and not DeviceErrors and not Float32Products and not TestCapture and not DevicePrograms"
LEFT_OUT += " and not memory_is_returned"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def numpy_features() -> list[str]:
    """Return the processor's features that NumPy has code of its own for, beyond what every build needs."""
    core = getattr(np, "_core", None) or np.core  # type: ignore[attr-defined]  # before NumPy 2
    umath = core._multiarray_umath
    return [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]


def setting(features: str, threads: int) -> dict[str, str]:
    """Return the environment in which libraries find all features or none ("baseline")."""
    # Threads that wait must not spin: other tests run beside these.
    values = {**dict.fromkeys(THREADS, str(threads)), "OMP_WAIT_POLICY": "passive"}
    if features == "baseline":
        values |= {"NPY_DISABLE_CPU_FEATURES": " ".join(numpy_features()), "ATEN_CPU_CAPABILITY": "default"}
        if platform.machine() == "x86_64":
            values |= {"OPENBLAS_CORETYPE": "Nehalem", "ONEDNN_MAX_CPU_ISA": "SSE41"}
            values |= {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    return values


def python(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Run Python so, from a starter that ignores Ctrl-C and hangups; return what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", sys.executable, *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_the_settings_are_taken() -> None:
    program = """
import numpy as np
core = getattr(np, "_core", None) or np.core
features = core._multiarray_umath.__cpu_features__
print(any(features[name] for name in core._multiarray_umath.__cpu_dispatch__))
"""
    assert python(["-c", program], setting("all", 1)).split() == [str(bool(numpy_features()))]
    assert python(["-c", program], setting("baseline", 1)).split() == ["False"]
    if importlib.util.find_spec("torch") is not None:
        program = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
        assert python(["-c", program], setting("baseline", 1)).split() == ["DEFAULT", "1"]


# By default both settings differ from those of the other tests at once.
@pytest.mark.parametrize(
    ("features", "threads", "names"),
    [
        ("baseline", 2, FEW),
        pytest.param("baseline", 2, NUMERICAL, marks=pytest.mark.slow),
        pytest.param("baseline", 1, NUMERICAL, marks=pytest.mark.slow),
        pytest.param("all", 2, NUMERICAL, marks=pytest.mark.slow),
    ],
)
def test_numbers_do_not_depend_on_the_processor(features: str, threads: int, names: Sequence[str]) -> None:
    modules = [str(ROOT / "tests" / f"{name}.py") for name in names]
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    options += ["-m", f"not tensorflow{' and not slow' * (names is FEW)}"]
    signals = [f"{ROOT}/tests/test_convert.py::test_a_signal_leaves_nothing_behind"]
    chosen = modules if names is FEW else [*modules, *signals]
    output = python(["-m", "pytest", *options, *chosen], setting(features, threads))
    assert " passed" in output.splitlines()[-1]
