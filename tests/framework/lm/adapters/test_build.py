from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.adapters.build import peft_errors
from partita.lm.adapters.inits import best_low_rank, loftq, normal_float, normal_float_levels
from partita_schema.errors import ModelError
from partita_schema.rules.adapters import MOVES_WEIGHTS
from partita_schema.sections.adapter import LoraAdapter
from partita_trainers.base import Batch

from ....properties import ends

LORA = [
    {"type": "lora", "init": init, "r": 4}
    for init in ("default", "gaussian", "orthogonal", "pissa", "pissa_niter_4", "pissa_niter_16", "olora", "corda")
]
OTHERS: list[dict[str, Any]] = [
    {"type": "lora", "use_dora": True},
    {"type": "lora", "use_rslora": True, "init": "pissa", "r": 4, "alpha": 3},
    {"type": "lora", "init": "pissa", "r": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 1}},
    {"type": "lora", "init": "pissa", "r": 4, "use_dora": True},
    {"type": "lora", "layers_to_transform": [1], "bias": "all", "dropout": 0.1},
    {"type": "lora", "modules_to_save": ["lm_head"]},
    {"type": "adalora"},
    {"type": "ia3"},
    {"type": "vera", "r": 16},
    {"type": "loha"},
    {"type": "lokr", "decompose_both": True},
    {"type": "boft"},
    {"type": "oft"},
    {"type": "fourierft", "n_frequency": 100},
    {"type": "ln_tuning"},
    {"type": "vblora", "vector_length": 16},
    {"type": "prompt_tuning"},
    {"type": "prefix_tuning"},
    {"type": "prefix_tuning", "prefix_projection": True, "encoder_hidden_size": 32},
    {"type": "p_tuning"},
    {"type": "p_tuning", "encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 16},
    {"type": "peft", "peft_type": "miss", "parameters": {"r": 4}},
    {"type": "peft", "peft_type": "HRA"},
]


def name_of(adapter: dict[str, Any]) -> str:
    return "-".join(str(value) for value in adapter.values())


@pytest.mark.parametrize("adapter", ends([*LORA, *OTHERS]), ids=name_of)
def test_an_adapter_learns_resumes_bit_for_bit_and_answers_the_same_after_loading(
    small, adapter: dict[str, Any], tmp_path: Path
) -> None:
    config = small.config(adapter=adapter)
    lm = small.load(config)
    lm.prepare_training(6)
    untouched = {name: p.clone() for name, p in lm.module.named_parameters() if not p.requires_grad}
    small.take_steps(lm, steps=2)
    lm.save_checkpoint(tmp_path / "checkpoint")
    torch.manual_seed(0)
    straight = small.take_steps(lm, steps=2, first=3)

    resumed = small.load(config)
    resumed.prepare_training(6)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    torch.manual_seed(0)
    assert small.take_steps(resumed, steps=2, first=3) == straight
    assert resumed.fingerprint == lm.fingerprint
    assert all(torch.equal(p, untouched[name]) for name, p in lm.module.named_parameters() if name in untouched)

    start = small.held_out_loss(small.load(config))
    lm.save(tmp_path / "model")
    read = small.load(config, saved=tmp_path / "model", trainable=False)
    assert not any(parameter.requires_grad for parameter in read.module.parameters())
    learned = small.held_out_loss(lm)
    assert learned != start
    assert small.held_out_loss(read) == pytest.approx(learned, abs=max(2e-5, 0.01 * abs(learned - start)))
    assert read.fingerprint == lm.fingerprint


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "mixtral", "gpt_neox"])
@pytest.mark.parametrize("kind", ["lora", "ia3", "ln_tuning", "prefix_tuning"])
def test_default_targets_fit_every_architecture(small, architecture: str, kind: str) -> None:
    lm = small.load(small.config(architecture=architecture, adapter={"type": kind}))
    before = small.held_out_loss(lm)
    small.take_steps(lm, steps=2)
    assert small.held_out_loss(lm) != before


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "eva", "default", "gaussian"])
def test_an_init_does_not_change_the_outputs_of_the_model(small, init: str) -> None:
    batches = repetitive_batches(small)
    plain = small.load(small.config())
    lm = load_with(small, {"type": "lora", "init": init, "r": 2}, batches)
    tolerance = 0.05 if init == "gaussian" else 1e-4  # gaussian starts with B = 0, so the output is exact for any A.
    assert small.held_out_loss(lm) == pytest.approx(small.held_out_loss(plain), abs=tolerance)


