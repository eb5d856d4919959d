"""`python -m tests.hostile.twice [--times N]`: every hostile file read by two processes, which must agree.

What a reader returns of memory that it never filled depends on what was there before. So the two processes
fill what they allocate and free with different bytes (malloc.perturb of glibc) and hash texts differently.
Compared are the digests of all tensors and the notes, or the error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.hostile.mutations import kinds, mutant
from tests.hostile.room import forked_children, room
from tests.hostile.seeds import BY_NAME

ROOT = Path(__file__).resolve().parent.parent.parent
# Large blocks come from the heap too; fresh ones of the kernel's would be zeros.
_HEAP = "glibc.malloc.mmap_threshold=268435456:glibc.malloc.trim_threshold=1073741824:glibc.malloc.perturb="
_MEMORY = {
    str(byte): {
        "PYTHONHASHSEED": str(byte),
        "PYTHONMALLOC": "malloc",
        "MALLOC_PERTURB_": str(byte),
        "GLIBC_TUNABLES": f"{_HEAP}{byte}",
    }
    for byte in (23, 170)
}
# The HDF5 library takes seconds to fail on some of the mutants with lower numbers.
_FIRST = 1020
# Half of the time goes into these, which the tests leave out.
SLOW = frozenset(
    (
        "safetensors-tensors-50000",
        "torch-unpacked-again-and-again",
        "torch-expanded-many-times",
        "graph-50000-deep",
        "safetensors-padding-of-100-MB",
        "zip-70001-members",
        "pickle-200,000-deep",
    )
)


def differences(
    crafted: Mapping[str, Path], times: int, names: Sequence[str] = (), every: int = 1
) -> tuple[int, list[str]]:
    """Return how many files both processes read, and the names of those on which they do not agree.

    Args:
        crafted: files by name
        times: mutants of each seed in each way
        names: the seeds to damage, all without any
        every: a seed is damaged in one of so many ways
    """
    request = {
        "crafted": {name: str(path) for name, path in crafted.items()},
        "times": times,
        "seeds": list(names or BY_NAME),
        "every": every,
    }
    command = [sys.executable, "-m", "tests.hostile.twice", "--read", "-"]
    started = [
        subprocess.Popen(
            command, env={**os.environ, **memory}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        for memory in _MEMORY.values()
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    results = []
    for process in started:
        assert process.stdout is not None
        results.append(dict(map(json.loads, process.stdout)))
        assert process.wait() == 0
    one, other = results
    return len(one), [
        f"{name}: {one.get(name)} and {other.get(name)}"
        for name in one | other
        if one.get(name) != other.get(name)
    ]


def verdict(path: str) -> list[Any]:
    """Return what is read at a path, in words that two readings can be compared by."""
    from ckpttool.core import CkpttoolError
    from ckpttool.core.digests import digest_checkpoint
    from ckpttool.formats import open_checkpoint

    try:
        checkpoint = open_checkpoint(path)
    except CkpttoolError as error:
        return ["refused", type(error).__name__, error.message]
    try:
        return ["read", digest_checkpoint(checkpoint).sha256, list(checkpoint.notes)]
    except CkpttoolError as error:
        return ["listed", type(error).__name__, error.message, _tensors(checkpoint), list(checkpoint.notes)]


def _tensors(checkpoint: Any) -> list[str]:
    """Return the digest of every tensor that can be read, and the error of every other one."""
    from ckpttool.core import CkpttoolError
    from ckpttool.core.digests import hash_tensor

    digests = []
    for _, leaf in checkpoint.tree.tensors():
        try:
            digests.append(hash_tensor(leaf))
        except CkpttoolError as error:
            digests.append(type(error).__name__)
    return digests


def _read(request: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for name, path in request["crafted"].items():
        yield name, verdict(path)
    with room() as workroom:
        for at, seed in enumerate(BY_NAME[name] for name in request["seeds"]):
            for kind in kinds(seed)[at % request["every"] :: request["every"]]:
                for number in range(_FIRST, _FIRST + request["times"]):
                    workroom.fill(mutant(seed, kind, number))
                    yield f"{seed.name}/{kind}/{number}", verdict(str(workroom.folder / seed.path))


def make(folder: Path, *, whole: bool = True, every: int = 1) -> dict[str, Path]:
    """Write one of `every` crafted files, each into a folder of its own, with or without the slow ones."""
    import importlib
    import pkgutil

    from tests import hostile
    from tests.hostile.case import BAIT

    paths = {}
    for module in pkgutil.iter_modules(hostile.__path__):
        if not module.name.startswith("crafted_"):
            continue
        for case in importlib.import_module(f"tests.hostile.{module.name}").CASES[::every]:
            if case.name in SLOW and not whole:
                continue
            home = folder / case.name / "case"
            home.mkdir(parents=True)
            (home.parent / BAIT).write_bytes(b"\x11" * 4096)
            # A library that a case needs may be absent.
            with contextlib.suppress(ImportError):
                paths[case.name] = case.make(home)
    return paths


def main() -> None:
    """Print the files on which two processes do not agree; the status says whether there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.twice")
    parser.add_argument("--times", type=int, default=500, help="damaged copies of each seed, in each way")
    parser.add_argument("--seed", action="append", default=[], choices=sorted(BY_NAME), help="repeatable")
    parser.add_argument("--quick", action="store_true", help="leave out the slow crafted files")
    parser.add_argument("--every", type=int, default=1, help="one of so many files of each kind")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.read:
        from ckpttool.formats import hdf5_child

        # Its imports are done once, here, and the forks have them.
        hdf5_child.preload_modules()
        with forked_children(), mock.patch.object(hdf5_child, "preload_modules"):
            for row in _read(json.load(sys.stdin)):
                sys.stdout.write(json.dumps(row) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        crafted = make(Path(folder), whole=not chosen.quick, every=chosen.every)
        count, wrong = differences(crafted, chosen.times, chosen.seed, chosen.every)
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    sys.stdout.write(f"{count:,} files, {len(wrong):,} read differently\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
