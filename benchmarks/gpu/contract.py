"""The project's own CUDA tests through pytest, and a small program under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu import networks
from benchmarks.gpu.groups import ROOT
from benchmarks.gpu.parts import Absent, Check, Context, Figure, Part, difference, require, scrubbed

Found = list[Check | Figure]

# Tests that need a CUDA device carry this marker.
MARKER = "gpu"
PYTEST_S, SANITIZER_S = 150, 80


def pytest_contract(context: Context) -> Found:
    """Run the tests that are marked for a GPU, in a process of their own, and count them."""
    require("pytest")
    tests = ROOT / "tests"
    marked = re.compile(rf"\bmark\.{MARKER}\b")
    files = [
        str(file.relative_to(ROOT))
        for file in sorted(tests.glob("test_*.py"))
        if marked.search(file.read_text("utf-8"))
    ]
    if not files:
        raise Absent(f"no test is marked {MARKER!r} here")
    report = Path(context.folder) / "contract.xml"
    command = [sys.executable, "-m", "pytest", "-m", MARKER, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # The options of pyproject.toml need pytest-xdist.
    command += ["-o", "addopts=--import-mode=importlib", "--junitxml", str(report), *files]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=PYTEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pytest had not finished after {PYTEST_S} s") from None
    if not report.is_file():
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(f"pytest wrote no report (status {done.returncode}): {lines[-1] if lines else ''}")
    return counted(report.read_text("utf-8"), done.returncode)


def counted(report: str, status: int) -> Found:
    """Return the counts of a JUnit report that pytest has written itself."""
    suite = next(ElementTree.fromstring(report).iter("testsuite"))  # noqa: S314 - our own child's file
    run, failures, errors, skipped = (
        int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")
    )
    broken = [
        f"{case.get('name')}: {element.get('message')}"
        for case in suite.iter("testcase")
        for element in (*case.findall("failure"), *case.findall("error"))
    ]
    reasons = sorted({str(element.get("message")) for element in suite.iter("skipped")})
    passed = run - failures - errors - skipped
    if not run or passed == failures == errors == 0:
        raise Absent(scrubbed(f"{skipped} CUDA tests skipped: {'; '.join(reasons) or 'nothing collected'}"))
    note = scrubbed("; ".join(broken)) if broken else f"{passed} passed, {skipped} skipped"
    # Status 5 is an empty selection, 0 and 1 are results; all others are pytest's own failures.
    return [
        Check("tests that failed", failures + errors, 0, note=note),
        Check("tests that passed", passed, 1, "at least"),
        Check("pytest's own status", float(status not in (0, 1)), 0),
        Figure("tests that were skipped", skipped, "", note=scrubbed("; ".join(reasons))),
    ]


def memcheck(caching: bool) -> Callable[[Context], Found]:
    """Return the run of the small parts below under compute-sanitizer, which watches device memory.

    Without PyTorch's caching allocator every tensor is an allocation of its own, so that an access beyond one
    shows; a graph cannot be captured then, and is watched with it.
    """

    def run(context: Context) -> Found:
        context.require_cuda("accesses to device memory")
        program = shutil.which("compute-sanitizer")
        if program is None:
            raise Absent("compute-sanitizer is not installed")
        log = Path(context.folder) / f"memcheck-{int(caching)}.txt"
        command = [program, "--tool", "memcheck", "--log-file", str(log), "--error-exitcode", "9"]
        command += [sys.executable, "-m", "benchmarks.gpu.child", f"{__name__}:SANITIZED"]
        command += ["--device", context.device, "--parts", f'["{"graphs" if caching else "kernels"}"]']
        more = {} if caching else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=ROOT,
                timeout=SANITIZER_S,
                check=False,
                env={**os.environ, **more},
            )
        except subprocess.TimeoutExpired:
            raise Absent(f"compute-sanitizer had not finished after {SANITIZER_S} s") from None
        text = log.read_text("utf-8", "replace") if log.is_file() else ""
        return summary(text, done.returncode, done.stdout + done.stderr)

    return run


def summary(log: str, status: int, printed: str) -> Found:
    """Return the checks on what compute-sanitizer has logged."""
    match = re.search(r"ERROR SUMMARY: (\d+) error", log)
    if match is None:
        lines = printed.strip().splitlines()
        raise RuntimeError(f"compute-sanitizer wrote no summary: {lines[-1] if lines else ''}")
    return [
        Check("errors that memcheck found", int(match[1]), 0),
        Check("the program's status", status, 0),
    ]


def stepped(graphs: bool) -> Callable[[Context], Found]:
    """Return the program that memcheck watches: steps at shapes whose arrays go up whole and in pieces."""

    def check(context: Context) -> Found:
        checks: Found = []
        cases = {"layer norms": networks.normed(), "lstm": networks.recurrent("lstm", units=8)}
        for name, network in cases.items():
            policy, referee, largest = context.build(network, graphs=graphs), context.referee(network), 0.0
            for rows in (1, 3, 70, 3, 1, 16_000, 16_000):
                obs = networks.observations(network, rows, rows)
                largest = max(largest, difference(policy.step(obs)[0], referee.step(obs)[0]))
            checks.append(Check(name, largest, 1e-5))
        return checks

    return check


SANITIZED = (Part("kernels", stepped(graphs=False)), Part("graphs", stepped(graphs=True)))
PARTS = (Part("CUDA tests of the project", pytest_contract, PYTEST_S + 20),)
SANITIZERS = (
    Part("memcheck, kernel by kernel", memcheck(caching=False), SANITIZER_S + 10, optional=True),
    Part("memcheck, captured graphs", memcheck(caching=True), SANITIZER_S + 10, optional=True),
)
