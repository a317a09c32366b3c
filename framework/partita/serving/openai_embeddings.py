"""Embeddings of the OpenAI API."""

import asyncio
import base64
import struct
from collections.abc import Sequence

import numpy as np
from starlette.responses import JSONResponse, Response

from partita.generation.encoded_prompts import EncodedPrompts
from partita.serving.bodies import EmbeddingsBody
from partita.serving.errors import ApiError
from partita.serving.rows import RowService
from partita_schema.sections.features import TextInput
from partita_schema.sections.outputs.embedding import EmbeddingOutput


async def embeddings(body: EmbeddingsBody, rows: RowService, *, model: str) -> Response:
    """Return embeddings of texts."""
    config = rows.config
    outputs = config.output_features
    inputs = [feature for feature in config.input_features if isinstance(feature, TextInput)]
    if len(inputs) != 1 or not isinstance(outputs[0], EmbeddingOutput):
        raise ApiError(
            400,
            "the model computes no embeddings, which needs one text input and an output of type embedding; its outputs "
            f"are {', '.join(f'{output.name} ({output.type})' for output in outputs)}",
        )
    if body.dimensions is not None:
        raise ApiError(400, "dimensions is not supported; leave it out", param="dimensions")
    opened = rows.open([{inputs[0].name: text} for text in body.input], None)
    prompts = await asyncio.to_thread(rows.encoded, opened)
    refuse_long(prompts)
    answers = await rows.answers(opened)
    wrong = next((index for index, answer in enumerate(answers) if answer.error is not None), None)
    if wrong is not None:
        raise ApiError(400, f"text {wrong + 1}: {answers[wrong].error}", param="input")
    vectors = [answer.decoded.values[outputs[0].name] for answer in answers]
    tokens = int(prompts.lengths.sum())
    data = [
        {"object": "embedding", "index": index, "embedding": written(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": model, "usage": usage})


def refuse_long(prompts: EncodedPrompts) -> None:
    """Raise ApiError for the first text that is longer than the context, as OpenAI does."""
    cut = np.flatnonzero(prompts.cut_tokens)
    if len(cut):
        index = int(cut[0])
        read, lost = int(prompts.lengths[index]), int(prompts.cut_tokens[index])
        message = (
            f"text {index + 1} has {lost:,} tokens more than the {read:,} that are read; shorten it, or send it to "
            "/predict, which reads its beginning"
        )
        raise ApiError(400, message, param="input")


def written(vector: Sequence[float], encoding: str) -> list[float] | str:
    """Return an embedding as numbers, or as base64 of 32-bit floats."""
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
