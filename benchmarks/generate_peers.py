"""Another library on the work of generate.py; called there in an environment with it: `JOB.json`.

The job names the engine, whether to convert the model or to answer with it, and the settings. An answer is one line of
JSON on stdout: CPU seconds, peak memory, the number of tokens and the text of each row. The clock runs from prompts as
texts to token ids (for llama.cpp, to texts), after a first batch of other prompts. The end token is not allowed.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

Job = dict[str, Any]
Ids = list[list[int]]
Answer = Callable[[Ids], Sequence[Any]]
"""Answers prompts; returns token ids, or texts with their number of tokens."""
PAD, END = 0, 2
WARM_UP = 16
"""Prompts of the first batch: those of the work, backwards."""


def in_batches(ids: Ids, size: int, answer: Answer) -> list[Any]:
    """Answer batches of rows sorted by length; return the answers in the order of the rows."""
    order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    found: list[Any] = [None] * len(ids)
    for start in range(0, len(order), size):
        part = order[start : start + size]
        for row, tokens in zip(part, answer([ids[row] for row in part]), strict=True):
            found[row] = tokens
    return found


# CTranslate2


def convert_ctranslate2(job: Job) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(job["model"]).convert(job["converted"], quantization=job["precision"])


def load_ctranslate2(job: Job) -> Answer:
    """Batches with a maximum number of tokens; the common beginning of all prompts is the static prompt."""
    from ctranslate2 import Generator

    vocabulary = Tokenizer.from_file(f"{job['model']}/tokenizer.json")
    generator = Generator(
        job["converted"], device="cpu", compute_type=job["precision"], intra_threads=1, inter_threads=1
    )

    def answer(ids: Ids) -> list[list[int]]:
        shared = len(os.path.commonprefix(ids))  # noqa: RUF071
        words = [[vocabulary.id_to_token(token) for token in prompt] for prompt in ids]
        static = {"static_prompt": words[0][:shared], "cache_static_prompt": True} if shared else {}
        found = generator.generate_batch(
            [prompt[shared:] for prompt in words],
            max_batch_size=job["settings"]["tokens"],
            batch_type="tokens",
            min_length=job["new_tokens"],
            max_length=job["new_tokens"],
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            **static,
        )
        return [one.sequences_ids[0] for one in found]

    return answer


# OpenVINO


def convert_openvino(job: Job) -> None:
    words = ["optimum-cli", "export", "openvino", "--model", job["model"], "--task", "text-generation-with-past"]
    words[0] = str(Path(sys.executable).with_name(words[0]))
    subprocess.run([*words, "--weight-format", job["precision"], job["converted"]], stdout=sys.stderr, check=True)


def load_openvino(job: Job) -> Answer:
    """Continuous batching with a paged cache of 4 GB and prefix caching; keys and values in fp32 for fp32 weights."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.enable_prefix_caching = job["work"] in ("shared", "documents")
    scheduler.max_num_seqs = job["settings"]["rows"]
    scheduler.max_num_batched_tokens = job["settings"]["tokens"]
    options: Job = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    if job["precision"] == "fp32":
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(job["converted"], scheduler, "CPU", options)
    limits = {"min_new_tokens": job["new_tokens"], "max_new_tokens": job["new_tokens"]}
    settings = openvino_genai.GenerationConfig(**limits, eos_token_id=END, do_sample=False, apply_chat_template=False)

    def answer(ids: Ids) -> list[list[int]]:
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in ids]
        return [list(one.m_generation_ids[0]) for one in pipeline.generate(tensors, [settings] * len(ids))]

    return answer


# llama.cpp


def convert_llama_cpp(job: Job) -> None:
    from generate_gguf import write_gguf

    write_gguf(Path(job["model"]), Path(job["converted"]), job["precision"])


def load_llama_cpp(job: Job) -> Answer:
    """The server in this process, without HTTP, with a thread for each slot; a slot keeps its last prompt.

    With f32 weights, keys and values are f32 and flash attention, which computes in f16, is off.
    """
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    slots = job["settings"]["slots"]
    parameters = xllamacpp.CommonParams()
    parameters.model.path = job["converted"]
    parameters.n_parallel = slots
    parameters.n_ctx = slots * job["context"]
    parameters.kv_unified = False  # otherwise every row attends over the cells of all
    parameters.n_gpu_layers = 0
    parameters.fit_params = False
    parameters.cache_ram_mib = 0
    parameters.verbosity = -1
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads = 1
        threads.poll = 0
    if job["precision"] == "f32":
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    pool = ThreadPoolExecutor(slots)

    def ask(prompt: list[int]) -> tuple[str, int]:
        body = {"prompt": prompt, "n_predict": job["new_tokens"], "temperature": 0, "samplers": ["temperature"]}
        found = server.handle_completions({**body, "cache_prompt": True, "logit_bias": [[END, False]]})
        found = json.loads(found) if isinstance(found, str) else found
        return found["choices"][0]["text"], found["usage"]["completion_tokens"]

    return lambda ids: list(pool.map(ask, ids))


