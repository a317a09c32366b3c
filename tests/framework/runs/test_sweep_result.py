"""The result of a sweep is printed with its trials, the best first."""

from pathlib import Path

from IPython.lib.pretty import pretty

from partita.runs.sweep_record import Trial, TrialResult
from partita.runs.sweep_result import SweepResult


def test_a_result_is_printed_with_the_trials_that_have_ended_the_best_first() -> None:
    rates = {0: 0.5, 1: 0.01, 2: 0.02, 3: 0.03}
    results = {
        0: TrialResult("failed", None, error="OutOfMemory: too long\nmore"),
        1: TrialResult("done", 0.25),
        2: TrialResult("done", 0.75),
    }
    trials = tuple(
        Trial(number, {"trainer.learning_rate": rates[number]}, None, results.get(number)) for number in rates
    )
    result = SweepResult(Path("sweeps/x"), "team.accuracy", "maximize", trials, 6)
    assert pretty(result) == str(result)
    assert str(result).splitlines() == [
        "3 of 6 trials of sweeps/x, the best first",
        "  trial 2: team.accuracy 0.75 (trainer.learning_rate 0.02)",
        "  trial 1: team.accuracy 0.25 (trainer.learning_rate 0.01)",
        "  trial 0: failed: OutOfMemory: too long (trainer.learning_rate 0.5)",
    ]
