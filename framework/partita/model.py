"""The public class: a configuration and the verbs that work on it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from partita.backends.arguments import count_of, path_of, texts_of
from partita.backends.base import Backend, PredictOptions
from partita.backends.context import RunContext
from partita.backends.folds import train_folds
from partita.backends.one_thread import ThreadLock, in_one_thread
from partita.backends.open import open_backend
from partita.backends.row_server.predict import predict_on_server
from partita.export.hub import push
from partita.export.options import MIN_AGREEMENT, Dtype, ExportFormat, ExportOptions, GgufType
from partita.export.report import ExportReport
from partita.pipeline.batch_sizes import BatchSizes
from partita.report.run_page import try_to_write_report
from partita.report.run_record import holds_results
from partita.report.simulated import page_folder
from partita.runs.manifest import MANIFESTS
from partita.runs.opening import log_run
from partita.serving.engine import ServingEngine
from partita.serving.limits import MAX_WAITING, ServerLimits
from partita.serving.server import ServeOptions, serve
from partita.simulation.report import SimulationReport
from partita_schema.config import Config, summary
from partita_schema.errors import ConfigError, DataError, Problem
from partita_schema.layers import ConfigSource
from partita_schema.load import load_config
from partita_trainers.base import TrainResult
from partita_trainers.callback_setup import check_callbacks

if TYPE_CHECKING:
    from partita.generation.predictions import Predictions


class Model:
    """A language model described by a configuration.

    One thread at a time uses it; calls from other threads wait. Several objects can work at the same time. Code that a
    verb calls, such as a callback or a world, uses the same Model only in the thread in which it is called.
    """

    def __init__(
        self,
        config: ConfigSource,
        *,
        overrides: Sequence[str] = (),
        quiet: bool = False,
    ) -> None:
        """Check the configuration. The model is loaded when a verb first needs it.

        Args:
            config: A path, YAML text, a dictionary or a Config; or a list of these, each merged over those before it.
            overrides: Values for keys of the file, such as `trainer.epochs=1`.
            quiet: Show no progress.

        Raises:
            ConfigError: The configuration is invalid; all errors are reported at once.
        """
        context = RunContext(load_config(config, overrides=overrides), quiet=quiet)
        self._backend: Backend = open_backend(context)
        self._lock = ThreadLock()

    def __repr__(self) -> str:
        run = f", run {self.run}" if self.run is not None else ""
        return f"<Model {self.name}: {summary(self.config)}{run}>"

    @property
    def config(self) -> Config:
        """The validated configuration."""
        return self._backend.context.config

    @property
    def name(self) -> str:
        """Stem of the file name; names the directory of its runs."""
        return self._backend.context.name

    @property
    def _served_name(self) -> str:
        """Name for clients: the stem of the file name; without a file, the name of the folder that was loaded."""
        if self.run is None or self._backend.context.loaded.file:
            return self.name
        return self.run.resolve().name

    @property
    def run(self) -> Path | None:
        """Directory of the run that was trained or loaded."""
        return self._backend.context.run

    def _prepare_backend(self) -> Backend:
        """Write the heads of an encoder's outputs into the configuration, and return the backend.

        Raises ConfigError if the file describes a sweep.
        """
        if self.config.sweep is not None:
            message = (
                "describes several runs, and this is a verb for one; run partita sweep FILE, name the run directory of "
                "a trial instead of the file, or ignore the section with --set sweep=null"
            )
            raise ConfigError([Problem("sweep", message, file=self._backend.context.loaded.file)])
        self._backend.context.write_heads()
        return self._backend

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        overrides: Sequence[str] = (),
        quiet: bool = False,
        trust_remote_code: bool = False,
    ) -> "Model":
        """Load the model of a finished run, or of a folder written by `save`.

        Relative paths in its configuration are resolved as they were when it was trained.

        Args:
            folder: The run's directory, or the saved model.
            overrides: Values for keys of its configuration, such as `trainer.eval_batch_size=4`.
            quiet: Show no progress.
            trust_remote_code: Run the code that the folder names: classes given as `module:Class`, and code shipped
                with the base model. The author of the folder chose this code.

        Raises:
            PartitaError: The folder has no finished run, or it cannot be read.
            ConfigError: The folder names code and `trust_remote_code` is false. Code that only some verbs need, such as
                a trainer's, is refused by those verbs.
        """
        model = cls.__new__(cls)
        folder = path_of("folder", folder)
        context = RunContext.load(folder, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
        model._backend = open_backend(context)  # noqa: SLF001
        model._lock = ThreadLock()  # noqa: SLF001
        if (folder / MANIFESTS[0]).exists():
            log_run(folder, "finished")
        return model

    @in_one_thread
    def train(
        self, dataset: Any = None, run: str | Path | None = None, *, callbacks: Sequence[object] = ()
    ) -> TrainResult:
        """Train as configured; with `trainer: {type: none}`, evaluate; with `data.split: {type: kfold}`, each fold.

        Args:
            dataset: Replaces data.source, or all of data.mix with a warning: a path or glob, a Hub name, a pandas
                frame, a dataset of `datasets` or torch, a DatasetDict, a generator function, a list of dicts or a dict
                of lists.
            run: The run's directory. An unfinished run is resumed, a finished one is not trained again.
                Default: runs/NAME, or the next free NAME-2.
            callbacks: Objects with methods of `partita_trainers.Callback`, called on rank 0 after those of the file.
        """
        folder = None if run is None else path_of("run", run)
        callbacks = check_callbacks(callbacks)
        backend = self._prepare_backend()
        if self.config.cross_validates:
            return train_folds(backend.context, dataset, folder, callbacks=callbacks, report=self._write_report)
        result = backend.train(dataset, folder, callbacks=callbacks)
        self._write_report(result.run)
        return result

    @in_one_thread
    def predict(
        self,
        dataset: Any,
        output: str | Path | None = None,
        *,
        batch_size: int | None = None,
        retry_errors: bool = False,
        fresh: bool = False,
        safe_csv: bool = False,
        server: str | None = None,
    ) -> "Predictions":
        """Predict every row, in input order. Call it again with the same arguments to resume.

        Args:
            dataset: The rows: a path or glob, a Hub name, a pandas frame, a pyarrow table, a dataset of `datasets` or
                torch, a generator function, a list of dicts or a dict of lists.
            output: A .jsonl, .csv or .parquet file to write. Default: none.
            batch_size: Rows generated at a time. Default: found by measuring.
            retry_errors: Generate rows again that ended in an error.
            fresh: Discard earlier answers and start over.
            safe_csv: In a .csv output, prefix text that a spreadsheet would run as a formula with an apostrophe.
            server: Address of `partita serve` with this file or run, such as http://127.0.0.1:8000. Rows are answered
                there, with the same result, and no model is loaded here. PARTITA_TOKEN holds its token. `batch_size` is
                the number of rows in a request. Default: 64.

        Raises:
            ServerError: The server cannot be reached, or fails; what it has answered is saved.
            ModelError: The server needs a token.
            DataError: The server has other values of the file; or `output` cannot be written, or is one of the files to
                read, which is checked before anything is loaded or generated.
        """
        options = PredictOptions(
            output=None if output is None else path_of("output", output),
            batch_size=count_of("batch_size", batch_size),
            retry_errors=retry_errors,
            fresh=fresh,
            safe_csv=safe_csv,
        )
        backend = self._prepare_backend()
        if server is not None:
            return predict_on_server(backend.context, dataset, options, url=server)
        return backend.predict(dataset, options)

    @in_one_thread
    def evaluate(self, dataset: Any = None, *, batch_size: int | None = None) -> dict[str, dict[str, Any]]:
        """Compute metrics by output feature on labeled rows, and `loss` under the key `model`.

        Outputs of labels also have `per_label`, the metrics of each label; categories `confusion`, a list of the
        labels that were answered for each correct one, with numbers of rows.

        Rows that cannot be scored are counted as `skipped`. A server returns no loss.

        Args:
            dataset: Labeled rows. Default: the test rows of the file, else its validation rows.
            batch_size: Rows generated at a time. Default: found by measuring.

        Raises:
            DataError: No row can be scored.
        """
        metrics = self._prepare_backend().evaluate(dataset, batch_size=count_of("batch_size", batch_size))
        self._write_report(self._backend.context.output_folder)
        return metrics

    @in_one_thread
    def simulate(
        self, output: str | Path | None = None, *, batch_size: int | None = None, fresh: bool = False
    ) -> SimulationReport:
        """Roll out the episodes of the `simulation` section, and write their transcripts.

        Episodes are saved as they finish; call it again to run only the missing ones.

        Args:
            output: Folder of the transcripts. Default: `transcripts` in the directory of the run.
            batch_size: Episodes at a time. Default: found by measuring.
            fresh: Whether to start over instead of resuming.

        Raises:
            ConfigError: There is no `simulation` section, or one of its programs cannot be created.
            ResumeError: The folder has transcripts of another simulation, and `fresh` is false.
        """
        folder = None if output is None else path_of("output", output)
        report = self._prepare_backend().simulate(folder, batch_size=count_of("batch_size", batch_size), fresh=fresh)
        self._write_report(page_folder(Path(report.folder)))
        return report

    def _write_report(self, folder: Path) -> None:
        """Write the report of a folder, on the process that writes; a failure is logged."""
        if self._backend.context.process_group.rank == 0 and holds_results(folder):
            try_to_write_report(folder)

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
        """Generate text after each prompt, without a prompt template or chat template.

        Args:
            prompts: One prompt, or several.
            max_new_tokens: Limit of generated tokens per prompt.
            batch_size: Prompts generated at a time. Default: found by measuring.
            stream: Return an iterator of text pieces as they are generated; for several prompts, of pairs of a prompt's
                index and a piece.
        """
        if not isinstance(prompts, str):
            prompts = texts_of(prompts)
        with self._lock:
            answers: Any = self._prepare_backend().generate(
                prompts,
                max_new_tokens=count_of("max_new_tokens", max_new_tokens),
                batch_size=count_of("batch_size", batch_size),
                stream=stream,
            )
        return self._lock.iterate(answers) if stream else answers

    @in_one_thread
    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        name: str | None = None,
        ui: bool = False,
        token: bool = False,
        context: int | None = None,
        batch_size: int | None = None,
        max_waiting: int = MAX_WAITING,
        max_body: int = ServerLimits.body_bytes,
        max_seconds: float = ServerLimits.answer_seconds,
        finish_seconds: float = ServerLimits.finish_seconds,
        say: Callable[[str], None] = print,
    ) -> None:
        """Serve the model over HTTP until SIGTERM or Ctrl-C: the OpenAI API, and `/predict` for rows.

        Args:
            host: Address to listen on. Other than 127.0.0.1, clients need a token.
            port: Port; 0 for a free one.
            name: Name of the model for clients. Default: that of the file, or of the folder of the run.
            ui: Serve a page to chat in a browser, at `/`.
            token: Demand a token on 127.0.0.1 too: that of the variable PARTITA_TOKEN, or a new one.
            context: Maximum number of tokens of a prompt and its answer. Default: the model's, at most 8,192.
            batch_size: Requests answered at a time. Default: found by measuring.
            max_waiting: Maximum number of requests that wait for others.
            max_body: Maximum size of a request in bytes.
            max_seconds: Maximum time of an answer in seconds, with the time that it waits.
            finish_seconds: Time for accepted requests after SIGTERM, in seconds.
            say: Receives the line with the address, and that with a new token.

        Raises:
            DataError: The address cannot be listened on.
            PartitaError: The engine failed, or packages of the extra `serve` are missing.
        """
        limits = ServerLimits(body_bytes=max_body, answer_seconds=max_seconds, finish_seconds=finish_seconds)
        options = ServeOptions(
            host=host, port=port, name=name or self._served_name, ui=ui, needs_token=token, limits=limits
        )
        engine = partial(open_engine, self, context=context, batch_size=batch_size, max_waiting=max_waiting)
        serve(engine, options, say=say)

    @in_one_thread
    def tune(self, dataset: Any = None, *, fresh: bool = False) -> BatchSizes:
        """Measure the batch sizes that fit this machine, and choose the best.

        For a file that trains, the sizes of training and of its evaluations. For a finished run, or with
        `trainer: {type: none}`, the sizes of generation, and of evaluation if `dataset` has answers.

        Args:
            dataset: Replaces data.source, or the rows to evaluate on.
            fresh: Whether to ignore the sizes that earlier runs found.
        """
        return self._prepare_backend().tune(dataset, fresh=fresh)

    @in_one_thread
    def save(self, folder: str | Path) -> Path:
        """Write the model in the standard layout of transformers or peft, with the metadata for `Model.load`.

        Args:
            folder: Folder to write.

        Raises:
            DataError: The folder is the directory of a run.
        """
        folder = path_of("folder", folder)
        if (folder / MANIFESTS[0]).exists():
            raise DataError(f"{folder} is the directory of a run; name another folder to save the model in")
        self._prepare_backend().save(folder, origin=self._backend.context.loaded.folder)
        return folder

    @in_one_thread
    def export(
        self,
        to: ExportFormat,
        output: str | Path,
        *,
        dtype: Dtype = "auto",
        gguf_type: GgufType | None = None,
        dataset: Any = None,
        min_agreement: float = MIN_AGREEMENT,
        llama_cpp: str | Path | None = None,
    ) -> ExportReport:
        """Write the model in the format of other programs, and compare the answers of both.

        32 prompts are answered greedily by the model and by what was exported, and the text of the chat template is
        compared byte for byte. The report is also written to export.json in the folder.

        Args:
            to: `merged`: a plain transformers model. `gguf`: a file for llama.cpp. `ollama`: the same with a Modelfile.
                `onnx`: a file for onnxruntime.
            output: Folder to write; new or empty.
            dtype: Type of the weights of `merged`. Default: the type that the model computes in.
            gguf_type: Type of the weights of `gguf` and `ollama`. Default: f16.
            dataset: Rows whose prompts are answered. Default: test or validation rows of the file, else prompts made
                from the tokenizer.
            min_agreement: Share of equal tokens, from 0 to 1; for a head, of equal rows.
            llama_cpp: A checkout of llama.cpp, for `gguf` and `ollama`. Default: the environment variable
                PARTITA_LLAMA_CPP.

        Raises:
            ExportError: The export agrees less than `min_agreement`, renders another chat template, or could not be
                converted.
            PartitaError: The model cannot be exported in this format, or an option is invalid.
        """
        options = ExportOptions(
            to=to,
            output=path_of("output", output),
            dtype=dtype,
            gguf_type=gguf_type,
            dataset=dataset,
            min_agreement=min_agreement,
            llama_cpp=None if llama_cpp is None else path_of("llama_cpp", llama_cpp),
        )
        report = self._prepare_backend().export(options)
        report.raise_if_failed()
        return report

    @in_one_thread
    def push_to_hub(self, name: str, *, private: bool = True, dry_run: str | Path | None = None) -> str:
        """Upload what `save` writes, with a model card, to a Hub repository, created if missing, and return its URL.

        The model card has the metrics with their intervals, the numbers of rows, the configuration as it was written,
        and how to load the model. It has no absolute path of this machine.

        Args:
            name: Name of the repository, such as `somebody/tickets`.
            private: Whether a new repository is private.
            dry_run: Folder to write what would be uploaded; nothing is uploaded, and its path is returned.
        """
        self._backend.refusals.check("save")
        backend = self._prepare_backend()
        context = backend.context
        return push(
            name,
            private=private,
            dry_run=None if dry_run is None else path_of("dry_run", dry_run),
            save=lambda folder: backend.save(folder, origin=None),
            loaded=context.loaded,
            run=context.run,
        )


def open_engine(
    model: Model, *, context: int | None = None, batch_size: int | None = None, max_waiting: int = MAX_WAITING
) -> ServingEngine:
    """Return an engine that answers requests of a model as they arrive; it starts as a context manager.

    Args:
        model: The model.
        context: Maximum number of tokens of a prompt and its answer. Default: the model's, at most 8,192.
        batch_size: Requests answered at a time. Default: found by measuring.
        max_waiting: Maximum number of requests that wait for others.
    """
    return model._prepare_backend().open_engine(  # noqa: SLF001
        max_tokens=count_of("context", context),
        batch_size=count_of("batch_size", batch_size),
        max_waiting=count_of("max_waiting", max_waiting) or MAX_WAITING,
    )
