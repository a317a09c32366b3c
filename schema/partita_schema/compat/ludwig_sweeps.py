"""Conversion of Ludwig's section `hyperopt` to `sweep`.

Runs before other keys are renamed or removed. Yields the path and reason of each key to remove with a warning.
"""

from collections.abc import Iterator

from partita_schema.compat.ludwig_keys import METRICS, RENAMED
from partita_schema.yaml.tree import Node, Path

SPACES = {"uniform": "uniform", "loguniform": "log_uniform", "randint": "int", "lograndint": "log_int"}
"""Ludwig's spaces with two limits, and their keys here."""
SAMPLERS = {"optuna": "tpe", "hyperopt": "tpe", "bohb": "tpe", "random": "random", "variant_generator": "random"}
"""Search algorithms, and the sampler here; tpe is used for others."""
SCHEDULERS = {"hyperband": "hyperband", "bohb": "hyperband", "hb_bohb": "hyperband"}
HALVING = ("async_hyperband", "asynchyperband", "asha")
"""Schedulers of Ray Tune that stop trials, and the pruner here."""


def convert_hyperopt(root: dict[str, Node]) -> Iterator[tuple[Path, str]]:
    """Convert a section `hyperopt` in place: its keys move to `sweep`."""
    node = root.get("hyperopt")
    if node is None:
        return
    section = node.mapping()
    if not section.get("parameters", Node({})).mapping() or "sweep" in root:
        yield ("hyperopt",), "sweep is set as well" if "sweep" in root else "it has no parameters"
        return
    sweep: dict[str, Node] = {"parameters": section.pop("parameters")}
    grid = [parameter.find(("space",)) for parameter in sweep["parameters"].mapping().values()]
    all_listed = all(space is not None and space.value == "grid_search" for space in grid)
    convert_parameters(sweep["parameters"])
    convert_metric(section, sweep)
    yield from convert_search(section, sweep, all_listed=all_listed)
    yield from convert_executor(section, sweep, metric_problem=unmeasured_metric(root, sweep))
    yield from ((("hyperopt", key), "a sweep does not use it") for key in list(section) if key != "executor")
    moved = Node(sweep, node.position, node.key_position, written="hyperopt")
    moved.origin = f"ludwig: hyperopt ({node.key_position})" if node.key_position else "ludwig: hyperopt"
    root["sweep"] = moved


def convert_parameters(parameters: Node) -> None:
    """Rename the parameters, and write their spaces as here. Unknown spaces stay, and are reported as errors."""
    section = parameters.mapping()
    for old in list(section):
        node = section.pop(old)
        section[RENAMED.get(old, old)] = node
        values = node.mapping()
        space = values.get("space")
        kind = space.value if space is not None else None
        listed = values.get("categories") or values.get("values")
        if kind in ("choice", "grid_search") and listed is not None:
            node.value = {"choice": listed}
        elif kind in SPACES and {"lower", "upper"} <= set(values):
            node.value = {SPACES[str(kind)]: limits(values, whole=str(kind).endswith("int"))}
        elif kind in ("qrandint", "quniform") and {"lower", "upper", "q"} <= set(values):
            step = values["q"]
            if isinstance(step.value, int):
                node.value = {"int": limits(values, whole=False), "step": step}


def limits(values: dict[str, Node], *, whole: bool) -> Node:
    """Return lower and upper limit as a list; Ludwig's upper limit of an integer is not one of the values."""
    lower, upper = values["lower"], values["upper"]
    if whole and isinstance(upper.value, int):
        upper.value, upper.text = upper.value - 1, None
    return Node([lower, upper], lower.position, lower.key_position)


def convert_metric(section: dict[str, Node], sweep: dict[str, Node]) -> None:
    """Move goal, metric and output feature."""
    goal, metric, output = (section.pop(key, None) for key in ("goal", "metric", "output_feature"))
    if goal is not None:
        sweep["mode"] = goal
    if metric is None:
        return
    if metric.value in METRICS:
        metric.value, metric.text = "loss", None
    elif output is not None and output.value != "combined" and metric.value != "loss":
        metric.value, metric.text = f"{output.value}.{metric.value}", None
    sweep["metric"] = metric


