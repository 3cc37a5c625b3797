"""Designs that no other beats in everything at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from depthlaw.scaling.laws import Array

BLOCK = 4096


def front(points: Array) -> Array:
    """Rows of the points (m, 3) that no other point equals or undercuts in all three coordinates, by the first one.

    Smaller is better. Of points that are equal the first stands for all. In order of the first coordinate, a point is
    on the front if none before it is as small in the other two; those before it form a staircase, whose step is found
    by bisection, for a block of points at once and then for each that is left: O(m log m) but for the moves of a list.
    Points with a value that is not finite are left out.
    """
    points = np.asarray(points, dtype=np.float64)
    order = np.lexsort((points[:, 2], points[:, 1], points[:, 0]))
    order = order[np.isfinite(points[order]).all(axis=1)]
    kept: list[int] = []
    # Second coordinates rising, third falling: the steps that the points so far leave.
    second: list[float] = []
    third: list[float] = []
    for block in (order[i : i + BLOCK] for i in range(0, order.size, BLOCK)):
        if second:  # most of a block is beaten by the blocks before it
            steps = np.searchsorted(second, points[block, 1], side="right")
            block = block[(steps == 0) | (np.array(third)[steps - 1] > points[block, 2])]
        for i, y, z in zip(block.tolist(), *points[block, 1:].T.tolist(), strict=True):
            step = bisect_right(second, y)
            if step and third[step - 1] <= z:
                continue
            kept.append(i)
            first = bisect_left(second, y)
            last = first
            while last < len(third) and third[last] >= z:
                last += 1
            second[first:last], third[first:last] = [y], [z]
    return np.array(kept, dtype=np.int64)
