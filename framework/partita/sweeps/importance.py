"""How much each parameter of a sweep matters, computed by Optuna."""

import warnings
from collections.abc import Sequence

from partita.runs.sweep_record import Trial
from partita.sweeps.search import Search

MIN_TRIALS = 8
"""Finished trials below which importances are noise."""
GOOD_SHARE = 0.25
"""Share of the trials that count as good."""


def importances(search: Search, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the importance of each parameter, the highest first; empty with too few trials.

    PED-ANOVA (Watanabe et al. 2023): how much the values of the best quarter of the trials differ from those of all.
    Shares sum to 1.
    """
    done = [trial for trial in trials if trial.result is not None and trial.result.state == "done"]
    values = {trial.result.value for trial in done if trial.result is not None}
    varied = [key for key in search.sweep.parameters if len({str(trial.values[key]) for trial in done}) > 1]
    if len(done) < MIN_TRIALS or len(values) < 2 or not varied:
        return {}
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    with warnings.catch_warnings(action="ignore"):
        study = search.study(trials, len(trials))
        evaluator = PedAnovaImportanceEvaluator(target_quantile=GOOD_SHARE)
        result = get_param_importances(study, evaluator=evaluator, params=varied)
    return {key: float(share) for key, share in result.items()}
