"""Which batch size to probe next, and which to use: pure functions of the measurements so far.

Memory. The peak of a batch is the maximum over its phases, and each phase needs a constant plus an amount per row, so
the peak is a convex piecewise linear function of the rows. Two things follow. A secant through two sizes underestimates
larger ones, less so the closer the two are. Scaling a peak in proportion to its rows never underestimates, because no
constant is negative. The search probes 1 and 4 rows, then the largest size predicted by the secant. If that exceeds the
proportional bound, it first goes part of the way and predicts again from the two largest points, until there is nothing
to gain. A size between one that fits and one that ran but took too much needs no proof.

Speed. More rows are not always faster: a batch is as long as its longest row, so large batches of uneven rows contain
more padding. The criterion is the time for the whole data, predicted for every size from the times of the probes.

This module does not depend on devices. In a run with several processes all of them probe each size, and the functions
here get the worst result.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from partita_trainers.batch_size.probe import ProbeResult

FIRST_STEP = 4
MIN_GROWTH = 0.015
"""The search ends if the gain is below this fraction of the largest size that fits."""
NEARLY_SAFE = 1.025
"""How far the next size may exceed the proportional bound, as a factor."""
PART_OF_THE_WAY = 5
"""Divisor of the next increase if it is not safe."""
COMFORTABLE = 0.5
"""A predicted peak below this fraction of the budget needs no proof."""
NEAR_BEST = 0.98
"""Fraction of the highest speed that is fast enough."""


def next_rows(probes: Sequence[ProbeResult], *, cap: int, budget: int) -> int | None:
    """Return the size to probe next; None if the largest that fits is known well enough, or if one row does not fit."""
    if not probes:
        return 1
    fitting, bound = split_by_verdict(probes)
    if not fitting:
        return None
    top = fitting[-1]
    limit = cap if bound is None else min(cap, bound.rows - 1)
    if top.rows >= limit:
        return None
    if bound is not None and bound.taken_bytes is not None:
        return None  # it ran: sizes between two that ran need no proof
    if len(fitting) == 1:
        return min(limit, max(2, min(FIRST_STEP, predicted_rows(probes, budget=budget))))
    aim = predicted_rows(probes, budget=budget)
    safe = int(top.rows * budget / max(1, taken(top)))
    if aim > NEARLY_SAFE * safe:
        aim = max(safe, top.rows + (aim - top.rows) // PART_OF_THE_WAY)
    aim = min(limit, aim)
    return aim if aim - top.rows >= max(1, MIN_GROWTH * top.rows) else None


def split_by_verdict(probes: Sequence[ProbeResult]) -> tuple[list[ProbeResult], ProbeResult | None]:
    """Return the sizes that fit in ascending order, and the smallest that does not."""
    bound = min((probe for probe in probes if probe.verdict != "fits"), key=lambda probe: probe.rows, default=None)
    fitting = {p.rows: p for p in probes if p.verdict == "fits" and (bound is None or p.rows < bound.rows)}
    return [fitting[rows] for rows in sorted(fitting)], bound


def taken(probe: ProbeResult) -> int:
    """Return the bytes taken from the device; 0 if unknown."""
    return probe.taken_bytes or 0


def slope(probes: Sequence[ProbeResult]) -> float:
    """Return the bytes of one more row at the largest size that fits.

    With one size this is the mean per row, an overestimate because it includes the constant. With more it is the secant
    of the used bytes, scaled by the allocator's overhead: used bytes are exact, taken bytes come in blocks.
    """
    fitting, bound = split_by_verdict(probes)
    top = fitting[-1]
    if bound is not None and bound.taken_bytes is not None:
        return (taken(bound) - taken(top)) / (bound.rows - top.rows)
    if len(fitting) == 1:
        return taken(top) / top.rows
    below = fitting[-2]
    used = ((top.used_bytes or 0) - (below.used_bytes or 0)) / (top.rows - below.rows)
    return used * (taken(top) / top.used_bytes if top.used_bytes else 1.0)


def predicted_rows(probes: Sequence[ProbeResult], *, budget: int) -> int:
    """Return the most rows predicted to fit; if memory does not grow, a multiple of the largest size probed."""
    fitting, bound = split_by_verdict(probes)
    top, grows = fitting[-1], slope(probes)
    most = 16 * top.rows
    rows = top.rows + int((budget - taken(top)) / grows) if grows > 0 else most
    if bound is None:
        return rows
    if bound.taken_bytes is not None:
        return min(rows, bound.rows - 1)
    # The device refused: by how much is unknown, and the secant was just wrong.
    return min(rows, top.rows + max(1, (bound.rows - 1 - top.rows) * 2 // 3))


def largest_fitting(probes: Sequence[ProbeResult], *, cap: int, budget: int) -> int:
    """Return the largest size known to fit: it ran, or is below one that ran and took too much. 0 if there is none."""
    fitting, bound = split_by_verdict(probes)
    if not fitting:
        return 0
    if bound is None or bound.taken_bytes is None:
        return fitting[-1].rows
    return min(cap, max(fitting[-1].rows, predicted_rows(probes, budget=budget)))


def predicted_bytes(probes: Sequence[ProbeResult], rows: int) -> float:
    """Return the predicted peak of a size."""
    fitting, _ = split_by_verdict(probes)
    return taken(fitting[-1]) + (rows - fitting[-1].rows) * slope(probes)


def is_comfortable(probes: Sequence[ProbeResult], rows: int, *, budget: int) -> bool:
    """Return whether a size needs no proof: it was probed, or its predicted peak leaves half of the budget free."""
    fitting, bound = split_by_verdict(probes)
    if not fitting or (bound is not None and rows >= bound.rows):
        return False
    return rows <= fitting[-1].rows or predicted_bytes(probes, rows) <= COMFORTABLE * budget


def candidate_sizes(largest: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 12, 16 ... and the largest: every size is within a third of one of them."""
    rows = 1
    while rows < largest:
        yield rows
        if rows > 1 and rows + rows // 2 < largest:
            yield rows + rows // 2
        rows *= 2
    yield largest


def smallest_near_best(sizes: Sequence[int], speed: Callable[[int], float]) -> int:
    """Return the smallest size within 2 % of the highest speed."""
    speeds = [speed(rows) for rows in sizes]
    best = max(speeds)
    return next(rows for rows, achieved in zip(sizes, speeds, strict=True) if achieved >= NEAR_BEST * best)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line to (x, y) points by relative error; return its constant and slope, both at least 0."""
    weights = [1 / (y * y) if y > 0 else 1.0 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if spread == 0:
        return 0.0, mean_y / mean_x
    rise = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    constant = mean_y - rise * mean_x
    if constant < 0 or rise < 0:
        through_zero = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
        square = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
        return (0.0, through_zero / square) if rise >= 0 else (mean_y, 0.0)
    return constant, rise


def between(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Interpolate linearly at `rows`; extrapolate beyond the last point."""
    known = sorted(points)
    index = bisect_left(known, rows, key=lambda point: point[0])
    if index == len(known):
        last_rows, last = known[-1]
        if len(known) == 1:
            return last
        first_rows, first = known[-2]
        return max(last, last + (rows - last_rows) * (last - first) / (last_rows - first_rows))
    high_rows, high = known[index]
    if high_rows == rows or index == 0:
        return high
    low_rows, low = known[index - 1]
    return low + (rows - low_rows) * (high - low) / (high_rows - low_rows)
