"""Ask `partita serve` for the team of each message in a file, with nothing but the standard library."""

import csv
import json
import sys
from urllib.request import Request, urlopen

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

with open("new_tickets.csv", encoding="utf8", newline="") as file:  # noqa: PTH123 -- as short as possible
    rows = [{"message": row["message"]} for row in csv.DictReader(file)][:5]
request = Request(f"{URL}/predict", json.dumps({"rows": rows}).encode(), {"Content-Type": "application/json"})
with urlopen(request, timeout=60) as response:
    predictions = json.load(response)["predictions"]
for row in predictions:
    print(f"{row['team_probability']:.0%} {row['team']}: {row['message']}")
