"""Test that the loss of an encoder-decoder depends on nothing but the prompt and the labels before."""

from collections.abc import Iterator

import torch

from partita.lm.batch_generation.batch_check import check_context, prompts_with_answers
from partita.lm.loaded_model import TextModel


def check_sides(lm: TextModel) -> None:
    """Raise ModelError if logits depend on later tokens of the decoder, or on padding after the prompt."""
    prompt, row = prompts_with_answers(lm)[1:3]
    short = row[: len(row) // 2]

    def logits() -> Iterator[torch.Tensor]:
        yield forward(lm, prompt, short, padding=0)
        yield forward(lm, prompt, row, padding=0)
        yield forward(lm, prompt, short, padding=len(prompt))

    instead = "choose a model whose decoder sees only the tokens before"
    check_context(lm, logits(), where="other labels", instead=instead)


def forward(lm: TextModel, prompt: list[int], inputs: list[int], *, padding: int) -> torch.Tensor:
    """Return the logits [T, V] of a decoder's inputs.

    Args:
        lm: The model.
        prompt: Tokens for the encoder.
        inputs: T tokens for the decoder.
        padding: Number of masked tokens after the prompt.
    """
    ids_1S = torch.tensor([[*prompt, *[lm.tokenizer.pad_token_id] * padding]], device=lm.device)
    mask_1S = (torch.arange(ids_1S.shape[1], device=lm.device) < len(prompt)).long()[None]
    inputs_1T = torch.tensor([inputs], device=lm.device)
    logits: torch.Tensor = lm.base(
        input_ids=ids_1S, attention_mask=mask_1S, decoder_input_ids=inputs_1T, use_cache=False
    ).logits[0]
    return logits.double()
