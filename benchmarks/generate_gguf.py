"""Write a Llama of transformers as a GGUF file, with a byte-level BPE vocabulary.

The tensors are written directly, so that the benchmark needs no checkout of llama.cpp, whose converter is not on the
package index.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK = 32
"""Columns that share a scale in q8_0."""


def write_gguf(source: Path, path: Path, kind: str) -> None:
    """Write the model in `source` to a GGUF file.

    Args:
        source: Folder of the model.
        path: The file.
        kind: f32, or q8_0; as llama.cpp does it, a matrix whose width is no multiple of 32 is float16 then.
    """
    shape = json.loads((source / "config.json").read_text(encoding="utf8"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if kind == "f32" else gguf.LlamaFileType.MOSTLY_Q8_0)
    add_vocabulary(writer, json.loads((source / "tokenizer.json").read_text(encoding="utf8")))
    for name, tensor in load_file(source / "model.safetensors").items():
        add_tensor(writer, name.removesuffix(".weight"), tensor.astype(np.float32), kind=kind, shape=shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    """Add the tokens and merges; the first three are padding, start and end."""
    vocabulary = tokenizer["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.get)
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(words) - 3)
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Any, *, kind: str, shape: dict[str, Any]) -> None:
    """Add a tensor under its name in llama.cpp, which has the halves of rotary dimensions next to each other."""
    if name.startswith("model.layers."):
        _, _, number, part = name.split(".", 3)
        target = f"blk.{number}.{LAYER[part]}.weight"
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
        if heads is not None:
            halves = tensor.reshape(shape[heads], 2, -1, tensor.shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    else:
        target = f"{OTHER[name]}.weight"
    if kind == "f32" or tensor.ndim == 1:
        writer.add_tensor(target, tensor)
    elif tensor.shape[1] % BLOCK:
        writer.add_tensor(target, tensor.astype(np.float16))
    else:
        quantized = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(target, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