def repetitive_batches(small) -> list[Batch]:
    """Return batches whose activations have few directions, so that EVA converges."""
    batches = [small.batch(seed, lengths=(24, 24, 20, 18)) for seed in range(2)]
    return [Batch(batch.input_ids_BT % 4 + 10, batch.labels_BT, batch.lengths_B, batch.keys) for batch in batches]


def load_with(small, adapter: dict[str, Any], batches: list[Batch] | None):
    from partita.lm.load_model import load_model
    from partita.tokenizers.load import load_tokenizer

    config = small.config(adapter=adapter)
    tokenizer = load_tokenizer(config, folder=Path(), texts=list)
    given = None if batches is None else (lambda: batches)
    return load_model(config, folder=Path(), tokenizer=tokenizer, batches=given, trainable=True)


def test_eva_starts_from_principal_directions_of_the_activations(small) -> None:
    lm = load_with(small, {"type": "lora", "init": "eva", "r": 2}, repetitive_batches(small))
    again = load_with(small, {"type": "lora", "init": "eva", "r": 2}, repetitive_batches(small))
    a = lm.adapted.base_model.model.model.layers[0].mlp.down_proj.lora_A["default"].weight
    torch.testing.assert_close(a @ a.T, torch.eye(len(a)), atol=1e-3, rtol=0)
    assert lm.fingerprint == again.fingerprint


@pytest.mark.long
def test_eva_reports_batches_that_are_too_small_and_missing_convergence(small) -> None:
    with pytest.raises(ModelError, match=r"eva with r 64 and rho 2.0 needs batches of at least 128 tokens"):
        load_with(small, {"type": "lora", "init": "eva", "r": 64}, [small.batch()])
    noisy = [small.batch(seed) for seed in range(3)]
    with pytest.raises(ModelError, match=r"eva did not converge in 50 passes over 3 batches"):
        load_with(small, {"type": "lora", "init": "eva", "r": 4}, noisy)


@pytest.mark.parametrize("init", ["eva", "corda"])
def test_an_init_that_needs_data_reports_missing_data(small, init: str) -> None:
    with pytest.raises(ModelError, match=rf"adapter\.init: {init} looks at training batches, and there are none here"):
        load_with(small, {"type": "lora", "init": init}, None)


def test_alpha_defaults_to_twice_the_rank(small) -> None:
    for kind in ("lora", "loha", "lokr"):
        layer = small.load(small.config(adapter={"type": kind, "r": 4})).adapted.base_model.model.model.layers[0]
        assert layer.self_attn.q_proj.scaling["default"] == 2


