"""Small real models and batches for the tests of this folder."""

import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from partita.lm.base import GenerationOptions, GenerationRequest, SlotAnswer, SlotRequest
from partita.lm.huggingface import HuggingFaceModel
from partita.lm.load_model import load_model
from partita.lm.products.fast_linear import Least, enable_fast_products
from partita.lm.products.product import Implementation
from partita.tokenizers.load import load_tokenizer
from partita_schema.config import Config
from partita_trainers.base import Batch

ROOT = Path(__file__).parents[3]
SMALLEST = Least(multiplications=0, weights=1024)
SCRATCH = {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 64}


def build_config(**sections: Any) -> Config:
    architecture = sections.pop("architecture", "llama")
    given = {
        "base_model": SCRATCH | {"architecture": architecture},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
    return Config.model_validate(given | sections)


def build_batch(seed: int = 0, *, lengths: tuple[int, ...] = (24, 5, 17, 2)) -> Batch:
    """Return random rows whose last tokens are in the loss, a few more in each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 250, (len(lengths), max(lengths)), generator=generator)
    labels = torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
        start = max(1, length - 4 - row)
        labels[row, start:length] = ids[row, start:length]
    return Batch(ids, labels, torch.tensor(lengths), tuple(f"row {row}" for row in range(len(lengths))))


def build_requests(*sizes: tuple[int, int]) -> list[GenerationRequest]:
    """Return random prompts of given lengths with their limits on new tokens."""
    draw = random.Random(0)
    return [GenerationRequest([draw.randrange(2, 250) for _ in range(length)], limit) for length, limit in sizes]


def sharpen(module: torch.nn.Module) -> None:
    """Make a random model's greedy answers vary."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)


def load(
    config: Config, *, folder: Path = Path(), saved: Path | None = None, trainable: bool = True
) -> HuggingFaceModel:
    tokenizer = load_tokenizer(config, folder=folder, texts=list, saved=saved)
    return load_model(
        config,
        folder=folder,
        tokenizer=tokenizer,
        saved=saved,
        batches=lambda: [build_batch(seed) for seed in range(3)],
        trainable=trainable,
    )


def load_sharp(folder: Path, *, products: Implementation | None = None) -> HuggingFaceModel:
    """Return a saved llama whose greedy answers vary, for generation only.

    `products` is the implementation of even the smallest products; None leaves it to the machine.
    """
    base = load(build_config())
    sharpen(base.module)
    base.save(folder / "base")
    lm = load(build_config(base_model=str(folder / "base"), trainer={"type": "none"}), trainable=False)
    if products is not None:
        lm.has_fast_products = products is not Implementation.TORCH
        lm.few_kernels = products.is_onednn
        count = enable_fast_products(lm.module, least=SMALLEST, implementation=products, few_kernels=products.is_onednn)
        assert count
    return lm


def make_foreign(kind: str, shape: dict[str, Any], *, like: Path, folder: Path) -> Any:
    """Return a sharpened model of any architecture of transformers.

    Args:
        kind: The model type of transformers.
        shape: Keys of its configuration.
        like: Folder of a model whose tokenizer it takes.
        folder: Where the model is saved.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(like)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(kind, **shape, **special, vocab_size=len(tokenizer))
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lm = load(build_config(base_model=str(folder)))
    sharpen(lm.module)
    return lm


def take_steps(lm: HuggingFaceModel, *, steps: int, first: int = 1, learning_rate: float = 0.5) -> list[float]:
    """Run plain clipped gradient descent, as a trainer would; return the losses."""
    parameters = [parameter for parameter in lm.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=learning_rate)
    losses = []
    with lm.training():
        for step in range(first, first + steps):
            loss = lm.loss(lm.module, build_batch(step))
            losses.append(loss.item())
            extra = lm.auxiliary_loss()
            (loss if extra is None else loss + extra).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            lm.after_step(step)
            optimizer.zero_grad()
    return losses


def held_out_loss(lm: HuggingFaceModel) -> float:
    with torch.no_grad():
        return lm.loss(lm.module, build_batch(99)).item()


def gradients(loss: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Return the gradients of all trained parameters that have one, as a vector."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def slot_requests(*sizes: tuple[int, int], prefix: Sequence[int] = (), seed: int = 0) -> list[SlotRequest]:
    """Return random prompts of given lengths with a common prefix, with their limits on new tokens."""
    draw = random.Random(seed)
    return [
        SlotRequest([*prefix, *(draw.randrange(2, 250) for _ in range(length))], limit, row, key=str(row).encode())
        for row, (length, limit) in enumerate(sizes)
    ]


def greedy_alone(lm: HuggingFaceModel, request: GenerationRequest) -> tuple[int, ...]:
    """Return greedy new tokens of transformers' `generate` for one row without padding, up to the end token."""
    prompt = torch.tensor([list(request.input_ids)])
    ids = lm.base.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens, do_sample=False
    )[0, prompt.shape[1] :].tolist()
    end = lm.tokenizer.eos_token_id
    return tuple(ids[: ids.index(end)] if end in ids else ids)


