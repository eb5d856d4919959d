"""The least that a proven conversion does, without ckpttool: what its time is to be compared with.

Each of two processes takes every other matrix of a file of 1024 by 1024 float32: reads it, with its CRC-32C
and SHA-256, transposes it, takes the CRC-32C and the SHA-256 of that, and writes it; then what it wrote is
read back and its CRC-32C compared. With `sync` the file is on the disk at the end. There is no format, no
name, no receipt, and no order in which a file is written: nobody waits for anybody.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator

import google_crc32c
import numpy as np

MATRIX, ROWS = 1024, 64
NBYTES = 4 * MATRIX * MATRIX
PIECE = 256 << 10
# Where the first tensor of a small zip would begin, as ckpttool writes them.
HEAD = 64
WORKERS = 2


def pieces(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Go through an array's bytes in pieces that fit a processor's cache, each after its offset."""
    flat = array.reshape(-1).view(np.uint8)
    for at in range(0, flat.size, PIECE):
        yield at, flat[at : at + PIECE]


def transpose(matrix: np.ndarray, array: np.ndarray, tile: np.ndarray) -> None:
    """Fill `array` by tiles, as ckpttool/mapping/rules.py does: the fastest way that NumPy has."""
    view = tile[:, :MATRIX]
    for top in range(0, MATRIX, ROWS):
        view[...] = matrix[top : top + ROWS]
        array[:, top : top + ROWS] = view.T


def work(source: str, target: str, worker: int) -> None:
    """Convert every matrix of one worker, and read its part of the target back."""
    matrix, output = (np.empty((MATRIX, MATRIX), np.float32) for _ in range(2))
    tile = np.empty((ROWS, MATRIX + 16), np.float32)
    digests_by_begin, digests = {}, []
    source_file, target_file = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR)
    for number in range(worker, os.fstat(source_file).st_size // NBYTES, WORKERS):
        begin, checksum, digest = number * NBYTES, 0, hashlib.sha256()
        for at, piece in pieces(matrix):
            os.preadv(source_file, [piece], begin + at)
            checksum = google_crc32c.extend(checksum, piece)
            digest.update(piece)
        transpose(matrix, output, tile)
        digests.append((checksum, digest.digest()))
        checksum, digest = 0, hashlib.sha256()
        for at, piece in pieces(output):
            checksum = google_crc32c.extend(checksum, piece)
            digest.update(piece)
            os.pwrite(target_file, piece, HEAD + begin + at)
        digests.append((checksum, digest.digest()))
        digests_by_begin[begin] = checksum
    for begin, written in digests_by_begin.items():
        checksum = 0
        for at, piece in pieces(output):
            os.preadv(target_file, [piece], HEAD + begin + at)
            checksum = google_crc32c.extend(checksum, piece)
        if checksum != written:
            raise RuntimeError("what was written is not what was read")


def written_back(target: str, done: threading.Event) -> None:
    """Have the disk take what there is, again and again, until all is there."""
    descriptor = os.open(target, os.O_RDONLY)
    while not done.wait(0.1):
        os.fsync(descriptor)
    os.fsync(descriptor)


def main(source: str, target: str, *how: str) -> None:
    """Convert `source` into `target`, a new file."""
    open(target, "xb").close()
    child = os.fork()
    if not child:
        work(source, target, 1)
        os._exit(0)
    done = threading.Event()
    disk = threading.Thread(target=written_back, args=(target, done))
    if how == ("sync",):
        disk.start()
    work(source, target, 0)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("the other half failed")
    done.set()
    if how == ("sync",):
        disk.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