def test_an_adapter_without_matching_layers_lists_the_layers_of_the_model(small) -> None:
    with pytest.raises(
        ModelError, match=r"adapter\.target_modules: \['query'\] matches no module; .*down_proj.*v_proj"
    ):
        small.load(small.config(adapter={"type": "lora", "target_modules": ["query"]}))


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        ({"peft_type": "MIS"}, r"peft has no MIS; did you mean MISS\?"),
        ({"peft_type": "MISS", "parameters": {"rr": 4}}, r"MISS has no key rr; did you mean r\?"),
        ({"peft_type": "MISS", "parameters": {"task_type": "X"}}, r"MISS has no key task_type; it has "),
        ({"peft_type": "LORA", "parameters": {"layers_pattern": "h"}}, r"adapter\.parameters: LORA: "),
    ],
)
def test_other_methods_of_peft_are_checked_by_name_and_key(small, adapter: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        small.load(small.config(adapter={"type": "peft", **adapter}))


def test_trainable_tokens_are_rows_of_the_embedding(small) -> None:
    adapter = {"type": "peft", "peft_type": "TRAINABLE_TOKENS", "parameters": {"token_indices": [5, 6]}}
    lm = small.load(small.config(adapter=adapter))
    names = {name: tuple(part.shape) for name, part in lm.adapted.named_parameters() if part.requires_grad}
    assert list(names) == ["base_model.model.model.embed_tokens.trainable_tokens_delta.default"]
    assert next(iter(names.values())) == (2, lm.base.config.hidden_size)
    adapter["parameters"] = {"token_indices": [10**6]}
    with pytest.raises(ModelError, match=r"adapter: peft does not fit this model: .*"):
        small.load(small.config(adapter=adapter))


def test_butterfly_factors_that_peft_cannot_compute_are_refused(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: None)
    with pytest.raises(ModelError, match=r"adapter\.boft_n_butterfly_factor: peft computes 2 factors only with a CUDA"):
        small.load(small.config(adapter={"type": "boft", "boft_n_butterfly_factor": 2}))
    small.load(small.config(adapter={"type": "boft"}))


def test_an_error_of_peft_without_a_text_is_named(small) -> None:
    with (
        pytest.raises(ModelError, match=r"^adapter: lora does not fit this model: AssertionError$"),
        peft_errors(small.load(small.config()).base, LoraAdapter(type="lora")),
    ):
        raise AssertionError


def test_values_that_do_not_fit_the_model_are_reported(small) -> None:
    with pytest.raises(ModelError, match=r"adapter: vblora does not fit this model: .*256"):
        small.load(small.config(adapter={"type": "vblora"}))
    adapter = LoraAdapter(type="lora", init="olora")
    with pytest.raises(ModelError, match="olora does not work on layers of gpt2; write init: pissa"):
        small.load(small.config(architecture="gpt2").model_copy(update={"adapter": adapter}))


def test_training_continues_from_a_pretrained_adapter(small, tmp_path: Path) -> None:
    base = small.config()
    small.load(base).save(tmp_path / "base")
    on_base = {"base_model": "base", "adapter": {"type": "lora", "r": 4}}
    first = small.load(small.config(**on_base), folder=tmp_path)
    small.take_steps(first, steps=2)
    first.save(tmp_path / "first")
    adapter = {"type": "lora", "pretrained_adapter_weights": "first"}
    second = small.load(small.config(base_model="base", adapter=adapter), folder=tmp_path)
    assert small.held_out_loss(second) == small.held_out_loss(first)
    before = second.fingerprint
    small.take_steps(second, steps=1)
    assert second.fingerprint != before
    other = {"type": "vera", "pretrained_adapter_weights": "first"}
    with pytest.raises(ModelError, match=r"adapter\.type: the adapter in .*first is LORA; write type: lora"):
        small.load(small.config(base_model="base", adapter=other), folder=tmp_path)


@pytest.fixture(scope="module")
def continued(small, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that loads a model with a saved adapter, given keys of the adapter section."""
    folder = tmp_path_factory.mktemp("continued")
    small.load(small.config()).save(folder / "base")

    def load(section: dict[str, Any], keys: dict[str, Any]) -> Any:
        saved = folder / section["type"]
        if not saved.exists():
            first = small.load(small.config(base_model="base", adapter=section), folder=folder)
            first.prepare_training(4)
            small.take_steps(first, steps=4)
            first.save(saved)
        adapter = {"type": section["type"], "pretrained_adapter_weights": saved.name, **keys}
        return small.load(small.config(base_model="base", adapter=adapter), folder=folder)

    return load


SAVED = {"type": "lora", "r": 4, "target_modules": ["v_proj", "q_proj"], "rank_pattern": {"q_proj": 2}}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"r": 32}, r"adapter\.r: 32 does not fit the adapter in .*lora, which has 4; remove the key"),
        ({"alpha": 5}, r"adapter\.alpha: 5.0 does not fit .*, which has 8; remove the key"),
        ({"use_rslora": True}, r"adapter\.use_rslora: True does not fit .*, which has False"),
        ({"r": 16}, r"adapter\.r: 16 does not fit the adapter in .*lora, which has 4"),  # 16 is the default
        ({"target_modules": "all-linear"}, r"\.target_modules: all-linear does not .* has \['q_proj', 'v_proj'\]"),
        ({"target_modules": ["q_proj"]}, r"\.target_modules: \['q_proj'\] does not .* has \['q_proj', 'v_proj'\]"),
        ({"modules_to_save": ["lm_head"]}, r"adapter\.modules_to_save: \['lm_head'\] does not fit .* has None"),
        ({"rank_pattern": {"q_proj": 3}}, r"adapter\.rank_pattern: \{'q_proj': 3\} does not fit"),
    ],
)
def test_keys_that_a_pretrained_adapter_does_not_have_are_refused(
    continued: Callable[..., Any], keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        continued(SAVED, keys)


def test_a_pretrained_adapter_takes_its_own_keys_and_another_dropout(continued: Callable[..., Any]) -> None:
    lm = continued(SAVED, SAVED | {"target_modules": ["q_proj", "v_proj"], "alpha": 8, "dropout": 0.5})
    layer = lm.adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert (layer.r["default"], layer.lora_dropout["default"].p) == (2, 0.5)
    assert lm.adapted.active_peft_config.lora_dropout == 0.5


KEEPS_KEYS = [
    one
    for one in [*LORA, *OTHERS]
    if one.get("init") not in MOVES_WEIGHTS
    and one["type"] not in {"peft", "prompt_tuning", "prefix_tuning", "p_tuning"}
]
"""Adapters that can be trained further, and are saved with the keys of their section."""


@pytest.mark.parametrize("section", KEEPS_KEYS, ids=name_of)
def test_a_pretrained_adapter_takes_all_keys_of_the_section_that_it_was_trained_with(
    small, tmp_path: Path, section: dict[str, Any]
) -> None:
    small.load(small.config()).save(tmp_path / "base")
    first = small.config(base_model="base", adapter=section)
    small.load(first, folder=tmp_path).save(tmp_path / "first")
    keys = first.adapter.model_dump(mode="json", exclude={"init"}) | {"pretrained_adapter_weights": "first"}
    second = small.config(base_model="base", adapter=keys)
    assert second.adapter.model_dump(mode="json") == keys
    small.load(second, folder=tmp_path)


def test_virtual_tokens_are_not_trained_further(continued: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"has virtual tokens, and peft cannot train them further; .* none\} to use"):
        continued({"type": "prompt_tuning"}, {})


def test_an_adalora_adapter_without_some_of_its_ranks_is_not_trained_further(continued: Callable[..., Any]) -> None:
    section = {"type": "adalora", "init_r": 4, "target_r": 2}
    with pytest.raises(ModelError, match=r"adapter\.pretrained_adapter_weights: .* has lost ranks in its training"):
        continued(section, {"init_r": 4, "target_r": 2})


def test_parameters_of_another_method_are_those_of_the_pretrained_adapter(continued: Callable[..., Any]) -> None:
    section = {"type": "peft", "peft_type": "MISS", "parameters": {"r": 4}}
    continued(section, {"peft_type": "MISS", "parameters": {"r": 4}})
    with pytest.raises(ModelError, match=r"adapter\.parameters\.r: 2 does not fit the adapter in .* has 4"):
        continued(section, {"peft_type": "MISS", "parameters": {"r": 2}})


def test_a_missing_pretrained_adapter_is_reported(small, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "first").mkdir(parents=True)
    for name, text in (
        ("./adapters/frist", r"pretrained_adapter_weights: there is no folder .*frist; did you mean first\?"),
        ("./adapters/first", r"pretrained_adapter_weights: .*first holds no adapter_config\.json"),
    ):
        config = small.config(adapter={"type": "lora", "pretrained_adapter_weights": name})
        with pytest.raises(ModelError, match=text):
            small.load(config, folder=tmp_path)


def test_an_untrained_adapter_is_not_added_when_nothing_is_trained(small) -> None:
    config = small.config(adapter={"type": "lora"})
    assert small.load(config, trainable=False).adapted is None


def test_prompt_tuning_starts_from_the_tokens_of_a_text_or_of_the_vocabulary(small) -> None:
    adapter = {"type": "prompt_tuning", "num_virtual_tokens": 5}
    lm = small.load(small.config(adapter=adapter | {"init_text": "abc"}))
    words = lm.base.get_input_embeddings().weight
    learned = lm.adapted.prompt_encoder["default"].embedding.weight
    assert torch.equal(learned, words[torch.tensor(lm.tokenizer.encode("abcab"))])
    drawn = small.load(small.config(adapter=adapter)).adapted.prompt_encoder["default"].embedding.weight
    assert all((words == vector).all(dim=1).any() for vector in drawn)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"modules_to_save": ["lm_haed"]}, "modules_to_save: lm_haed matches no module; did you mean lm_head?"),
        ({"exclude_modules": ["up_prj"]}, "exclude_modules: up_prj matches no module; did you mean up_proj?"),
        ({"exclude_modules": ".*q_projj"}, "exclude_modules: .*q_projj matches no module; did you mean q_proj?"),
        ({"rank_pattern": {"q_prj": 4}}, "rank_pattern: q_prj matches no module; did you mean q_proj?"),
        ({"alpha_pattern": {r"layers\.9\..*": 4}}, r"alpha_pattern: layers\.9\..* matches no module"),
        (
            {"rank_pattern": {"up_proj": 4}, "target_modules": ["q_proj"]},
            "rank_pattern: up_proj matches no adapted module; add it to target_modules",
        ),
    ],
)
def test_names_that_match_no_module_are_reported(small, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        small.load(small.config(adapter={"type": "lora", **keys}))
    assert str(refused.value) == f"adapter.{message}"


def test_names_that_match_modules_are_used(small) -> None:
    patterns = {"rank_pattern": {r"layers\.0\..*q_proj": 3, "model.layers.1.self_attn.v_proj": 5}}
    names = {"modules_to_save": ["lm_head"], "exclude_modules": ["k_proj"], "alpha_pattern": {"v_proj": 7}}
    lm = small.load(small.config(adapter={"type": "lora", "r": 2, **patterns, **names}))
    layers = lm.adapted.base_model.model.model.layers
    ranks = [layers[0].self_attn.q_proj.r["default"], layers[1].self_attn.v_proj.r["default"]]
    assert ranks == [3, 5]
    assert not hasattr(layers[0].self_attn.k_proj, "r")


def test_missing_layers_are_reported(small) -> None:
    with pytest.raises(ModelError, match=r"adapter\.layers_to_transform: \[7\] matches no module"):
        small.load(small.config(adapter={"type": "lora", "layers_to_transform": [7]}))


def test_adalora_prunes_to_its_budget_and_penalises_matrices_that_are_not_orthogonal(small) -> None:
    adapter = {"type": "adalora", "init_r": 6, "target_r": 2, "tinit": 0.1, "tfinal": 2, "orth_reg_weight": 0.3}
    lm = small.load(small.config(adapter=adapter))
    lm.prepare_training(10)
    factors = {n: p.detach() for n, p in lm.module.named_parameters() if "lora_A" in n or "lora_B" in n}
    distance = [
        torch.linalg.norm((f @ f.T if "lora_A" in n else f.T @ f) - torch.eye(6)).item() for n, f in factors.items()
    ]
    assert lm.auxiliary_loss().item() == pytest.approx(0.3 * sum(distance) / len(distance), rel=1e-5)
    small.take_steps(lm, steps=10)
    kept = sum(sum(ranks) for ranks in lm.adapted.active_peft_config.rank_pattern.values())
    assert kept == 2 * 14
    alive = sum(int((p != 0).sum()) for n, p in lm.module.named_parameters() if "lora_E" in n)
    assert alive <= kept


def test_layers_without_gradients_lose_their_ranks_first(small) -> None:
    adapter = {"type": "adalora", "init_r": 4, "target_r": 2}
    trainer = {"type": "finetune", "layers_to_freeze_regex": r"layers\.0\."}
    lm = small.load(small.config(adapter=adapter, trainer=trainer))
    lm.prepare_training(8)
    small.take_steps(lm, steps=8)
    kept: dict[str, int] = {}
    for name, ranks in lm.adapted.active_peft_config.rank_pattern.items():
        layer = "first" if ".layers.0." in name else "second"
        kept[layer] = kept.get(layer, 0) + sum(ranks)
    assert kept["first"] < kept["second"]
    assert all(factor.grad is None for name, factor in lm.module.named_parameters() if ".layers.0." in name)


def test_alpha_of_adalora_defaults_to_twice_its_initial_rank(small) -> None:
    ranks = {"type": "adalora", "init_r": 6, "target_r": 2}
    for adapter, alpha in ((ranks, 12), ({**ranks, "alpha": 5}, 5)):
        assert small.load(small.config(adapter=adapter)).adapted.active_peft_config.lora_alpha == alpha


def test_the_phases_of_adalora_leave_a_step_for_pruning_if_possible(small) -> None:
    lm = small.load(small.config(adapter={"type": "adalora", "init_r": 6, "target_r": 2, "tinit": 0.3, "tfinal": 8}))
    settings, found = lm.adapted.active_peft_config, {}
    for steps in (1, 2, 10, 40):
        lm.prepare_training(steps)
        found[steps] = (settings.tinit, settings.tfinal, settings.total_step)
    assert found == {1: (0, 0, 2), 2: (1, 0, 2), 10: (3, 6, 10), 40: (12, 8, 40)}


@pytest.mark.parametrize(("steps", "tfinal"), [(1, 0), (3, 2), (3, 9)])
def test_adalora_measures_importance_before_it_prunes_in_a_short_run(small, steps: int, tfinal: int) -> None:
    adapter = {"type": "adalora", "init_r": 4, "target_r": 2, "tfinal": tfinal}
    lm = small.load(small.config(adapter=adapter))
    lm.prepare_training(steps)
    assert len(small.take_steps(lm, steps=steps)) == steps


def test_adalora_without_a_training_plan_is_an_internal_error(small) -> None:
    lm = small.load(small.config(adapter={"type": "adalora"}))
    with pytest.raises(AssertionError, match="prepare_training"):
        lm.after_step(1)


def test_normal_float_levels_at_four_bits_are_those_of_the_paper() -> None:
    paper = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    paper += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    torch.testing.assert_close(normal_float_levels(4), torch.tensor(paper), atol=2e-4, rtol=0)
    assert len(normal_float_levels(2)) == 4


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_loftq_has_a_lower_error_than_rounding_and_more_steps_lower_it(bits: int) -> None:
    weight = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    rounding = (weight - normal_float(weight, bits=bits)).norm()
    errors = []
    for iterations in (1, 4):
        rounded, a, b = loftq(weight, bits=bits, rank=8, iterations=iterations)
        errors.append((weight - rounded - b @ a).norm())
        assert a.shape == (8, 40)
        assert b.shape == (48, 8)
    assert errors[0] < 0.9 * rounding
    assert errors[1] < errors[0]


def test_the_best_low_rank_approximation_is_exact_if_the_rank_suffices() -> None:
    weight = torch.randn(9, 2) @ torch.randn(2, 7)
    a, b = best_low_rank(weight, rank=2)
    torch.testing.assert_close(b @ a, weight)


def test_a_model_with_rounded_weights_is_saved_merged(small, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small.config(adapter={"type": "lora", "init": "loftq", "r": 4, "loftq_bits": 2})
    plain, lm = small.load(small.config()), small.load(config)
    assert small.held_out_loss(lm) != pytest.approx(small.held_out_loss(plain), abs=1e-3)
    small.take_steps(lm, steps=2)
    with caplog.at_level("INFO"):
        lm.save(tmp_path)
    assert "init loftq changed the base weights: the result is saved as a plain, merged model" in caplog.text
    assert not (tmp_path / "adapter_config.json").exists()
    read = small.load(config, saved=tmp_path, trainable=False)
    assert read.adapted is None
    assert small.held_out_loss(read) == pytest.approx(small.held_out_loss(lm), abs=1e-4)
