"""`python -m tests.hostile.damage [--times N]`: damaged files, and what readers make of them.

Of each seed N copies with one flipped bit ("flips"), N with a flipped bit, another byte, an integer at the
edge of a type's range, or a cut ("mixed"), and N mixed ones whose checksums were made right afterwards
("resigned"). A damaged file is refused, is read as the same checkpoint, or it is the reader's failure: WRONG
(read without complaint, with another tree, name, shape or value), untyped (an exception that is not the
reader's own), crash, hang, memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.hostile.readers import OURS, READERS, Read, Refused, ours
from tests.hostile.repair import resigned
from tests.hostile.room import Room, forked_children, room
from tests.hostile.seeds import SEEDS, Seed

KINDS = ("flips", "mixed", "resigned")
WORDS = ("refused", "same", "WRONG", "untyped", "crash", "hang", "memory")
SECONDS, MEMORY = 20, 1 << 30


class Outcome(NamedTuple):
    """What became of damage number `number`; `detail` names the exception or the signal."""

    number: int
    word: str
    detail: str


def damaged(seed: Seed, kind: str, number: int) -> dict[str, bytes]:
    """Return the files of a seed, one of them damaged; the same for the same arguments, everywhere."""
    choose = random.Random(f"{seed.name}/{kind}/{number}")
    whole = seed.contents()
    at = choose.randrange(sum(len(whole[name]) for name in seed.damaged))
    for name in seed.damaged:
        if at < len(whole[name]):
            break
        at -= len(whole[name])
    change = _flip if kind == "flips" else changed
    files = {**whole, name: change(whole[name], at, choose)}
    return resigned(whole, files) if kind == "resigned" else files


def changed(data: bytes, at: int, choose: random.Random) -> bytes:
    """Return the data with one flipped bit, another byte, an edge integer or a cut at a place."""
    return choose.choice((_flip, _byte, _integer, _cut))(data, at, choose)


def _flip(data: bytes, at: int, choose: random.Random) -> bytes:
    return data[:at] + bytes((data[at] ^ 1 << choose.randrange(8),)) + data[at + 1 :]


def _byte(data: bytes, at: int, choose: random.Random) -> bytes:
    return data[:at] + bytes((choose.randrange(256),)) + data[at + 1 :]


def _cut(data: bytes, at: int, choose: random.Random) -> bytes:
    return data[:at]


def _integer(data: bytes, at: int, choose: random.Random) -> bytes:
    width = choose.choice((1, 2, 4, 8))
    top = 1 << 8 * width
    edge = choose.choice((0, 1, 2, top // 2 - 1, top // 2, top // 2 + 1, top - 2, top - 1))
    number = edge.to_bytes(width, choose.choice(("little", "big")))
    return (data[:at] + number + data[at + width :])[: max(len(data), at + width)]


def resignable(seed: Seed) -> bool:
    """Say whether a seed has checksums that can be made right."""
    return seed.covered or seed.name in ("torch DCP", "d3rlpy")


def outcomes(read: Read, seed: Seed, kind: str, numbers: Iterable[int]) -> Iterator[Outcome]:
    """Read each damaged copy in a forked process, a new one after each that has died."""
    waiting = list(numbers)[::-1]
    with room() as place:
        place.fill(seed.contents())
        truth = read(str(place.folder / seed.path))
        while waiting:
            for outcome in _batch(read, seed, kind, waiting[::-1], truth, place):
                assert waiting.pop() == outcome.number
                yield outcome


def _batch(
    read: Read, seed: Seed, kind: str, numbers: Sequence[int], truth: str, place: Room
) -> Iterator[Outcome]:
    """Give the outcomes up to the first that ends the process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        _work(read, seed, kind, numbers, truth, place, theirs)
    os.close(theirs)
    done = 0
    with open(ours, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            yield Outcome(*json.loads(line))
            done += 1
    _, status = os.waitpid(child, 0)
    if done < len(numbers):
        ended = os.waitstatus_to_exitcode(status)
        name = signal.Signals(-ended).name if ended < 0 else f"status {ended}"
        yield Outcome(numbers[done], "hang" if name == "SIGALRM" else "crash", name)


def _work(
    read: Read, seed: Seed, kind: str, numbers: Sequence[int], truth: str, place: Room, out: int
) -> NoReturn:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        for number in numbers:
            place.fill(damaged(seed, kind, number))
            signal.alarm(SECONDS)
            word, detail = _outcome(read, str(place.folder / seed.path), truth)
            signal.alarm(0)
            os.write(out, (json.dumps([number, word, detail[:300]]) + "\n").encode())
    except Exception as error:  # noqa: BLE001  # the harness is wrong, not the reader
        os.write(out, (json.dumps([number, "crash", f"harness: {error!r}"]) + "\n").encode())
    finally:
        os._exit(0)


def _outcome(read: Read, path: str, truth: str) -> tuple[str, str]:
    try:
        found = read(path)
    except Refused as refused:
        return "refused", str(refused)
    except MemoryError as error:
        return "memory", str(error)
    except BaseException as error:  # noqa: BLE001  # what is counted
        return "untyped", f"{type(error).__name__}: {error}"
    return ("same", "") if found == truth else ("WRONG", "")


class Row(NamedTuple):
    """How often each word was the outcome, and the first damages that were failures."""

    seed: str
    reader: str
    kind: str
    counts: Mapping[str, int]
    failures: Sequence[Outcome]


def rows(reader: str, times: int, names: Sequence[str] = ()) -> Iterator[Row]:
    """Damage every seed that a reader reads, in all ways; give a row for each seed and way."""
    read = READERS[reader]()
    for seed in SEEDS:
        if (names and seed.name not in names) or reader not in (OURS, seed.peer):
            continue
        for kind in KINDS if resignable(seed) else KINDS[:2]:
            found = list(outcomes(read, seed, kind, range(times)))
            counts = Counter(outcome.word for outcome in found)
            bad = [each for each in found if each.word not in ("refused", "same")]
            yield Row(seed.name, reader, kind, {word: counts[word] for word in WORDS}, bad[:20])


def _table(found: Sequence[Row]) -> Iterator[str]:
    yield "| file | reader | damage | " + " | ".join(WORDS) + " |"
    yield "|---|---|---|" + "---:|" * len(WORDS)
    places = {seed.name: number for number, seed in enumerate(SEEDS)}
    for row in sorted(found, key=lambda row: (places[row.seed], KINDS.index(row.kind), row.reader != OURS)):
        counts = " | ".join(f"{row.counts[word]:,}" for word in WORDS)
        yield f"| {row.seed} | {row.reader} | {row.kind} | {counts} |"


def main() -> None:
    """Print the table of all readers, or the rows of one as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.damage")
    parser.add_argument("--times", type=int, default=2000, help="damaged copies of each seed, in each way")
    parser.add_argument("--seed", action="append", default=[], help="only this seed; repeatable")
    parser.add_argument("--reader", action="append", default=[], help="only this reader; repeatable")
    parser.add_argument("--rows", metavar="READER", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rows:
        with forked_children():
            for row in rows(asked.rows, asked.times, asked.seed):
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
        return
    found: list[Row] = []
    for reader in asked.reader or READERS:
        command = [
            sys.executable,
            "-m",
            "tests.hostile.damage",
            "--rows",
            reader,
            "--times",
            str(asked.times),
        ]
        command += [word for name in asked.seed for word in ("--seed", name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                row = Row(*json.loads(line))
                found.append(row)
                for outcome in row.failures if reader == OURS else ():
                    sys.stderr.write(f"{row.seed} {row.kind} {outcome}\n")
    sys.stdout.write("\n".join(_table(found)) + "\n")


def sample(plan: Sequence[tuple[str, str, int]]) -> list[Any]:
    """Damage seeds as (name, kind, times) say; return their rows. For a process that was forked."""
    from tests.hostile.seeds import BY_NAME

    found = []
    with forked_children():
        for name, kind, times in plan:
            each = list(outcomes(ours, BY_NAME[name], kind, range(times)))
            counts = Counter(outcome.word for outcome in each)
            bad = [outcome for outcome in each if outcome.word not in ("refused", "same")]
            found.append(Row(name, OURS, kind, dict(counts), bad[:20]))
    return found


if __name__ == "__main__":
    main()
