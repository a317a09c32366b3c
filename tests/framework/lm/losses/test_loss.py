import typing
from pathlib import Path

import pytest
import torch

from partita_schema.sections.model import Architecture
from partita_trainers.base import Batch

from ..conftest import gradients

ARCHITECTURES = typing.get_args(Architecture)


def full_logits_loss(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of transformers over all positions, with an attention mask; a sum because it is divided by 1."""
    loss: torch.Tensor = module(
        input_ids=batch.input_ids_BT,
        attention_mask=batch.attention_mask(),
        labels=batch.labels_BT,
        num_items_in_batch=1,
    ).loss
    return loss


def assert_same_loss(lm, batch: Batch, *, tolerance: float = 1e-5) -> None:
    ours, theirs = lm.loss(lm.module, batch), full_logits_loss(lm.module, batch)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.float(), rtol=tolerance, atol=0)
    a, b = gradients(ours, lm.module).float(), gradients(theirs, lm.module).float()
    assert b.norm() > 0
    assert (a - b).norm() <= 10 * tolerance * b.norm()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradients_equal_those_of_full_logits_and_a_mask(small, architecture: str) -> None:
    lm = small.load(small.config(architecture=architecture))
    small.sharpen(lm.module)
    assert_same_loss(lm, small.batch())


def library_log_probs(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return log-probabilities of the loss tokens from the logits of transformers, each row computed alone."""
    found = []
    with torch.no_grad():
        for ids, labels, length in zip(batch.input_ids_BT, batch.labels_BT, batch.lengths_B.tolist(), strict=True):
            log_probs = module(input_ids=ids[None, :length]).logits[0].double().log_softmax(-1)
            found += [log_probs[place - 1, labels[place]] for place in range(1, length) if labels[place] != -100]
    return torch.stack(found).float()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt"])
def test_token_log_probs_equal_those_of_the_logits_of_transformers(small, architecture: str) -> None:
    lm, batch = small.load(small.config(architecture=architecture)), small.batch()
    small.sharpen(lm.module)
    log_probs = lm.token_log_probs(lm.module, batch)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.detach(), library_log_probs(lm.module, batch), rtol=0, atol=1e-5)
    assert batch.loss_token_rows.tolist() == [0] * 4 + [1] * 4 + [2] * 6 + [3]


@pytest.mark.parametrize("adapter", [None, {"type": "lora", "init": "gaussian"}, {"type": "prompt_tuning"}])
def test_the_loss_is_the_negative_sum_of_token_log_probs_with_the_same_gradients(small, adapter: dict | None) -> None:
    lm, batch = small.load(small.config(adapter=adapter)), small.batch()
    loss, negative_sum = lm.loss(lm.module, batch), -lm.token_log_probs(lm.module, batch).sum()
    torch.testing.assert_close(negative_sum, loss, rtol=1e-6, atol=0)
    assert torch.equal(gradients(negative_sum, lm.module), gradients(loss, lm.module))


@pytest.mark.parametrize(
    "adapter",
    [
        {"type": "lora", "init": "gaussian"},
        {"type": "lora", "target_modules": ["q_proj", "lm_head", "embed_tokens"]},
        {"type": "lora", "modules_to_save": ["lm_head"]},
        {"type": "prompt_tuning", "num_virtual_tokens": 3},
        {"type": "p_tuning", "num_virtual_tokens": 3},
        {"type": "prefix_tuning", "num_virtual_tokens": 3},
    ],
    ids=lambda adapter: "-".join(map(str, adapter.values())),
)
def test_loss_under_an_adapter_equals_that_of_full_logits_and_a_mask(small, adapter: dict) -> None:
    lm = small.load(small.config(adapter=adapter))
    small.take_steps(lm, steps=2)
    assert_same_loss(lm, small.batch())


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "gemma2"])
def test_virtual_tokens_before_the_prompt_shift_the_labels_on_other_architectures(small, architecture: str) -> None:
    lm = small.load(small.config(architecture=architecture, adapter={"type": "prompt_tuning"}))
    assert_same_loss(lm, small.batch())


def test_loss_with_activation_checkpointing_is_the_same(small) -> None:
    plain = small.load(small.config(adapter={"type": "lora", "init": "gaussian"}))
    saving = small.load(
        small.config(
            adapter={"type": "lora", "init": "gaussian"}, trainer={"type": "finetune", "gradient_checkpointing": True}
        )
    )
    batch = small.batch()
    with plain.training(), saving.training():
        a, b = plain.loss(plain.module, batch), saving.loss(saving.module, batch)
        assert a.item() == b.item()
        torch.testing.assert_close(gradients(a, plain.module), gradients(b, saving.module))


