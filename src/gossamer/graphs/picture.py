"""A Graph as an SVG picture: replicas on a circle, a line for each pair that exchanges."""

from __future__ import annotations

import math

import numpy as np

from gossamer.graphs.graph import Graph

_LARGEST = 128  # more dots than this can't be told apart


def can_draw(graph: Graph) -> bool:
    return graph.n <= _LARGEST


def svg(graph: Graph, t: int | None = None, size: int = 220) -> str:
    """The Round at step t, or the union of all Rounds of the period."""
    steps = range(graph.period) if t is None else [t]
    joined = np.zeros((graph.n, graph.n), dtype=bool)
    for step in steps:
        joined |= graph.matrix(step) > 0
    joined |= joined.T
    pairs = np.argwhere(np.triu(joined, 1))
    middle, radius = size / 2, size / 2 - 10
    angles = [2 * math.pi * i / graph.n - math.pi / 2 for i in range(graph.n)]
    places = [(middle + radius * math.cos(a), middle + radius * math.sin(a)) for a in angles]
    width = max(0.15, min(1.2, 60 / max(1, len(pairs))))
    path = "".join(f"M{places[i][0]:.1f} {places[i][1]:.1f}L{places[j][0]:.1f} {places[j][1]:.1f}" for i, j in pairs)
    dot = max(1.2, min(4.0, 120 / graph.n))
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dot:.1f}"/>' for x, y in places)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" role="img" aria-label="{graph.name}, n={graph.n}">'
        f'<path d="{path}" stroke="#5b8db8" stroke-width="{width:.2f}" fill="none"/><g fill="#d55e00">{dots}</g></svg>'
    )
