"""RunContext: the configuration, the run and the data that a backend works on."""

import logging
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.backends.launch import get_process_group
from partita.data.labels import find_labels
from partita.data.rows import Rows
from partita.data.run_data import RunData, open_run_data
from partita.data.sources.sources import errors_at, local_files, open_rows
from partita.data.sources.transcripts import WantedRows
from partita.lm.model_config.encoders import with_heads
from partita.pipeline.build import Labels
from partita.pipeline.row_recorder import RecordedEvaluation
from partita.runs.directory import RunDirectory
from partita.runs.directory_choice import ChosenRun, choose_folder, find_finished, unfinished_sibling
from partita.runs.earlier_results import step_of_weights
from partita.runs.finished import load_finished, refuse_code, trained_weights
from partita.runs.manifest import MANIFESTS, RUNS, manifest_path, read_manifest
from partita.runs.notebook import show_in_notebook
from partita.runs.opening import log_run, open_run_of_group
from partita.runs.progress import show_progress
from partita.runs.row_results import BASE
from partita_schema.config import Config
from partita_schema.dump import resolved_yaml
from partita_schema.errors import DataError, PartitaError
from partita_schema.load import LoadedConfig, load_config
from partita_schema.sections.model import ScratchModel
from partita_trainers.process_group import ProcessGroup

DRAWN = ("random", "stratify", "kfold")
"""Types of splits in which one more row can move other rows from training to test."""

logger = logging.getLogger(__name__)
file_logger = logging.getLogger("partita.file")
"""Logger for warnings about the configuration file."""


def name_of_dataset(dataset: Any, *, splits: Collection[str]) -> str:
    """Return the name of an evaluation of a dataset that the caller passed: that of its file, else `dataset`.

    `splits` are the names of the run's own splits, which name no other evaluation.
    """
    stem = Path(dataset).stem if isinstance(dataset, str | os.PathLike) else ""
    name = re.sub(r"[^\w.-]", "_", stem)[:100].strip(".-") or "dataset"
    taken = name in splits or name.endswith(BASE)
    return f"{name}-dataset" if taken else name


