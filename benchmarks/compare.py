"""Compare two result files of one benchmark: each number before and after, and their ratio.

python benchmarks/compare.py BEFORE.json AFTER.json
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Row, print_table, read_records


def compare(before: list[Row], after: list[Row]) -> list[Row]:
    """Return a row for each number in both results; see `keyed`."""
    old = keyed(before)
    return [
        {"row": key[0], "what": name, "before": old[key][name], "after": value, "ratio": ratio(value, old[key][name])}
        for key, row in keyed(after).items()
        for name, value in row.items()
        if name != "limit" and is_number(value) and is_number(old.get(key, {}).get(name))
    ]


def keyed(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """Return rows by their texts, and by their position among rows with the same texts.

    The hash of all answers is not part of the key: it may differ between commits, and a limit compares it.
    """
    seen: Counter[str] = Counter()
    found = {}
    for row in rows:
        label = ", ".join(value for name, value in row.items() if isinstance(value, str) and name != "answers")
        found[label, seen[label]] = row
        seen[label] += 1
    return found


def ratio(after: float, before: float) -> float | str:
    return round(after / before, 3) if before else ""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    first, second = (read_records(Path(name)) for name in sys.argv[1:])
    for one, other in zip(first, second, strict=True):
        print(f"\n{other['name']}: {one['commit']}, then {other['commit']}")
        print_table(compare(one["rows"] + one["limits"], other["rows"] + other["limits"]), [])
