"""LoRA initializations that depend on training batches, and LoftQ.

PiSSA, OLoRA and CorDA move a part of the base weights into the adapter; LoftQ rounds the base weights.
`initial_adapter` copies the initial adapter, so that it can be saved as a plain LoRA for the original base model.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.precision import is_quantized, plain_weight
from partita_schema.errors import ModelError
from partita_schema.rules.adapters import MOVES_WEIGHTS, NOT_OLORA, ONE_ITERATION, ORTHOGONAL, WEIGHTS_MOVED
from partita_schema.sections import adapter as schema
from partita_trainers.base import Batch

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

CORDA_ROWS = 256
"""Number of rows for CorDA's activations, as in section 4 of the paper."""
EVA_PASSES = 50
"""Number of passes over EVA's batches after which it counts as not converging."""
BLOCK = 64
"""Number of weights that share a scale in LoftQ."""

Batches = Callable[[], Iterable[Batch]]


def prepare_init(model: "PreTrainedModel", settings: Any, adapter: schema.Adapter, *, batches: Batches | None) -> None:
    """Check and prepare the base model for an init, before the adapter is added.

    Args:
        model: The base model.
        settings: The peft config, which CorDA's analysis may change.
        adapter: The adapter section.
        batches: Returns training batches.

    Raises:
        ModelError: The init does not work on this model, or needs batches and there are none.
    """
    if not isinstance(adapter, schema.LoraAdapter):
        return
    eight_bits = any(type(layer).__name__ == "Linear8bitLt" for layer in model.modules())
    if adapter.use_dora and eight_bits and model.device.type == "cpu":
        raise ModelError("adapter.use_dora: it does not work on an 8-bit base on a CPU; write quantization.bits: 4")
    quantized = any(is_quantized(layer) for layer in model.modules())
    if adapter.init == "orthogonal" and quantized:
        raise ModelError(f"adapter.init: {ORTHOGONAL}")
    if adapter.init in MOVES_WEIGHTS and quantized:
        raise ModelError(f"adapter.init: {WEIGHTS_MOVED.format(adapter.init)}")
    if adapter.init == "olora" and any(type(layer).__name__ == "Conv1D" for layer in model.modules()):
        raise ModelError(f"adapter.init: {NOT_OLORA.format(model.config.model_type)}")
    if adapter.init == "corda":
        measure_covariance(model, settings, batches=require_batches(batches, init="corda"))


def initialize(
    adapted: "PeftModel",
    adapter: schema.Adapter,
    *,
    batches: Batches | None,
    original_weights: Callable[[], dict[str, torch.Tensor]],
    tokenizer: Any,
) -> None:
    """Run an init that needs the adapter on the model.

    Args:
        adapted: The model with its adapter.
        adapter: The adapter section.
        batches: Returns training batches.
        original_weights: Returns the weights before quantization.
        tokenizer: Tokenizer, for the init text of prompt tuning.
    """
    if isinstance(adapter, schema.PromptTuningAdapter):
        start_from_words(adapted, adapter, tokenizer=tokenizer)
    if not isinstance(adapter, schema.LoraAdapter):
        return
    if adapter.init == "eva":
        fit_to_activations(adapted, adapter, batches=require_batches(batches, init="eva"))
    elif adapter.init == "loftq":
        make_up_for_rounding(adapted, adapter, original_weights=original_weights)


@torch.no_grad()
def start_from_words(adapted: "PeftModel", adapter: schema.PromptTuningAdapter, *, tokenizer: Any) -> None:
    """Initialize prompt tuning with embeddings of a text or of random tokens (Lester et al. 2021, section 3.2)."""
    embedding = adapted.get_base_model().get_input_embeddings()
    count = adapter.num_virtual_tokens
    if adapter.init_text is None:
        ids = torch.randint(len(tokenizer), (count,))
    else:
        words = tokenizer.encode(adapter.init_text, add_special_tokens=False)
        ids = torch.tensor((words * count)[:count])
    learned = adapted.prompt_encoder["default"].embedding.weight
    learned.copy_(embedding(ids.to(learned.device)))


