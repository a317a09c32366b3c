"""Numbers as people read them: metrics, quantities with three digits, bytes, and times."""

import math

COUNTS = ("n", "skipped", "queries")
"""Metrics that are numbers of rows."""


def is_count(name: str) -> bool:
    """Return whether a metric is a number of rows. A field of a JSON value may be named like one."""
    *parents, last = name.split(".")
    return last in COUNTS and not {"field", "slot"} & set(parents)


def as_number(name: str, value: float | None) -> str:
    """Format a metric: counts as integers, other values with up to four digits; empty without a value."""
    if not isinstance(value, int | float) or math.isnan(value):
        return ""
    if is_count(name):
        return f"{value:,.0f}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.4g}"
    return f"{value:.3f}" if abs(value) >= 0.001 or not value else f"{value:.1e}"


def digits(number: float | None) -> str:
    """Format a number with three digits, or all digits before the decimal point; empty for None."""
    if number is None:
        return ""
    for decimals, limit in ((4, 0.0995), (3, 0.9995), (2, 9.995), (1, 99.95)):
        if 0 < number < limit:
            return f"{number:.{decimals}f}"
    return f"{number:,.0f}"


def bytes_text(number: float | None) -> str:
    """Format bytes with three digits in powers of 1000, as in the config; empty for None."""
    if number is None or number < 999.5:
        return "" if number is None else f"{number:.0f} B"
    for unit, power in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if number < 999.5 * power:
            return f"{digits(number / power)} {unit}"
    return f"{digits(number / 10**12)} TB"


def age_text(seconds: float) -> str:
    """Format an age in its largest unit, such as `5 min`."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:,.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def duration(seconds: float) -> str:
    """Format a time: seconds with a decimal, or hours, minutes and seconds."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
