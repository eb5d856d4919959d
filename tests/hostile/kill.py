"""Conversions over a good target, killed: at every step that changes a folder, or at random moments.

A started process forks a child for each, which runs the command line and dies by SIGKILL. What stands at the
target then must be the old checkpoint with its receipt, or the new one with its own.

    python -m tests.hostile.kill --times 200
    python -m tests.hostile.kill --every 1 tf fujimoto
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ckpttool.conversion.write import save
from ckpttool.core import CkpttoolError, Sidecar, atomic_write, find_pending_files, is_hidden_name, sidecar
from ckpttool.core.digests import digest_checkpoint
from ckpttool.evaluation.restore import read_verified_sidecar, restore_agent
from ckpttool.formats import open_checkpoint, resolve
from ckpttool.listing import folder
from tests.trees import torch_tree

# What changes a folder, or has it on the disk.
STEPS = ("replace", "rename", "link", "unlink", "fsync", "open", "mkdir")
# The receipt must be the one of the weights: the agents' actions have other bounds.
_BOUNDS = {"old": 1.0, "new": 2.0}


class Kind(NamedTuple):
    """A target: its name, what `--to` says, and how many critics its agent has."""

    name: str
    to: str
    critics: int = 2


KINDS = {
    "torch": Kind("agent.pt", "torch"),
    "safetensors": Kind("agent.safetensors", "safetensors"),
    "npz": Kind("agent.npz", "npz"),
    "keras": Kind("agent.weights.h5", "keras"),
    "tf": Kind("agent-7", "tf"),
    "fujimoto": Kind("agent", "fujimoto"),
    "keras_rl": Kind("agent.h5f", "keras_rl", 1),
}


class Bench:
    """A folder with two sources and, for each, the target that a whole conversion of it gives."""

    def __init__(self, home: Path, kind: Kind) -> None:
        """Make sources and targets."""
        self.kind, self.home = kind, home
        self.folder = home / "place"
        self.wholes: dict[str, Path] = {}
        self.digests: dict[str, str] = {}
        for seed, age in enumerate(("old", "new")):
            source = str(home / f"{age}.pt")
            save(agent(seed, kind.critics), source, sync=False)
            bound = _BOUNDS[age]
            sha256 = digest_checkpoint(open_checkpoint(source)).sha256
            record = Sidecar(sha256, head="tanh", action_low=[-bound], action_high=[bound])
            Path(sidecar.sidecar_path(source)).write_bytes(record.encode())
            self.folder = self.wholes[age] = home / f"whole_{age}"
            self.folder.mkdir()
            assert self.child(self.words(age)) == 0, age
            self.digests[age] = digest_checkpoint(open_checkpoint(str(self.target))).sha256
        assert self.digests["old"] != self.digests["new"]
        self.folder = home / "place"

    @property
    def target(self) -> Path:
        """The target of the present place."""
        return self.folder / self.kind.name

    def words(self, age: str, *more: str) -> list[str]:
        """Return the command that converts that source onto the target."""
        source, target = str(self.home / f"{age}.pt"), str(self.target)
        return ["convert", source, target, "--to", self.kind.to, "--allow-missing", *more]

    def reset(self) -> None:
        """Put the old target there, and nothing else."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.wholes["old"], self.folder)

    def child(
        self,
        words: list[str],
        before: Callable[[], object] = lambda: None,
        wait_s: float | None = None,
        number: signal.Signals = signal.SIGKILL,
    ) -> int:
        """Run a command in a child; return its status. The signal is sent after `wait_s` if that is given."""
        # Until the child is where an interrupt ends it, it would go on as if it were its parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        pid = os.fork()
        if not pid:
            _command(words, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if wait_s is not None:
            time.sleep(wait_s)
            os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    def stands(self) -> str:
        """Return which of the two is read at the target; raise AssertionError unless it is whole."""
        checkpoint = open_checkpoint(str(self.target))
        sha256 = digest_checkpoint(checkpoint).sha256
        ages = [age for age, known in self.digests.items() if known == sha256]
        assert ages, "neither the old nor the new one"
        own = read_verified_sidecar(checkpoint).sidecar
        assert own is not None, "the receipt is lost"
        assert own.action_high == [_BOUNDS[ages[0]]], "another's receipt"
        restore_agent(str(self.target))
        self._require_tidy(ages[0], moved=is_hidden_name(checkpoint.path))
        return ages[0] + (", from its backup" if is_hidden_name(checkpoint.path) else "")

    def equals(self) -> str:
        """Return what `stands` does, without reading where bytes tell: a conversion gives the same twice."""
        for age, whole in self.wholes.items():
            files = [
                path for path in whole.iterdir() if "ckpttool" not in path.name and path.name != "checkpoint"
            ]
            receipt = sidecar.sidecar_path(str(whole / self.kind.name))
            known = sidecar.sidecar_path(str(self.target))
            contents = {
                Path(at).read_bytes() for at in (known, *find_pending_files(known)) if os.path.exists(at)
            }
            same = all(_bytes(self.folder / path.name) == path.read_bytes() for path in files)
            if same and Path(receipt).read_bytes() in contents:
                self._require_tidy(age, moved=True)
                return age
        return self.stands()

    def _require_tidy(self, age: str, *, moved: bool) -> None:
        """Assert that nobody takes a leftover for a checkpoint, and that no set is mixed."""
        files = {path.name: path.read_bytes() for path in self.folder.iterdir() if path.name[0] != "."}
        if self.kind.to in ("fujimoto", "keras_rl"):
            of = [{p.name: p.read_bytes() for p in whole.iterdir()} for whole in self.wholes.values()]
            members = {name: data for name, data in files.items() if "ckpttool" not in name}
            assert any(members.items() <= item.items() for item in of), f"a mixed set {sorted(members)}"
        if not moved:
            listed = [checkpoint.path for checkpoint in folder.list_checkpoints(str(self.folder))]
            assert all(not is_hidden_name(path) for path in listed), listed
        if self.kind.to == "tf":
            assert resolve(str(self.folder)).location == str(self.target)

    def again(self) -> None:
        """Assert that the command without --force refuses, that with it all is new, and nothing is left."""
        before = {path.name: _bytes(path) for path in self.folder.iterdir()}
        stood = self.stands()
        if "backup" not in stood or any(path.name[0] != "." for path in self.folder.iterdir()):
            assert self.child(self.words("new")) == 2, stood
            assert {path.name: _bytes(path) for path in self.folder.iterdir()} == before
        assert self.child(self.words("new", "--force")) == 0
        assert self.stands() == "new"
        # Shards under interim names may be left by the one that was killed: no index lists them.
        shard = re.compile(r"agent-7\.data-\d{5}-of-0000[2-9]")
        left_names = {path.name for path in self.folder.iterdir() if not is_hidden_name(path.name)}
        names = {name for name in left_names if not shard.fullmatch(name)}
        assert names == {path.name for path in self.wholes["new"].iterdir()}, sorted(names)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def agent(seed: int, critics: int) -> Any:
    """Return a small TD3 agent's networks as a torch program keeps them."""
    generator = np.random.default_rng(seed)

    def layer(name: str, n_in: int, n_out: int) -> dict[str, np.ndarray]:
        shapes = {"weight": (n_out, n_in), "bias": (n_out,)}
        return {f"{name}.{end}": generator.random(shape, np.float32) for end, shape in shapes.items()}

    entries: dict[str, Any] = {}
    for end in ("", "_target"):
        for number, shape in enumerate(((3, 8), (8, 8), (8, 1)), 1):
            entries |= layer(f"actor{end}/l{number}", *shape)
        for critic in range(1, critics + 1):
            for number, shape in enumerate(((4, 8), (8, 8), (8, 1))):
                entries |= layer(f"critic{end}/q{critic}.{2 * number}", *shape)
    return torch_tree(entries)


def _command(words: list[str], before: Callable[[], object]) -> NoReturn:
    """Run the command line in this child, its words going nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("KILL_SPEAKS"):
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    sys.argv = ["ckpttool", *words]
    status = 1
    # As a program starts from a terminal, whatever this process ignores or handles.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        from ckpttool.cli import main

        before()
        main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:  # before or after all
        status = 128 + signal.SIGINT
    finally:
        os._exit(status)


def counted(at: int | None, descriptor: int | None = None) -> None:
    """Die at that step of this process, or write the number of its steps to `descriptor` in the end."""
    done = 0

    def step() -> None:
        nonlocal done
        if done == at:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        if descriptor is not None:
            os.pwrite(descriptor, done.to_bytes(4, "little"), 0)

    def stepping(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*inputs: Any, **named: Any) -> Any:
            step()
            return function(*inputs, **named)

        return wrapped

    for name in STEPS:
        if name != "open":
            setattr(os, name, stepping(getattr(os, name)))
    atomic_write._open_exclusive = stepping(atomic_write._open_exclusive)
    atomic_write._BackgroundFile._put = stepping(atomic_write._BackgroundFile._put)  # type: ignore[method-assign]


def every(bench: Bench, stride: int, *, quick: bool = False) -> Iterator[tuple[int, str]]:
    """Kill at each `stride`-th step of a forced conversion; yield the step and what stood there then."""
    with tempfile.TemporaryFile() as note:
        bench.reset()
        command = bench.words("new", "--force")
        assert bench.child(command, lambda: counted(None, note.fileno())) == 0
        assert bench.stands() == "new"
        steps = int.from_bytes(os.pread(note.fileno(), 4, 0), "little")
    for at in range(0, steps, stride):
        bench.reset()
        assert bench.child(command, functools.partial(counted, at)) == -signal.SIGKILL
        yield at, bench.equals() if quick else bench.stands()
        if not quick or at % 4 == 0:
            bench.again()


def at_random(
    bench: Bench, times: int, generator: random.Random, sent: signal.Signals
) -> Iterator[tuple[int, str]]:
    """Send a signal at random moments, spread over a conversion's time and a tenth more.

    The time is taken again and again: a machine does not keep its pace, and early kills prove little.
    """
    command = bench.words("new", "--force")
    durations: collections.deque[float] = collections.deque(maxlen=5)
    for number in range(times):
        for _ in range(1 if durations else 5) if number % 10 == 0 else ():
            bench.reset()
            began = time.monotonic()
            bench.child(command)
            durations.append(time.monotonic() - began)
        bench.reset()
        moment = generator.uniform(0, 1.1 * sorted(durations)[2])
        status = bench.child(command, wait_s=moment, number=sent)
        assert status in (0, 128 + sent, -sent), status
        if sent != signal.SIGKILL:
            left = [path.name for path in bench.folder.iterdir() if is_hidden_name(path.name)]
            assert not left, left
        yield number, bench.equals() if number % 10 else bench.stands()
        if number % 20 == 0:
            bench.again()


def main() -> int:
    """Run what is asked for and print, a line of JSON for each kind, how often what stood there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all if none is named")
    parser.add_argument("--times", type=int, default=200, help="random moments for each kind")
    parser.add_argument("--every", type=int, metavar="N", help="kill once at every N-th step instead")
    parser.add_argument("--quick", action="store_true", help="look at bytes where they tell")
    parser.add_argument("--signal", default="SIGKILL", help="another that ends it, as SIGTERM")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # The child finds all imported.
    from tests.hostile import started  # noqa: F401

    wrong = 0
    for name in options.kinds or KINDS:
        counts: collections.Counter[str] = collections.Counter()
        with tempfile.TemporaryDirectory() as home:
            bench = Bench(Path(home), KINDS[name])
            generator = random.Random(options.seed)
            runs = (
                every(bench, options.every, quick=options.quick)
                if options.every
                else at_random(bench, options.times, generator, signal.Signals[options.signal])
            )
            try:
                for _, stood in runs:
                    counts[stood] += 1
            except (AssertionError, CkpttoolError) as error:
                wrong += 1
                counts[f"wrong: {error}"] += 1
        print(json.dumps({"kind": name, **counts}), flush=True)  # noqa: T201  # a program's answer
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
