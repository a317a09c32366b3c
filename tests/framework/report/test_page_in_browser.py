"""Pages in a real browser: nothing is outside the viewport, text is readable, and the console is empty."""

import html
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita.backends.folds import summary_of
from partita.backends.folds import write_folds as write_means
from partita.data.episode import Episode
from partita.report.compare_page import write_page
from partita.report.comparison import compare_runs
from partita.report.run_page import write_report
from partita.report.sweep_page import write_sweep_page
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow, evaluation_path
from partita.runs.sweep_record import Trial, TrialEvaluation, TrialResult
from partita.runs.sweep_result import SweepResult
from partita_trainers.base import TrainResult

from ..recorded_results import write_row_results
from .made_runs import (
    category,
    dialogue,
    joined,
    json_value,
    label_set,
    labelled,
    number,
    pair,
    rows_of,
    score,
    tags,
    text,
    write_dialogues,
    write_preference_run,
    write_run,
)
from .test_run_page import hostile_strings, write_everything

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (400, 800, 1400)
MIN_CONTRAST = 4.5
"""Of text and its background (WCAG 2.2, success criterion 1.4.3)."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

CONTRAST = (Path(__file__).parents[1] / "contrast.js").read_text(encoding="utf8")
MEASURE = (
    f"<script>\n{CONTRAST}"
    """
