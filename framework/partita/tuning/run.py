"""The sizes of a run: those that it began with, or found before its first step."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from partita.assembly import Assembly, Parts
from partita.data.encoded import EncodedRows
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.splits import has_answers
from partita.evaluation import Examination, prepare
from partita.inference.prompts import EncodedPrompts
from partita.tuning.sizes import BatchSizes, Sizing
from partita.tuning.training_shape import TrainingShape
from partita.tuning.trials import countable_rows
from partita_schema.batching import PackBatching
from partita_schema.errors import ConfigError, Problem
from partita_schema.rows import row_schema
from partita_schema.trainer import FinetuneTrainer
from partita_trainers.base import Trainer, TrialWork
from partita_trainers.batch_size.bench import Bench
from partita_trainers.batch_size.trial import BatchSize, Trial
from partita_trainers.batch_size.tune import warm_up
from partita_trainers.team import ALONE, Team

logger = logging.getLogger(__name__)


def run_sizes(
    trainer: Trainer,
    assembly: Assembly,
    sizing: Sizing,
    *,
    shape: TrainingShape | None,
    examinations: Mapping[str, Examination],
    begun: Mapping[str, Any],
) -> BatchSizes:
    """Sizes of all that a run does.

    `shape` is that of the training rows, None where nothing is trained. `begun` holds the records of a run that has
    taken steps already: it goes on as it began. Otherwise training comes first, and while the state of its optimizers
    is on the device, what will have to run beside it. Raises OutOfMemory where not even one row fits, and ConfigError
    where a custom trainer does not say what to try.
    """
    sizes = BatchSizes(**{name: BatchSize.from_record(record) for name, record in begun.items()})
    needed = needs_trial(assembly, begun)
    with training_trial(trainer, assembly, shape, needed=needed, team=sizing.team) as trial:
        if shape is not None and sizes.training is None:
            written = sizing.written("training", shape.written)
            if written is None and trial is not None:
                written = sizing.training(trial, shape)
            elif trial is not None:
                warm_up(Bench(trial, sizing.memory))
            elif written is None:
                message = f"auto needs a trainer that says what to probe: {type(trainer).__name__}.trial gave None"
                raise ConfigError([Problem("trainer.batch_size", f"{message}; write a number")])
            sizes = replace(sizes, training=None if written is None else shape.with_tokens(written))
        sizing.beside_training = trial is not None
        try:
            return evaluation_sizes(assembly, sizing, examinations, sizes=sizes)
        finally:
            sizing.beside_training = False


def needs_trial(assembly: Assembly, begun: Mapping[str, Any]) -> bool:
    """Whether any size has to be found."""
    trainer = assembly.config.trainer
    return not begun and "auto" in (trainer.batch_size, trainer.eval_batch_size)


@contextmanager
def training_trial(
    trainer: Trainer, assembly: Assembly, shape: TrainingShape | None, *, needed: bool, team: Team
) -> Iterator[Trial | None]:
    """The trainer's trial, where there is training and a size is to be found beside it or for it."""
    if shape is None or not needed:
        yield None
        return
    config, lm = assembly.config, assembly.lm
    longest, learned = shape.longest, shape.most_learned

    def estimated_bytes(rows: int) -> int:
        return lm.estimated_bytes("training", rows, tokens=longest, new_tokens=0, learned=learned)

    work = TrialWork(
        config=config,
        lm=lm,
        device=lm.device,
        longest_row=longest,
        most_learned=learned,
        token_ids=lm.token_ids,
        max_rows=countable_rows(shape.most_rows, vocabulary_size=lm.vocabulary_size, learned=learned),
        volume=shape.volume,
        estimated_bytes=estimated_bytes,
        packed=isinstance(shape.batching, PackBatching),
        team=team,
    )
    # A class of the user's may lack the method; what is evaluated beside its training is then tried without it.
    declare = getattr(trainer, "trial", None)
    with (declare(work) if declare is not None else None) or nullcontext() as trial:
        yield trial


def evaluation_sizes(
    assembly: Assembly, sizing: Sizing, examinations: Mapping[str, Examination], *, sizes: BatchSizes
) -> BatchSizes:
    """`sizes` with those of evaluations and of generated answers, where there are any."""
    if not examinations or evaluates_never(assembly):
        return sizes
    held = [examination.encoded for examination in examinations.values()]
    if sizes.evaluation is None:
        lengths = np.concatenate([encoded.lengths for encoded in held])
        sizes = replace(sizes, evaluation=sizing.evaluation(lengths, most_learned(held)))
    if sizes.generation is None and generates(assembly):
        asked = [examination.rows for examination in examinations.values()]
        lengths, shared = asked_prompts(assembly, asked, team=sizing.team)
        sizes = replace(sizes, generation=sizing.generation(lengths, shared_tokens=shared))
    return sizes


def answering_sizes(assembly: Assembly, rows: Rows, *, sizing: Sizing) -> BatchSizes:
    """Sizes of answers to these rows, and of their evaluation where they have answers."""
    lengths, shared = asked_prompts(assembly, [rows], team=sizing.team)
    sizes = BatchSizes(generation=sizing.generation(lengths, shared_tokens=shared))
    if not has_answers(rows, assembly.config):
        return sizes
    encoded = prepare(assembly, rows, split="test", ledger=Ledger(None, max_bad_rows=1.0)).encoded
    return replace(sizes, evaluation=sizing.evaluation(encoded.lengths, most_learned([encoded])))


def evaluates_never(assembly: Assembly) -> bool:
    trainer = assembly.config.trainer
    return isinstance(trainer, FinetuneTrainer) and trainer.skip_all_evaluation


def generates(assembly: Assembly) -> bool:
    """Whether answers are generated during the run or at its end."""
    trainer = assembly.config.trainer
    if not isinstance(trainer, FinetuneTrainer):
        return True
    return trainer.evaluate_generated is not False or trainer.validation_metric != "loss"


def asked_prompts(assembly: Parts, sources: Iterable[Rows], *, team: Team = ALONE) -> tuple[np.ndarray, int]:
    """Tokens of each row's prompt, 0 for rows without one; and how many all prompts of a source begin with.

    The ranks of `team` share the work.
    """
    schema = row_schema(assembly.config, supervised=False)
    prompts = [EncodedPrompts(rows, assembly.encoder, schema, team=team) for rows in sources]
    return np.concatenate([one.lengths for one in prompts]), min(len(one.prefix) for one in prompts)


def most_learned(sources: Sequence[EncodedRows]) -> int:
    """Most learned tokens of a row."""
    return max(int(encoded.learned_tokens.max(initial=0)) for encoded in sources)