def answer_in_slots(
    lm: HuggingFaceModel,
    requests: Sequence[SlotRequest],
    *,
    slots: int,
    options: GenerationOptions | None = None,
    prefix: Sequence[int] = (),
    seed: int = 0,
    plan: Sequence[int] = (1, 3, 0, 2, 0, 0),
) -> dict[int, SlotAnswer]:
    """Return the outcome of each row; `plan`, repeated, has the prompts to prefill at once, or 0 for a decode step."""
    tokens = max(len(request.input_ids) + request.max_new_tokens for request in requests)
    options = GenerationOptions({"do_sample": False}) if options is None else options
    assert lm.why_no_slots(options, tokens=tokens) is None
    opened = lm.open_slots(options, slots=slots, tokens=tokens, prefix=prefix, seed=seed)
    found: dict[int, SlotAnswer] = {}
    waiting, turn = list(requests), 0
    with lm.evaluating():
        while waiting or opened.live:
            count = min(plan[turn % len(plan)] if plan else 0, slots - len(opened.live), len(waiting))
            turn += 1
            if not count and not opened.live:
                count = 1
            ended = opened.admit(waiting[:count]) if count else opened.step()
            waiting = waiting[count:]
            assert not {answer.request.row for answer in ended} & set(found), "a row was returned twice"
            found |= {answer.request.row: answer for answer in ended}
            assert len(opened.live) <= slots
    opened.close()
    return found


@pytest.fixture(scope="session")
def small() -> Any:
    """Return the builders of this file by short names."""

    class Builders:
        config: Callable[..., Config] = staticmethod(build_config)
        batch: Callable[..., Batch] = staticmethod(build_batch)
        requests: Callable[..., list[GenerationRequest]] = staticmethod(build_requests)
        load: Callable[..., HuggingFaceModel] = staticmethod(load)
        load_sharp: Callable[..., HuggingFaceModel] = staticmethod(load_sharp)
        take_steps = staticmethod(take_steps)
        held_out_loss = staticmethod(held_out_loss)
        sharpen = staticmethod(sharpen)
        slot_requests = staticmethod(slot_requests)
        greedy_alone = staticmethod(greedy_alone)
        answer_in_slots = staticmethod(answer_in_slots)

    return Builders


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a saved llama with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "small"
    load(build_config()).save(folder)
    return folder


@pytest.fixture(scope="module")
def foreign(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Any]:
    """Return a function that creates a model of any architecture of transformers."""

    def make(kind: str, shape: dict[str, Any]) -> Any:
        return make_foreign(kind, shape, like=base_folder, folder=tmp_path_factory.mktemp(kind))

    return make


@pytest.fixture(scope="module")
def architectures() -> ModuleType:
    """Return the module in benchmarks/ that measures architectures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import architectures  # type: ignore[import-not-found]

        return architectures  # type: ignore[no-any-return]