# onnxruntime-genai


def convert_onnxruntime(job: Job) -> None:
    words = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", job["model"], "-o", job["converted"]]
    words += ["-p", job["precision"], "-e", "cpu", "-c", f"{job['converted']}-cache"]
    subprocess.run(words, stdout=sys.stderr, check=True)


def load_onnxruntime(job: Job) -> Answer:
    """Batches of rows sorted by length. They are padded on the right: on the left, attention sees the padding."""
    import numpy as np
    import onnxruntime_genai

    config = onnxruntime_genai.Config(job["converted"])
    options = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = onnxruntime_genai.Model(config)

    def answer(ids: Ids) -> list[list[int]]:
        width = max(map(len, ids))
        length = width + job["new_tokens"]
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(min_length=length, max_length=length, do_sample=False, batch_size=len(ids))
        generator = onnxruntime_genai.Generator(model, parameters)
        padded = [prompt + [PAD] * (width - len(prompt)) for prompt in ids]
        generator.append_tokens(np.array(padded, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [generator.get_sequence(row)[width:].tolist() for row in range(len(ids))]

    return lambda ids: in_batches(ids, job["settings"]["rows"], answer)


# Continuous batching of transformers


def load_transformers(job: Job) -> Answer:
    """`generate_batch` with a cache of 64 pages of 256 tokens; without that setting it takes most of the memory."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    limits = {"min_new_tokens": job["new_tokens"], "max_new_tokens": job["new_tokens"]}
    settings = GenerationConfig(eos_token_id=END, pad_token_id=PAD, do_sample=False, **limits)
    batching = ContinuousBatchingConfig(
        num_blocks=job["settings"]["pages"],
        page_size=256,
        max_batch_tokens=job["settings"]["tokens"],
        use_cuda_graph=False,
    )

    def answer(ids: Ids) -> list[list[int]]:
        with torch.inference_mode():
            found = model.generate_batch(
                ids,
                generation_config=settings,
                continuous_batching_config=batching,
                progress_bar=False,
                warmup=False,
            )
        names = sorted(found, key=lambda name: int(name.rsplit("_", 1)[-1]))
        return [list(found[name].generated_tokens) for name in names]

    return answer


CONVERTERS: dict[str, Callable[[Job], None]] = {
    "ctranslate2": convert_ctranslate2,
    "openvino": convert_openvino,
    "llama.cpp": convert_llama_cpp,
    "onnxruntime": convert_onnxruntime,
}
LOADERS: dict[str, Callable[[Job], Answer]] = {
    "ctranslate2": load_ctranslate2,
    "openvino": load_openvino,
    "llama.cpp": load_llama_cpp,
    "onnxruntime": load_onnxruntime,
    "transformers": load_transformers,
}


def measure(job: Job) -> Job:
    """Answer the prompts of the job; return what was measured. Raise ValueError if a row or a token is missing."""
    tokenizer = Tokenizer.from_file(f"{job['model']}/tokenizer.json")
    answer = LOADERS[job["engine"]](job)
    answer([prompt[::-1] for prompt in encoded(tokenizer, job["prompts"][:WARM_UP])])
    cpu = time.process_time()
    found = answer(encoded(tokenizer, job["prompts"]))
    cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    counts = {one[1] if isinstance(one, tuple) else len(one) for one in found}
    if len(found) != len(job["prompts"]) or counts != {job["new_tokens"]}:
        raise ValueError(f"{len(found)} of {len(job['prompts'])} rows, of {sorted(counts)} new tokens")
    texts = [one[0] if isinstance(one, tuple) else tokenizer.decode(one) for one in found]
    return {"cpu": cpu, "peak": peak, "texts": texts, "tokens": len(texts) * job["new_tokens"]}


def encoded(tokenizer: Tokenizer, prompts: Sequence[str]) -> Ids:
    return [one.ids for one in tokenizer.encode_batch(prompts)]


if __name__ == "__main__":
    content: Job = json.loads(Path(sys.argv[1]).read_text(encoding="utf8"))
    if content["convert"]:
        CONVERTERS[content["engine"]](content)
        result: Job = {}
    else:
        result = measure(content)
    print(json.dumps(result))