function measure() {
  document.querySelectorAll("details").forEach(one => one.open = true);
  const outside = [], clipped = [], faint = [];
  for (const element of document.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    const scrolls = element.closest(".scroll, pre");
    if (!scrolls && (box.right > innerWidth + 1 || box.left < -1)) outside.push(element.outerHTML.slice(0, 200));
    if (scrolls === element && box.right > innerWidth + 1) outside.push(element.outerHTML.slice(0, 200));
    const chart = element.closest("svg"), frame = chart && chart.getBoundingClientRect();
    const cut = frame && box.width && (box.left < frame.left - 1 || box.right > frame.right + 1);
    if (cut) clipped.push(element.outerHTML.slice(0, 200));
    const own = [...element.childNodes].some(one => one.nodeType === 3 && one.data.trim());
    if (own && element.tagName !== "title" && contrast(element) < LEAST)
      faint.push([contrast(element), element.outerHTML.slice(0, 200)]);
  }
  const tall = document.documentElement.scrollHeight;
  const wide = document.documentElement.scrollWidth;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const elements = document.all.length;
  parent.postMessage({width: innerWidth, wide, tall, dark, outside, clipped, faint, elements}, "*");
}
addEventListener("load", measure);
</script>
"""
)
FRAMES = """
<!DOCTYPE html><html><head><meta name="color-scheme" content="light dark"></head><body><pre id="found"></pre><script>
const found = [];
addEventListener("message", event => {
  found.push(event.data);
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""


def browse(page: Path, *, folder: Path, is_dark: bool) -> tuple[list[dict[str, Any]], str]:
    """Return what a page looks like at each width, and the messages of its console."""
    copy, frames = folder / "copy.html", folder / "frames.html"
    source = page.read_text(encoding="utf8")
    script = MEASURE.replace("LEAST", str(MIN_CONTRAST))
    copy.write_text(source.replace("</body>", f"{script}</body>"), encoding="utf8")
    widths = [f'<iframe src="copy.html" style="width:{width}px;height:900px;border:0"></iframe>' for width in WIDTHS]
    frames.write_text(FRAMES + "".join(widths) + "</body></html>", encoding="utf8")
    ended = chromium(frames, "--dump-dom", is_dark=is_dark, folder=folder)
    answer = re.search(r'<pre id="found">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert answer is not None, ended.stderr
    console = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(answer.group(1))), "\n".join(console)


def chromium(page: Path, *options: str, is_dark: bool, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Open a page in a browser without a window, and return what it prints."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        "--window-size=1500,1000",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        *options,
        page.resolve().as_uri(),
    ]
    home = os.environ | {"HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=home, check=True)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a run with every type of output and every section."""
    folder = tmp_path_factory.mktemp("page")
    outputs = {
        "team": "category",
        "price": "number",
        "topics": "set",
        "summary": "text",
        "booking": "json",
    }

    def draw(share: float) -> Any:
        return joined(category(share), number(5), label_set(share), text(share), json_value(share))

    run = write_run(
        folder / "run",
        outputs=outputs,
        results=rows_of(300, draw(0.8)),
        base=rows_of(300, draw(0.3)),
        steps=900,
        resumed=[300],
        out_of_memory=[{"step": 500, "now": 8, "tokens": 100}],
        best_step=700,
        evaluations=[{"step": step, "split": "validation", "loss": 30 / step} for step in range(100, 1000, 100)],
        sources={"chat": {"rows": 30, "tokens": 900}, "web": {"rows": 10, "tokens": 100}},
        lengths={"training": {"edges": list(range(0, 110, 10)), "counts": list(range(10))}},
    )
    counts = {"rows": 50, "used": 40, "cut": 2, "left_out": 10, "loss_tokens": 640, "reasons": {"no label": 10}}
    (run / "ledger.json").write_text(json.dumps({"splits": {"training": counts}}), encoding="utf8")
    sample = {"key": "row-1", "texts": ["Which", " team?", " bill", "ing"], "loss": [False, False, True, True]}
    (run / "samples.json").write_text(json.dumps({"rows": [sample] * 3}), encoding="utf8")
    return write_report(run)


def assert_fits(found: list[dict[str, Any]], console: str) -> None:
    """Assert that nothing is outside the viewport or a chart at any width, and that the console is empty."""
    assert sorted(one["width"] for one in found) == list(WIDTHS)
    for one in found:
        assert one["outside"] == []
        assert one["clipped"] == []
        assert one["wide"] <= one["width"]
    assert console == ""


def assert_readable(found: list[dict[str, Any]], *, is_dark: bool, elements: int) -> None:
    """Assert that a page of more than a number of elements has readable text only, in this color scheme."""
    for one in found:
        assert one["dark"] == is_dark
        assert one["elements"] > elements
        assert one["faint"] == []


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_nothing_is_outside_the_viewport_and_all_text_is_readable(
    everything: Path, is_dark: bool, tmp_path: Path
) -> None:
    found, console = browse(everything, folder=tmp_path, is_dark=is_dark)

    assert_fits(found, console)
    assert_readable(found, is_dark=is_dark, elements=1000)


def test_faults_of_a_page_are_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    wide, faint = "<div id='wide' style='width:900px'>a</div>", "<p id='faint' style='color:#bbb'>b</p>"
    chart = "<svg style='margin: 0 99px' width='200'><text id='clipped' x='9' text-anchor='end'>clipped</text></svg>"
    script = "<script>console.error('an error')</script>"
    page.write_text(f"<!DOCTYPE html><html><body>{wide}{faint}{chart}{script}</body></html>", encoding="utf8")

    found, console = browse(page, folder=tmp_path, is_dark=False)

    narrow = min(found, key=lambda one: one["width"])
    assert "wide" in narrow["outside"][0]
    assert narrow["wide"] > narrow["width"]
    assert ["clipped" in text for text in narrow["clipped"]] == [True]
    assert ["faint" in text for _, text in narrow["faint"]] == [True]
    assert "an error" in console


def test_hostile_texts_stay_inside_the_viewport_and_run_nothing(tmp_path: Path) -> None:
    page = write_report(write_everything(tmp_path / "run", hostile_strings()))

    found, console = browse(page, folder=tmp_path, is_dark=False)

    assert_fits(found, console)


def test_long_texts_without_spaces_stay_inside_the_viewport(tmp_path: Path) -> None:
    labels = ["x" * 200, "y" * 200]
    config = {"output_features": [{"name": "team", "type": "category", "decoder": {"labels": labels}}]}
    run = write_run(
        tmp_path / ("n" * 100),
        outputs={"team": "category"},
        results=rows_of(40, category(0.5, labels=labels)),
        config=config,
        error="z" * 500,
    )

    found, console = browse(write_report(run), folder=tmp_path, is_dark=False)

    assert_fits(found, console)


def write_tags(folder: Path) -> Path:
    """Write the report of a run with tags."""
    rows, base = rows_of(20, tags(0.9)), rows_of(20, tags(0.2))
    return write_report(write_run(folder, outputs={"people": "tags"}, results=rows, base=base))


def write_scores(folder: Path) -> Path:
    """Write the report of a run with scores of pairs of texts."""
    return write_report(write_run(folder, outputs={"fit": "score"}, results=rows_of(60, score(0.7))))


def write_embeddings(folder: Path) -> Path:
    """Write the report of a run with embeddings."""
    ranks = [1, 1, 2, 5, 1, 30] * 5
    outputs = [OutputResult(None, None, of_row={"rank": rank}) for rank in ranks]
    rows = [
        RecordedRow(f"row-{index}", "Where is it?", None, 1 / (index + 1), 1, {"vector": output})
        for index, output in enumerate(outputs)
    ]
    return write_report(write_run(folder, outputs={"vector": "embedding"}, results=rows))


def write_language_model(folder: Path) -> Path:
    """Write the report of a run that continues texts, with metrics without an interval."""
    rows = [
        RecordedRow(f"stories.jsonl:{index}", "Once upon a time " * 9, None, 1 + index / 9, 40) for index in range(30)
    ]
    config = {"data": {"batching": {"type": "chunk"}}, "base_model": {"type": "scratch", "context_length": 64}}
    run = write_run(folder, results=rows, config=config, steps=2000)
    metrics = {"loss": 2.6, "perplexity": 13.5, "bits_per_byte": 1.25}
    write_row_results(evaluation_path(run, "test"), EvaluationHeader("test", "result", "f", metrics=metrics), rows)
    return write_report(run)


def write_zero_shot(folder: Path) -> Path:
    """Write the report of an evaluation without training."""
    settings = {"base_model": f"{'owner' * 20}/model", "trainer": {"type": "none"}}
    rows = rows_of(40, category(0.4))
    return write_report(write_run(folder, outputs={"team": "category"}, results=rows, steps=0, config=settings))


def write_self_training(folder: Path) -> Path:
    """Write the report of a run with rounds of self-training and dialogues of both histories."""
    numbers = {
        "dialogues.n": 60.0,
        "done.n": 60.0,
        "success": 0.8,
        "reward": 0.7,
        "exact_turns": 0.6,
        "exact_last": 0.5,
    }
    run = write_run(
        folder,
        outputs={"reply": "text"},
        results=rows_of(20, text(0.5, name="reply")),
        config={"input_features": [{"name": "messages", "type": "dialogue"}]},
        rounds=[{"kept": True, "steps": 40, "metrics": {"validation": {"loss": 0.5}}}, {"kept": False, "steps": 40}],
        dialogues=[numbers, numbers, numbers | {"success": 0.4}],
    )
    write_dialogues(run, gold=dialogues(0.9), predicted=dialogues(0.5))
    return write_report(run)


def write_simulation(folder: Path) -> Path:
    """Write the report of a simulation without a run."""
    write_dialogues(folder, predicted=dialogues(0.5))
    return write_report(folder)


def write_transcripts(folder: Path) -> Path:
    """Write the page of the dialogues themselves."""
    write_dialogues(folder, gold=dialogues(0.9), predicted=dialogues(0.5))
    return folder / "transcripts" / "index.html"


def dialogues(share: float) -> list[Episode]:
    """Return dialogues of which a share is right, one that failed and one with long messages."""
    answers = ["two" if index < 40 * share else "three" for index in range(40)]
    many = [dialogue(f"task {index}", answer=answer, ok=answer == "two") for index, answer in enumerate(answers)]
    failed = dialogue("broken", status="failed", reason="environment: OSError: the desk is closed")
    long = dialogue("long", answer="x" * 900, gold="the right answer " * 20, rounds=2, metrics={"a" * 90: 0.5})
    return [*many, failed, long]


def write_folds(folder: Path) -> Path:
    """Write the page of a cross-validation."""
    folds = [{"validation": {"loss": 1.0, "team.accuracy": share, "team.n": 40.0}} for share in (0.5, 0.7, 0.9)]
    write_means(summary_of([TrainResult(folder, metrics, steps=3) for metrics in folds], folder))
    return write_report(folder)


def write_pairs(folder: Path) -> Path:
    """Write the report of training on pairs, some of which have long answers."""
    rows = rows_of(40, pair(0.5))
    metrics = {"validation": {"rewards/chosen": -0.3, "chosen_falls": 0.8}}
    long = [replace(row, prompt="x" * 300, key="k" * 90) for row in rows[:9]]
    for row in long:
        vars(row.outputs["reply"])["of_row"]["rejected"] = "y" * 900
    return write_report(write_preference_run(folder, results=[*long, *rows[9:]], metrics=metrics))


def write_labelled(folder: Path) -> Path:
    """Write the report of training on labelled answers."""
    return write_report(write_preference_run(folder, results=rows_of(40, labelled(0.5)), loss="kto"))


KINDS: dict[str, Callable[[Path], Path]] = {
    "tags": write_tags,
    "scores": write_scores,
    "embeddings": write_embeddings,
    "language modelling": write_language_model,
    "zero-shot": write_zero_shot,
    "self-training": write_self_training,
    "simulation": write_simulation,
    "transcripts": write_transcripts,
    "folds": write_folds,
    "pairs": write_pairs,
    "labelled answers": write_labelled,
}


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_every_kind_stay_inside_the_viewport_and_are_readable(
    kind: str, is_dark: bool, tmp_path: Path
) -> None:
    found, console = browse(KINDS[kind](tmp_path / "run"), folder=tmp_path, is_dark=is_dark)

    assert_fits(found, console)
    assert_readable(found, is_dark=is_dark, elements=30)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_a_comparison_of_runs_stays_inside_the_viewport_and_is_readable(is_dark: bool, tmp_path: Path) -> None:
    outputs = {"team_of_the_customer": "category", "price": "number", "summary": "text", "booking": "json"}
    team = category(0.8, name="team_of_the_customer")
    rows = rows_of(60, joined(team, number(5), text(0.8), json_value(0.8)))
    runs = [
        write_run(tmp_path / name, outputs=outputs, results=results, config={"base_model": f"{'owner' * 30}/{name}"})
        for name, results in (("first" * 8, rows), ("second", with_other_values(rows, seed=1)), ("third", rows[9:]))
    ]
    page = tmp_path / "compare.html"
    write_page(page, compare_runs(runs, max_examples=40))

    found, console = browse(page, folder=tmp_path, is_dark=is_dark)

    assert_fits(found, console)
    assert_readable(found, is_dark=is_dark, elements=300)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_hostile_parameters_of_a_sweep_stay_inside_the_viewport_and_run_nothing(is_dark: bool, tmp_path: Path) -> None:
    hostile = hostile_strings()
    error = "\n".join([*hostile, "z" * 500])
    trials = [hostile_trial(number, text, error=error) for number, text in enumerate(hostile)]
    result = SweepResult(tmp_path / ("<i>&" * 20), f"{hostile[0]}.accuracy", "minimize", tuple(trials), len(trials))
    result.folder.mkdir()
    page = write_sweep_page(result, {key: 1 / (index + 1) for index, key in enumerate(trials[0].values)})

    found, console = browse(page, folder=tmp_path, is_dark=is_dark)

    assert_fits(found, console)
    assert_readable(found, is_dark=is_dark, elements=1000)
    assert "<script" not in page.read_text(encoding="utf8")


@pytest.mark.parametrize("name", ["department_of_the_customer_who_wrote_the_ticket", "W" * 60, "品" * 40])
def test_long_names_of_a_metric_and_of_parameters_stay_inside_the_viewport(name: str, tmp_path: Path) -> None:
    keys = [f"{part}.{name}" for part in ("trainer", "adapter", "data", "prompt")]

    def trial(number: int) -> Trial:
        curve = tuple(TrialEvaluation(share, round(100 * share), number + 1 - share) for share in (0.5, 1.0))
        result = TrialResult("done", float(number), curve=curve)
        return Trial(number * 10**6, dict.fromkeys(keys, number % 3), result=result)

    trials = tuple(trial(number) for number in range(8))
    result = SweepResult(tmp_path / "sweep", f"{name}.macro_averaged_f1", "maximize", trials, len(trials))
    result.folder.mkdir()
    page = write_sweep_page(result, dict.fromkeys(keys, 0.25))

    found, console = browse(page, folder=tmp_path, is_dark=False)

    assert_fits(found, console)


def hostile_trial(number: int, text: str, *, error: str) -> Trial:
    """Return a trial with hostile names and values of parameters; every tenth was stopped, and every tenth failed."""
    keys = ("<script>alert(1)</script>", "a.'><img src=x onerror=alert(1)>", "k" * 200, "</svg>.{{ 7 * 7 }}")
    values = dict(zip(keys, (text, {text: [text]}, "v" * (number + 1), number), strict=True))
    curve = tuple(TrialEvaluation(share, round(100 * share), number + 1 - share) for share in (0.5, 1.0))
    if number % 10 == 1:
        return Trial(number, values, result=TrialResult("pruned", curve=curve[:1]))
    if number % 10 == 2:
        return Trial(number, values, result=TrialResult("failed", error=error))
    return Trial(number, values, result=TrialResult("done", float(number), curve=curve))


def with_other_values(rows: list[RecordedRow], *, seed: int) -> list[RecordedRow]:
    """Return rows half of whose values are unreadable."""
    rng = random.Random(seed)

    def changed(output: OutputResult) -> OutputResult:
        return OutputResult(output.reference, None, False) if rng.random() < 0.5 else output

    return [replace(row, outputs={name: changed(one) for name, one in row.outputs.items()}) for row in rows]


def test_hostile_rows_of_a_comparison_stay_inside_the_viewport_and_run_nothing(tmp_path: Path) -> None:
    rng, hostile = random.Random(1), hostile_strings()

    def rows(share: float) -> list[RecordedRow]:
        return [
            RecordedRow(
                text, text, text, 1.0, 2, {"team": OutputResult(text, rng.choice(hostile), rng.random() < share)}
            )
            for text in hostile
        ]

    runs = [write_run(tmp_path / name, outputs={"team": "text"}, results=rows(0.5)) for name in ("<i>a", "b")]
    page = tmp_path / "compare.html"
    write_page(page, compare_runs(runs, max_examples=200))

    found, console = browse(page, folder=tmp_path, is_dark=False)

    assert_fits(found, console)
    assert "<script" not in page.read_text(encoding="utf8")
