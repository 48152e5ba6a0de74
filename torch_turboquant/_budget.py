"""One choice for each of several items, so that their sizes are within a budget at the least cost.

Bits of layers are chosen so: formats of weights (weight_calibration) and presets of caches
(eval/allocation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST_SUMS = 1 << 15
_EQUAL = 1e-6  # of a cost: nobody measures one so well that a smaller difference counts


class _Sums(NamedTuple):
    """Sums over the first items, one for each selection that the best may begin with."""

    sizes: np.ndarray
    """Above those of the smallest choices."""
    costs: np.ndarray
    before: np.ndarray
    """Which sum without the last item each of them goes on from."""
    choices: np.ndarray
    """Of the last item."""


class _Bound:
    """The least costs of some items if their choices could be mixed in any shares.

    That takes the steps along the lower convex hulls of cost over size, the steepest first, and the
    last of them in part. Without that part it is a selection.
    """

    def __init__(self, first: float, sizes: np.ndarray, gains: np.ndarray) -> None:
        """first: costs of the smallest choices. sizes, gains: of the steps, the steepest first."""
        self._sizes, gains = (np.concatenate([[0.0], x.cumsum()]) for x in (sizes, gains))
        self._costs = first - gains

    def mixed(self, room: np.ndarray) -> np.ndarray:
        """The least costs in this room, beside the smallest choices."""
        return np.interp(room, self._sizes, self._costs)

    def whole(self, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many whole steps there is room for, and the costs behind them."""
        steps = np.searchsorted(self._sizes, room, side="right") - 1
        return steps, self._costs[steps]


def cheapest(
    sizes: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float
) -> list[int]:
    """The choices within the budget that cost least, to a millionth of the cost.

    One item after the other joins all sums of sizes and costs, without those that another one
    undercuts in both, and without those that stay above a known selection even if the choices of
    all later items could be mixed. Of 400 items with 6 choices some hundreds are left. Should more
    than MOST_SUMS be left, the most promising go on, and the result may be a little above the
    least; no such costs of layers are known.

    Args:
        sizes, costs: finite, of the choices of each item, which has one at least.
        budget: the sum of the smallest sizes, or more.

    Returns:
        For each item the number of its choice.
    """
    if not sizes:
        return []
    # From here on choices are those that none undercuts, by size.
    kept = [_undercut_by_none(np.array(s), np.array(c)) for s, c in zip(sizes, costs, strict=True)]
    size = [np.array(s, dtype=np.float64)[k] for s, k in zip(sizes, kept, strict=True)]
    cost = [np.array(c, dtype=np.float64)[k] for c, k in zip(costs, kept, strict=True)]
    room = max(0.0, budget - sum(float(s[0]) for s in size))
    item, after, step, gain = _steps(size, cost)

    # The price of a unit of size decides most items; those that it hardly decides come last.
    last = np.searchsorted(step.cumsum(), room) if len(step) else 0
    price = (gain / step)[min(last, len(step) - 1)] if len(step) else 0.0
    order = sorted(range(len(size)), key=lambda i: -_lead(cost[i] + price * size[i]))
    rank = np.argsort(order)[item]

    sums = _Sums(np.zeros(1), np.zeros(1), np.zeros(1, int), np.zeros(1, int))
    trail: list[_Sums] = []
    best, limit = (0, 0, 0), np.inf  # which place of the trail, sum there, and steps behind it
    for place in range(len(order) + 1):
        trail.append(sums)
        later = rank >= place
        smallest = sum(float(cost[i][0]) for i in order[place:])
        bound = _Bound(smallest, step[later], gain[later])
        steps, rest = bound.whole(room - sums.sizes)
        known = sums.costs + rest
        least = int(known.argmin())
        if known[least] < limit:
            best = place, least, int(steps[least])
            limit = known[least] - _EQUAL * abs(known[least])
        reach = sums.costs + bound.mixed(room - sums.sizes)
        hopeful = np.flatnonzero(reach < limit)
        if place == len(order) or len(hopeful) == 0:
            break
        if len(hopeful) > MOST_SUMS:
            hopeful = hopeful[np.argpartition(reach[hopeful], MOST_SUMS)[:MOST_SUMS]]
        sums = _joined(sums, hopeful, size[order[place]], cost[order[place]], room)

    place, at, taken = best
    chosen = dict.fromkeys(order[place:], 0)
    later = rank >= place
    chosen.update(zip(item[later][:taken].tolist(), after[later][:taken].tolist(), strict=True))
    for number in range(place, 0, -1):
        chosen[order[number - 1]] = int(trail[number].choices[at])
        at = int(trail[number].before[at])
    return [int(kept[i][chosen[i]]) for i in range(len(kept))]


def _undercut_by_none(sizes: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Which choices are cheaper than all that are no larger, by size."""
    by_size = np.lexsort((costs, sizes))
    before = np.concatenate([[np.inf], np.minimum.accumulate(costs[by_size])[:-1]])
    return by_size[costs[by_size] < before]


def _steps(
    sizes: Sequence[np.ndarray], costs: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """From choice to choice along the hulls of all items, the steepest first.

    Returns:
        The item of each step, the choice that it leads to, what it takes, and what it gains.
    """
    hulls = [_hull(s, c) for s, c in zip(sizes, costs, strict=True)]
    item = np.repeat(np.arange(len(hulls)), [len(hull) - 1 for hull in hulls])
    after = np.concatenate([hull[1:] for hull in hulls])
    step = [np.diff(s[hull]) for s, hull in zip(sizes, hulls, strict=True)]
    gain = [-np.diff(c[hull]) for c, hull in zip(costs, hulls, strict=True)]
    # those of one item stay in order, whatever rounding makes of their rates
    rates = [np.minimum.accumulate(g / s) for g, s in zip(gain, step, strict=True)]
    by_rate = np.argsort(-np.concatenate(rates), kind="stable")
    return (
        item[by_rate],
        after[by_rate],
        np.concatenate(step)[by_rate],
        np.concatenate(gain)[by_rate],
    )


def _hull(sizes: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Which of the choices, each larger and cheaper than the one before, are on the lower hull."""
    hull: list[int] = []

    def slope(i: int, j: int) -> float:
        return float((costs[j] - costs[i]) / (sizes[j] - sizes[i]))

    for i in range(len(sizes)):
        while len(hull) > 1 and slope(hull[-2], i) <= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(i)
    return np.array(hull)


def _lead(costs: np.ndarray) -> float:
    """By how much the least of the costs is less than the second."""
    return float(np.diff(np.sort(costs)[:2])[0]) if len(costs) > 1 else np.inf


def _joined(
    sums: _Sums, hopeful: np.ndarray, sizes: np.ndarray, costs: np.ndarray, room: float
) -> _Sums:
    """These sums with one more item: those within the room that no other undercuts."""
    size = (sums.sizes[hopeful][:, None] + (sizes - sizes[0])).ravel()
    cost = (sums.costs[hopeful][:, None] + costs).ravel()
    inside = np.flatnonzero(size <= room)
    left = inside[_undercut_by_none(size[inside], cost[inside])]
    before, choices = np.divmod(left, len(sizes))
    return _Sums(size[left], cost[left], hopeful[before], choices)
