"""Tests of the page of a sweep: what it says, its charts, and its size."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from partita.report.sweep_page import sweep_page, write_sweep_page
from partita.runs.sweep_record import Trial, TrialEvaluation, TrialResult
from partita.runs.sweep_result import SweepResult, short_names


def trial(number: int, loss: float | None, *, state: str = "done", error: str | None = None) -> Trial:
    shares = (0.25, 0.5, 1.0) if state == "done" else (0.25,)
    curve = tuple(TrialEvaluation(share, int(40 * share), (loss or 1) + 1 - share) for share in shares)
    values = {"trainer.learning_rate": 10.0 ** -(number % 5 + 1), "adapter.type": ("lora", "dora")[number % 2]}
    result = TrialResult(state, loss, curve=curve, error=error, cpu_seconds=2.0)  # type: ignore[arg-type]
    return Trial(number, values, result=result)


def sweep(*trials: Trial) -> SweepResult:
    return SweepResult(Path("sweeps/reviews"), "loss", "minimize", trials, len(trials))


MANY = sweep(
    *(trial(number, 0.5 + number / 10) for number in range(8)),
    trial(8, None, state="pruned"),
    trial(9, None, state="failed", error="no memory </table><script>alert(1)</script>"),
    replace(trial(0, 0.5), number=10, repeats=0),
)
IMPORTANCE = {"trainer.learning_rate": 0.8, "adapter.type": 0.2}


class Tags(HTMLParser):
    """Counts the elements of a page, and checks that they are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1


def test_the_page_names_the_best_trial_its_values_and_the_command() -> None:
    text = sweep_page(MANY, IMPORTANCE)
    assert "The best of 9 results is trial 0 with loss 0.5; the median is 0.8." in text
    assert f"partita predict {MANY.run_of(MANY.trials[0])} --dataset ROWS --output FILE" in text
    assert "11 trials, 1 with the values of an earlier one, 1 stopped early, 1 failed, 20 CPU seconds" in text
    assert "10 (as 0)" in text


def test_the_median_of_an_even_number_of_results_is_between_the_two_in_the_middle() -> None:
    text = sweep_page(sweep(*(trial(number, float(number)) for number in range(4))), {})
    assert "The best of 4 results is trial 0 with loss 0; the median is 1.5." in text


def test_a_parameter_has_the_last_parts_of_its_key_that_tell_it_apart_in_charts() -> None:
    keys = ["trainer.learning_rate", "adapter.type", "trainer.optimizer.type", "type", "prompt.task"]
    assert short_names(keys) == {
        "trainer.learning_rate": "learning_rate",
        "adapter.type": "adapter.type",
        "trainer.optimizer.type": "optimizer.type",
        "type": "type",
        "prompt.task": "task",
    }
    changed = [replace(one, values={**one.values, "trainer.optimizer.type": "sgd"}) for one in MANY.trials]
    chart = sweep_page(sweep(*changed), {}).partition("<svg")[2].partition("</svg>")[0]
    for name in ("learning_rate", "adapter.type", "optimizer.type"):
        assert f">{name}</text>" in chart


def test_the_page_has_charts_of_values_progress_importance_and_curves() -> None:
    text = sweep_page(MANY, IMPORTANCE)
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert titles == ["Values and results", "Progress", "Importance of parameters", "The best trials", "Stopped early"]
    assert Tags(text).counts["svg"] == 5
    first = text.partition("<svg")[2].partition("</svg>")[0]
    assert first.count("<polyline") == 9
    assert first.count("var(--c1)") == 1


def test_a_parameter_with_few_numbers_has_its_values_on_the_axis() -> None:
    rates = ["1e-05", "0.0001", "0.001", "0.01", "0.1"]
    names = re.findall(r">([^<>]+)</text>", sweep_page(MANY, IMPORTANCE))

    assert [name for name in names if name in rates] == rates


def test_the_results_of_trials_are_dots_without_a_line() -> None:
    progress = sweep_page(MANY, IMPORTANCE).split("<svg")[2].partition("</svg>")[0]

    assert progress.count("<polyline") == 1
    assert progress.count("<circle") == 9 + 1, "nine trials, and the legend"


def test_text_of_errors_is_no_markup() -> None:
    text = sweep_page(MANY, IMPORTANCE)
    assert "script" not in Tags(text).counts
    assert "&lt;script&gt;alert(1)" in text


def test_a_sweep_with_one_result_has_no_charts_of_many() -> None:
    text = sweep_page(sweep(trial(0, 0.5)), {})
    assert "Only trial 0 has a result: loss 0.5." in text
    assert "Values and results" not in text


def test_a_sweep_with_few_trials_says_that_importance_needs_more() -> None:
    assert "needs at least 8 trials" in sweep_page(sweep(trial(0, 0.5), trial(1, 0.4)), {})


def test_the_page_of_a_thousand_trials_is_small(tmp_path: Path) -> None:
    many = SweepResult(tmp_path, "loss", "minimize", tuple(trial(n, 0.5 + n / 1e4) for n in range(1000)), 1000)
    path = write_sweep_page(many, IMPORTANCE)
    assert path == tmp_path / "report.html"
    assert path.stat().st_size < 500_000
    assert "900 more are in sweep.json." in path.read_text()
