"""The search for the largest batch that fits, on 3,000 made-up memory curves, beside the searches of other tools.

A curve is what a batch takes from a device, by its rows: the largest of one to four phases, each a constant (up to 5 %
of the free memory) and a slope; rounded up to 2 MB; and on top of it what the allocator cannot fill, up to 4 % on half
of the curves and up to 12 % on the others, a little different at every size. A fifth of the data sets are smaller than
what fits. True maxima lie between 16 and 16,384 rows. partita may take 98 % of the free memory less 256 MB, as it does
on GPUs; the others take what they get. The others are made anew after what their sources do: Ludwig doubles until the
device refuses; Lightning doubles, or doubles and then bisects, up to 25 times; accelerate begins with the 128 of its
documentation and takes a tenth off while the device refuses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import Limit, parse_arguments, report

from partita_trainers.batch_size.probe import Probe
from partita_trainers.batch_size.search import largest_fitting, next_rows

MB, GB = 10**6, 10**9
BLOCK = 2 * 2**20
CURVES = 3000


class Curve:
    """A device with a model on it, and what a batch takes."""

    def __init__(self, number: int) -> None:
        chance = np.random.default_rng([20, number])
        self.number = number
        self.free = float(chance.choice([24, 40, 48, 80, 96, 141])) * GB * (1 - chance.uniform(0.05, 0.6))
        self.most_waste = 0.04 if number % 2 else 0.12
        self.usual_waste = chance.uniform(0, 1)
        wanted = np.exp(chance.uniform(np.log(16), np.log(16_384)))
        phases = int(chance.integers(1, 5))
        self.constants = np.exp(chance.uniform(np.log(0.0005), np.log(0.05), phases)) * self.free
        self.slopes = self.free / wanted * chance.uniform(0.2, 1, phases)
        self.slopes[0] = self.free / wanted
        self.rows = 1 << 20
        fits = self.largest()
        if chance.random() < 0.2:
            self.rows = max(4, int(fits * np.exp(-chance.uniform(0, 2))))
        self.true = min(fits, self.rows)

    def used(self, rows: int) -> int:
        return int(-(-np.max(self.constants + self.slopes * rows) // BLOCK) * BLOCK)

    def taken(self, rows: int, *, wandering: bool = True) -> int:
        wander = np.random.default_rng([self.number, rows]).normal(0, 0.05) if wandering else 0.0
        waste = self.most_waste * float(np.clip(self.usual_waste + wander, 0, 1))
        return int(-(-self.used(rows) * (1 + waste) // BLOCK) * BLOCK)

    def largest(self) -> int:
        low, high = 0, 1 << 20
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.taken(middle, wandering=False) <= self.free else (low, middle)
        return low


@dataclass
class Device:
    """Runs batches, and counts."""

    curve: Curve
    probes: int = 0
    crashes: int = 0

    def run(self, rows: int) -> bool:
        self.probes += 1
        fits = self.curve.taken(rows) <= self.curve.free
        self.crashes += not fits
        return fits


def partita(device: Device) -> int:
    curve = device.curve
    budget = int(0.98 * curve.free - 256 * MB)
    probes: list[Probe] = []
    while (rows := next_rows(probes, cap=min(curve.rows, 65_535), budget=budget)) is not None:
        if device.run(rows):
            verdict: Any = "fits" if curve.taken(rows) <= budget else "too large"
            probes.append(Probe(rows, verdict, used_bytes=curve.used(rows), taken_bytes=curve.taken(rows)))
        else:
            probes.append(Probe(rows, "out of memory", used_bytes=None, taken_bytes=None))
    return largest_fitting(probes, cap=curve.rows, budget=budget)


def doubling(device: Device) -> int:
    """Ludwig, which also stops at a fifth of the data; that is left out here."""
    rows = 1
    while rows <= device.curve.rows and device.run(rows):
        rows *= 2
    return rows // 2


def lightning_power(device: Device) -> int:
    rows = 2
    for _ in range(25):
        if rows > device.curve.rows:
            return device.curve.rows
        if not device.run(rows):
            return rows // 2
        rows *= 2
    return rows


def lightning_bisection(device: Device) -> int:
    low, high, rows = 1, None, 2
    for _ in range(25):
        if device.run(rows):
            low = rows
            if high is None and rows >= device.curve.rows:
                return device.curve.rows
            if high is not None and high - low <= 1:
                return rows
            rows = rows * 2 if high is None else (high + low) // 2
        else:
            high = rows
            rows = (high + low) // 2
            if high - low <= 1:
                return rows
    return rows


def accelerate_shrinking(device: Device) -> int:
    rows = 128
    while rows > 0 and not device.run(min(rows, device.curve.rows)):
        rows = int(rows * 0.9)
    return min(rows, device.curve.rows)


METHODS: dict[str, Callable[[Device], int]] = {
    "partita": partita,
    "doubling (Ludwig)": doubling,
    "power (Lightning)": lightning_power,
    "bisection (Lightning)": lightning_bisection,
    "shrinking from 128 (accelerate)": accelerate_shrinking,
}


def row(name: str, curves: list[Curve], *, about: str) -> dict[str, Any]:
    devices = [Device(curve) for curve in curves]
    shares = [METHODS[name](device) / device.curve.true for device in devices]
    probes = [device.probes for device in devices]
    return {
        "search": name,
        "curves": about,
        "probes, median": float(np.median(probes)),
        "probes, p95": float(np.percentile(probes, 95)),
        "out of memory a search": round(sum(device.crashes for device in devices) / len(devices), 4),
        "share of the true maximum, median": round(float(np.median(shares)), 4),
        "share, p5": round(float(np.percentile(shares, 5)), 4),
        "answers that do not fit": sum(
            device.curve.taken(round(share * device.curve.true)) > device.curve.free
            for device, share in zip(devices, shares, strict=True)
        ),
    }


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    curves = [Curve(number) for number in range(300 if arguments.quick else CURVES)]
    rows = [row(name, curves, about=f"all {len(curves):,}") for name in METHODS]
    for waste in (0.04, 0.12):
        chosen = [curve for curve in curves if curve.most_waste == waste]
        rows.append(row("partita", chosen, about=f"waste up to {waste:.0%}"))
    ours = rows[0]
    limits = [
        Limit("probes, median", ours["probes, median"], 4, "max"),
        Limit("probes, p95", ours["probes, p95"], 5, "max"),
        Limit("out of memory a search", ours["out of memory a search"], 0.01, "max"),
        Limit("share of the true maximum, median", ours["share of the true maximum, median"], 0.97, "min"),
        Limit("share of the true maximum, p5", ours["share, p5"], 0.94, "min"),
    ]
    report("tuner", rows, limits, arguments=arguments, about=" ".join((__doc__ or "").split()))


if __name__ == "__main__":
    main()
