"""The facade: a file, and the verbs that work on it."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from partita.assembly import Assembly, Labels, ServedAssembly, assemble, assemble_served
from partita.data.ledger import Ledger
from partita.data.reading.sources import open_rows
from partita.data.rows import Rows, digest
from partita.data.run_data import RunData, open_run_data
from partita.data.shaping.labels import find_labels
from partita.data.splits import check_columns, has_answers
from partita.evaluation import mean_loss, prepare, score
from partita.inference.engine import generate_requests
from partita.inference.halving import Capacity
from partita.inference.predict import predict_rows
from partita.inference.prompts import PromptSource
from partita.inference.streaming import stream_requests
from partita.lm.base import GenerationRequest
from partita.lm.fingerprint import folder_digest
from partita.plain_prompts import plain_requests
from partita.runs.directory import RunDirectory, open_run
from partita.runs.files import write_atomically
from partita.runs.finding import choose_folder, find_finished
from partita.runs.manifest import MANIFESTS, read_manifest
from partita.runs.progress import show_progress
from partita.served import SAVE, TRAIN, TUNE, is_served, refuse_served, served_capacity, written_texts
from partita.training import check_validation_metric, find_sizes, run_trainer
from partita.tuning.run import asked_prompts, most_learned
from partita.tuning.sizes import BatchSizes, Sizing
from partita_schema.config import Config
from partita_schema.dump import resolved_yaml
from partita_schema.errors import DataError, PartitaError, ResumeError
from partita_schema.load import Loaded, load_config
from partita_schema.model import ScratchModel
from partita_schema.records import FORMAT_VERSION
from partita_schema.rows import row_schema
from partita_trainers.base import TrainResult
from partita_trainers.batch_size.cache import Cache
from partita_trainers.batch_size.trial import BatchSize
from partita_trainers.registry import build_trainer

if TYPE_CHECKING:
    from partita.inference.predictions import Predictions

logger = logging.getLogger(__name__)

RUNS = Path("runs")
"""Where runs go that are not told where."""


class Model:
    """A language model as a file describes it."""

    def __init__(
        self,
        config: "str | Path | Mapping[str, object] | Config",
        *,
        overrides: Sequence[str] = (),
        quiet: bool = False,
    ) -> None:
        """`config` is a path, YAML text, a dictionary or a Config; `overrides` are texts such as trainer.epochs=1.

        Raises ConfigError naming every mistake. Nothing heavy is loaded before a verb needs it.
        """
        self.loaded: Loaded = load_config(config, overrides=overrides)
        for warning in self.loaded.warnings:
            logger.warning("%s", warning)
        self.quiet = quiet
        self.run: Path | None = None
        """Directory of the run that was trained or loaded."""
        self._assembly: Assembly | None = None
        self._served: ServedAssembly | None = None
        self._sizing: Sizing | None = None
        self._splits: dict[str, Rows] = {}

    @property
    def config(self) -> Config:
        """The checked configuration."""
        return self.loaded.config

    @property
    def name(self) -> str:
        """Name of the file, for the directory of its runs."""
        return Path(self.loaded.file).stem if self.loaded.file else "run"

    @classmethod
    def load(cls, folder: str | Path, *, overrides: Sequence[str] = (), quiet: bool = False) -> "Model":
        """The model of a finished run's directory, or of a folder that `save` wrote.

        Raises PartitaError where there is no finished run. Relative paths of the file start where they did.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if not manifest:
            raise PartitaError(
                f"{folder} is neither a run directory nor a saved model: it has no {' or '.join(MANIFESTS)}"
            )
        status = manifest.get("status")
        if status != "done":
            raise PartitaError(
                f"the run in {folder} is not finished (status {status}); train again with --run {folder}"
            )
        model = cls(manifest["config"], overrides=overrides, quiet=quiet)
        model.loaded = replace(model.loaded, folder=Path(manifest["folder"]))
        model.run = folder
        return model

    def train(self, dataset: Any = None, run: str | Path | None = None) -> TrainResult:
        """Train as the file says, or for `trainer: {type: none}` evaluate.

        `dataset` takes the place of data.source: a path or glob, a Hub name, a pandas frame, a `datasets` object, a
        list of dicts or a dict of lists. `run` is the run's directory; one that was begun is continued, one that is
        finished is not trained again. Default: runs/NAME, or the next free NAME-2.
        """
        refuse_served(self.config, what=TRAIN)
        folder = Path(run) if run is not None else choose_folder(self.name, config=self.config, base=RUNS)
        check_validation_metric(self.config)
        trainer = build_trainer(self.config.trainer, folder=self.loaded.folder)
        with self.open_run(folder) as directory:
            if directory.finished:
                logger.info("the run in %s is finished already", folder)
                if dataset is not None:
                    self.check_rows_of(directory, self.open_data(dataset))
                self.run, self._assembly, self._sizing = folder, None, None
                return finished_result(folder, directory.manifest)
            data = self.open_data(dataset)
            labels = find_labels(self.config, data.training)
            tokenizer = folder / "tokenizer"
            if not directory.has_checkpoints:
                shutil.rmtree(tokenizer, ignore_errors=True)  # of a start that came to nothing
            trains = self.config.trainer.type != "none"
            assembly = self.assemble(labels, data.training, trainable=trains, tokenizer_folder=tokenizer)
            sizing = Sizing(assembly, cache=Cache.of_user())
            result = run_trainer(trainer, assembly, data, directory, sizing=sizing)
            model = "model" if (folder / "model").is_dir() else None
            directory.note(status="done", steps=result.steps, stopped_early=result.stopped_early, model=model)
        self.run, self._assembly, self._splits, self._sizing = folder, assembly, data.splits, sizing
        return replace(result, batch_sizes=directory.manifest["batch_sizes"])

    def predict(
        self,
        dataset: Any,
        output: str | Path | None = None,
        *,
        batch_size: int | None = None,
        retry_errors: bool = False,
        fresh: bool = False,
    ) -> "Predictions":
        """Answers for every row, in input order, written to `output` (.jsonl, .csv or .parquet) where one is given.

        Answers are kept as they are made: called again with the same arguments, only what is missing is generated.
        `fresh` begins anew, `retry_errors` does rows again that ended in an error.
        """
        assembly = self.answering()
        rows = open_rows(dataset, folder=Path.cwd())
        check_columns(rows, self.config, supervised=False)
        if rows.bad:
            logger.warning(
                "%d rows cannot be read and get no answer, such as %s: %s",
                len(rows.bad),
                rows.bad[0].key,
                rows.bad[0].reason,
            )
        target = Path(output) if output is not None else None
        fingerprint = self.fingerprint(assembly, rows)
        used: list[BatchSize] = []

        def capacity(prompts: PromptSource) -> Capacity:
            if isinstance(assembly, ServedAssembly):
                return served_capacity(assembly, batch_size)
            shared = len(prompts.prefix)
            used.append(self.sizing.generation(prompts.lengths, shared_tokens=shared, rows=batch_size))
            return self.sizing.capacity("generation", used[-1])

        try:
            return predict_rows(
                lm=assembly.lm,
                rows=rows,
                encoder=assembly.encoder,
                schema=row_schema(self.config, supervised=False),
                decoder=assembly.decoder,
                config=self.config,
                generation=assembly.generation,
                max_new_tokens=assembly.max_new_tokens,
                capacity=capacity,
                seed=self.sampling_seed,
                journal_path=self.journal(target, fingerprint),
                output=target,
                fingerprint=fingerprint,
                retry_errors=retry_errors,
                fresh=fresh,
                progress=self.progress,
            )
        finally:
            if used:
                self.note_memory(BatchSizes(generation=used[-1]))

    def evaluate(self, dataset: Any = None, *, batch_size: int | None = None) -> dict[str, dict[str, float]]:
        """Metrics by output feature on rows with known answers, and `loss` under the key `model`.

        Default of `dataset`: the test rows of the file, else its validation rows. Raises DataError without either. A
        server tells no loss.
        """
        assembly = self.answering()
        rows = self.evaluation_rows() if dataset is None else open_rows(dataset, folder=Path.cwd())
        ledger = Ledger(None, max_bad_rows=self.config.data.max_bad_rows)
        examination = prepare(assembly, rows, split="test", ledger=ledger)
        if isinstance(assembly, ServedAssembly):
            requests = served_capacity(assembly, batch_size).rows
            scores = score(assembly, examination.rows, batch_size=requests, progress=self.progress)
            return {name: dict(values) for name, values in scores.outputs.items()}
        sizing = self.sizing
        encoded = examination.encoded
        evaluation = sizing.evaluation(encoded.lengths, most_learned([encoded]), rows=batch_size)
        with sizing.work("evaluation", evaluation) as capacity:
            loss = mean_loss(assembly, encoded, batch_size=capacity.rows, limit=capacity.limit)
        lengths, shared = asked_prompts(assembly, [examination.rows])
        generation = sizing.generation(lengths, shared_tokens=shared, rows=batch_size)
        with sizing.work("generation", generation) as capacity:
            rows = examination.rows
            scores = score(assembly, rows, batch_size=capacity.rows, limit=capacity.limit, progress=self.progress)
        self.note_memory(BatchSizes(generation=generation, evaluation=evaluation))
        return {**{name: dict(values) for name, values in scores.outputs.items()}, "model": loss}

    @overload
    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        stream: Literal[False] = False,
    ) -> list[str]: ...

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts as well
        self, prompts: str, *, max_new_tokens: int | None = None, batch_size: int | None = None, stream: Literal[True]
    ) -> Iterator[str]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        stream: Literal[True],
    ) -> Iterator[tuple[int, str]]: ...

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        stream: bool = False,
    ) -> list[str] | Iterator[str] | Iterator[tuple[int, str]]:
        """What the model writes after each prompt, as it stands: no template, no chat.

        With `stream`, an iterator of the pieces of the answer as they are made; of several prompts, of pairs of a
        prompt's place and a piece.
        """
        assembly = self.answering()
        if isinstance(assembly, ServedAssembly):
            return written_texts(
                assembly,
                prompts,
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                seed=self.sampling_seed,
                stream=stream,
            )
        requests = plain_requests(assembly, prompts, max_new_tokens=max_new_tokens)
        lengths = np.array([len(request.input_ids) for request in requests])
        limit = max_new_tokens or assembly.max_new_tokens
        size = self.sizing.generation(lengths, rows=batch_size, max_new_tokens=limit)
        if stream:
            pieces = self.stream(assembly, requests, size)
            return (piece for _, piece in pieces) if isinstance(prompts, str) else pieces
        with self.sizing.work("generation", size) as capacity:
            found = generate_requests(
                assembly.lm, requests, options=assembly.generation.free, capacity=capacity, seed=self.sampling_seed
            )
        self.note_memory(BatchSizes(generation=size))
        return [generated.text for generated in found]

    def stream(
        self, assembly: Assembly, requests: Sequence[GenerationRequest], size: BatchSize
    ) -> Iterator[tuple[int, str]]:
        """Places of requests with the next piece of their answer."""
        with self.sizing.work("generation", size) as capacity:
            yield from stream_requests(
                assembly.lm, requests, options=assembly.generation.free, capacity=capacity, seed=self.sampling_seed
            )
        self.note_memory(BatchSizes(generation=size))

    def tune(self, dataset: Any = None, *, fresh: bool = False) -> BatchSizes:
        """The batch sizes that this machine allows and what is best of them, measured now.

        Of a file that trains: those of training and of the evaluations beside it. Of a finished run, or with
        `trainer: {type: none}`: those of generation, and of evaluation where `dataset` has answers. `dataset` takes the
        place of data.source, or of the rows that would be evaluated. `fresh` forgets what earlier runs have found.
        """
        refuse_served(self.config, what=TUNE)
        if self.config.trainer.type != "none" and self.run is None:
            return self.tune_training(dataset, fresh=fresh)
        assembly = self.ready()
        rows = self.evaluation_rows() if dataset is None else open_rows(dataset, folder=Path.cwd())
        sizing = self._sizing = Sizing(assembly, cache=Cache.of_user(), fresh=fresh)
        lengths, shared = asked_prompts(assembly, [rows])
        generation = sizing.generation(lengths, shared_tokens=shared)
        if not has_answers(rows, self.config):
            sizing.fresh = False
            return BatchSizes(generation=generation)
        encoded = prepare(assembly, rows, split="test", ledger=Ledger(None, max_bad_rows=1.0)).encoded
        evaluation = sizing.evaluation(encoded.lengths, most_learned([encoded]))
        sizing.fresh = False  # what comes after uses what was found
        return BatchSizes(generation=generation, evaluation=evaluation)

    def tune_training(self, dataset: Any, *, fresh: bool) -> BatchSizes:
        """The sizes that `train` would find; nothing is written but what earlier runs have found."""
        trainer = build_trainer(self.config.trainer, folder=self.loaded.folder)
        data = self.open_data(dataset)
        assembly = self.assemble(find_labels(self.config, data.training), data.training, trainable=True)
        return find_sizes(trainer, assembly, data, sizing=Sizing(assembly, cache=Cache.of_user(), fresh=fresh))

    def save(self, folder: str | Path) -> Path:
        """Write the model in the standard layout of transformers or peft, with what `Model.load` needs beside it."""
        refuse_served(self.config, what=SAVE)
        assembly = self.ready()
        folder = Path(folder)
        assembly.lm.save(folder)
        write_card(folder, config=self.config, labels=assembly.labels, origin=self.loaded.folder)
        return folder

    def push_to_hub(self, name: str, *, private: bool = True) -> str:
        """Upload what `save` writes to a Hub repository, made where there is none; its address comes back."""
        from huggingface_hub import HfApi

        refuse_served(self.config, what=SAVE)
        api = HfApi()
        repository = api.create_repo(name, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            write_card(Path(folder), config=self.config, labels=self.ready().labels, origin=None)
            api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload from partita")
        return str(repository)

    # What the verbs share

    def ready(self) -> Assembly:
        """The parts that answer: those of the last training, of the run, or for zero-shot of the base model."""
        if self._assembly is None:
            self.use_finished_run()
            labels, training = self.known_labels()
            self._assembly = self.assemble(labels, training, trainable=False)
        return self._assembly

    def answering(self) -> Assembly | ServedAssembly:
        """The parts that answer, with a model in this process or on a server."""
        if not is_served(self.config):
            return self.ready()
        if self._served is None:
            labels, training = self.known_labels()
            self._served = assemble_served(self.config, folder=self.loaded.folder, labels=labels, training=training)
        return self._served

    def use_finished_run(self) -> None:
        """Take this file's newest finished run where the file trains. Raises PartitaError where there is none."""
        if self.result is not None or self.config.trainer.type == "none":
            return
        self.run, apart = find_finished(self.name, config=self.config, base=RUNS)
        if self.run is None:
            others = f" (the run in {RUNS / self.name} is of another file: {'; '.join(apart[:5])})" if apart else ""
            raise PartitaError(
                f"nothing has been trained with this file yet{others}: train first, name the directory of a finished "
                "run, or write trainer: {type: none} for zero-shot"
            )
        logger.info("using the finished run in %s", self.run)

    def open_data(self, dataset: Any = None) -> RunData:
        """The rows of a run; `dataset` takes the place of data.source."""
        return open_run_data(self.config, folder=self.loaded.folder, dataset=dataset)

    def check_rows_of(self, directory: RunDirectory, data: RunData) -> None:
        """Raises ResumeError where a finished run was trained on other rows than these."""
        learned = directory.manifest.get("data", {}).get("training", {}).get("fingerprint")
        if data.training is not None and learned not in (None, data.training.fingerprint):
            raise ResumeError(
                f"the run in {directory.folder} is finished, and it learned from other rows; "
                "give this run another folder with --run"
            )

    def known_labels(self) -> tuple[Labels, Rows | None]:
        """Labels of the category outputs, and the training rows where anything needs them."""
        saved = read_manifest(self.run).get("labels") if self.run is not None else None
        labels = {name: tuple(values) for name, values in (saved or {}).items()}
        open_labels = any(
            output.type == "category" and output.labels is None and output.name not in labels
            for output in self.config.output_features
        )
        new = isinstance(self.config.base_model, ScratchModel) and self.result is None
        retrieval = self.config.prompt.retrieval
        training = None
        if new or (retrieval is not None and retrieval.dataset is None) or (open_labels and self.config.data.source):
            training = self.open_data().training
        return labels or find_labels(self.config, training), training

    def assemble(
        self, labels: Labels, training: Rows | None, *, trainable: bool, tokenizer_folder: Path | None = None
    ) -> Assembly:
        return assemble(
            self.config,
            folder=self.loaded.folder,
            labels=labels,
            training=training,
            saved=None if trainable else self.result,
            tokenizer_folder=tokenizer_folder,
            trainable=trainable,
        )

    @property
    def result(self) -> Path | None:
        """Folder of the trained weights; None where nothing was trained."""
        if self.run is None:
            return None
        found = self.run / "model" if (self.run / "model").is_dir() else self.run
        return found if (found / "tokenizer_config.json").exists() else None

    @property
    def sizing(self) -> Sizing:
        """What finds batch sizes for the model in memory."""
        if self._sizing is None:
            self._sizing = Sizing(self.ready(), cache=Cache.of_user())
        return self._sizing

    def note_memory(self, used: BatchSizes) -> None:
        """Keep in the run's manifest which sizes were too large after all, and what fitted."""
        after = self.sizing.after(used)
        if after != used and self.run is not None and os.access(self.run / MANIFESTS[0], os.W_OK):
            directory = RunDirectory(self.run, config=self.config)
            directory.note(batch_sizes={**directory.manifest.get("batch_sizes", {}), **after.records()})

    @property
    def sampling_seed(self) -> int:
        """Seed of sampling."""
        return self.config.seed if self.config.generation.seed is None else self.config.generation.seed

    def evaluation_rows(self) -> Rows:
        """The test rows of the file, else its validation rows. Raises DataError where there are none."""
        splits = self._splits
        if not splits and self.config.data.test is not None:
            splits = {"test": open_rows(self.config.data.test, folder=self.loaded.folder, name="test")}
        if not splits:
            splits = self.open_data().splits
        rows = splits.get("test", splits.get("validation"))
        if rows is None:
            raise DataError("the file has no test or validation rows; write data.test or give a dataset")
        return rows

    def fingerprint(self, assembly: Assembly | ServedAssembly, rows: Rows) -> dict[str, str]:
        """What decides an answer, by part."""
        settings = self.config.model_dump(mode="json", include={"prompt", "generation", "input_features", "defaults"})
        return {
            "model": self.model_fingerprint(assembly),
            "dataset": rows.fingerprint,
            **{name: digest(json.dumps(value)) for name, value in settings.items()},
            "output_features": digest(
                *(f"{output.name}:{output.type}" for output in self.config.output_features),
                *([assembly.generation.form] if assembly.generation.form else ()),
            ),
        }

    def model_fingerprint(self, assembly: Assembly | ServedAssembly) -> str:
        """The same for a model that was just trained and for one that was loaded from its run."""
        if self.result is None:
            return assembly.lm.fingerprint
        held = self.config.model_dump_json(include={"model_parameters", "quantization"})
        return digest(folder_digest(self.result), held)

    def journal(self, output: Path | None, fingerprint: Mapping[str, str]) -> Path:
        """Where answers are kept: by the output file, or without one by all that decides them."""
        folder = self.run if self.run is not None and os.access(self.run, os.W_OK) else RUNS / self.name
        place = digest(str(output.resolve()) if output is not None else json.dumps(fingerprint))[:12]
        return folder / "journal" / f"{output.stem if output is not None else 'rows'}-{place}.jsonl"

    def progress(self, total: int, description: str, *, completed: int = 0) -> AbstractContextManager[Any]:
        """A progress display."""
        return show_progress(total, description, completed=completed, quiet=self.quiet)

    def open_run(self, folder: Path) -> AbstractContextManager[RunDirectory]:
        """The run directory `folder`, new or continued."""
        return open_run(
            folder,
            config=self.config,
            text=self.loaded.text,
            resolved=resolved_yaml(self.loaded),
            origin=self.loaded.folder,
            quiet=self.quiet,
        )


def write_card(folder: Path, *, config: Config, labels: Labels, origin: Path | None) -> None:
    """Write down what a saved model is, and the folder that relative paths of its file start from."""
    card = {
        "format_version": FORMAT_VERSION,
        "status": "done",
        "config": config.model_dump(mode="json", exclude_unset=True),
        "folder": str(origin.resolve()) if origin is not None else ".",
        "labels": {name: list(values) for name, values in labels.items()},
    }
    write_atomically(folder / MANIFESTS[1], json.dumps(card, indent=2) + "\n")


def finished_result(folder: Path, manifest: Mapping[str, Any]) -> TrainResult:
    """The result of a run that was finished before."""
    return TrainResult(
        run=folder,
        metrics=manifest.get("metrics", {}),
        steps=manifest.get("steps", 0),
        stopped_early=manifest.get("stopped_early", False),
        batch_sizes=manifest.get("batch_sizes", {}),
    )
