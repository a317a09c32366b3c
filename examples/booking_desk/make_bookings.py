"""Writes bookings.jsonl: dialogues of a desk that always understood, to learn from."""

import json
import sys
from pathlib import Path

from desk import wishes_of, written

COUNT = 4000


def main(path: Path, *, count: int = COUNT) -> None:
    """Dialogues whose seeds no simulation has."""
    with path.open("w", encoding="utf8") as file:
        for number in range(count):
            messages = []
            for text, booking in wishes_of(f"written down {number}"):
                messages.append({"role": "user", "content": text})
                messages.append({"role": "assistant", "content": written(booking)})
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "bookings.jsonl"))