def convert_search(section: dict[str, Node], sweep: dict[str, Node], *, all_listed: bool) -> Iterator[tuple[Path, str]]:
    """Choose the sampler of a search algorithm.

    Args:
        section: The section of Ludwig.
        sweep: The section here.
        all_listed: Whether all parameters are lists of which every value is tried.
    """
    search = section.pop("search_alg", None)
    kind = search.find(("type",)) if search is not None else None
    name = kind.value if kind is not None else "variant_generator"
    sampler = "grid" if all_listed and name == "variant_generator" else SAMPLERS.get(str(name), "tpe")
    position = search.position if search is not None else None
    sweep["sampler"] = Node(sampler, position, origin="ludwig: hyperopt.search_alg")
    if str(name) not in SAMPLERS and search is not None:
        section["search_alg"] = search
        yield ("hyperopt", "search_alg"), f"{name} is not offered; tpe is used"
    split = section.get("split")
    if split is not None and split.value == "validation":
        del section["split"]


def unmeasured_metric(root: dict[str, Node], sweep: dict[str, Node]) -> str:
    """Return why trials cannot be stopped early by the metric of the sweep; empty if they can.

    While a trial trains, only the loss and trainer.validation_metric are computed.
    """
    metric = sweep.get("metric", Node("loss")).value
    trainer, outputs = root.get("trainer", Node({})), root.get("output_features", Node([]))
    validated, field, first = (
        None if node is None else node.value
        for node in (
            trainer.find(("validation_metric",)),
            trainer.find(("validation_field",)),
            outputs.find((0, "name")),
        )
    )
    own = f"{first if field in (None, 'combined') else field}.{validated}"
    if metric == "loss" or own == (metric if "." in str(metric) else f"{first}.{metric}"):
        return ""
    return f"{metric} is not computed while a trial trains; write it as trainer.validation_metric"


def convert_executor(
    section: dict[str, Node], sweep: dict[str, Node], *, metric_problem: str
) -> Iterator[tuple[Path, str]]:
    """Move the number of trials, and choose the pruner of a scheduler.

    Args:
        section: The section of Ludwig.
        sweep: The section here.
        metric_problem: Why trials cannot be stopped early by the metric; empty if they can.
    """
    node = section.get("executor")
    if node is None:
        return
    executor = node.mapping()
    moved = {"num_samples": "trials", "max_concurrent_trials": "max_concurrent_trials"}
    reasons = dict.fromkeys(executor, "a sweep does not use it")
    if sweep["sampler"].value == "grid":  # of which each sample of Ray Tune is a repetition
        del moved["num_samples"]
        reasons["num_samples"] = "each combination of a grid is tried once"
        if "num_samples" in executor and executor["num_samples"].value == 1:
            del executor["num_samples"]
    for old, new in moved.items():
        value = executor.pop(old, None)
        if value is not None and value.value not in (None, "auto"):
            sweep[new] = value
    scheduler = executor.get("scheduler")
    kind = scheduler.find(("type",)) if scheduler is not None else None
    pruner = "successive_halving" if kind is not None and kind.value in HALVING else None
    pruner = pruner or (SCHEDULERS.get(str(kind.value)) if kind is not None else None)
    if pruner is not None and metric_problem:
        reasons["scheduler"] = metric_problem
    elif pruner is not None and scheduler is not None:
        del executor["scheduler"]
        sweep["pruner"] = Node({"type": Node(pruner, scheduler.position)}, scheduler.position, scheduler.key_position)
    elif kind is not None and kind.value == "fifo":
        del executor["scheduler"]
    if executor.get("type") is not None:
        del executor["type"]
    yield from ((("hyperopt", "executor", key), reasons[key]) for key in executor)