class RunContext:
    """The configuration, the run and the data that a backend works on; also sent to other processes."""

    def __init__(self, loaded: LoadedConfig, *, quiet: bool = False) -> None:
        """Log the warnings of the configuration."""
        self.loaded = loaded
        show_in_notebook(quiet=quiet)
        for warning in self.loaded.warnings:
            file_logger.warning("%s", warning)
        self.quiet = quiet
        self.run: Path | None = None
        """Directory of the run that was trained or loaded."""
        self.distrusted: Path | None = None
        """Manifest of the configuration, if it names code that the caller has not allowed."""
        self.allows_saved_code = self.config.trust_remote_code
        """Whether to run code named by other saved models that take part in a simulation."""
        self.splits: dict[str, Rows] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        overrides: Sequence[str] = (),
        quiet: bool = False,
        trust_remote_code: bool = False,
    ) -> "RunContext":
        """Read a run directory or a saved model; see `Model.load`."""
        folder = Path(folder)
        loaded = load_finished(folder, overrides=overrides, trust_remote_code=trust_remote_code)
        context = cls(loaded, quiet=quiet)
        context.run = folder
        context.allows_saved_code = trust_remote_code
        context.distrusted = None if trust_remote_code else manifest_path(folder)
        return context

    def for_other_process(self) -> "RunContext":
        """Return a copy for another process: the user's file with an absolute folder, without the model."""
        loaded = replace(self.loaded, folder=self.loaded.folder.resolve(), warnings=())  # they were logged here
        copy = RunContext(loaded, quiet=self.quiet)
        copy.distrusted, copy.allows_saved_code = self.distrusted, self.allows_saved_code
        return copy

    def write_heads(self) -> None:
        """Write the heads of an encoder's outputs into the configuration."""
        self.loaded = with_heads(self.loaded, saved=self.weights)

    @property
    def config(self) -> Config:
        """The validated configuration."""
        return self.loaded.config

    @property
    def name(self) -> str:
        """Stem of the file name; names the directory of its runs."""
        return Path(self.loaded.file).stem if self.loaded.file else "run"

    def refuse_code(self, of: str) -> None:
        """Raise ConfigError if a saved model names code that would run now and the caller has not allowed it.

        `of` names the step that would run the code, as for `code_of`.
        """
        if self.distrusted is not None:
            refuse_code(self.loaded, self.distrusted, of=of)

    def use_finished_run(self) -> None:
        """Use the newest finished run of this file if the file trains. Raise PartitaError if there are no weights."""
        if self.weights is not None or not self.config.trains:
            return
        if self.run is not None:
            raise PartitaError(
                f"{self.run} has no model/ with the trained weights; restore it from a copy, or write it again from "
                f"the newest checkpoint with partita train FILE --run {shlex.quote(str(self.run))}"
            )
        if self.config.cross_validates:
            raise PartitaError(
                f"cross-validation trains a model per fold; name the run of one, such as {RUNS / self.name / 'fold-1'}"
            )
        self.run, apart = find_finished(self.name, config=self.config, origin=self.loaded.folder, base=RUNS)
        if self.run is None:
            others = f" (the run in {RUNS / self.name} is of another file: {'; '.join(apart[:5])})" if apart else ""
            raise PartitaError(
                f"nothing has been trained with this file yet{others}: train first, name the directory of a finished "
                "run, or write trainer: {type: none} for zero-shot"
            )
        log_run(self.run, "finished")
        unfinished = self.unfinished_sibling(self.run)
        if unfinished is not None:
            logger.info("%s", unfinished)

    def open_data(self, dataset: Any = None) -> RunData:
        """Open the rows of a run; `dataset` replaces data.source."""
        self.refuse_code("data")
        return open_run_data(self.config, folder=self.loaded.folder, dataset=dataset)

    def known_labels(self) -> tuple[Labels, Rows | None]:
        """Return the labels of the outputs, and the training rows if anything needs them."""
        saved = read_manifest(self.run).get("labels") if self.run is not None else None
        labels = {name: tuple(values) for name, values in (saved or {}).items()}
        open_labels = any(
            output.has_labels and output.labels is None and output.name not in labels
            for output in self.config.output_features
        )
        new = isinstance(self.config.base_model, ScratchModel) and self.weights is None
        retrieval, data = self.config.prompt.retrieval, self.config.data
        training = None
        needed = new or (retrieval is not None and retrieval.dataset is None) or open_labels
        if needed and (data.source is not None or data.mix is not None):
            training = self.open_data().training
        return labels or find_labels(self.config, training), training

    @property
    def weights(self) -> Path | None:
        """Folder of the trained weights; None if nothing was trained."""
        return None if self.run is None else trained_weights(self.run)

    @property
    def output_folder(self) -> Path:
        """Folder for journals and transcripts: the run's, or that of a future run."""
        return self.run if self.run is not None and os.access(self.run, os.W_OK) else RUNS / self.name

    def open_dataset(self, dataset: Any) -> Rows:
        """Open the rows passed to a verb; relative paths start at the current folder. Raise DataError."""
        limit, wanted = self.config.data.max_row_bytes, WantedRows.by(self.config)
        return open_rows(dataset, folder=Path.cwd(), max_row_bytes=limit, wanted=wanted)

    def check_not_read(self, output: Path, dataset: Any) -> None:
        """Raise DataError if a file to write is one of the files of `dataset` or of the configuration."""
        if not output.exists():
            return
        data, retrieval, folder = self.config.data, self.config.prompt.retrieval, self.loaded.folder
        sources = [("the dataset", dataset, Path.cwd())]
        sources += [(f"data.{key}", getattr(data, key), folder) for key in ("source", "validation", "test")]
        sources += [(f"data.mix[{index}]", part.source, folder) for index, part in enumerate(data.mix or ())]
        sources += [("prompt.retrieval.dataset", retrieval.dataset, folder)] if retrieval is not None else []
        for name, source, base in sources:
            for path in local_files(source, folder=base):
                if output.samefile(path) or (path.is_dir() and path.resolve() in output.resolve().parents):
                    raise DataError(f"{output} is a file of {name}, which would be overwritten; name another output")

    def evaluation_rows(self) -> tuple[str, Rows]:
        """Return the test rows of the file, else its validation rows, with the name of the split.

        Raises DataError if there are none.
        """
        splits = self.splits
        if not splits:
            self.refuse_code("data")
        if not splits and self.config.data.test is not None:
            limit = self.config.data.max_row_bytes
            source, folder, wanted = self.config.data.test, self.loaded.folder, WantedRows.by(self.config)
            with errors_at("data.test"):
                test = open_rows(source, folder=folder, name="test", max_row_bytes=limit, wanted=wanted)
            splits = {"test": test}
        if not splits:
            splits = self.open_data().splits
        split = next((name for name in ("test", "validation") if name in splits), None)
        if split is None:
            raise DataError("the file has no test or validation rows; write data.test or pass a dataset")
        return split, splits[split]

    def rows_to_compare(self, dataset: Any) -> tuple[str, Rows]:
        """Return rows to compare an export on, with their name: a dataset, else the test or validation rows.

        Raises PartitaError if there are none.
        """
        if dataset is not None:
            return name_of_dataset(dataset, splits=()), self.open_dataset(dataset)
        split, rows = self.evaluation_rows()
        return f"the {split} split", rows

    def recorded_evaluation(self, split: str | None, dataset: Any, rows: Rows) -> RecordedEvaluation | None:
        """Return where the results of the rows of an evaluation are recorded.

        Returns None without a run that can be written, if the base model or the number format of the weights is not
        that of training, and if the rows of the split are drawn from other data than those of training were.

        Args:
            split: Name of the split of the file; None if the caller passed a dataset.
            dataset: The dataset, whose file names the evaluation.
            rows: The rows.
        """
        if self.run is None or not os.access(self.run / MANIFESTS[0], os.W_OK) or not os.access(self.run, os.W_OK):
            return None
        manifest = read_manifest(self.run)
        trained = load_config(manifest["config"], finished=True).config
        if split is not None and self.is_drawn_from_other_rows(split, rows, manifest):
            logger.warning(
                "the data has changed since the model was trained, and the %s rows are drawn from it again: training "
                "rows may be among them. The results are not recorded in the run; to evaluate rows that the model has "
                "not seen, name their file with --dataset",
                split,
            )
            return None
        changed = None
        if trained.base_model != self.config.base_model:
            changed = "base model"
        elif number_formats_of(trained) != number_formats_of(self.config):
            changed = "number format"
        if changed is not None:
            logger.info("the results of rows are not recorded in the run: the %s is not that of training", changed)
            return None
        if split is None:
            split = name_of_dataset(dataset, splits=manifest.get("data", {}))
        return RecordedEvaluation(self.run, split, step=step_of_weights(manifest))

    def is_drawn_from_other_rows(self, split: str, rows: Rows, manifest: Mapping[str, Any]) -> bool:
        """Return whether the rows of a split are a random choice from other data than in training.

        Args:
            split: Name of the split.
            rows: Its rows now.
            manifest: The manifest of the run.
        """
        is_drawn = getattr(self.config.data, split) is None and self.config.split.type in DRAWN
        recorded = manifest.get("data", {}).get(split, {}).get("fingerprint")
        return is_drawn and recorded not in (None, rows.fingerprint)

    def progress(self, total: int, description: str, *, completed: int = 0) -> AbstractContextManager[Any]:
        """Return a progress display; only rank 0 shows it."""
        quiet = self.quiet or self.process_group.rank > 0
        return show_progress(total, description, completed=completed, quiet=quiet)

    def check_single_process(self) -> None:
        """Raise PartitaError if this process was started as one of several, which the backend does not allow."""
        if self.process_group.world_size > 1:
            raise PartitaError(
                f"backend: {{type: {self.config.backend.type}}} needs one process, and here are "
                f"{self.process_group.world_size}; start the command by itself"
            )

    @property
    def process_group(self) -> ProcessGroup:
        """The process group; a single process unless it was launched as one of several."""
        return get_process_group(self.config)

    def choose_run(self, named: Path | None) -> ChosenRun:
        """Return the run directory to use: the one that the caller names, else an unfinished or a new one."""
        chosen = (
            ChosenRun(named)
            if named is not None
            else choose_folder(self.name, config=self.config, origin=self.loaded.folder, base=RUNS)
        )
        unfinished = self.unfinished_sibling(chosen.folder, with_changes=named is None)
        return ChosenRun(chosen.folder, unfinished or chosen.not_continued)

    def unfinished_sibling(self, used: Path, *, with_changes: bool = False) -> str | None:
        """Return which unfinished run of this file is not used, and the command that continues it."""
        return unfinished_sibling(
            self.name,
            config=self.config,
            origin=self.loaded.folder,
            base=RUNS,
            file=self.loaded.file,
            used=used,
            with_changes=with_changes,
        )

    def open_run(self, folder: Path, config: Config | None = None) -> AbstractContextManager[RunDirectory]:
        """Open the run directory `folder`, new or continued, for this configuration or for `config`."""
        loaded = self.loaded if config is None else load_config(config)
        return open_run_of_group(
            self.process_group,
            folder,
            config=loaded.config,
            text=loaded.text,
            resolved=resolved_yaml(loaded),
            origin=self.loaded.folder,
            quiet=self.quiet,
        )


def number_formats_of(config: Config) -> tuple[Any, Any]:
    """Return the keys that choose the number format of the weights."""
    return config.model_parameters.dtype, config.quantization
