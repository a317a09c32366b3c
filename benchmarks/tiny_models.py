"""A tiny random model of every causal architecture of the installed transformers.

The sizes of a configuration are set by the names of its keys, also in nested configurations; `SHAPES` adds the
requirements of single architectures. `LEFT_OUT` has the reasons why architectures cannot be built.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTEXT = 64
VOCABULARY = 260
BOS = 2
SHARPER = 4
"""Factor of random weights, so that greedy answers vary."""
NOISE = 0.1
"""Spread of the noise on biases and scales, which are 0 and 1 in a new model, unlike in a trained one."""
SHIPPED = {"repetition_penalty": 1.3, "suppress_tokens": list(range(40, 60)), "min_new_tokens": 4}
"""Keys of the generation_config.json of every second architecture."""
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "embed_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "hidden_dim", "out_hidden_size", "projection_dim"), 32),
    **dict.fromkeys(("vision_output_dim", "audio_embed_dim", "mm_embed_dim", "output_proj_dims", "base_channels"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_inner"), 48),
    **dict.fromkeys(("dff", "dim_ff", "ffn_hidden_size", "ffn_hidden_dim", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("head_dim", "d_head", "dim_head", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_head_dim", "n_mamba_heads", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("linear_head_dim",), 8),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads", "rotary_dim", "laurel_rank", "patch_size"), 4),
    **dict.fromkeys(("state_size", "d_state", "ssm_state_size", "mamba_d_state", "mamba_d_conv"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "router_hidden_size", "image_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "mamba_expand", "altup_num_inputs"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 32),
    **dict.fromkeys(("n_group", "n_groups", "topk_group", "mamba_n_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), CONTEXT),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "index_topk"), CONTEXT),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "shape_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size_per_layer_input", "output_channels", "shape_embed_dim"), 8),
    **dict.fromkeys(("pronunciation_vocab_size",), VOCABULARY),
    **dict.fromkeys(("pronunciation_embed_dim",), 8),
    "num_kv_shared_layers": 0,
    "attention_hidden_size": 32,
    "num_position_embeddings": 16,
}
OFF = ("sliding_window", "attention_chunk_size", "num_experts", "moe_intermediate_size", "q_lora_rank", "index_topk")
"""Sizes that enable a feature: they remain None."""
WINDOWS = (
    "sliding_window",
    "attention_window_size",
    "attention_chunk_size",
    "window_size",
    "index_topk",
    "indexer_budget",
)
"""Sizes that limit the attended tokens."""

DECODER = {"is_decoder": True}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": CONTEXT,
    "indexer_compress_ratio": 4,
}
ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
HYBRID = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_key_value_heads": 4,
}
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xlm"),
)
LATENTS = (
    *("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash"),
    *("minicpm3", "youtu", "dots3_note_text"),
)
SHAPES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(ENCODERS, DECODER),
    **dict.fromkeys(LATENTS, LATENT),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), CONVOLUTION),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "granitemoehybrid"), MIXED),
    "qwen3_5": {"text_config": MIXED},
    "qwen3_5_moe": {"text_config": MIXED},
    "bailing_hybrid": LATENT | {"layer_group_size": 2, "num_mtp_layers": 0},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY}},
    "cwm": {"bos_token_id": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_top_k": 2},
    },
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "deepseek_v2": LATENT | {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": LATENT,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": CONTEXT},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LATENT | MIXED | {"q_lora_rank": None},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "modernbert-decoder": {"bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2},
    "qwen4_exp_text": INDEXED,
    "qwen4_exp": {"text_config": INDEXED},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": DECODER
    | {
        "attention_head_size": 8,
        "hash_seed": 0,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "num_buckets": 4,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "xlstm": {"hidden_size": 64, "chunk_size": 8, "num_heads": 2, "qk_dim_factor": 1.0},
    "xmod": DECODER | {"default_language": "en_XX"},
    "zamba": HYBRID | {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": HYBRID | {"adapter_rank": 4, "attention_head_dim": 16, "attention_hidden_size": 64, "mamba_d_state": 8},
    "zaya": {"num_experts_per_tok": 1},
}
LEFT_OUT = {
    "blt": "it has no num_hidden_layers, which transformers' own cache asks for",
    "gemma3n": "its images are read by a model of timm, which is not installed",
    "gemma4_assistant": "it drafts tokens for another model and reads that model's cache",
    "gemma4_unified_assistant": "it drafts tokens for another model and reads that model's cache",
    "musicgen": "it writes sound, and transformers cannot make it from its configuration alone",
    "musicgen_melody": "it writes sound, and transformers cannot make it from its configuration alone",
}


def kinds() -> list[str]:
    """Return the model types of all causal architectures."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def encoder_decoder_kinds() -> list[str]:
    """Return the model types of all encoder-decoders that read only text."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    from partita.lm.model_config.kinds import reads_more_than_text

    made = {kind: AutoConfig.for_model(kind) for kind in sorted(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)}
    return [kind for kind, one in made.items() if one.is_encoder_decoder and not reads_more_than_text(one)]


def ships_settings(kind: str) -> bool:
    """Return whether a tiny model of this architecture has a generation_config.json."""
    return kind in kinds()[::2]


def tiny_config(kind: str, *, window: int | None = None, special: Mapping[str, Any]) -> Any:
    """Return the configuration of a tiny model, with windows of `window` tokens if it has windows."""
    from transformers import AutoConfig

    made = type(AutoConfig.for_model(kind))
    usual = made().to_dict()
    names = getattr(made, "attribute_map", {})
    for name, stored in names.items():
        if stored in usual and name in SIZES:
            usual.setdefault(name, usual[stored])
    given = merged(sized(usual, window, special), SHAPES.get(kind, {}))
    for name, stored in names.items():
        if name in given and stored in given:
            given.pop(stored if name in SHAPES.get(kind, {}) else name)
    return AutoConfig.for_model(kind, **({**special, "vocab_size": VOCABULARY} | given))


def sized(usual: Mapping[str, Any], window: int | None, special: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a configuration with these keys."""
    found: dict[str, Any] = {}
    for key, value in usual.items():
        if key in SIZES and not (value is None and key in OFF):
            found[key] = window if window is not None and key in WINDOWS else SIZES[key]
        elif isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
            part = sized(value, window, special) | {name: number for name, number in special.items() if name in value}
            found[key] = part | {name: value[name] for name in ("model_type",) if name in value}
    return found


def merged(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    both = {key for key in left if isinstance(left[key], dict) and isinstance(right.get(key), dict)}
    return {**left, **right, **{key: merged(left[key], right[key]) for key in both}}


def write_tiny_model(
    kind: str, folder: Path, *, tokenizer: Any, window: int | None = None, two_sided: bool = False
) -> None:
    """Save a tiny model with random weights, and the tokenizer, in the format of transformers.

    Raises ValueError if it is not tiny.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto_class = AutoModelForSeq2SeqLM if two_sided else AutoModelForCausalLM
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": BOS, "eos_token_id": tokenizer.eos_token_id}
    special |= {"decoder_start_token_id": BOS} if two_sided else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = tiny_config(kind, window=window, special=special)
        with torch.device("meta"):
            size = sum(each.numel() for each in auto_class.from_config(config).parameters())
        if size > 5_000_000:
            raise ValueError(f"not tiny: {size:,} parameters")
        torch.manual_seed(0)
        model = auto_class.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(SHARPER)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=NOISE)
            embedding = model.get_input_embeddings().weight
            embedding[tokenizer.pad_token_id] = embedding[BOS]
        if ships_settings(kind) and not two_sided:
            model.generation_config.update(**SHIPPED)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
