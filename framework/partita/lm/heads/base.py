"""Heads: layers on top of a model that predict a value in place of generated text.

A head knows how the module is built and loaded by transformers, its loss, and how its output becomes an answer. The
losses are those of transformers (`ForSequenceClassificationLoss`), one per loss token.

Shapes: B rows of a batch, N loss tokens (here one per row), K outputs of the head.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional

from partita.lm.base import Generated
from partita_schema.config import Config
from partita_schema.errors import ModelError, shortened
from partita_trainers.base import Batch
from partita_trainers.device_copies import to_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MAX_NAMES = 200
"""Maximum number of characters of labels in an error text."""
DIVERGED = "the scores are NaN because training diverged; train again with a lower trainer.learning_rate"


@dataclass(frozen=True)
class Head(ABC):
    """A head of a transformers model."""

    labels: tuple[str, ...] = ()
    """Labels by index of the head's outputs; empty if it has none, or if those of the checkpoint are used."""

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    """Class of transformers that builds and loads the model."""
    task_type: ClassVar[str] = "SEQ_CLS"
    """peft's name of the task."""
    problem_type: ClassVar[str | None]
    """transformers' name of the loss."""
    reads_pairs: ClassVar[bool] = False
    """Whether a row is two texts, the second of which begins at the loss token."""
    scores_answers: ClassVar[bool] = False
    """Whether a row is a prompt with answers, whose scores are compared."""
    is_bare: ClassVar[bool] = False
    """Whether there is no layer on top of the model, and its hidden states are read."""

    @property
    def size(self) -> int:
        """K, the number of outputs."""
        return len(self.labels)

    @property
    def target_size(self) -> int:
        """Number of targets of a loss token."""
        return 1

    def with_labels(self, labels: Sequence[str]) -> Self:
        """Return the head with other labels."""
        return replace(self, labels=tuple(labels))

    def loaded_with(self, described: "PretrainedConfig") -> Self:
        """Return the head with the labels of a loaded model, in its order."""
        return self.with_labels([str(described.id2label[index]) for index in sorted(described.id2label)])

    def describe(self, described: "PretrainedConfig") -> None:
        """Write the head into a transformers config."""
        names = self.labels or tuple(f"LABEL_{index}" for index in range(self.size))
        described.id2label = dict(enumerate(names))
        described.label2id = {name: index for index, name in enumerate(names)}
        if self.problem_type is not None:
            described.problem_type = self.problem_type

    def write_files(self, folder: Path, *, model: "PreTrainedModel", max_length: int | None) -> None:
        """Write what other libraries need in addition to the files of transformers. Often there is nothing to do.

        Args:
            folder: Folder of the saved model.
            model: The model.
            max_length: Context length in tokens.
        """
        return

    @abstractmethod
    def losses(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return the loss of each loss token, float32 [N].

        Args:
            output: Output of the module for the batch.
            batch: The batch. Without targets, as in probes of batch sizes, all targets are 0.
        """

    @abstractmethod
    def answers(self, output: Any, batch: Batch) -> list[Generated]:
        """Return the answer of each row, from the output of the module for the batch; raise ModelError for NaN."""

    def targets(self, batch: Batch, *, device: torch.device) -> torch.Tensor:
        """Return the targets of a batch, float32 [N, target_size]; 0 if it has none."""
        if batch.targets_NK is not None:
            return to_device(batch.targets_NK, device)
        return torch.zeros(batch.loss_tokens, self.target_size, device=device)


class ClassificationHead(Head):
    """One of K labels; the loss is the cross-entropy."""

    problem_type: ClassVar = "single_label_classification"

    def losses(self, output: Any, batch: Batch) -> torch.Tensor:
        logits_NK = output.logits.float()
        targets_N = self.targets(batch, device=logits_NK.device)[:, 0].long()
        return functional.cross_entropy(logits_NK, targets_N, reduction="none")

    def answers(self, output: Any, batch: Batch) -> list[Generated]:
        """Return the most probable label of each row, the first of a tie, with the log-probabilities of all."""
        return [self._answer(scores) for scores in output.logits.double().log_softmax(-1).tolist()]

    def _answer(self, scores: Sequence[float]) -> Generated:
        check_numbers(scores)
        return Generated.most_probable(self.labels, scores)


@dataclass(frozen=True)
class MultiLabelHead(Head):
    """Any number of K labels; the loss is the binary cross-entropy, averaged over the labels."""

    threshold: float = 0.5
    """Minimum probability of the labels in the set."""
    write: Callable[[Sequence[str]], str] = ", ".join
    """Writes a set of labels as an answer."""

    problem_type: ClassVar = "multi_label_classification"

    @property
    def target_size(self) -> int:
        return self.size

    def losses(self, output: Any, batch: Batch) -> torch.Tensor:
        logits_NK = output.logits.float()
        targets_NK = self.targets(batch, device=logits_NK.device)
        return functional.binary_cross_entropy_with_logits(logits_NK, targets_NK, reduction="none").mean(-1)

    def answers(self, output: Any, batch: Batch) -> list[Generated]:
        """Return the labels above the threshold, with the log-probability of each label."""
        return [self._answer(scores) for scores in functional.logsigmoid(output.logits.double()).tolist()]

    def _answer(self, scores: Sequence[float]) -> Generated:
        check_numbers(scores)
        by_label = dict(zip(self.labels, scores, strict=True))
        members = [label for label, score in by_label.items() if math.exp(score) >= self.threshold]
        return Generated((), self.write(members), "stop", scores=by_label)


@dataclass(frozen=True)
class RegressionHead(Head):
    """A number; the loss is the squared error."""

    minimum: float | None = None
    """Smaller predictions become this number."""
    maximum: float | None = None
    """Larger predictions become this number."""

    problem_type: ClassVar = "regression"

    @property
    def size(self) -> int:
        return 1

    def loaded_with(self, described: "PretrainedConfig") -> Self:
        return self

    def losses(self, output: Any, batch: Batch) -> torch.Tensor:
        values_N: torch.Tensor = output.logits.float()[:, 0]
        return (values_N - self.targets(batch, device=values_N.device)[:, 0]).square()

    def answers(self, output: Any, batch: Batch) -> list[Generated]:
        """Return the number of each row, within the limits, with the digits of float32: 0.1, and not 0.10000000149."""
        return [self._answer(float(str(value))) for value in output.logits.float()[:, 0].cpu().numpy()]

    def _answer(self, value: float) -> Generated:
        check_numbers([value])
        value = value if self.minimum is None else max(value, self.minimum)
        value = value if self.maximum is None else min(value, self.maximum)
        return Generated((), repr(value), "stop")


def fit_labels(head: Head, described: "PretrainedConfig", *, source: str, listed: bool, may_be_new: bool) -> Head:
    """Return the head with its labels in the order of a checkpoint that has a head for the same labels.

    Default names (LABEL_0, LABEL_1) are replaced by listed labels, in their order, and by labels of the data if these
    are class indices. Other labels of the data do not say which output is theirs.

    Args:
        head: The head, with the labels of the file or of the data.
        described: The checkpoint's transformers config.
        source: Folder or Hub id of the checkpoint.
        listed: Whether the file lists the labels.
        may_be_new: Whether a head with random weights may be added, which is then trained or loaded.

    Raises:
        ModelError: The checkpoint has no head, or one for other labels, and a new one is not allowed.
    """
    if head.is_bare:
        return head
    saved = saved_labels(head, described)
    if saved is None:
        if not may_be_new:
            trainer, kind = ("reward", "reward model") if head.scores_answers else ("finetune", "classifier")
            raise ModelError(
                f"base_model: {source} has no head, and a new one has random weights; write trainer: {{type: "
                f"{trainer}}}, or name a model that was trained as a {kind}"
            )
        return head
    labels = labels_of_outputs(head, saved, listed=listed)
    if labels is not None:
        return head.with_labels(labels)
    if not may_be_new:
        advice = "write those of the model"
        if has_default_names(saved):
            advice = "list them in decoder.labels, in the order of the model"
        raise ModelError(f"base_model: {other_labels(head, saved, source=source)}; {advice}, or train a new head")
    return head


def labels_of_outputs(head: Head, saved: tuple[str, ...], *, listed: bool) -> tuple[str, ...] | None:
    """Return the labels of the outputs of a checkpoint's head, none for a number; None if it is for other labels.

    Args:
        head: The head, with the labels of the file or of the data.
        saved: The labels of the checkpoint.
        listed: Whether the file lists the labels.
    """
    if isinstance(head, RegressionHead):
        return () if len(saved) == 1 else None
    wanted = set(head.labels)
    if not wanted or set(saved) == wanted:
        return saved
    if has_default_names(saved):
        if listed:
            return head.labels if len(saved) == len(head.labels) else None
        classes = tuple(map(str, range(len(saved))))
        return classes if wanted <= set(classes) else None
    return saved if not listed and set(saved) > wanted else None


def has_default_names(labels: Sequence[str]) -> bool:
    """Return whether labels are the names that transformers gives to outputs without labels."""
    return all(name == f"LABEL_{index}" for index, name in enumerate(labels))


def other_labels(head: Head, saved: Sequence[str], *, source: str) -> str:
    """Return the sentence that a checkpoint has a head for other labels.

    Args:
        head: The wanted head.
        saved: The labels of the checkpoint.
        source: Folder or Hub id of the checkpoint.
    """
    wanted = (
        f"the labels are {shortened(', '.join(head.labels), MAX_NAMES)}" if head.labels else "the output is a number"
    )
    return f"{source} has a head for {shortened(', '.join(saved), MAX_NAMES)}, and {wanted}"


def has_other_labels(head: Head, described: "PretrainedConfig", *, listed: bool) -> bool:
    """Return whether a checkpoint has a head for other labels than wanted; training then starts with a new one.

    Args:
        head: The head, as `fit_labels` returns it.
        described: The checkpoint's transformers config.
        listed: Whether the file lists the labels.
    """
    saved = None if head.is_bare else saved_labels(head, described)
    return saved is not None and labels_of_outputs(head, saved, listed=listed) is None


def lists_labels(config: Config) -> bool:
    """Return whether a file lists the labels of its head."""
    return config.head_output is not None and config.head_output.labels is not None


def saved_labels(head: Head, described: "PretrainedConfig") -> tuple[str, ...] | None:
    """Return the labels of a checkpoint with a head of this kind, by index; None if it has none."""
    suffix = head.auto_class.removeprefix("AutoModel")
    if not any(str(name).endswith(suffix) for name in described.architectures or ()):
        return None
    names = described.id2label or {}
    return tuple(str(names[index]) for index in sorted(names))


def is_of_head(name: str, *, prefix: str) -> bool:
    """Return whether a weight is of the head: outside of the base model, or of its pooler, which has no other use."""
    return not name.startswith(f"{prefix}.") or ".pooler." in name


def is_of_pooler(name: str) -> bool:
    """Return whether a weight is of the pooler of a model, whose output is not read without a head."""
    return name.startswith("pooler.")


def head_modules(model: Any) -> list[str]:
    """Return the names of the modules of a transformers model that are trained with its head; none without one."""
    if not hasattr(model, model.base_model_prefix):
        return []
    own = [name for name, _ in model.named_children() if name != model.base_model_prefix]
    base = getattr(model, model.base_model_prefix)
    own += ["pooler"] if getattr(base, "pooler", None) is not None else []
    with_weights = {name.split(".")[0] for name, _ in model.named_parameters()}
    return [name for name in own if name in with_weights or name == "pooler"]


def output_layers(model: Any, *, size: int) -> list[nn.Module]:
    """Return the linear layers of a model's head that have `size` outputs, such as `classifier` or its `out_proj`."""
    heads = [model.get_submodule(name) for name in head_modules(model) if name != "pooler"]
    layers = [layer for head in heads for layer in head.modules()]
    return [layer for layer in layers if isinstance(layer, nn.Linear) and layer.out_features == size]


def check_numbers(scores: Sequence[float]) -> None:
    """Raise ModelError if a score is NaN."""
    if any(score != score for score in scores):
        raise ModelError(DIVERGED)