def require_batches(batches: Batches | None, *, init: str) -> Batches:
    """Return `batches`, or raise ModelError if there are none."""
    if batches is None:
        raise ModelError(f"adapter.init: {init} looks at training batches, and there are none here; write another init")
    return batches


def initial_adapter(adapted: "PeftModel", adapter: schema.Adapter) -> dict[str, torch.Tensor]:
    """Return copies of the initial low-rank matrices, by name, if the init moved base weights into them."""
    if not isinstance(adapter, schema.LoraAdapter) or adapter.init not in MOVES_WEIGHTS:
        return {}
    return {
        name: parameter.detach().cpu().clone()
        for name, parameter in adapted.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


@torch.no_grad()
def measure_covariance(model: "PreTrainedModel", settings: Any, *, batches: Batches) -> None:
    """Run CorDA's analysis of the activations of single rows (Yang et al. 2024, section 3.2)."""
    from peft.tuners.lora.corda import preprocess_corda

    if settings.target_modules == "all-linear":
        settings.target_modules = linear_targets(model)

    def run() -> None:
        device = next(model.parameters()).device
        rows = (row for batch in batches() for row in real_rows(batch))
        for ids_T in islice(rows, CORDA_ROWS):
            model(input_ids=ids_T.unsqueeze(0).to(device), use_cache=False)

    training = model.training
    preprocess_corda(model, settings, run_model=run)
    model.train(training)


def real_rows(batch: Batch) -> Iterable[torch.Tensor]:
    """Return the token ids of each row without padding."""
    return (ids_T[:length] for ids_T, length in zip(batch.input_ids_BT, batch.lengths_B.tolist(), strict=True))


def linear_targets(model: "PreTrainedModel") -> set[str]:
    """Return the full names of the linear layers except the output layer."""
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    return {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | Conv1D) and layer is not output
    }


