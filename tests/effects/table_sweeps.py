"""Sweeps: the choice of values, early stops, and the number of trials at a time. Workers compute a formula."""

from pathlib import Path

from partita.runs.sweep_record import TrialEvaluation, TrialResult, write_result
from partita.sweeps.sweep_run import SweepPlan, SweepRun
from partita.sweeps.trial import TrialOrder
from partita.sweeps.workers import TrialEnd
from partita_schema.load import load_config

from .bases import FINETUNE, trainer
from .effects import Flip, Group
from .observers import Config, Observation, cleaned, messages

RATES = {"log_uniform": [1e-5, 1e-1]}
STEPS = 10


def sweep(**section: object) -> Config:
    return {"sweep": {"parameters": {"trainer.learning_rate": RATES}, "trials": 12, **section}}


def space(key: str, **values: object) -> Config:
    return {"sweep": {"parameters": {key: values}}}


class Formula:
    """Workers whose trials end in order, with a loss that depends on the learning rate."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.running: list[TrialOrder] = []
        self.most = 0

    def start(self, order: TrialOrder) -> None:
        self.running.append(order)
        self.most = max(self.most, len(self.running))

    def wait(self) -> TrialEnd:
        order = self.running.pop(0)
        loss = abs(order.config["trainer"]["learning_rate"] - 0.01)
        curve: list[TrialEvaluation] = []
        stop = False
        for step in range(1, STEPS):
            curve.append(TrialEvaluation(step / STEPS, step, loss + 1 / step))
            stop = order.search.should_stop(order.earlier, curve)
            if stop:
                break
        state, value = ("pruned", None) if stop else ("done", loss)
        write_result(order.run, TrialResult(state, value, curve=tuple(curve)))
        return TrialEnd(order.number, 0)

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def sweeping(config: Config, place: Path) -> Observation:
    """Run a sweep."""
    with messages() as said:
        plan = SweepPlan.of(load_config(config))
        pool = Formula(plan.section.workers)
        progress = SweepRun(plan, place / "sweep")
        progress.work(pool)
        result = progress.save()
    results: Observation = {
        "values": [dict(trial.values) for trial in result.trials],
        "ends": [len(trial.result.curve) for trial in result.trials if trial.result is not None],
        "best": result.best.number if result.best is not None else None,
        "metric": result.metric,
        "most at a time": pool.most,
        "log": said,
    }
    return cleaned(results, place)


PRUNED = sweep(pruner={"type": "hyperband"}, trials=24, sampler="random")
HALVED = sweep(pruner={"type": "successive_halving"}, trials=24, sampler="random")
MEDIAN = sweep(pruner={"type": "median"}, trials=24, sampler="random")

SWEEPS = [
    Group(
        "sweep",
        sweeping,
        FINETUNE | sweep(),
        "values",
        {
            "sweep.metric": Flip("answer.exact_match", given=trainer(evaluate_generated="auto"), part="metric"),
            "sweep.mode": Flip("maximize", part="best"),
            "sweep.trials": 13,
            "sweep.sampler": "random",
            "sweep.seed": 5,
            "sweep.max_concurrent_trials": 1,
            "sweep.workers": Flip(3, part="most at a time"),
            "sweep.pruner[hyperband].type": Flip({"type": "median"}, given=PRUNED, part="ends"),
            "sweep.pruner[hyperband].min_share": Flip(0.6, given=PRUNED, part="ends"),
            "sweep.pruner[hyperband].reduction_factor": Flip(2, given=PRUNED, part="ends"),
            "sweep.pruner[successive_halving].type": Flip({"type": "median"}, given=HALVED, part="ends"),
            "sweep.pruner[successive_halving].min_share": Flip(0.6, given=HALVED, part="ends"),
            "sweep.pruner[successive_halving].reduction_factor": Flip(2, given=HALVED, part="ends"),
            "sweep.pruner[median].type": Flip({"type": "hyperband"}, given=MEDIAN, part="ends"),
            "sweep.pruner[median].min_share": Flip(0.6, given=MEDIAN, part="ends"),
            "sweep.pruner[median].startup_trials": Flip(15, given=MEDIAN, part="ends"),
        },
    ),
    Group(
        "values of a parameter",
        sweeping,
        FINETUNE | {"sweep": {"trials": 3}},
        "values",
        {
            "sweep.parameters.choice": Flip([0.3], given=space("trainer.learning_rate", choice=[0.1])),
            "sweep.parameters.uniform": Flip([0.3, 0.5], given=space("trainer.learning_rate", uniform=[0.1, 0.2])),
            "sweep.parameters.log_uniform": Flip(
                [0.3, 0.5], given=space("trainer.learning_rate", log_uniform=[0.1, 0.2])
            ),
            "sweep.parameters.int": Flip([3, 5], given=space("seed", int=[1, 2])),
            "sweep.parameters.log_int": Flip([3, 5], given=space("seed", log_int=[1, 2])),
            "sweep.parameters.step": Flip(3, given=space("seed", int=[1, 8])),
        },
    ),
]