def test_loss_in_bfloat16_is_summed_in_float32(small, base_folder: Path) -> None:
    config = small.config(base_model=str(base_folder), adapter={"type": "lora"}, model_parameters={"dtype": "bfloat16"})
    lm = small.load(config)
    assert lm.base.dtype == torch.bfloat16
    assert_same_loss(lm, small.batch(), tolerance=2e-3)


def test_the_output_layer_computes_only_positions_that_predict_a_label(small) -> None:
    lm, batch, seen = small.load(small.config()), small.batch(), []
    lm.base.get_output_embeddings().register_forward_hook(lambda layer, inputs, output: seen.append(output.shape))
    lm.loss(lm.module, batch)
    lm.token_log_probs(lm.module, batch)
    with torch.no_grad():
        lm.module(input_ids=batch.input_ids_BT)
    assert [tuple(shape[:2]) for shape in seen] == [*[(1, batch.loss_tokens)] * 2, (4, 24)]


@pytest.mark.long
def test_a_wrapped_module_has_the_same_loss(small) -> None:
    lm, batch = small.load(small.config()), small.batch()
    compiled = torch.compile(lm.module, backend="eager")
    assert lm.loss(compiled, batch).item() == lm.loss(lm.module, batch).item()
    shorter = small.batch(1, lengths=(11, 7))
    assert lm.loss(compiled, shorter).item() == lm.loss(lm.module, shorter).item()


@pytest.mark.parametrize("lengths", [(), (1, 1)])
def test_a_batch_without_labels_needs_no_forward_pass_and_can_be_differentiated(
    small, lengths: tuple[int, ...]
) -> None:
    lm = small.load(small.config())
    width = max(lengths, default=1)
    ids = torch.full((len(lengths), width), 7)
    batch = Batch(ids, torch.full_like(ids, -100), torch.tensor(lengths, dtype=torch.int64), ("x",) * len(lengths))
    lm.base.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    loss = lm.loss(lm.module, batch)
    loss.backward()
    assert loss.item() == 0
    log_probs = lm.token_log_probs(lm.module, batch)
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert all(p.grad is None or not p.grad.any() for p in lm.module.parameters())


def test_the_first_token_of_a_row_has_no_loss(small) -> None:
    lm, batch = small.load(small.config()), small.batch(lengths=(6, 6))
    labels = batch.labels_BT.clone()
    labels[:, 0] = batch.input_ids_BT[:, 0]
    with_first = Batch(batch.input_ids_BT, labels, batch.lengths_B, batch.keys)
    assert lm.loss(lm.module, with_first).item() == lm.loss(lm.module, batch).item()


def embeddings_seen(lm, batch: Batch) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = lm.base.get_input_embeddings().register_forward_hook(lambda layer, inputs, output: seen.append(output))
    lm.loss(lm.module, batch)
    hook.remove()
    return seen[0].detach()


def test_neftune_noise_is_uniform_within_alpha_over_the_root_of_length_times_width(small) -> None:
    lm = small.load(small.config(model_parameters={"neftune_noise_alpha": 5.0}))
    batch = small.batch(lengths=(60, 15))
    clean = embeddings_seen(lm, batch)
    with lm.training():
        noise = embeddings_seen(lm, batch) - clean
    for row, length in enumerate((60, 15)):
        reach = 5.0 / (length * 64) ** 0.5
        assert noise[row].abs().max() <= reach * 1.001
        assert noise[row].std() == pytest.approx(reach / 3**0.5, rel=0.05)


def test_there_is_no_neftune_noise_outside_training_and_in_evaluation_mode(small) -> None:
    lm = small.load(small.config(model_parameters={"neftune_noise_alpha": 5.0}))
    batch = small.batch()
    clean = embeddings_seen(lm, batch)
    with lm.training():
        lm.module.eval()
        assert torch.equal(embeddings_seen(lm, batch), clean)
    assert torch.equal(embeddings_seen(lm, batch), clean)


def test_training_mode_ends_with_the_context(small) -> None:
    lm = small.load(small.config())
    with lm.training():
        assert lm.module.training
    assert not lm.module.training
