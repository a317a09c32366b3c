"""Choice of the next token on the device, without reading anything of it.

The formulas are those of `partita.lm.decoding.sampler` and of transformers' processors. Penalties look tokens up in a
matrix of those that each row has, so that they are computed for all rows at once.

Shapes: N rows, V vocabulary.
"""

from collections.abc import Sequence

import torch

from partita.lm.base import GenerationOptions, GenerationRequest
from partita.lm.decoding.sampler import HISTORY, greedy, inverse_transform, is_given
from partita.lm.paged.row_state import RowState
from partita.lm.slots.row_settings import RowSettings

SUPPORTED = ("repetition_penalty", "min_length", "suppress_tokens", "begin_suppress_tokens")
"""Options that depend on the tokens of a row and are computed here."""
READS = ("top_h", "eta_cutoff")
"""Options that read scores back to the host."""


def why_not_on_device(options: GenerationOptions) -> str | None:
    """Return why tokens cannot be chosen on the device; None if they can."""
    if options.is_constrained:
        return "decoder.constrain chooses tokens on the host"
    if options.scores_labels:
        return "decoder.scoring compares labels on the host"
    if options.logprobs:
        return "generation.logprobs is computed on the host"
    names = [name for name in HISTORY if name not in SUPPORTED] + (list(READS) if options.do_sample else [])
    used = [name for name in names if is_given(name, options.arguments.get(name))]
    return f"generation.{used[0].removesuffix('_ids')} is computed on the host" if used else None


class DeviceChoice:
    """Chooses the next token of rows."""

    def __init__(self, settings: RowSettings, *, vocabulary: int, device: torch.device) -> None:
        """Prepare constants on the device.

        Args:
            settings: How tokens are chosen; `why_not_on_device` returned None for their options.
            vocabulary: V, the number of scores.
            device: Device of the scores.
        """
        arguments, ends = settings.options.arguments, settings.ends
        self.do_sample, self.warpers = settings.options.do_sample, settings.sampler.warpers
        penalty = arguments.get("repetition_penalty")
        self.penalty: float | None = penalty if penalty not in (None, 1, 1.0) else None
        self.least = int(arguments.get("min_new_tokens") or 0) if ends else 0
        self.least_length = int(arguments.get("min_length") or 0) if ends else 0
        self.ends_V = marked(ends, vocabulary=vocabulary, device=device)
        self.never_V, self.not_first_V = (
            marked(arguments[name], vocabulary=vocabulary, device=device) if arguments.get(name) else None
            for name in ("suppress_tokens", "begin_suppress_tokens")
        )

    def least_of(self, request: GenerationRequest) -> int:
        """Return the number of new tokens before which a row cannot end."""
        length, most = len(request.input_ids), request.max_new_tokens
        return max(min(self.least, most), min(self.least_length, length + most) - length)

    def __call__(self, logits_NV: torch.Tensor, rows: RowState) -> torch.Tensor:
        """Return the next token of each row [N], -1 for rows without one."""
        scores_NV = logits_NV.float()
        if self.penalty is not None:
            punished_NV = torch.where(scores_NV < 0, scores_NV * self.penalty, scores_NV / self.penalty)
            scores_NV = torch.where(rows.seen, punished_NV, scores_NV)
        if self.least or self.least_length:
            early_N1 = (rows.drawn < rows.least)[:, None]
            scores_NV = scores_NV.masked_fill(early_N1 & self.ends_V, -torch.inf)
        if self.never_V is not None:
            scores_NV = scores_NV.masked_fill(self.never_V, -torch.inf)
        if self.not_first_V is not None:
            scores_NV = scores_NV.masked_fill((rows.drawn == 0)[:, None] & self.not_first_V, -torch.inf)
        if self.do_sample:
            last = rows.uniforms.shape[1] - 1
            chances_N1 = rows.uniforms.gather(1, rows.drawn.clamp(max=last)[:, None])
            tokens_N, valid_N = inverse_transform(scores_NV, chances_N1, warpers=self.warpers)
        else:
            tokens_N, valid_N = greedy(scores_NV)
        return torch.where(valid_N, tokens_N, -1)


def marked(tokens: Sequence[int], *, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return whether each token of the vocabulary is one of these [V]."""
    marks_V = torch.zeros(vocabulary, dtype=torch.bool)
    marks_V[[token for token in tokens if token < vocabulary]] = True
    return marks_V.to(device)
