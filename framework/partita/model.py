"""The facade: a file, and the verbs that work on it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from partita import bag_verbs
from partita.assembly import Assembly, FleetAssembly, ServedAssembly
from partita.bag_verbs import refuse_bag
from partita.data.ledger import Ledger
from partita.data.run_data import RunData
from partita.data.shaping.labels import find_labels
from partita.data.splits import check_columns
from partita.evaluation import Examination, mean_loss, prepare, score, tokens_made_once
from partita.identity import answer_fingerprint, journal_path, model_fingerprint
from partita.inference.engine import generate_requests
from partita.inference.halving import Capacity
from partita.inference.predict import predict_rows
from partita.inference.prompts import PromptSource
from partita.inference.streaming import stream_requests
from partita.inference.tables import check_output
from partita.lm.base import GenerationRequest
from partita.model_state import ModelState
from partita.on_ray import (
    evaluate_on_ray,
    fleet_capacity,
    is_on_ray,
    refuse_on_ray,
    simulate_on_ray,
    train_on_ray,
)
from partita.other_models import other_models
from partita.plain_prompts import plain_requests
from partita.rounds import Rounds, check_rounds, rounds_of
from partita.runs.directory import RunDirectory
from partita.runs.finding import ChosenRun, runs_beside
from partita.runs.manifest import MANIFESTS, manifest_path, read_manifest
from partita.saving import upload, write_card
from partita.served import SAVE, SIMULATE, TRAIN, TUNE, refuse_served, served_capacity, written_texts
from partita.simulation.opening import section_of
from partita.simulation.report import SimulationReport
from partita.simulation.run import simulate
from partita.simulation.seating import SeatModel
from partita.training import (
    check_same_rows,
    check_shared,
    check_validation_metric,
    find_sizes,
    finished_result,
    train_in,
)
from partita.tuning.run import answering_sizes, asked_prompts, most_learned
from partita.tuning.sizes import BatchSizes, Sizing
from partita_schema.errors import ConfigError, DataError, PartitaError
from partita_schema.rounds import TrainOn
from partita_schema.rows import row_schema
from partita_trainers.base import TrainResult
from partita_trainers.batch_size.cache import Cache
from partita_trainers.batch_size.trial import BatchSize
from partita_trainers.registry import build_trainer
from partita_trainers.team import in_turn, together

if TYPE_CHECKING:
    from partita.inference.predictions import Predictions

logger = logging.getLogger(__name__)


class Model(ModelState):
    """A language model as a file describes it."""

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        overrides: Sequence[str] = (),
        quiet: bool = False,
        trust_remote_code: bool = False,
    ) -> "Model":
        """Load the model of a finished run's directory, or of a folder that `save` wrote.

        Relative paths of the file start where they did.

        Args:
            folder: The run's directory, or the saved model.
            overrides: Other values for keys of its file, such as trainer.eval_batch_size=4.
            quiet: Whether to show no progress.
            trust_remote_code: Whether to run the code that the folder names: classes by module:Class, and code that
                comes with the base model. Whoever made the folder chose it.

        Raises:
            PartitaError: There is no finished run, or it cannot be read.
            ConfigError: The folder names code, and `trust_remote_code` is not given. Code that only some verbs need,
                such as a trainer's, is refused by those verbs.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if not manifest:
            raise PartitaError(
                f"{folder} is neither a run directory nor a saved model: it has no {' or '.join(MANIFESTS)}"
                f"{runs_beside(folder)}"
            )
        status = manifest.get("status")
        if status != "done":
            raise PartitaError(
                f"the run in {folder} is not finished (status {status}); train again with --run {folder}"
            )
        place = manifest_path(folder)
        if "config" not in manifest:
            raise PartitaError(f"{place} has no config, so it is not known what the model is asked; restore it")
        try:
            model = cls(manifest["config"], overrides=overrides, quiet=quiet)
        except ConfigError as error:
            problems = [replace(problem, file=problem.file or str(place)) for problem in error.problems]
            raise ConfigError(problems) from None
        model.loaded = replace(model.loaded, folder=Path(manifest.get("folder", ".")))
        model.run = folder
        model.allows_saved_code = trust_remote_code
        if not trust_remote_code:
            model.distrusted = place
            model.refuse_code("model")
        return model

    def train(self, dataset: Any = None, run: str | Path | None = None) -> TrainResult:
        """Train as the file says, or for `trainer: {type: none}` evaluate.

        `dataset` takes the place of data.source: a path or glob, a Hub name, a pandas frame, a `datasets` object, a
        list of dicts or a dict of lists. `run` is the run's directory; one that was begun is continued, one that is
        finished is not trained again. Default: runs/NAME, or the next free NAME-2.
        """
        self.refuse_code("training")
        refuse_served(self.config, what=TRAIN)
        if not is_on_ray(self.config):
            return self.train_here(dataset, run)
        check_validation_metric(self.config)
        build_trainer(self.config.trainer, folder=self.loaded.folder)
        chosen = ChosenRun(Path(run)) if run is not None else self.choose_run()
        folder = chosen.folder
        manifest = read_manifest(folder)
        if manifest.get("status") == "done" and manifest.get("config") == self.config.model_dump(mode="json"):
            return self.train_here(dataset, folder)
        self._assembly = self._served = self._sizing = None
        if chosen.not_continued:
            logger.info("%s", chosen.not_continued)
        result = train_on_ray(self, dataset, folder=folder)
        self.run, self._splits = folder, {} if dataset is None else self.open_data(dataset).splits
        return result

    def train_here(self, dataset: Any = None, run: str | Path | None = None) -> TrainResult:
        """`train` in this process and those that it was started with, whatever the backend."""
        self.refuse_code("training")
        check_validation_metric(self.config)
        check_rounds(self.config, dataset, folder=self.loaded.folder)
        trainer = build_trainer(self.config.trainer, folder=self.loaded.folder)
        team, rounds = self.team, rounds_of(self.config)
        if rounds is not None:
            other_models(self)  # where one is not there, that is told before anything is trained
        check_shared(trainer, self.config, team)
        chosen = ChosenRun(Path(run)) if run is not None else team.lead(self.choose_run, "the folder of the run")
        folder = chosen.folder
        with self.open_run(folder) as directory:
            if chosen.not_continued:
                logger.info("%s", chosen.not_continued)
            if directory.finished:
                logger.info("the run in %s is finished already", folder)
                if dataset is not None:
                    check_same_rows(directory, self.open_data(dataset))
                self.run, self._assembly, self._served, self._sizing = folder, None, None, None
                return finished_result(directory)
            with together(team, "opening the data"):
                data = self.open_data(dataset)
                labels = find_labels(self.config, data.training)
            trains = self.config.trainer.type != "none"
            if "rounds" not in directory.manifest and (rounds is None or data.training is not None):
                self._assembly, self._sizing, result = train_in(
                    directory,
                    data,
                    trainer=trainer,
                    team=team,
                    assemble=partial(self.assemble, labels, data.training, trains),
                )
                directory.note(steps=result.steps, stopped_early=result.stopped_early)
            if rounds is not None:
                # The model of each round is read anew, and memory may have no room for two.
                self._assembly = self._served = self._sizing = None
                result = self.train_rounds(rounds, directory, data)
            model = "model" if (folder / "model").is_dir() else None
            directory.note(status="done", steps=result.steps, stopped_early=result.stopped_early, model=model)
        team.gather(None, "the end of the run")  # no rank may look for it before it is there
        self.run, self._splits = folder, data.splits
        return replace(result, batch_sizes=directory.manifest.get("batch_sizes", {}))

    def train_rounds(self, plan: TrainOn, directory: RunDirectory, data: RunData) -> TrainResult:
        """The rounds of dialogues and training of a run that has been trained on data."""
        if "rounds" not in directory.manifest:
            before = {"steps": directory.manifest.get("steps", 0), "metrics": directory.manifest.get("metrics", {})}
            directory.note(rounds=[], before_rounds=before)
        return Rounds(
            config=self.config,
            plan=plan,
            origin=self.loaded.folder,
            directory=directory,
            team=self.team,
            seed=self.sampling_seed,
            data=data,
            open_run=self.open_run,
            others=self.others,
        ).train()

    def predict(
        self,
        dataset: Any,
        output: str | Path | None = None,
        *,
        batch_size: int | None = None,
        retry_errors: bool = False,
        fresh: bool = False,
        safe_csv: bool = False,
    ) -> "Predictions":
        """Answers for every row, in input order, written to `output` (.jsonl, .csv or .parquet) where one is given.

        Answers are kept as they are made: called again with the same arguments, only what is missing is generated.
        `fresh` starts over, `retry_errors` repeats rows that ended in an error. `safe_csv` puts an apostrophe before
        text of a .csv output that a spreadsheet would run as a formula. Raises DataError where `output` cannot be
        written, before anything is loaded or answered.
        """
        target = Path(output) if output is not None else None
        if safe_csv and target is None:
            raise DataError("safe_csv is for a .csv output, and none is written; leave it out, or name an output")
        if target is not None:
            self.team.lead(lambda: check_output(target, safe_csv=safe_csv), "the file of predictions")
        assembly = self.answering()
        with together(self.team, "opening the data"):
            rows = self.open_dataset(dataset)
            check_columns(rows, self.config, supervised=False)
        fingerprint = answer_fingerprint(assembly, rows, config=self.config, result=self.result)
        used: list[BatchSize] = []

        def capacity(prompts: PromptSource) -> Capacity:
            if isinstance(assembly, ServedAssembly):
                return served_capacity(assembly, batch_size)
            shared = len(prompts.prefix)
            if isinstance(assembly, FleetAssembly):
                return fleet_capacity(assembly, prompts.lengths, shared_tokens=shared, rows=batch_size)
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
                journal_path=journal_path(self.kept, output=target, fingerprint=fingerprint),
                output=target,
                safe_csv=safe_csv,
                fingerprint=fingerprint,
                bad=rows.bad,
                retry_errors=retry_errors,
                fresh=fresh,
                progress=self.progress,
                team=self.team,
            )
        finally:
            if used:
                self.note_memory(BatchSizes(generation=used[-1]))

    def evaluate(self, dataset: Any = None, *, batch_size: int | None = None) -> dict[str, dict[str, float]]:
        """Metrics by output feature on rows with known answers, and `loss` under the key `model`.

        Default of `dataset`: the test rows of the file, else its validation rows. Rows that cannot be scored are left
        out and counted as `skipped`. Raises DataError without rows that can be scored. A server tells no loss.
        """
        assembly = self.answering()
        ledger = Ledger(None, max_bad_rows=1.0)
        with tokens_made_once(self.team, assembly, folder=self.kept) as parts:
            with together(self.team, "reading the rows"):
                rows = self.evaluation_rows() if dataset is None else self.open_dataset(dataset)
                examination = prepare(parts, rows, split="test", ledger=ledger)
            ledger.warn_of_unknown_tokens()
            counts = ledger.split("test")
            if counts.left_out:
                logger.warning(
                    "%s of %s rows cannot be scored and are left out of the metrics:\n%s",
                    f"{counts.left_out:,}",
                    f"{counts.rows:,}",
                    ledger.main_reasons(),
                )
            metrics = self.examined(assembly, examination, batch_size=batch_size)
        skipped = {"skipped": float(counts.left_out)} if counts.left_out else {}
        outputs = {output.name for output in self.config.output_features}
        return {name: values | skipped if name in outputs else values for name, values in metrics.items()}

    def examined(
        self, assembly: Assembly | ServedAssembly | FleetAssembly, examination: Examination, *, batch_size: int | None
    ) -> dict[str, dict[str, float]]:
        """Metrics on rows that are prepared."""
        if isinstance(assembly, ServedAssembly):
            requests = served_capacity(assembly, batch_size).rows
            scores = score(assembly, examination.rows, batch_size=requests, progress=self.progress)
            return {name: dict(values) for name, values in scores.outputs.items()}
        if isinstance(assembly, FleetAssembly):
            return evaluate_on_ray(assembly, examination, rows=batch_size, progress=self.progress)
        sizing = self.sizing
        encoded = examination.encoded
        evaluation = sizing.evaluation(encoded.lengths, most_learned([encoded]), rows=batch_size)
        with sizing.work("evaluation", evaluation) as capacity:
            loss = mean_loss(assembly, encoded, batch_size=capacity.rows, limit=capacity.limit, team=self.team)
        lengths, shared = asked_prompts(assembly, [examination.rows], team=self.team)
        generation = sizing.generation(lengths, shared_tokens=shared, rows=batch_size)
        with sizing.work("generation", generation) as capacity:
            scores = score(
                assembly,
                examination.rows,
                batch_size=capacity.rows,
                limit=capacity.limit,
                progress=self.progress,
                team=self.team,
            )
        self.note_memory(BatchSizes(generation=generation, evaluation=evaluation))
        return {**{name: dict(values) for name, values in scores.outputs.items()}, "model": loss}

    def simulate(
        self, output: str | Path | None = None, *, batch_size: int | None = None, fresh: bool = False
    ) -> SimulationReport:
        """Dialogues of the file's `simulation`, with their transcripts in the folder `output`.

        Dialogues are kept as they end: called again, only those that are missing are had. `fresh` begins anew.
        """
        refuse_bag(self.config, what=bag_verbs.SIMULATE)
        section_of(self.config)
        self.refuse_code("simulation")
        refuse_served(self.config, what=SIMULATE)
        if not is_on_ray(self.config):
            return self.simulate_here(output, batch_size=batch_size, fresh=fresh)
        self.use_finished_run()
        folder = Path(output) if output is not None else self.kept / "transcripts"
        return simulate_on_ray(self, folder=folder, batch_size=batch_size, fresh=fresh)

    def simulate_here(
        self, output: str | Path | None = None, *, batch_size: int | None = None, fresh: bool = False
    ) -> SimulationReport:
        """`simulate` in this process and those that it was started with, whatever the backend."""
        self.refuse_code("simulation")
        assembly = self.ready()
        report, used = simulate(
            assembly,
            folder=Path(output) if output is not None else self.kept / "transcripts",
            sizing=self.sizing,
            seed=self.sampling_seed,
            model=model_fingerprint(assembly, config=self.config, result=self.result),
            others=self.others(),
            batch_size=batch_size,
            fresh=fresh,
            progress=self.progress,
            team=self.team,
        )
        self.note_memory(used)
        return report

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
        refuse_bag(self.config, what=bag_verbs.GENERATE)
        refuse_on_ray(self.config, verb="generate")
        assembly = self.answering()
        assert not isinstance(assembly, FleetAssembly), "refused before"
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
        refuse_bag(self.config, what=bag_verbs.TUNE)
        refuse_served(self.config, what=TUNE)
        refuse_on_ray(self.config, verb="tune")
        if self.config.trainer.type != "none" and self.run is None:
            return self.tune_training(dataset, fresh=fresh)
        assembly = self.ready()
        with together(self.team, "opening the data"):
            rows = self.evaluation_rows() if dataset is None else self.open_dataset(dataset)
        sizing = self._sizing = Sizing(assembly, cache=Cache.of_user(), fresh=fresh, team=self.team)
        sizes = answering_sizes(assembly, rows, sizing=sizing)
        sizing.fresh = False  # what comes after uses what was found
        return sizes

    def tune_training(self, dataset: Any, *, fresh: bool) -> BatchSizes:
        """The sizes that `train` would find; nothing is written but what earlier runs have found."""
        self.refuse_code("training")
        trainer = build_trainer(self.config.trainer, folder=self.loaded.folder)
        with together(self.team, "opening the data"):
            data = self.open_data(dataset)
            labels = find_labels(self.config, data.training)
        with in_turn(self.team, "loading the model"):
            assembly = self.assemble(labels, data.training, trainable=True)
        sizing = Sizing(assembly, cache=Cache.of_user(), fresh=fresh, team=self.team)
        return find_sizes(trainer, assembly, data, sizing=sizing)

    def save(self, folder: str | Path) -> Path:
        """Write the model in the standard layout of transformers or peft, with what `Model.load` needs beside it."""
        return self.write(Path(folder), origin=self.loaded.folder)

    def push_to_hub(self, name: str, *, private: bool = True) -> str:
        """Upload what `save` writes to a Hub repository, made where there is none; its address comes back."""
        refuse_served(self.config, what=SAVE)
        refuse_on_ray(self.config, verb="save")
        return upload(name, private=private, write=lambda folder: self.write(folder, origin=None))

    # What verbs of several models and processes share

    def others(self) -> dict[str, SeatModel]:
        """Other models that speak in a simulation, by seat."""
        return {name: model.speaking() for name, model in other_models(self).items() if model is not self}

    def speaking(self) -> SeatModel:
        """This model for a seat of a simulation."""
        assembly = self.ready()
        return SeatModel(assembly, self.sizing, model_fingerprint(assembly, config=self.config, result=self.result))

    def sent(self) -> "Model":
        """This model for another process: the file, with paths that start where they do here, and nothing in memory."""
        model = Model(self.config, quiet=self.quiet)
        model.loaded = replace(self.loaded, folder=self.loaded.folder.resolve())
        model.distrusted, model.allows_saved_code = self.distrusted, self.allows_saved_code
        return model

    def write(self, folder: Path, *, origin: Path | None) -> Path:
        """Write the model; relative paths of its file start in `origin`, or where it is read."""
        refuse_served(self.config, what=SAVE)
        refuse_on_ray(self.config, verb="save")
        assembly = self.ready()
        assembly.lm.save(folder)
        write_card(folder, config=self.config, labels=assembly.labels, origin=origin)
        return folder
