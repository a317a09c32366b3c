"""Adapters: trained parameters, initialization and training."""

from typing import Any

from .bases import PROBE
from .effects import GENERIC, Flip, Group
from .observers import training

LAYERED = {
    "target_modules": ["q_proj", "v_proj"],
    "modules_to_save": ["lm_head"],
    "exclude_modules": ["q_proj"],
    "layers_to_transform": [1],
}


STARTED = Flip("before/run/model", part="refusal")
"""peft cannot continue the training of saved prompts; they are only for inference."""
PRUNED = Flip("before/run/model", part="refusal")
"""peft cannot train an adapter further whose ranks it has reduced."""
UNMERGED = {"postprocessor.merge_adapter_into_base_model": Flip(True, part="refusal")}
"""Virtual tokens cannot be merged into weights."""


def adapter(type: str, section: dict[str, Any], **flips: Any) -> Group:
    """Keys of an adapter on a base model with biases."""
    other = "ia3" if type != "ia3" else "ln_tuning"
    common = {
        "type": {"type": other},
        "pretrained_adapter_weights": "before/run/model",
        "postprocessor.merge_adapter_into_base_model": Flip(True, part="files"),
    }
    keys = {f"adapter[{type}].{name}": flip for name, flip in (common | flips).items()}
    return Group(type, training, PROBE | {"adapter": {"type": type, **section}}, "losses", keys, long=True)


LORA = LAYERED | {"alpha": 3, "dropout": 0.5}

ADAPTERS = [
    adapter(
        "lora",
        {"r": 4},
        **LORA,
        bias="all",
        use_rslora=GENERIC,
        r=2,
        use_dora=GENERIC,
        init="orthogonal",
        rank_pattern={"q_proj": 2},
        alpha_pattern={"q_proj": 2},
        **{
            "eva.rho": Flip(1.0, given={"adapter": {"init": "eva", "r": 2}}),
            "eva.tau": Flip(0.0, given={"adapter": {"init": "eva"}}),
            "eva.batches": Flip(1, given={"adapter": {"init": "eva"}}),
            "loftq_bits": Flip(2, given={"adapter": {"init": "loftq"}}),
            "loftq_iterations": Flip(3, given={"adapter": {"init": "loftq"}}),
            "corda_method": Flip("kpm", given={"adapter": {"init": "corda"}}),
        },
    ),
    adapter(
        "adalora",
        {"target_r": 2, "init_r": 4},
        **LORA,
        pretrained_adapter_weights=PRUNED,
        bias="all",
        target_r=3,
        init_r=6,
        tinit=2,
        tfinal=2,
        delta_t=2,
        beta1=Flip(0.1, part="saved"),
        beta2=Flip(0.1, part="saved"),
        orth_reg_weight=2.0,
    ),
    adapter("ia3", {}, target_modules=["q_proj"], modules_to_save=["lm_head"], feedforward_modules=["up_proj"]),
    adapter(
        "vera",
        {"r": 8},
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        layers_to_transform=[1],
        r=4,
        dropout=0.5,
        d_initial=0.5,
        projection_prng_key=1,
        save_projection=Flip(False, part="saved"),
    ),
    adapter("loha", {"r": 4}, **LAYERED, r=2, alpha=3, rank_dropout=0.5, module_dropout=0.5),
    adapter(
        "lokr",
        {"r": 2},
        **LAYERED,
        r=1,
        alpha=3,
        rank_dropout=0.5,
        module_dropout=0.5,
        decompose_both=GENERIC,
        decompose_factor=2,
    ),
    adapter(
        "boft",
        {},
        **LAYERED,
        boft_block_size=8,
        boft_block_num=Flip(4, also={"adapter": {"boft_block_size": 0}}),
        boft_dropout=0.5,
        bias="all",
    ),
    adapter(
        "oft",
        {"oft_block_size": 8},
        **LAYERED,
        r=Flip(2, also={"adapter": {"oft_block_size": 0}}),
        oft_block_size=4,
        coft=GENERIC,
        eps=Flip(1e-2, given={"adapter": {"coft": True}}),
        block_share=GENERIC,
    ),
    adapter("fourierft", {"n_frequency": 20}, **LAYERED, n_frequency=10, scaling=10.0, random_loc_seed=1),
    adapter("ln_tuning", {}, target_modules=["input_layernorm"], modules_to_save=["lm_head"]),
    adapter(
        "vblora",
        {"vector_length": 8, "num_vectors": 16},
        **LAYERED,
        r=2,
        num_vectors=8,
        vector_length=16,
        topk=3,
        dropout=0.5,
        save_only_topk_weights=Flip(True, part="saved"),
    ),
    adapter(
        "prompt_tuning",
        {"num_virtual_tokens": 4},
        **UNMERGED,
        pretrained_adapter_weights=STARTED,
        num_virtual_tokens=2,
        init_text="red ball",
    ),
    adapter(
        "prefix_tuning",
        {"num_virtual_tokens": 4},
        **UNMERGED,
        pretrained_adapter_weights=STARTED,
        num_virtual_tokens=2,
        prefix_projection=GENERIC,
        encoder_hidden_size=Flip(8, given={"adapter": {"prefix_projection": True}}),
    ),
    adapter(
        "p_tuning",
        {"num_virtual_tokens": 4},
        **UNMERGED,
        pretrained_adapter_weights=STARTED,
        num_virtual_tokens=2,
        encoder_reparameterization_type="LSTM",
        encoder_hidden_size=16,
        encoder_num_layers=Flip(1, given={"adapter": {"encoder_reparameterization_type": "LSTM"}}),
        encoder_dropout=Flip(0.5, given={"adapter": {"encoder_reparameterization_type": "LSTM"}}),
    ),
    adapter("peft", {"peft_type": "MISS", "parameters": {"r": 4}}, peft_type="HRA", parameters={"r": 2}),
]
