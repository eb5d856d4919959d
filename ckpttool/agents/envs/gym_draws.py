"""The first draws of the generators that Gymnasium seeds, for many seeds at once.

A reset draws from `Generator(PCG64(SeedSequence(seed)))`, which takes 20 us for each seed, and more than the
episode takes on a GPU. The arithmetic is that of numpy/random: bit_generator.pyx (SeedSequence) and
src/pcg64/pcg64.h.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_POOL = 4
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R, _SHIFT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715), np.uint32(16)
_PCG_HIGH, _PCG_LOW = np.uint64(0x2360ED051FC65DA4), np.uint64(0x4385DF649FCCF645)
_HALF, _LOW_WORD = np.uint64(32), np.uint64(0xFFFFFFFF)
# Of so many seeds the draws are compared with those of the environment itself.
_COMPARED = 32

Wide = tuple[np.ndarray, np.ndarray]
"""Integers of 128 bits: the high and the low halves, uint64 [n]."""


def starts(
    seeds: np.ndarray, low: np.ndarray, high: np.ndarray, draw: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Return what `generator.uniform(low, high)` draws first for each seed: float64 [len(seeds), len(low)].

    `draw` returns the same for one seed, by a reset of the environment. It is called for a sample of the
    seeds, and for all of them where the sample is not as computed here.
    """
    unique, inverse = np.unique(seeds, return_inverse=True)
    sample = np.unique(np.linspace(0, len(unique) - 1, _COMPARED).astype(np.int64))
    if len(sample) < len(unique) and int(unique[0]) >= 0 and int(unique[-1]) < 1 << 32:
        with np.errstate(over="ignore"):
            found = low + (high - low) * uniforms(unique.astype(np.uint32), len(low))
        if all(np.array_equal(found[place], draw(int(unique[place]))) for place in sample.tolist()):
            return np.asarray(found[inverse])
    return np.stack([draw(seed) for seed in unique.tolist()])[inverse]


def uniforms(seeds: np.ndarray, count: int) -> np.ndarray:
    """Return the first numbers in [0, 1) of each seed's generator: uint32 [n] to float64 [n, count]."""
    words = _state(seeds)
    halves = [words[2 * k].astype(np.uint64) | words[2 * k + 1].astype(np.uint64) << _HALF for k in range(4)]
    start, increment = (halves[0], halves[1]), (halves[2], halves[3])
    one = np.uint64(1)
    odd = (increment[0] << one | increment[1] >> np.uint64(63), increment[1] << one | one)
    state = _stepped(_sum(odd, start), odd)
    found = np.empty((len(seeds), count))
    for column in range(count):
        state = _stepped(state, odd)
        mixed, turn = state[0] ^ state[1], state[0] >> np.uint64(58)
        bits = mixed >> turn | mixed << (np.uint64(64) - turn & np.uint64(63))
        found[:, column] = (bits >> np.uint64(11)) * 2.0**-53
    return found


def _state(seeds: np.ndarray) -> list[np.ndarray]:
    """Return the eight words that SeedSequence generates from each seed: uint32 [n] each."""
    constant = _INIT_A

    def hashed(value: np.ndarray) -> np.ndarray:
        nonlocal constant
        first = value ^ np.uint32(constant)
        constant = constant * _MULT_A & 0xFFFFFFFF
        product: np.ndarray = first * np.uint32(constant)
        return np.asarray(product ^ product >> _SHIFT)

    pool = [hashed(seeds if word == 0 else np.zeros_like(seeds)) for word in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                mixed: np.ndarray = _MIX_L * pool[target] - _MIX_R * hashed(pool[source])
                pool[target] = mixed ^ mixed >> _SHIFT
    words, constant = [], _INIT_B
    for word in range(2 * _POOL):
        first = pool[word % _POOL] ^ np.uint32(constant)
        constant = constant * _MULT_B & 0xFFFFFFFF
        product: np.ndarray = first * np.uint32(constant)
        words.append(product ^ product >> _SHIFT)
    return words


def _stepped(state: Wide, increment: Wide) -> Wide:
    """Return the generator's next state, state * multiplier + increment modulo 2^128."""
    (high, low), a = state, state[1]
    a_low, a_high = a & _LOW_WORD, a >> _HALF
    b_low, b_high = _PCG_LOW & _LOW_WORD, _PCG_LOW >> _HALF
    middle = a_high * b_low + (a_low * b_low >> _HALF)
    other = a_low * b_high + (middle & _LOW_WORD)
    carried = a_high * b_high + (middle >> _HALF) + (other >> _HALF)
    return _sum((carried + high * _PCG_LOW + low * _PCG_HIGH, low * _PCG_LOW), increment)


def _sum(one: Wide, other: Wide) -> Wide:
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]), low