def fit_to_activations(adapted: "PeftModel", adapter: schema.LoraAdapter, *, batches: Batches) -> None:
    """Initialize lora_A by EVA: the right singular vectors of the activations (Paischer et al. 2024, section 3).

    All tokens except padding count, not only answers: short answers have too few tokens for peft.

    Raises:
        ModelError: The batches have too few tokens for the ranks, or EVA does not converge.
    """
    from peft import initialize_lora_eva_weights

    options = adapter.eva or schema.EvaOptions()
    ranks = [adapter.r, *adapter.rank_pattern.values()]
    components = round(max(ranks) * options.rho)
    taken = [
        {"input_ids": batch.input_ids_BT, "attention_mask": batch.attention_mask()}
        for batch in islice(batches(), options.batches)
        if batch.tokens >= components
    ]
    if not taken:
        raise ModelError(
            f"adapter.init: eva with r {max(ranks)} and rho {options.rho} needs batches of at least {components} "
            "tokens, and the training batches are smaller; write a larger trainer.batch_size, or a smaller r"
        )
    forwards = 0

    def forward(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
        nonlocal forwards
        forwards += 1
        if forwards > EVA_PASSES * len(taken):
            raise ModelError(
                f"adapter.init: eva did not converge in {EVA_PASSES} passes over {len(taken)} batches; "
                "write a smaller adapter.eva.tau, or another init"
            )
        return model(**inputs, use_cache=False)

    with torch.no_grad():
        initialize_lora_eva_weights(
            adapted, dataloader=taken, forward_fn=forward, prepare_layer_inputs_fn=real_inputs, show_progress_bar=False
        )


def real_inputs(layer_input: Any, indices_K2: torch.Tensor, layer_name: str) -> torch.Tensor:
    """Return the inputs of a layer at real tokens, even if an architecture has flattened rows and columns.

    Raises:
        ModelError: The inputs do not say which of them are of which row.
    """
    hidden: torch.Tensor = layer_input if isinstance(layer_input, torch.Tensor) else layer_input[0]
    if hidden.ndim == 3:
        return hidden[indices_K2[:, 0], indices_K2[:, 1]]
    rows, columns = (int(size) + 1 for size in indices_K2.max(dim=0).values)
    if len(hidden) != rows * columns:
        raise ModelError(
            f"adapter.init: eva cannot tell rows apart in {layer_name}; name other target_modules, or another init"
        )
    return hidden[indices_K2[:, 0] * columns + indices_K2[:, 1]]


@torch.no_grad()
def make_up_for_rounding(
    adapted: "PeftModel", adapter: schema.LoraAdapter, *, original_weights: Callable[[], dict[str, torch.Tensor]]
) -> None:
    """Initialize by LoftQ: rounded weights plus adapter approximate the weights (Li et al. 2023, algorithm 1).

    On a quantized base the weights stay unchanged, and one step of the algorithm fits the adapter to them.
    """
    layers = [(name, layer) for name, layer in adapted.named_modules() if getattr(layer, "lora_A", None)]
    quantized = [name for name, layer in layers if is_quantized(layer.get_base_layer())]
    if quantized and adapter.loftq_iterations > 1:
        raise ModelError(f"adapter.loftq_iterations: {ONE_ITERATION}")
    original = original_weights() if quantized else {}
    for name, layer in layers:
        if "default" not in layer.lora_A:
            continue
        base, rank, scale = layer.get_base_layer(), layer.r["default"], layer.scaling["default"]
        if name in quantized:
            rounded = plain_weight(base)
            weight = original[name.removeprefix("base_model.model.") + ".weight"].to(rounded)
            a, b = best_low_rank(weight - rounded, rank=rank)
        else:
            weight = base.weight.T if layer.fan_in_fan_out else base.weight
            rounded, a, b = loftq(
                weight.float(), bits=adapter.loftq_bits, rank=rank, iterations=adapter.loftq_iterations
            )
            base.weight.copy_(rounded.T if layer.fan_in_fan_out else rounded)
        layer.lora_A["default"].weight.copy_(a)
        layer.lora_B["default"].weight.copy_(b / scale)


def loftq(
    weight: torch.Tensor, *, bits: int, rank: int, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round weights and fit low-rank factors, so that Q + B A approximates the weights.

    Args:
        weight: Weights [out, in].
        bits: Bits of the rounding.
        rank: Rank r of the factors.
        iterations: Number of alternations between rounding and fitting.

    Returns the rounded weights Q [out, in] and the factors A [r, in] and B [out, r].
    """
    low_rank = torch.zeros_like(weight)
    for _ in range(iterations):
        rounded = normal_float(weight - low_rank, bits=bits)
        a, b = best_low_rank(weight - rounded, rank=rank)
        low_rank = b @ a
    return rounded, a, b


def best_low_rank(weight: torch.Tensor, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors A [r, in], B [out, r] of the best approximation of that rank, singular values shared evenly."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = values[:rank].sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def normal_float(weight: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Round weights to the NormalFloat levels of `bits` bits, in blocks with one scale (QLoRA, section 3)."""
    levels = normal_float_levels(bits).to(weight)
    flat = weight.flatten()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % BLOCK)]).view(-1, BLOCK)
    scale = padded.abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
    edges = (levels[1:] + levels[:-1]) / 2
    rounded = levels[torch.bucketize(padded / scale, edges)] * scale
    return rounded.flatten()[: len(flat)].view_as(weight)


def normal_float_levels(bits: int) -> torch.Tensor:
    """Return 2^bits levels in [-1, 1] including 0, equally likely under a normal distribution (QLoRA, section 3)."""
    edge = 0.9677083
    half = 2 ** (bits - 1)
    quantile: Callable[[torch.Tensor], torch.Tensor] = torch.distributions.Normal(0.0, 1.0).icdf
    positive = quantile(torch.linspace(edge, 0.5, half + 1, dtype=torch.float64)[:-1])
    negative = -quantile(torch.linspace(edge, 0.5, half, dtype=torch.float64)[:-1])
    levels = torch.cat([positive, torch.zeros(1, dtype=torch.float64), negative]).sort().values
    return (levels / levels.max()).float()
