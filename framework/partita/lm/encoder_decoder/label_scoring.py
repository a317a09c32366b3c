"""Choice of labels by their probability with an encoder-decoder.

The score of a label is that of `partita.lm.slots.label_scoring`: the sum of the log probabilities of its tokens and of
any end token after them. The encoder runs once per row; the decoder then computes each label, a few rows at a time.

Shapes: B rows, L labels, T tokens of the longest label with the token that starts the decoder's sequence, E end tokens,
S tokens of the longest prompt, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch

from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita.lm.batch_generation.generation import answer_ends
from partita.lm.decoding.row import NOT_NUMBERS
from partita.lm.loaded_model import TextModel
from partita.lm.slots.label_scoring import LEAST_SCORE, MOST_ELEMENTS, NO_END, before_end
from partita_schema.errors import ModelError


@torch.no_grad()
def choose_labels(lm: TextModel, requests: Sequence[GenerationRequest], options: GenerationOptions) -> list[Generated]:
    """Return the most probable label of each row, the first one of a tie; the model must be in evaluation mode.

    Raises:
        ModelError: The model has no end token, or the scores of a row are NaN.
        ValueError: A label is longer than the row's limit.
    """
    ends = answer_ends(lm, options)
    if not ends:
        raise ModelError(NO_END)
    labels = [before_end(label, ends=ends) for label in options.labels]
    longest = max(map(len, labels))
    for request in requests:
        if request.max_new_tokens < longest:
            raise ValueError(f"the decoder writes {request.max_new_tokens:,} tokens, and the longest label {longest:,}")
    prompts = lm.batch_prompts(requests, beams=1)
    mask_BS = prompts.inputs["attention_mask"]
    hidden_BSH = lm.base.get_encoder()(input_ids=prompts.inputs["input_ids"], attention_mask=mask_BS)[0]
    inputs_LT, lengths_L = label_inputs(lm, labels, start=prompts.requests[0].input_ids[0])
    rows = max(1, MOST_ELEMENTS // (len(labels) * (longest + 1) * lm.vocabulary_size))
    scores_BL = torch.cat(
        [
            label_scores(
                lm,
                hidden_BSH[start : start + rows],
                mask_BS[start : start + rows],
                inputs_LT=inputs_LT,
                lengths_L=lengths_L,
                ends=ends,
            )
            for start in range(0, len(requests), rows)
        ]
    )
    if scores_BL.isnan().any():
        raise ModelError(NOT_NUMBERS)
    texts = [label.text for label in options.labels]
    scores_of_rows = scores_BL.clamp(min=LEAST_SCORE).tolist()
    return [Generated.most_probable(texts, scores, logprobs=options.logprobs) for scores in scores_of_rows]


def label_inputs(lm: TextModel, labels: Sequence[Sequence[int]], *, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decoder's inputs for the labels [L, T], padded on the right, and the tokens of each label [L]."""
    lengths_L = torch.tensor([len(ids) for ids in labels])
    inputs_LT = torch.full((len(labels), int(lengths_L.max()) + 1), lm.tokenizer.pad_token_id)
    inputs_LT[:, 0] = start
    for index, ids in enumerate(labels):
        inputs_LT[index, 1 : 1 + len(ids)] = torch.tensor(ids, dtype=torch.long)
    return inputs_LT.to(lm.device), lengths_L.to(lm.device)


def label_scores(
    lm: TextModel,
    hidden_BSH: torch.Tensor,
    mask_BS: torch.Tensor,
    *,
    inputs_LT: torch.Tensor,
    lengths_L: torch.Tensor,
    ends: Sequence[int],
) -> torch.Tensor:
    """Return the score of each label for each row [B, L], float64.

    Args:
        lm: The model.
        hidden_BSH: Output of the encoder for the prompts.
        mask_BS: 1 for tokens of the prompts.
        inputs_LT: The decoder's inputs for each label.
        lengths_L: Tokens of each label.
        ends: End tokens.
    """
    rows, (count, width) = len(hidden_BSH), inputs_LT.shape
    logits = lm.base(
        encoder_outputs=(hidden_BSH.repeat_interleave(count, dim=0),),
        attention_mask=mask_BS.repeat_interleave(count, dim=0),
        decoder_input_ids=inputs_LT.repeat(rows, 1),
        use_cache=False,
    ).logits
    chances_BLTV = logits.float().log_softmax(-1).view(rows, count, width, -1)
    next_BLT1 = inputs_LT.roll(-1, dims=1).expand(rows, -1, -1)[..., None]
    tokens_BLT = chances_BLTV.gather(-1, next_BLT1)[..., 0].double()
    after_LT = torch.arange(width, device=lm.device) >= lengths_L[:, None]
    ends_BLT = chances_BLTV[..., torch.tensor(ends, device=lm.device)].logsumexp(-1).double()
    ends_BL = ends_BLT.gather(2, lengths_L.expand(rows, -1)[..., None])[..., 0]
    scores_BL: torch.Tensor = tokens_BLT.masked_fill(after_LT, 0.0).sum(-1) + ends_BL
    return scores_BL
