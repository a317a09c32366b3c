"""The head of token classification: one of K tags for the first token of each word."""

import json
from typing import Any, ClassVar

import torch
from torch.nn import functional

from partita.lm.base import Generated
from partita.lm.heads.base import Head, check_numbers
from partita_trainers.base import Batch


class TagHead(Head):
    """One of K tags for each loss token; the loss is the cross-entropy."""

    auto_class: ClassVar = "AutoModelForTokenClassification"
    task_type: ClassVar = "TOKEN_CLS"
    problem_type: ClassVar = None

    def losses(self, output: Any, batch: Batch) -> torch.Tensor:
        logits_NK = self.logits(output, batch)
        targets_N = self.targets(batch, device=logits_NK.device)[:, 0].long()
        return functional.cross_entropy(logits_NK, targets_N, reduction="none")

    def answers(self, output: Any, batch: Batch) -> list[Generated]:
        """Return the most probable tag of each loss token of a row, the first of a tie, as a JSON array."""
        logits_NK = self.logits(output, batch)
        check_numbers(logits_NK.amax(-1).tolist())
        tags: list[list[str]] = [[] for _ in range(batch.rows)]
        for row, index in zip(batch.loss_token_rows.tolist(), logits_NK.argmax(-1).tolist(), strict=True):
            tags[row].append(self.labels[index])
        return [Generated((), json.dumps(of_row, ensure_ascii=False), "stop") for of_row in tags]

    def logits(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return the logits of the loss tokens, float32 [N, K]."""
        logits_NK: torch.Tensor = output.logits[(batch.labels_BT != -100).to(output.logits.device)]
        return logits_NK.float()
