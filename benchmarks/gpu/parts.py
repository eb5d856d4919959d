"""What a run consists of: parts that check or measure, the context that they get, the records they return."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Sense = Literal["at most", "at least"]

PASSED, FAILED, ABSENT, MEASURED = "passed", "failed", "absent", "measured"
LIMIT_S = 60.0

# An absolute path names folders and users of the machine; its last name is enough for a reader.
_PATH = re.compile(r"(?<![\w.:/])(?:/[^\s/'\":,;()<>]+)*/(?=[^\s/'\":,;()<>])")


class Absent(Exception):  # noqa: N818 - not an error
    """A part cannot run here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Check:
    """A measured number and the bound that it must keep; NaN keeps none."""

    name: str
    measured: float
    bound: float
    sense: Sense = "at most"
    unit: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the bound is kept."""
        if self.sense == "at most":
            return self.measured <= self.bound
        return self.measured >= self.bound

    def document(self) -> dict[str, Any]:
        """Return the JSON object; JSON has no infinity, so one is written as null."""
        return {
            "name": self.name,
            "status": PASSED if self.passed else FAILED,
            "measured": finite(self.measured),
            "sense": self.sense,
            "bound": self.bound,
            "unit": self.unit,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured speed or size.

    `settings` are the sizes with which it was measured; `beside` are ratios to other ways and to limits, each
    above 1 where this way is faster. `value` is None where `note` gives the reason for not measuring.
    """

    name: str
    value: float | None
    unit: str
    settings: Mapping[str, int | str] = field(default_factory=dict)
    beside: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "name": self.name,
            "value": None if self.value is None else finite(self.value),
            "unit": self.unit,
            "settings": dict(self.settings),
            "beside": {name: finite(ratio) for name, ratio in self.beside.items()},
            "note": self.note,
        }


Found = Sequence[Check | Figure] | dict[str, Any]
"""What a part returns: checks and figures, or facts about the device."""


def finite(number: float) -> float | None:
    """Return the number with six significant digits, or None where JSON has none."""
    return float(f"{number:.6g}") if math.isfinite(number) else None


def torch_policy(network: Any, device: str, **options: Any) -> Any:
    """Return ckpttool's policy on PyTorch."""
    from ckpttool.core import plugins

    backend: Any = plugins.find("backends", "torch").load()
    return backend.build(network, device, **options)


@dataclass(frozen=True)
class Context:
    """Where a part runs, and how much it may do.

    `make` builds policies (tests replace it by a faulty one); `folder` is for files.
    """

    device: str = "cpu"
    quick: bool = False
    folder: str = "."
    make: Callable[..., Any] = torch_policy

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    @property
    def budget_s(self) -> float:
        """How long one way of computing is timed."""
        return 0.05 if self.quick else 0.4

    @property
    def workspace(self) -> Any:
        """The device with its index, as PyTorch names it."""
        import torch

        return torch.device("cuda:0" if self.device == "cuda" else self.device)

    def build(self, network: Any, device: str | None = None, **options: Any) -> Any:
        """Return a policy on the device; raise Absent where PyTorch is not installed."""
        require("torch")
        return self.make(network, device or self.device, **options)

    def referee(self, network: Any) -> Any:
        """Return the same network in NumPy and float64."""
        return backend("numpy").build(network.cast("float64"))

    def wait(self) -> None:
        """Return when the device has nothing left to do."""
        if self.cuda:
            import torch

            torch.cuda.synchronize(self.workspace)

    def current(self) -> Any:
        """Return a context in which the device is PyTorch's current one."""
        if not self.cuda:
            return nullcontext()
        import torch

        return torch.cuda.device(self.workspace)

    def require_cuda(self, feature: str) -> None:
        """Raise Absent unless the device is a GPU."""
        if not self.cuda:
            raise Absent(f"{feature} exist on CUDA devices alone")


