"""Write bookings.jsonl: training dialogues in which the desk understood everything."""

import json
import sys
from pathlib import Path

from desk import wishes_of, written

COUNT = 4000


def main(path: Path, *, count: int = COUNT) -> None:
    """Write dialogues with seeds that no simulation uses."""
    with path.open("w", encoding="utf8") as file:
        for number in range(count):
            messages = []
            for text, booking in wishes_of(f"written down {number}"):
                messages.append({"role": "user", "content": text})
                messages.append({"role": "assistant", "content": written(booking)})
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "bookings.jsonl"))
