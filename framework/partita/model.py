"""The public class: a configuration, and the verbs that work on it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from partita.runtime import ModelRuntime
from partita.simulation.report import SimulationReport
from partita.tuning.sizes import BatchSizes
from partita.verbs.evaluate import evaluate
from partita.verbs.generate import generate
from partita.verbs.predict import predict
from partita.verbs.save import push_to_hub, save
from partita.verbs.simulate import simulate
from partita.verbs.train import train
from partita.verbs.tune import tune
from partita_schema.config import Config
from partita_schema.load import load_config
from partita_schema.summary import summary
from partita_trainers.base import TrainResult

if TYPE_CHECKING:
    from partita.inference.predictions import Predictions


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
        self._runtime = ModelRuntime(load_config(config, overrides=overrides), quiet=quiet)

    def __repr__(self) -> str:
        run = f", run {self.run}" if self.run is not None else ""
        return f"<Model {self.name}: {summary(self.config)}{run}>"

    @property
    def config(self) -> Config:
        """The checked configuration."""
        return self._runtime.config

    @property
    def name(self) -> str:
        """Name of the file, for the directory of its runs."""
        return self._runtime.name

    @property
    def run(self) -> Path | None:
        """Directory of the run that was trained or loaded."""
        return self._runtime.run

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
        model = cls.__new__(cls)
        model._runtime = ModelRuntime.load(
            folder, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code
        )
        return model

    def train(self, dataset: Any = None, run: str | Path | None = None) -> TrainResult:
        """Train as the file says, or for `trainer: {type: none}` evaluate.

        `dataset` takes the place of data.source: a path or glob, a Hub name, a pandas frame, a `datasets` object, a
        list of dicts or a dict of lists. `run` is the run's directory; one that was begun is continued, one that is
        finished is not trained again. Default: runs/NAME, or the next free NAME-2.
        """
        return train(self._runtime, dataset, run)

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
        return predict(
            self._runtime,
            dataset,
            output,
            batch_size=batch_size,
            retry_errors=retry_errors,
            fresh=fresh,
            safe_csv=safe_csv,
        )

    def evaluate(self, dataset: Any = None, *, batch_size: int | None = None) -> dict[str, dict[str, float]]:
        """Metrics by output feature on rows with known answers, and `loss` under the key `model`.

        Default of `dataset`: the test rows of the file, else its validation rows. Rows that cannot be scored are left
        out and counted as `skipped`. Raises DataError without rows that can be scored. A server tells no loss.
        """
        return evaluate(self._runtime, dataset, batch_size=batch_size)

    def simulate(
        self, output: str | Path | None = None, *, batch_size: int | None = None, fresh: bool = False
    ) -> SimulationReport:
        """Dialogues of the file's `simulation`, with their transcripts in the folder `output`.

        Dialogues are kept as they end: called again, only those that are missing are had. `fresh` begins anew.
        """
        return simulate(self._runtime, output, batch_size=batch_size, fresh=fresh)

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
        return generate(self._runtime, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, stream=stream)

    def tune(self, dataset: Any = None, *, fresh: bool = False) -> BatchSizes:
        """The batch sizes that this machine allows and what is best of them, measured now.

        Of a file that trains: those of training and of the evaluations beside it. Of a finished run, or with
        `trainer: {type: none}`: those of generation, and of evaluation where `dataset` has answers. `dataset` takes the
        place of data.source, or of the rows that would be evaluated. `fresh` forgets what earlier runs have found.
        """
        return tune(self._runtime, dataset, fresh=fresh)

    def save(self, folder: str | Path) -> Path:
        """Write the model in the standard layout of transformers or peft, with what `Model.load` needs beside it."""
        return save(self._runtime, folder)

    def push_to_hub(self, name: str, *, private: bool = True) -> str:
        """Upload what `save` writes to a Hub repository, made where there is none; its address comes back."""
        return push_to_hub(self._runtime, name, private=private)
