"""The types of adapters: their names in peft, and the names of our keys there."""

LAYERED = ("target_modules", "modules_to_save", "exclude_modules", "layers_to_transform")
"""Keys of all adapters on layers, with the same name in peft."""
LORA = {"alpha": "lora_alpha", "dropout": "lora_dropout", "bias": "bias"}


def same(*keys: str) -> dict[str, str]:
    """Map keys to themselves, for keys with the same name in peft."""
    return {key: key for key in keys}


NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "lora": ("LORA", LORA | same("r", "use_rslora", "use_dora")),
    "adalora": (
        "ADALORA",
        LORA | same("target_r", "init_r", "beta1", "beta2", "orth_reg_weight") | {"delta_t": "deltaT"},
    ),
    "ia3": ("IA3", {}),
    "vera": ("VERA", same("r", "d_initial", "projection_prng_key", "save_projection") | {"dropout": "vera_dropout"}),
    "loha": ("LOHA", same("r", "alpha", "rank_dropout", "module_dropout")),
    "lokr": ("LOKR", same("r", "alpha", "rank_dropout", "module_dropout", "decompose_both", "decompose_factor")),
    "boft": ("BOFT", same("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout", "bias")),
    "oft": ("OFT", same("r", "oft_block_size", "coft", "eps", "block_share")),
    "fourierft": ("FOURIERFT", same("n_frequency", "scaling", "random_loc_seed")),
    "ln_tuning": ("LN_TUNING", {}),
    "vblora": (
        "VBLORA",
        same("r", "num_vectors", "vector_length", "topk", "save_only_topk_weights") | {"dropout": "vblora_dropout"},
    ),
    "prompt_tuning": ("PROMPT_TUNING", same("num_virtual_tokens")),
    "prefix_tuning": ("PREFIX_TUNING", same("num_virtual_tokens", "prefix_projection", "encoder_hidden_size")),
    "p_tuning": (
        "P_TUNING",
        same("num_virtual_tokens", "encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers")
        | same("encoder_dropout"),
    ),
}
"""By type: the name in peft, and our keys mapped to those of peft."""
