"""`python -m tests.hostile.fuzz [--seconds N] [TARGET ...]`: libFuzzer, by way of atheris, on every parser.

Each target of targets.py runs in a process of its own, for N seconds: it has a gibibyte of memory, and five
seconds for one input. What leaves a target other than as CkpttoolError ends it, and the input that did it
stays in `found`, the folder whose files the tests try again. A line of JSON per target says what was done.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOUND = Path(__file__).with_name("found")
# Of the processor for one input; libFuzzer's clock is the wall's, which on a busy machine says little.
SECONDS, MEMORY_MB = 5, 1024
_WALL = 120


def _met(name: str) -> list[str]:
    """Return the modules of the package whose functions a target's seeds call; those are instrumented."""
    from tests.hostile.room import room
    from tests.hostile.targets import BY_TARGET, attempt

    files: set[str] = set()
    with room() as workroom:
        for data in BY_TARGET[name].seeds():
            sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
            try:
                attempt(BY_TARGET[name], workroom, data)
            finally:
                sys.setprofile(None)
    homes = {getattr(module, "__file__", None): module.__name__ for module in list(sys.modules.values())}
    return sorted(homes[file] for file in files if str(homes.get(file)).startswith("ckpttool."))


def fuzz(name: str, options: list[str]) -> None:
    """Fuzz one target in this process, which atheris ends."""
    import atheris  # type: ignore[import-not-found]  # the extra `fuzz`

    command = [sys.executable, "-m", "tests.hostile.fuzz", "--met", name]
    met = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    with atheris.instrument_imports(include=met, enable_loader_override=False):
        for module in met:
            importlib.import_module(module)
    from tests.hostile.room import Room
    from tests.hostile.targets import BY_TARGET, attempt

    target, room = BY_TARGET[name], Room()
    corpus = Path(options[-1])
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(data)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (MEMORY_MB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def once(data: bytes) -> None:
        began = time.process_time()
        attempt(target, room, data)
        if time.process_time() - began > SECONDS:
            raise TimeoutError(f"{name} took more than {SECONDS} s for {len(data)} bytes")

    atheris.Setup([sys.argv[0], *options], once)
    atheris.Fuzz()


def run(name: str, seconds: int, corpus: Path, artifacts: Path) -> dict[str, Any]:
    """Fuzz one target for so long in a process of its own; return what libFuzzer says of it."""
    corpus.mkdir(parents=True, exist_ok=True)
    artifacts.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={_WALL}",
        f"-rss_limit_mb={MEMORY_MB + 512}",
        f"-artifact_prefix={artifacts}/{name}-",
        "-print_final_stats=1",
        "-max_len=20000",
        str(corpus),
    ]
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "tests.hostile.fuzz", "--one", name]
    done = subprocess.run(
        [*command, "--", *options], capture_output=True, text=True, errors="replace", check=False
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = done.stdout + done.stderr
    return {
        "target": name,
        "executions": _number(r"stat::number_of_executed_units: +(\d+)", text),
        "edges": _number(r"cov: (\d+)", text),
        "features": _number(r" ft: (\d+)", text),
        "inputs": len(list(corpus.iterdir())),
        "peak_mb": _number(r"stat::peak_rss_mb: +(\d+)", text),
        "slowest_s": _number(r"stat::slowest_unit_time_sec: +(\d+)", text),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 1),
        "status": done.returncode,
        "crash": "" if not done.returncode else text[-3000:],
    }


def _number(pattern: str, text: str) -> int:
    matches = re.findall(pattern, text)
    return int(matches[-1]) if matches else 0


def main() -> None:
    """Fuzz the targets that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz")
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", type=Path, help="a folder that keeps the inputs for the next time")
    parser.add_argument("--artifacts", type=Path, default=FOUND, help="where inputs go that are not survived")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--met", help=argparse.SUPPRESS)
    own, _, options = _split(sys.argv[1:])
    requested = parser.parse_args(own)
    if requested.met:
        sys.stdout.write(" ".join(_met(requested.met)))
        return
    if requested.one:
        fuzz(requested.one, options)
        return
    from tests.hostile.targets import TARGETS

    with tempfile.TemporaryDirectory() as scratch:
        corpus = requested.corpus or Path(scratch)
        crashed = 0
        for name in requested.targets or [target.name for target in TARGETS]:
            result = run(name, requested.seconds, corpus / name, requested.artifacts)
            crashed += bool(result["status"])
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
    sys.exit(1 if crashed else 0)


def _split(words: list[str]) -> tuple[list[str], bool, list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], at < len(words), words[at + 1 :]


if __name__ == "__main__":
    main()
