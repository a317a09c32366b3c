"""`Model.tune`: measured batch sizes."""

from typing import Any

from partita.backends import bag_verbs
from partita.backends.bag_verbs import refuse_bag
from partita.backends.context import ModelRuntime
from partita.backends.endpoint.verbs import TUNE, refuse_served
from partita.backends.ray.verbs import refuse_on_ray
from partita.data.formatting.labels import find_labels
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.tune import answering_sizes
from partita.training.run import find_sizes
from partita_trainers.batch_size.cache import Cache
from partita_trainers.process_group import main_process_first, synchronized_errors
from partita_trainers.registry import build_trainer


def tune(runtime: ModelRuntime, dataset: Any = None, *, fresh: bool = False) -> BatchSizes:
    """Find the best batch sizes for this machine; see `Model.tune`."""
    refuse_bag(runtime.config, what=bag_verbs.TUNE)
    refuse_served(runtime.config, what=TUNE)
    refuse_on_ray(runtime.config, verb="tune")
    if runtime.config.trainer.type != "none" and runtime.run is None:
        return tune_training(runtime, dataset, fresh=fresh)
    pipeline = runtime.ready()
    with synchronized_errors(runtime.process_group, "opening the data"):
        rows = runtime.evaluation_rows() if dataset is None else runtime.open_dataset(dataset)
    sizing = runtime.found_sizing = BatchSizeTuner(
        pipeline, cache=Cache.of_user(), fresh=fresh, process_group=runtime.process_group
    )
    sizes = answering_sizes(pipeline, rows, sizing=sizing)
    sizing.fresh = False  # later verbs use the sizes found now
    return sizes


def tune_training(runtime: ModelRuntime, dataset: Any, *, fresh: bool) -> BatchSizes:
    """Return the batch sizes that `train` would choose; writes only the cache of measured sizes."""
    runtime.refuse_code("training")
    trainer = build_trainer(runtime.config.trainer, folder=runtime.loaded.folder)
    with synchronized_errors(runtime.process_group, "opening the data"):
        data = runtime.open_data(dataset)
        labels = find_labels(runtime.config, data.training)
    with main_process_first(runtime.process_group, "loading the model"):
        pipeline = runtime.build_pipeline(labels, data.training, trainable=True)
    sizing = BatchSizeTuner(pipeline, cache=Cache.of_user(), fresh=fresh, process_group=runtime.process_group)
    return find_sizes(trainer, pipeline, data, sizing=sizing)
