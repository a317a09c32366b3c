"""Shapes of small models of other architectures of transformers, for tests of generation."""

from typing import Any

CONTEXT = 64
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LOCAL = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}
FOREIGN: dict[str, dict[str, Any]] = {
    "qwen2_moe": SHAPE | EXPERTS | {"shared_expert_intermediate_size": 32},
    "granitemoe": SHAPE | EXPERTS,
    "gpt_oss": SHAPE | EXPERTS | {"head_dim": 8, "sliding_window": CONTEXT},
    "deepseek_v3": SHAPE | EXPERTS | LATENT,
    "phi3": SHAPE,
    "gemma3_text": SHAPE | {"head_dim": 8, "sliding_window": CONTEXT},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "gptj": GPT | {"rotary_dim": 4},
    "gpt_bigcode": GPT,
    "gpt_neo": LOCAL | {"hidden_size": 32, "window_size": CONTEXT, "max_position_embeddings": CONTEXT},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": SHAPE | {"num_kv_heads": 2},
    "bart": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": CONTEXT,
        "is_encoder_decoder": False,
    },
}

WINDOW = 8
"""Fewer tokens than the common prefix of the prompts, and than most of them."""
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": SHAPE | {"sliding_window": WINDOW},
    "gpt_oss": SHAPE | EXPERTS | {"head_dim": 8, "sliding_window": WINDOW},
    "gemma2": SHAPE | {"head_dim": 8, "sliding_window": WINDOW},
    "phi3": SHAPE | {"sliding_window": WINDOW},
    "cohere2": SHAPE | {"sliding_window": WINDOW, "num_hidden_layers": 4},
    "qwen2": SHAPE | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "starcoder2": SHAPE | {"sliding_window": WINDOW},
    "gemma3_text": SHAPE | {"head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 2},
}
