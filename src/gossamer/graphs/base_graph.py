"""The Base-(k+1) graph: at most k neighbours at a time, and the exact mean after finitely many steps for any n.

The idea is Takezawa et al.'s (2023); this is our own derivation of it, so its Rounds may come in another order.

If every prime factor of n is at most k+1, averaging digit by digit (n in a mixed radix) is exact: :func:`_digits`.
Otherwise write n in base k+1: parts V_1 > V_2 > … of a·(k+1)^p replicas, a ≤ k. First each part averages inside itself.
Then, part by part, with N = |V_m| + |V_(m+1)| + …: every replica of the later parts exchanges with one replica of each of
V_m's a blocks of (k+1)^p, with weight |V_m|/(a·N). After that each block of V_m has the global mean as its mean, and so has
the union of the later parts: V_m only needs to average inside its blocks, while the later parts go on in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gossamer.graphs.rounds import Groups, Mean, Permutation, Round, general, identity


class Step(NamedTuple):
    """What happens side by side in one step: groups that average, and edges (i, j, weight) that exchange."""

    groups: list[tuple[int, ...]]
    edges: list[tuple[int, int, float]]


_REST = Step([], [])


def base_rounds(n: int, k: int) -> Sequence[Round]:
    if n <= k + 1:
        return [Mean(n)]
    smooth, rest = _smooth_part(n, k)
    direct = _simple(range(n), k)
    if rest == 1 or smooth == 1:
        return [_round(n, step) for step in direct]
    # n = smooth · rest: the simple graph over `rest` replicas, `smooth` copies side by side, then digits of `smooth`.
    columns = [_simple(range(c, n, smooth), k) for c in range(smooth)]
    rows = [_digits(range(r * smooth, (r + 1) * smooth), k) for r in range(rest)]
    product = _side_by_side(columns) + _side_by_side(rows)
    return [_round(n, step) for step in min(direct, product, key=len)]


def _simple(members: Sequence[int], k: int) -> list[Step]:
    n = len(members)
    if _smooth_part(n, k)[1] == 1:
        return _digits(members, k)
    parts: list[tuple[Sequence[int], int, int]] = []  # (members, a, size of a block)
    start, size = 0, 1
    while size * (k + 1) <= n:
        size *= k + 1
    while size >= 1:
        a = (n - start) // size
        if a:
            parts.append((members[start : start + a * size], a, size))
            start += a * size
        size //= k + 1
    steps = _side_by_side([_digits(part, k) for part, _, _ in parts])
    tails: list[list[Step]] = []  # what each part still has to do after its exchange
    for m, (part, a, size) in enumerate(parts[:-1]):
        later = [j for other, _, _ in parts[m + 1 :] for j in other]
        weight = len(part) / (a * (len(part) + len(later)))
        exchange = Step([], [(part[b * size + i], j, weight) for i, j in enumerate(later) for b in range(a)])
        steps.append(_together([exchange, *(tail.pop(0) for tail in tails if tail)]))
        tails.append(_side_by_side([_digits(part[b * size : (b + 1) * size], k) for b in range(a)]))
    return steps + _side_by_side(tails)


def _side_by_side(sequences: Sequence[list[Step]]) -> list[Step]:
    """Several sequences of steps over different replicas, run at the same time; who is done rests."""
    return [_together(level) for level in itertools.zip_longest(*sequences, fillvalue=_REST)]


def _together(steps: Iterable[Step]) -> Step:
    groups, edges = zip(*steps, strict=True)
    return Step(list(itertools.chain(*groups)), list(itertools.chain(*edges)))


def _digits(members: Sequence[int], k: int) -> list[Step]:
    """Average along each digit of the position, in the mixed radix of the factors of the count."""
    steps: list[Step] = []
    stride = 1
    for factor in _factors(len(members), k):
        block = stride * factor
        corners = (start + low for start in range(0, len(members), block) for low in range(stride))
        steps.append(Step([tuple(members[corner + d * stride] for d in range(factor)) for corner in corners], []))
        stride = block
    return steps


def _factors(n: int, k: int) -> list[int]:
    """n as few factors of at most k+1, largest first."""
    factors = []
    while n > 1:
        factor = next(f for f in range(min(k + 1, n), 1, -1) if n % f == 0)
        factors.append(factor)
        n //= factor
    return factors


def _smooth_part(n: int, k: int) -> tuple[int, int]:
    """n = smooth · rest, where smooth has only prime factors up to k+1 and rest has none."""
    smooth, rest = 1, n
    for prime in range(2, k + 2):
        while rest % prime == 0:
            smooth, rest = smooth * prime, rest // prime
    return smooth, rest


def _round(n: int, step: Step) -> Round:
    if step.edges:
        w = np.eye(n)
        for group in step.groups:
            w[np.ix_(group, group)] = 1 / len(group)
        for i, j, weight in step.edges:
            w[i, j] = w[j, i] = weight
            w[i, i] -= weight
            w[j, j] -= weight
        return general(w)
    largest = max(map(len, step.groups), default=1)
    if largest == 1:
        return identity(n)
    if largest == 2:
        source = list(range(n))
        for group in step.groups:
            source[group[0]], source[group[-1]] = group[-1], group[0]
        return Permutation(n, tuple(source))
    resting = set(range(n)).difference(*step.groups)
    return Groups(n, (*step.groups, *((i,) for i in sorted(resting))))
