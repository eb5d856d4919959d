"""Proofs of conversions in shards: memory and rate, kills, a cluster that loses a node, throttled stores.

Each is a command: `python -m benchmarks.sharding constants`, `rate --gb 200`, `kills`, `cluster`, `stores`.
They print what docs/scale.md states. `stores` needs moto's server (`pip install moto[server]`).
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).parent.parent
NAME = "model.safetensors"
MB, GB = 10**6, 10**9


def sparse_file(file: Path, nbytes: int, count: int) -> Path:
    """Write a safetensors file of zeros that take no space on the disk."""
    values = nbytes // count // 4
    header = {
        f"l{n}": {"dtype": "F32", "shape": [values], "data_offsets": [4 * values * n, 4 * values * (n + 1)]}
        for n in range(count)
    }
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + 4 * values * count)
    return file


def random_file(file: Path, nbytes: int, count: int) -> Path:
    """Write a safetensors file of random numbers."""
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    save_file({f"l{n}": random.random(nbytes // count // 4, np.float32) for n in range(count)}, file)
    return file


class Run:
    """A command: its seconds, its CPU seconds, and the peak of each process's private memory in MiB."""

    def __init__(self, *words: object, cores: int = 0) -> None:
        """Run `ckpttool convert` with these words, on that many cores (0: all)."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        start, self.peaks = time.monotonic(), dict[int, int]()
        before = os.times()
        command = [sys.executable, "-m", "ckpttool", "convert", *map(str, words), "--quiet"]
        if cores:
            command = ["taskset", "--cpu-list", f"0-{cores - 1}", *command]
        with subprocess.Popen(command, env=environment, cwd=tempfile.gettempdir()) as program:
            while program.poll() is None:
                for pid in family(program.pid):
                    self.peaks[pid] = max(self.peaks.get(pid, 0), private_mib(pid))
                time.sleep(0.1)
        after = os.times()
        self.seconds = time.monotonic() - start
        self.cpu = after.children_user + after.children_system - before.children_user - before.children_system
        if program.returncode:
            raise SystemExit(program.returncode)

    def __str__(self) -> str:
        peaks = sorted(self.peaks.values(), reverse=True)[:4]
        return f"{self.seconds:.1f} s, {self.cpu:.1f} s of CPU, peak private memory {peaks} MiB"


def family(pid: int) -> list[int]:
    """Return a process and all that it started."""
    process = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            process += [descendant for child in file.read_text().split() for descendant in family(int(child))]
        except OSError:
            continue
    return process


def private_mib(pid: int) -> int:
    """Return the private memory of a process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) >> 10


def constants(folder: Path) -> None:
    """Measure the CPU seconds per GB of what a conversion does with each byte."""
    import hashlib

    import google_crc32c
    import numpy as np

    data = np.random.default_rng(0).integers(0, 255, 1 << 28, np.uint8)
    matrix = data.view("<f4").reshape(8192, -1)
    works = {
        "SHA-256": lambda: hashlib.sha256(data),
        "CRC-32C": lambda: google_crc32c.extend(0, data),
        "transpose of float32": lambda: np.ascontiguousarray(matrix.T),
        "copy": data.copy,
        "write to the disk": lambda: (folder / "data").write_bytes(data.data),
        "read of what is in memory": lambda: (folder / "data").read_bytes(),
    }
    (folder / "data").write_bytes(data.data)
    for name, work in works.items():
        least = float("inf")
        for _ in range(5):
            before = time.process_time()
            work()
            least = min(least, time.process_time() - before)
        print(f"{name}: {least / data.nbytes * GB:.2f} s of CPU per GB")


def rate(gigabytes: float, folder: Path) -> None:
    """Convert a sparse file by two workers and, before and after, a quarter as much into one file.

    Nothing waits for the disk. One process uses up to 1.6 cores: two workers on two cores are compared with
    one process on one core.
    """
    single = sparse_file(folder / "single.safetensors", int(gigabytes * GB / 4), 8)
    whole = sparse_file(folder / "whole.safetensors", int(gigabytes * GB), 32)
    rates = []
    for turn in ("before", "after"):
        for cores in (1, 2):
            run = Run(single, folder / f"{turn}{cores}.safetensors", "--no-sync", cores=cores)
            (folder / f"{turn}{cores}.safetensors").unlink()
            megabytes_s = single.stat().st_size / MB / run.seconds
            print(f"one file on {cores} cores, {turn}: {megabytes_s:.0f} MB/s; {run}", flush=True)
            if cores == 1:
                rates.append(megabytes_s)
        if turn == "before":
            (folder / "shards").mkdir()
            words = ("--shard-size", f"{gigabytes / 32 * 1.01}GB", "--jobs", 2, "--no-sync")
            run = Run(whole, folder / "shards" / NAME, *words, cores=2)
            worker_rate = whole.stat().st_size / MB / run.seconds / 2
            print(f"two workers: {worker_rate:.0f} MB/s each; {run}", flush=True)
            shutil.rmtree(folder / "shards")
    print(f"each worker has {worker_rate / (sum(rates) / 2):.0%} of the rate of one file on one core")


