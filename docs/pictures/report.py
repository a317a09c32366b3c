"""Draw the pictures of reports in the guides: train small models, and take pictures of their reports in chromium.

    python docs/pictures/report.py

The base model is an encoder that has seen few tickets; the result continues from it. A part of the tickets has the
team of another ticket, so that the model cannot be right everywhere, and some rows cannot be used. The report on
preferences is that of `examples/preferences`.
"""

import csv
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from partita import Model

ROOT = Path(__file__).parents[2]
PICTURES = {"report.png": (0, 1440), "report-answers.png": (1460, 3030)}
"""Pictures, with the first and the last line of the page that they show."""
PREFERENCES = {"preferences.png": (1690, 3075)}
"""The same of the report on preferences."""
WIDTH, HEIGHT = 1200, 3100
CONFIG: dict[str, Any] = {
    "input_features": [{"name": "message", "type": "text"}],
    "output_features": [{"name": "team", "type": "category", "head": "linear"}],
    "data": {"source": "tickets.csv", "split": {"type": "random", "probabilities": [0.5, 0.1, 0.4]}},
}
TRAINER: dict[str, Any] = {"type": "finetune", "batch_size": 16, "learning_rate": 0.002}
NEW = {"type": "scratch", "architecture": "distilbert", "size": "nano", "tokenizer": "word"}


def main() -> None:
    """Train, and draw the pictures."""
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        draw(train_on_tickets(), PICTURES)
    with tempfile.TemporaryDirectory() as place:
        draw(train_on_preferences(Path(place, "example")), PREFERENCES)


def train_on_preferences(folder: Path) -> Path:
    """Run the example on preferences in a new folder, and return the report of dpo."""
    shutil.copytree(ROOT / "examples" / "preferences", folder)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    runpy.run_path("make_questions.py")["write"](folder)
    Model("first.yaml", overrides=["trainer.skip_all_evaluation=true"], quiet=True).train(run="runs/first")
    runpy.run_path("make_pairs.py")["write"]()
    Model("config.yaml", overrides=["trainer.evaluate_base=true"], quiet=True).train(run="runs/config")
    return Path("runs/config/report.html")


def train_on_tickets() -> Path:
    """Train a classifier in the current folder, and return its report."""
    write_tickets()
    base = CONFIG | {"base_model": NEW, "trainer": TRAINER | {"max_steps": 12, "skip_all_evaluation": True}}
    Model(base, quiet=True).train(run="runs/base")
    trainer = TRAINER | {"epochs": 12, "validation_metric": "team.accuracy"}
    Model(CONFIG | {"base_model": "runs/base/model", "trainer": trainer}, quiet=True).train(run="runs/tickets")
    return Path("runs/tickets/report.html")


def write_tickets() -> None:
    """Write tickets.csv, with some wrong teams and some rows without a message."""
    make = runpy.run_path(str(ROOT / "examples" / "support_tickets" / "make_tickets.py"))
    rows, chance = make["make_rows"](600, seed=0), random.Random(1)
    teams = sorted({team for _, team in rows})
    changed = [(message, chance.choice(teams) if chance.random() < 0.12 else team) for message, team in rows]
    with Path("tickets.csv").open("w", newline="", encoding="utf8") as file:
        csv.writer(file).writerows([("message", "team"), *changed, *[("", team) for team in teams]])


def draw(page: Path, pictures: Mapping[str, tuple[int, int]]) -> None:
    """Take a picture of a page, and write its parts with 256 colors.

    Args:
        page: The page.
        pictures: Names of the pictures, with the first and the last line of the page that they show.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is needed to draw the page, and there is none")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--blink-settings=preferredColorScheme=1",
    ]
    files = ["--user-data-dir=profile", "--screenshot=page.png", page.resolve().as_uri()]
    subprocess.run([browser, *options, f"--window-size={WIDTH},{HEIGHT}", *files], check=True, capture_output=True)
    drawn = Image.open("page.png").convert("RGB")
    for name, (top, bottom) in pictures.items():
        part = drawn.crop((0, top, WIDTH, bottom)).quantize(256)
        part.save(ROOT / "docs" / "guides" / "pictures" / name, optimize=True)


if __name__ == "__main__":
    main()
