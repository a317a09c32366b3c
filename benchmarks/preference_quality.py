"""Whether training on preferences improves answers: by a rule, on unseen questions, over three seeds.

The example `examples/preferences` from end to end, for each seed: a small model (llama, 2 layers of 64) is trained from
scratch on answers of any length, a fifth of them wrong; its own answers are sampled and judged by the rule (the right
price in at most three words); and it is trained on the pairs, or with kto on the single answers. `good before` and
`good after` are the shares of 120 unseen questions with a good answer, one sample each, seed by seed. `right` and
`words` are means over the seeds: the share of right prices, and the words of an answer. The learning rates were chosen
with other seeds.
"""

import runpy
import shutil
import sys
from pathlib import Path
from statistics import fmean

from harness import ROOT, Limit, Result, Row, call, main

EXAMPLE = ROOT / "examples" / "preferences"
SEEDS = (1, 2, 3)
LEAST_GAIN = 0.2
TRAINERS: dict[str, tuple[str, float, list[str]]] = {
    "dpo": ("config.yaml", 3e-4, []),
    "orpo": ("config.yaml", 1e-3, ["trainer.loss={type: orpo}"]),
    "simpo": ("config.yaml", 3e-4, ["trainer.loss={type: simpo}"]),
    "kto": ("kto.yaml", 1e-4, []),
}
"""By name: file, learning rate, and further values."""


def quality(folder: Path, quick: bool) -> Result:
    seeds = SEEDS[:1] if quick else SEEDS
    found = [call(one_seed, folder / str(seed), seed) for seed in seeds]
    rows = [row_of(name, found) for name in TRAINERS]
    limits = [
        Limit(f"smallest gain of good answers of {name}", min(gains(name, found)), LEAST_GAIN, "min")
        for name in TRAINERS
    ]
    return rows, limits


def gains(name: str, found: list[dict[str, Row]]) -> list[float]:
    """Return for each seed the share of good answers after training, minus that before."""
    return [round(one[name]["good"] - one["first"]["good"], 6) for one in found]


def row_of(name: str, found: list[dict[str, Row]]) -> Row:
    """Return the row of a trainer.

    Args:
        name: Its name.
        found: The answers of all models, by seed.
    """

    def listed(model: str) -> str:
        return ", ".join(f"{one[model]['good']:.3f}" for one in found)

    return {
        "trainer": name,
        "learning rate": TRAINERS[name][1],
        "good before": listed("first"),
        "good after": listed(name),
        "right before": round(fmean(one["first"]["right"] for one in found), 3),
        "right after": round(fmean(one[name]["right"] for one in found), 3),
        "words before": round(fmean(one["first"]["words"] for one in found), 2),
        "words after": round(fmean(one[name]["words"] for one in found), 2),
    }


def one_seed(name: str, seed: int) -> dict[str, Row]:
    """Run the example with a seed in a new folder, and return the judgement of each model."""
    import os

    from partita import Model

    folder = Path(name)
    shutil.copytree(EXAMPLE, folder)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    make_questions, make_pairs, judge = (
        runpy.run_path(f"{script}.py") for script in ("make_questions", "make_pairs", "judge")
    )
    make_questions["write"](folder)
    common = [f"seed={seed}", "trainer.skip_all_evaluation=true"]
    Model("first.yaml", overrides=common, quiet=True).train(run="runs/first")
    make_pairs["write"](seed=seed)
    judged = {"first": judge["judge"]("runs/first")}
    for trainer, (file, rate, more) in TRAINERS.items():
        overrides = [*common, *more, f"trainer.learning_rate={rate}"]
        Model(file, overrides=overrides, quiet=True).train(run=f"runs/{trainer}")
        judged[trainer] = judge["judge"](f"runs/{trainer}")
    return judged


if __name__ == "__main__":
    main(quality)
