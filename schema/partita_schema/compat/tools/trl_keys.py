"""The keys of TRL's files, and what becomes of each."""

from partita_schema.compat.tools.conversion import By, Missing, Table, To, Unneeded
from partita_schema.compat.tools.training_arguments_keys import CACHE, DISTRIBUTED, KERNELS, PREFERENCES, TRAINING
from partita_schema.compat.tools.trl_preferences import PREFERENCE_TABLE

TEMPLATE = Missing("the chat template of the model's tokenizer is used; save another one with the tokenizer")

OTHER_TRAINERS = (
    *("num_generations", "reward_funcs", "reward_model_name_or_path", "reward_model_path", "num_ppo_epochs"),
    *("missing_eos", "center_rewards_coefficient", "reward_weights", "use_vllm", "judge", "epsilon_high"),
    *("num_mini_batches", "num_iterations", "scale_rewards", "epsilon", "vllm_mode", "vllm_server_host"),
)
"""Keys of the trainers of TRL that are not converted."""

TRL_KEYS: Table = {
    **TRAINING,
    # model
    "model_name_or_path": To("base_model"),
    "model_revision": To("model_parameters.revision"),
    "dtype": To("model_parameters.dtype"),
    "torch_dtype": To("model_parameters.dtype"),
    "trust_remote_code": To("trust_remote_code"),
    "attn_implementation": By("model_parameters.attention"),
    "use_flash_attention_2": To("model_parameters.attention", {True: "flash_attention_2", False: "auto"}),
    "model_init_kwargs": Missing("write the keys of model_parameters"),
    "use_peft": By("adapter.type: lora"),
    "lora_r": To("adapter.r"),
    "lora_alpha": To("adapter.alpha"),
    "lora_dropout": To("adapter.dropout"),
    "lora_target_modules": By("adapter.target_modules"),
    "lora_target_parameters": Missing("only modules are adapted"),
    "lora_modules_to_save": To("adapter.modules_to_save"),
    "lora_task_type": Unneeded("models are causal language models"),
    "use_rslora": To("adapter.use_rslora"),
    "use_dora": To("adapter.use_dora"),
    "load_in_4bit": By("quantization.bits"),
    "load_in_8bit": By("quantization.bits"),
    "bnb_4bit_quant_type": By("quantization.bnb_4bit_quant_type"),
    "bnb_4bit_quant_storage": Unneeded("4-bit weights are stored as bytes"),
    "use_bnb_nested_quant": By("quantization.bnb_4bit_use_double_quant"),
    # data
    "dataset_name": By("data.source"),
    "dataset_config": By("data.source: {type: hub, subset: ...}"),
    "dataset_train_split": By("data.source: {type: hub, split: ...}"),
    "dataset_test_split": By("data.validation: {type: hub, split: ...}"),
    "dataset_streaming": By("data.source: {streaming: true}"),
    "streaming": By("data.mix[].source: {streaming: true}"),
    "datasets": By("data.source or data.mix"),
    "test_split_size": By("data.split"),
    "dataset_text_field": By("output_features[0].name"),
    "dataset_num_proc": Unneeded("see data.loader.workers"),
    "dataset_batch_size": Unneeded("rows are tokenized as they are needed"),
    "dataset_kwargs": CACHE,
    "max_length": By("preprocessing.global_max_sequence_length or data.batching.context_length"),
    "max_seq_length": By("preprocessing.global_max_sequence_length or data.batching.context_length"),
    "truncation_mode": By("nothing: the end of long rows is cut"),
    "shuffle_dataset": Unneeded("rows are shuffled"),
    "packing": By("data.batching: {type: pack} or {type: chunk}"),
    "packing_strategy": By("data.batching"),
    "padding_free": Unneeded("batches are padded as their rows need it"),
    "pad_to_multiple_of": Unneeded("batches are padded as their rows need it"),
    "eval_packing": Unneeded("evaluation rows are not packed"),
    "chat_template_path": TEMPLATE,
    "eos_token": TEMPLATE,
    "pad_token": Unneeded("padding is not in the loss"),
    "completion_only_loss": By("trainer.completion_only_loss"),
    "assistant_only_loss": By("trainer.completion_only_loss"),
    "loss_type": By("trainer.loss, or nothing: the cross-entropy of the answers"),
    "activation_offloading": Missing("activations stay on the device; write trainer.gradient_checkpointing"),
    "ignore_bias_buffers": DISTRIBUTED,
    "num_processes": By("backend: {type: torchrun, processes: ...}"),
    "num_machines": Missing("write backend: {type: torchrun, nodes: ..., address: ...}"),
    "accelerate_config": Missing("write backend: {type: torchrun}"),
    "mixed_precision": To("trainer.mixed_precision"),
    "env": Missing("set these variables in the environment"),
    "use_liger_kernel": KERNELS,
    **PREFERENCE_TABLE,
    **dict.fromkeys(OTHER_TRAINERS, PREFERENCES),
}
"""Keys of TRL's files."""
