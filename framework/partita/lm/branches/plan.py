"""How a run will compute the answers of pairs, as far as its files show it: for `partita explain`.

This module imports neither torch nor transformers. The model itself is tested when the run begins; see
`partita.lm.branches.masks`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.lm.decoding.generation_defaults import cached_file
from partita.tokenizers.hub import find_base
from partita_schema.common.json_text import parse_json
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.rules.encoder_decoders import virtual_tokens
from partita_schema.sections.model import ENCODERS, NewModel, ScratchModel

TOGETHER_NAMES = """
afmoe apertus arcee aria_text axk1 axk2 beam bert bert-generation big_bird biogpt bitnet codegen cohere cohere2
cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1
dots3_note dots3_note_text electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint fuyu gemma
gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite
granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4
hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4 llama4_text longcat_flash megatron-bert
mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder
moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe
qwen2 qwen2_moe qwen3 qwen3_moe rembert roc_bert seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma whisper
xglm youtu
"""
APART_NAMES = """
bailing_hybrid bamba bart bigbird_pegasus blenderbot blenderbot-small bloom camembert cpmant data2vec-text falcon_h1
falcon_mamba granitemoehybrid inkling2_text inkling_text jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 marian
mbart minimax mpt mvp nemotron_h olmo_hybrid openai-gpt pegasus plbart prophetnet qwen3_5 qwen3_5_moe qwen3_5_moe_text
qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer roberta roberta-prelayernorm roformer rwkv
trocr xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod zamba zamba2 zaya
"""
TOGETHER = frozenset(TOGETHER_NAMES.split())
"""Architectures that compute a prompt once for its answers, measured with transformers 5.23."""
APART = frozenset(APART_NAMES.split())
"""Architectures that compute each answer as a separate row, measured with transformers 5.23."""

WITHOUT_SCORES = frozenset((*ENCODERS, *["big_bird", "electra", "ernie", "megatron-bert", "rembert", "roc_bert"]))
"""Encoders: as reward models they read whole texts, and compute no score for each token."""


@dataclass(frozen=True)
class BranchPlan:
    """How the answers of pairs will be computed."""

    architecture: str | None
    """`model_type` of the model; None if it is not known before the model is downloaded."""
    separate_rows: bool | None
    """Whether each answer is computed as a separate row, with its prompt; None if that is not known yet."""
    reason: str = ""
    """Why."""
    repeated_tokens: float | None = None
    """Prompt tokens that separate rows read a second time, as a share of all tokens; None without data."""

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return dict(vars(self))

    def lines(self) -> list[str]:
        """Return the plan in words."""
        if self.separate_rows is None:
            return [f"{self.reason}; the run tests it when it begins"]
        if not self.separate_rows:
            saved = ""
            if self.repeated_tokens is not None:
                share = self.repeated_tokens / (1 + self.repeated_tokens)
                saved = f", {share:.0%} fewer tokens than separate rows"
            return [f"{self.architecture} computes a prompt once for both of its answers{saved}"]
        return [f"{self.reason}: each answer is computed as a separate row, {cost(self.repeated_tokens)}"]


def cost(repeated_tokens: float | None) -> str:
    """Return what separate rows cost.

    `repeated_tokens` are the prompt tokens that are read a second time, as a share of all tokens.
    """
    share = "" if repeated_tokens is None else f", {repeated_tokens:.0%} more tokens"
    return f"and each prompt twice{share}"


def plan_branches(config: Config, *, folder: Path, repeated_tokens: float | None = None) -> BranchPlan | None:
    """Return how the answers of pairs will be computed; None if the rows of the run are not pairs.

    Args:
        config: The configuration.
        folder: Base of relative paths in it.
        repeated_tokens: Prompt tokens that separate rows would read a second time, as a share of all tokens.
    """
    if not (config.trains and config.output_features[0].has_pairs):
        return None
    kind = architecture_of(config, folder=folder)
    adapter, attention = virtual_tokens(config), config.model_parameters.attention
    if adapter:
        reason = f"{adapter} puts virtual tokens before each row"
    elif attention not in ("auto", "sdpa", "eager"):
        reason = f"attention is {attention}, and masks of branches are for sdpa and eager"
    elif config.scores_answers and kind in WITHOUT_SCORES:
        reason = f"{kind} is an encoder, which computes no score for each token"
    elif kind in APART:
        reason = f"{kind} takes no mask that separates the answers to a prompt"
    elif kind in TOGETHER:
        return BranchPlan(kind, False, repeated_tokens=repeated_tokens)
    else:
        known = "the model is not downloaded" if kind is None else f"{kind} is not among the architectures measured"
        return BranchPlan(kind, None, f"{known}, so it is open whether a prompt is computed once", repeated_tokens)
    return BranchPlan(kind, True, reason, repeated_tokens)


def architecture_of(config: Config, *, folder: Path) -> str | None:
    """Return the `model_type` of the text model from local files; None if they are not there."""
    if isinstance(config.base_model, NewModel):
        return config.base_model.architecture if isinstance(config.base_model, ScratchModel) else None
    try:
        source = find_base(config.base_model, folder=folder)
        path = Path(source) / "config.json" if Path(source).is_dir() else cached_file(config, source, "config.json")
        described = parse_json(path.read_bytes()) if path is not None else {}
        described = described.get("text_config") or described
        return str(described["model_type"])
    except (ModelError, OSError, ValueError, KeyError, AttributeError):
        return None
