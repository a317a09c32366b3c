"""Tests of the training probe: it does the work of training and leaves no trace."""

import importlib.util
import json
import random
import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partita_trainers.engine
from partita_schema.sections.trainer import CustomTrainer
from partita_trainers.base import ProbeContext
from partita_trainers.batch_size.probe import Volume
from partita_trainers.checkpoints.checkpoint import random_state
from partita_trainers.engine import TrainEngine, dry_run
from partita_trainers.finetune import Finetune
from partita_trainers.registry import check_probe
from partita_trainers.training_probe import TrainingProbe, worst_batch
from partita_trainers.zero_shot import ZeroShot

from ..properties import first
from .conftest import VOCABULARY, BigramModel, comparable, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_trainer" / "sharpness.py"
OPTIMIZERS = ["adamw", "adafactor", "sgd", "muon", "lion_8bit", "adamw_8bit", "paged_adamw_8bit", "schedule_free_adamw"]


def probe_context(
    work: Any, *, longest_row: int = 10, max_loss_tokens: int = 7, accumulates: bool = False
) -> ProbeContext:
    return ProbeContext(
        config=work.config,
        lm=work.lm,
        device=work.device,
        max_row_tokens=longest_row,
        max_loss_tokens=max_loss_tokens,
        token_ids=tuple(range(3, 23)),
        max_rows=48,
        volume=lambda rows: Volume(batches=-(-48 // rows), tokens=480),
        estimated_bytes=lambda rows: rows,
        accumulates=accumulates,
    )


def probe_of(work: Any, **sizes: Any) -> TrainingProbe:
    return Finetune(work.config.trainer).probe(probe_context(work, **sizes))


@pytest.mark.parametrize("optimizer", first(OPTIMIZERS))
def test_training_after_a_probe_equals_training_without_one(make_work: Any, tmp_path: Path, optimizer: str) -> None:
    rate = {"sgd": 0.3, "lion_8bit": 0.003}.get(optimizer, 0.02)
    options = {"optimizer": {"type": optimizer, "weight_decay": 0.1}, "learning_rate": rate, "epochs": 1}
    plain = make_work(run=make_work.recorder(tmp_path / "plain"), **options)
    run(plain)
    tried = make_work(run=make_work.recorder(tmp_path / "tried"), **options)
    with probe_of(tried) as probe:
        for rows in (1, 4, 16):
            probe.run(rows)
    run(tried)
    assert comparable(tried.run.log) == comparable(plain.run.log)
    for one, other in zip(tried.lm.module.parameters(), plain.lm.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_everything_is_restored_after_a_probe_also_after_an_error(make_work: Any) -> None:
    work = make_work()
    module = work.lm.module
    module.register_buffer("seen", torch.zeros(3))
    module.longest = 5
    module.dropout.train()

    def grow(part: Any, inputs: Any) -> None:
        part.longest += 1
        part.seen.add_(1)
        part.seen = part.seen + 1
        random.random(), np.random.rand(), torch.rand(1)

    module.register_forward_pre_hook(grow)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    buffer, attributes, state = module.seen, sorted(vars(module)), random_state()
    longest = []

    def fail_in_a_probe() -> None:
        with probe_of(work) as probe:
            probe.run(4)
            longest.append(module.longest)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_a_probe()
    assert longest == [7]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module.seen is buffer
    assert module.longest == 5
    assert (module.training, module.dropout.training, module.hidden.training) == (False, True, False)
    assert sorted(vars(module)) == attributes
    assert all(parameter.grad is None for parameter in module.parameters())
    after = random_state()
    assert torch.equal(after.pop("torch"), state.pop("torch"))
    assert after == state


def test_a_probe_does_not_change_weights(make_work: Any) -> None:
    work = make_work(optimizer={"type": "adamw", "weight_decay": 0.5})
    before = [parameter.detach().clone() for parameter in work.lm.module.parameters()]
    with probe_of(work) as probe:
        probe.run(8)
        for one, other in zip(work.lm.module.parameters(), before, strict=True):
            assert torch.equal(one, other)
            assert one.grad is None


def test_optimizer_state_is_kept_during_a_probe_and_freed_after_it(
    make_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TrainEngine] = []
    build = TrainEngine.build_optimizers

    def remember(self: TrainEngine) -> None:
        build(self)
        made.append(self)

    monkeypatch.setattr(TrainEngine, "build_optimizers", remember)
    work = make_work()
    with probe_of(work) as probe:
        (engine,) = made
        (optimizer,) = engine.raw_optimizers
        assert not optimizer.state
        probe.run(1)
        kept = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
        assert len(kept) == len(list(work.lm.module.parameters()))
        probe.run(4)
        assert all(one() is state["exp_avg"] for one, state in zip(kept, optimizer.state.values(), strict=True))
        del optimizer, engine
    made.clear()
    assert all(one() is None for one in kept)


@pytest.mark.long
def test_a_run_out_of_memory_leaves_nothing_and_the_next_one_succeeds(make_work: Any, tmp_path: Path) -> None:
    plain = make_work(run=make_work.recorder(tmp_path / "plain"), epochs=1)
    run(plain)
    work = make_work(run=make_work.recorder(tmp_path / "tried"), epochs=1)
    outputs = []

    def check(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        outputs.append(weakref.ref(output))
        if output.shape[0] > 8:
            output.register_hook(lambda gradient: throw(torch.OutOfMemoryError("CUDA out of memory")))

    hook = work.lm.module.hidden.register_forward_hook(check)
    full = False
    with probe_of(work) as probe:
        probe.run(8)
        try:
            probe.run(9)
        except torch.OutOfMemoryError:
            full = True
        assert full
        assert all(output() is None for output in outputs)
        assert all(parameter.grad is None for parameter in work.lm.module.parameters())
        probe.run(8)
    hook.remove()
    run(work)
    assert comparable(work.run.log) == comparable(plain.run.log)


def throw(error: BaseException) -> None:
    raise error


def shapes_of(work: Any) -> list[tuple[int, ...]]:
    """Record the shapes of all forward passes from now on."""
    shapes: list[tuple[int, ...]] = []
    work.lm.module.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_a_probe_uses_the_longest_rows_after_one_short_row(make_work: Any) -> None:
    work = make_work()
    shapes = shapes_of(work)
    probe = probe_of(work, longest_row=40, max_loss_tokens=9)
    assert (probe.purpose, probe.max_rows, probe.prompt_tokens, probe.new_tokens) == ("training", 48, 40, 0)
    assert probe.decode_step(4) == 0.0
    assert probe.volume(16) == Volume(batches=3, tokens=480)
    with probe:
        assert probe.run(5).prefill_seconds > 0
        probe.warm_up()
        probe.run(2)
    assert shapes == [(1, 16), (5, 40), (2, 40)]


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_probe_holds_the_gradients_that_the_later_micro_batches_of_a_step_begin_with(
    make_work: Any, accumulates: bool
) -> None:
    work = make_work()
    module = work.lm.module
    module.unused = torch.nn.Linear(4, 4)
    used = {name for name, _ in module.named_parameters() if not name.startswith("unused")}
    held = []

    def look(*_: Any) -> None:
        gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        assert not any(gradient.any() for gradient in gradients.values())
        held.append(set(gradients))

    module.register_forward_pre_hook(look)
    with probe_of(work, accumulates=accumulates) as probe:
        probe.run(4)
        probe.run(2)
        assert all(parameter.grad is None for parameter in module.parameters())
    assert held == [set(), *[used if accumulates else set()] * 2]


class WideModel(BigramModel):
    """A fast model, whose gradients and activations are large."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.module.embed = torch.nn.Embedding(4_096, 256)
        self.module.hidden = torch.nn.Sequential(*[torch.nn.Sigmoid() for _ in range(20)])
        self.module.head = torch.nn.Linear(256, VOCABULARY)


def allocated_at_most(work: Callable[[], object], folder: Path) -> int:
    """Return the peak of the bytes that torch allocates, which does not depend on what the heap has kept before."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(change for _, change in changes))


def test_a_probe_takes_the_memory_of_a_step_of_several_micro_batches(make_work: Any, tmp_path: Path) -> None:
    work = make_work(lm=WideModel())
    peaks = {}
    for accumulates in (False, True):
        with probe_of(work, longest_row=128, accumulates=accumulates) as probe:
            probe.warm_up()
            peaks[accumulates] = allocated_at_most(partial(probe.run, 8), tmp_path)
    batch = worst_batch(8, tokens=128, loss_tokens=7, token_ids=range(3, 23))
    with dry_run(work.config.trainer, work.lm, device=work.device) as take_step:
        take_step([batch])
        whole, parts = (allocated_at_most(partial(take_step, [batch] * count), tmp_path) for count in (1, 2))
    gradients = work.lm.module.embed.weight.nbytes
    assert parts - whole > 0.95 * gradients
    assert abs(peaks[False] - whole) < 0.05 * gradients
    assert abs(peaks[True] - parts) < 0.05 * gradients


@pytest.mark.parametrize(("longest", "loss_tokens"), [(1, 1), (6, 6), (6, 0), (2, 5)])
def test_rows_of_extreme_lengths_have_loss_tokens(make_work: Any, longest: int, loss_tokens: int) -> None:
    with probe_of(make_work(), longest_row=longest, max_loss_tokens=loss_tokens) as probe:
        assert probe.run(3).prefill_seconds > 0


@pytest.mark.long
def test_bf16_training_is_probed_in_bf16(make_work: Any, tmp_path: Path) -> None:
    def trained(name: str, *, tried: bool, **options: Any) -> tuple[list[Any], list[torch.dtype]]:
        work = make_work(run=make_work.recorder(tmp_path / name), epochs=1, **options)
        seen: list[torch.dtype] = []
        work.lm.module.hidden.register_forward_hook(
            lambda layer, inputs, output: seen.append(output.dtype) if output.requires_grad else None
        )
        if tried:
            with probe_of(work) as probe:
                probe.run(2)
                probe.run(4)
            assert set(seen) == {torch.bfloat16}
            assert not {"forward", "_original_forward", "_is_accelerate_prepared"} & vars(work.lm.module).keys()
            seen.clear()
        run(work)
        assert not {"forward", "_original_forward", "_is_accelerate_prepared"} & vars(work.lm.module).keys()
        return comparable(work.run.log), seen

    log, seen = trained("tried", tried=True, mixed_precision="bf16")
    assert set(seen) == {torch.bfloat16}
    assert log == trained("untried", tried=False, mixed_precision="bf16")[0]
    assert log != trained("plain", tried=False)[0]


def test_losses_that_are_not_finite_do_not_reach_the_weights_of_a_probe(make_work: Any) -> None:
    work = make_work()
    work.lm.module.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with probe_of(work) as probe:
        probe.run(4)
        assert all(torch.isfinite(parameter).all() for parameter in work.lm.module.parameters())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_model_trains_with_the_same_kernels_after_a_probe(make_work: Any, tmp_path: Path) -> None:
    options = {"compile": True, "mixed_precision": "bf16", "epochs": 1}
    plain = make_work(run=make_work.recorder(tmp_path / "plain"), **options)
    run(plain)
    torch.compiler.reset()
    tried = make_work(run=make_work.recorder(tmp_path / "tried"), **options)
    with probe_of(tried) as probe:
        probe.run(3)
        probe.run(5)
    run(tried)
    assert comparable(tried.run.log) == comparable(plain.run.log)


class Fp16:
    """accelerate as on a GPU in fp16, without the casts: a CPU has no kernels for them."""

    def __init__(self, build: Any) -> None:
        self.build = build
        self.made: list[Any] = []

    def __call__(self, config: Any, device: torch.device) -> Any:
        accelerator = self.build(config, device)
        accelerator.native_amp = False
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        prepare = accelerator.prepare_model

        def prepare_model(module: torch.nn.Module, **options: bool) -> Any:
            prepared = prepare(module, **options)
            accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
            return prepared

        accelerator.prepare_model = prepare_model
        self.made.append(accelerator)
        return accelerator


def test_steps_that_the_loss_scale_skips_are_taken_until_there_is_state(
    make_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp16 = Fp16(partita_trainers.engine.build_accelerator)
    monkeypatch.setattr(partita_trainers.engine, "build_accelerator", fp16)
    work = make_work(optimizer={"type": "adamw", "fused": False})  # a fused one has its state after a skipped step
    loss = work.lm.loss
    work.lm.loss = lambda module, batch: 1000 * loss(module, batch)
    before = [parameter.detach().clone() for parameter in work.lm.module.parameters()]
    shapes = shapes_of(work)
    with probe_of(work) as probe:
        probe.warm_up()
        (accelerator,) = fp16.made
        (optimizer,) = accelerator._optimizers
        assert len(shapes) > 4
        assert len(optimizer.state) == len(before)
        skipped = len(shapes)
        probe.run(4)
        assert len(shapes) == skipped + 1

        hook = optimizer.optimizer.register_step_pre_hook(
            lambda *_: throw(torch.OutOfMemoryError("CUDA out of memory"))
        )
        with pytest.raises(torch.OutOfMemoryError):
            probe.run(8)
        hook.remove()
        probe.run(4)
        for one, other in zip(work.lm.module.parameters(), before, strict=True):
            assert torch.equal(one, other)


def test_a_probe_outside_its_context_is_an_internal_error(make_work: Any) -> None:
    with pytest.raises(AssertionError, match="a probe runs only inside its own context"):
        probe_of(make_work()).run(1)


def test_without_training_there_is_nothing_to_probe(make_work: Any) -> None:
    work = probe_context(make_work())
    assert ZeroShot(work.config.trainer).probe(work) is None


def test_the_trainer_of_the_example_probes_sizes_with_its_own_steps(make_work: Any) -> None:
    spec = importlib.util.spec_from_file_location("sharpness", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    section = CustomTrainer(type="custom", target="sharpness:SharpnessAware")
    trainer = build_custom(example.SharpnessAware, section)
    work = make_work()
    before = [parameter.detach().clone() for parameter in work.lm.module.parameters()]
    shapes = shapes_of(work)
    with trainer.probe(probe_context(work)) as probe:
        probe.run(3)
        changed = [parameter.detach().clone() for parameter in work.lm.module.parameters()]
    assert shapes == [(1, 10), (1, 10), (3, 10), (3, 10)]  # ascent step and update, after a warm-up
    assert not any(torch.equal(one, other) for one, other in zip(changed, before, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(work.lm.module.parameters(), before, strict=True))


def build_custom(trainer: Any, section: CustomTrainer) -> Any:
    made = trainer(section)
    check_probe(made, section)
    return made