def kills(count: int, folder: Path) -> None:
    """Kill drivers and workers that often; the result must be byte-identical."""
    from tests.test_shards import disturb

    start = time.monotonic()
    disturb(folder, count)
    print(f"{count} kills: all bytes equal; {time.monotonic() - start:.0f} s")


def cluster(folder: Path) -> None:
    """Convert on a local cluster of three nodes, of which one is removed midway."""
    from ray.cluster_utils import Cluster

    source = random_file(folder / "source.safetensors", 2 * GB, 60)
    (folder / "here").mkdir()
    (folder / "there").mkdir()
    Run(source, folder / "here" / NAME, "--shard-size", "40MB")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    removed = [nodes.add_node(num_cpus=1), nodes.add_node(num_cpus=1)][1]
    nodes.wait_for_nodes()

    def remove() -> None:
        while len(list((folder / "there").glob(".*/*.record"))) < 10:
            time.sleep(0.01)
        nodes.remove_node(removed, allow_graceful=False)
        print(f"a node was removed after {len(list((folder / 'there').glob('.*/*.record')))} shards")

    thread = threading.Thread(target=remove)
    thread.start()
    run = Run(source, folder / "there" / NAME, "--shard-size", "40MB", "--ray", nodes.address)
    thread.join()
    nodes.shutdown()
    names = [file.name for file in (folder / "here").iterdir() if not file.name.endswith(".ckpttool.json")]
    same, _, _ = filecmp.cmpfiles(folder / "here", folder / "there", names, shallow=False)
    if sorted(same) != sorted(names):
        raise SystemExit("the cluster wrote other bytes")
    print(f"{len(names)} files equal; {run}")


class Throttle:
    """A proxy that counts the bytes of each direction and limits the rate of each connection."""

    def __init__(self, port: int, rate: float) -> None:
        """Forward to a port of this machine, with `rate` bytes/s in each direction of a connection."""
        self.rate, self.up, self.down = rate, 0, 0
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            there = socket.create_connection(self._target)
            for one, other, up in ((here, there, True), (there, here, False)):
                threading.Thread(target=self._forward, args=(one, other, up), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket, up: bool) -> None:
        free_at = time.monotonic()
        try:
            while data := one.recv(64 << 10):
                if up:
                    self.up += len(data)
                else:
                    self.down += len(data)
                free_at = max(free_at, time.monotonic()) + len(data) / self.rate
                time.sleep(max(0.0, free_at - time.monotonic()))
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            one.close()
            other.close()


def put(url: str, data: bytes) -> None:
    """Put an object, or make a bucket."""
    headers = {"Content-Type": "application/octet-stream"}
    with urlopen(Request(url, data, headers, method="PUT")):  # noqa: S310  # of this machine
        pass


@contextmanager
def moto() -> Iterator[int]:
    """Run moto's S3; yield its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with subprocess.Popen(
        [shutil.which("moto_server") or "moto_server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        put(f"http://127.0.0.1:{port}/bucket", b"")
        try:
            yield port
        finally:
            server.kill()


def stores(megabytes: int, folder: Path) -> None:
    """Convert from S3 to S3 through connections of several rates, with one worker and with two."""
    source = random_file(folder / "source.safetensors", megabytes * MB, 16)
    size = source.stat().st_size
    with moto() as port:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }
        put(f"http://127.0.0.1:{port}/bucket/source.safetensors", source.read_bytes())
        for megabytes_s in (1000, 20, 10):
            for jobs in (1, 2):
                proxy = Throttle(port, megabytes_s * MB)
                os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
                target = f"s3://bucket/{megabytes_s}-{jobs}/{NAME}"
                shard = f"{megabytes / 8 * 1.01}MB"
                run = Run("s3://bucket/source.safetensors", target, "--shard-size", shard, "--jobs", jobs)
                transferred = f"{proxy.down / size:.3f} of the source read, {proxy.up / size:.3f} written"
                print(f"{megabytes_s} MB/s per connection, {jobs} workers: {run}; {transferred}", flush=True)


def main() -> None:
    """Run one proof in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("proof", choices=("constants", "rate", "kills", "cluster", "stores"))
    parser.add_argument("--gb", type=float, default=16, help="size of the sparse source of `rate`")
    parser.add_argument("--mb", type=int, default=200, help="size of the source of `stores`")
    parser.add_argument("--count", type=int, default=100, help="number of kills")
    parser.add_argument("--folder", help="where temporary files are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.proof == "constants":
            constants(folder)
        elif options.proof == "rate":
            rate(options.gb, folder)
        elif options.proof == "kills":
            kills(options.count, folder)
        elif options.proof == "cluster":
            cluster(folder)
        else:
            stores(options.mb, folder)


if __name__ == "__main__":
    main()