@dataclass(frozen=True, slots=True)
class Part:
    """A named check or measurement, given up after `limit_s`.

    `fresh` starts a process for it alone. Without enough time left in the run, an `optional` part is absent,
    any other failed.
    """

    name: str
    run: Callable[[Context], Found]
    limit_s: float = LIMIT_S
    fresh: bool = False
    optional: bool = False


def run_part(part: Part, context: Context) -> dict[str, Any]:
    """Run one part and return its record; an exception becomes its error."""
    start = time.perf_counter()
    record: dict[str, Any] = {"part": part.name, "status": FAILED, "error": None, "checks": [], "figures": []}
    try:
        # A part with a process of its own may be for a library that PyTorch must not meet.
        with nullcontext() if part.fresh else context.current():
            results = part.run(context)
    except Absent as absent:
        record |= {"status": ABSENT, "error": scrubbed(str(absent))}
    except Exception as error:  # noqa: BLE001 - whatever fails is recorded, and the run goes on
        record["error"] = last_line(error)
    else:
        record |= _documents(results)
    return record | {"seconds": round(time.perf_counter() - start, 3)}


def _documents(results: Found) -> dict[str, Any]:
    if isinstance(results, dict):
        return {"status": MEASURED, "facts": results}
    checks = [result.document() for result in results if isinstance(result, Check)]
    figures = [result.document() for result in results if isinstance(result, Figure)]
    if not (checks or figures):
        return {"error": "the part returned neither a check nor a figure"}
    failed = any(check["status"] == FAILED for check in checks)
    status = FAILED if failed else PASSED if checks else MEASURED
    return {"status": status, "checks": checks, "figures": figures}


def failure(part: Part, error: str, seconds: float, status: str = FAILED) -> dict[str, Any]:
    """Return the record of a part that could not report by itself."""
    return {
        "part": part.name,
        "status": status,
        "error": scrubbed(error),
        "checks": [],
        "figures": [],
        "seconds": round(seconds, 3),
    }


def last_line(error: BaseException) -> str:
    """Return what the last line of a traceback says, without the machine's paths."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()
    return scrubbed(text[0] if text else type(error).__name__)


def scrubbed(text: str) -> str:
    """Return printable text of bounded length, without folders of this machine."""
    clean = "".join(character if character.isprintable() else " " for character in _PATH.sub("", text))
    return clean if len(clean) <= 400 else clean[:397] + "..."


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Let PyTorch multiply float32 in that precision inside the block, whatever its defaults are here.

    From PyTorch 2.9 on these settings have other names, and reading the old ones may raise.
    """
    import torch

    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        places = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
        kept = [backend.fp32_precision for backend in places]
        try:
            for backend in places:
                backend.fp32_precision = precision
            yield
        finally:
            for backend, before in zip(places, kept, strict=True):
                backend.fp32_precision = before
        return
    earlier = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(earlier)


def require(*modules: str) -> None:
    """Raise Absent for the first of the modules that is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Absent(f"{module} is not installed")


def backend(name: str) -> Any:
    """Return a backend's module; raise Absent where its libraries are not installed."""
    from ckpttool.core import plugins

    needed = {"numpy": (), "onnxruntime": ("onnx", "onnxruntime")}.get(name, (name,))
    require(*needed)
    return plugins.find("backends", name).load()


def difference(result: Any, expected: Any) -> float:
    """Return the largest error, relative where the expected number is above 1; infinity for other shapes."""
    actual_values, reference = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    if actual_values.shape != reference.shape or not np.isfinite(actual_values).all():
        return math.inf
    return float((abs(actual_values - reference) / np.maximum(1.0, abs(reference))).max(initial=0.0))


def unlike(result: Any, expected: Any) -> float:
    """Return how many elements are not the same bits; infinity for another shape or type."""
    actual_array, expected_array = np.asarray(result), np.asarray(expected)
    if actual_array.shape != expected_array.shape or actual_array.dtype != expected_array.dtype:
        return math.inf
    bits = f"u{actual_array.dtype.itemsize}"
    one, other = (np.ascontiguousarray(array).view(bits) for array in (actual_array, expected_array))
    return float((one != other).sum())
