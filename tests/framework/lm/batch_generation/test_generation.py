import json
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AddedToken

from partita.lm.base import GenerationOptions, GenerationRequest
from partita.lm.batch_generation.batch_decoding import StopStrings
from partita.lm.batch_generation.generation import RowLimits, answer_ends, generation_options
from partita_schema.errors import ModelError
from partita_schema.sections.model import Architecture

GREEDY = GenerationOptions({"do_sample": False, "num_beams": 1})
STORIES = Path(__file__).parents[5] / "shared" / "models" / "stories260k"
SIZES = ((3, 20), (17, 12), (9, 1), (1, 7))


def sharp(small, **sections):
    lm = small.load(small.config(**sections))
    small.sharpen(lm.module)
    return lm


def alone(lm, request: GenerationRequest) -> tuple[int, ...]:
    """Return greedy new tokens of transformers for one row without padding, up to the end token."""
    prompt = torch.tensor([list(request.input_ids)])
    ids = lm.base.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens, do_sample=False
    )[0, prompt.shape[1] :].tolist()
    end = lm.tokenizer.eos_token_id
    return tuple(ids[: ids.index(end)] if end in ids else ids)


@pytest.mark.parametrize("architecture", typing.get_args(Architecture))
def test_greedy_answers_of_a_padded_batch_equal_those_of_single_rows(small, architecture: str) -> None:
    lm = sharp(small, architecture=architecture)
    requests = small.requests(*SIZES)
    answers = lm.generate(requests, GREEDY, seed=0)
    assert [answer.ids for answer in answers] == [alone(lm, request) for request in requests]
    assert [len(answer.ids) for answer in answers if answer.finish_reason == "length"] == [
        request.max_new_tokens
        for request, answer in zip(requests, answers, strict=True)
        if answer.finish_reason == "length"
    ]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("kind", ["prompt_tuning", "p_tuning", "prefix_tuning"])
def test_virtual_tokens_precede_every_prompt_of_a_padded_batch(small, architecture: str, kind: str) -> None:
    lm = small.load(small.config(architecture=architecture, adapter={"type": kind, "num_virtual_tokens": 3}))
    small.sharpen(lm.base)
    small.take_steps(lm, steps=3, learning_rate=5.0)
    requests = small.requests(*SIZES)
    together = lm.generate(requests, GREEDY, seed=0)
    assert [answer.ids for answer in together] == [full_forward(lm, request) for request in requests]
    assert lm.context_length == 64 - 3


def full_forward(lm, request: GenerationRequest) -> tuple[int, ...]:
    """Return greedy new tokens, each by a full forward pass of peft's model: no cache, no padding."""
    ids = list(request.input_ids)
    for _ in range(request.max_new_tokens):
        with torch.no_grad():
            ids.append(int(lm.module(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == lm.tokenizer.eos_token_id:
            return tuple(ids[len(request.input_ids) : -1])
    return tuple(ids[len(request.input_ids) :])


def test_sampling_depends_only_on_the_seed_and_keeps_the_global_random_state(small) -> None:
    lm = small.load(small.config())
    options = GenerationOptions({"do_sample": True, "num_beams": 1, "top_k": 0})
    requests = small.requests((3, 20), (5, 20))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = lm.generate(requests, options, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert lm.generate(requests, options, seed=7) == first
    assert lm.generate(requests, options, seed=8) != first


def test_the_mode_of_the_module_is_restored_even_after_an_error(small) -> None:
    lm = small.load(small.config())
    lm.module.train()
    lm.generate(small.requests((3, 2)), GREEDY, seed=0)
    assert lm.module.training
    with pytest.raises(IndexError):
        lm.generate([GenerationRequest([10**6], 2)], GREEDY, seed=0)
    assert lm.module.training


def test_an_empty_batch_has_no_answers(small) -> None:
    assert small.load(small.config()).generate([], GREEDY, seed=0) == []


@pytest.fixture
def letters(small):
    """Return a model that writes letters, and its options."""
    lm = sharp(small, architecture="gpt_neox")
    letters = set(lm.tokenizer.encode("abcdefghijklmnop"))
    unwanted = [token for token in range(len(lm.tokenizer)) if token not in letters]
    return lm, {"do_sample": True, "top_k": 0, "suppress_tokens": unwanted}


def test_a_stop_text_ends_its_row_and_is_cut_off(small, letters) -> None:
    lm, arguments = letters
    requests = small.requests(*SIZES)
    plain = lm.generate(requests, GenerationOptions(arguments), seed=0)
    stop = plain[0].text[4:6]
    place = plain[0].text.find(stop)
    answers = lm.generate(requests, GenerationOptions(arguments, stop=(stop, "never")), seed=0)
    assert (answers[0].text, answers[0].finish_reason) == (plain[0].text[:place], "stop")
    assert answers[0].ids == plain[0].ids[: place + 2]
    for answer, old in zip(answers[1:], plain[1:], strict=True):
        assert answer.text == old.text.partition(stop)[0]
        assert answer.finish_reason == ("stop" if stop in old.text else "length")


def test_a_stop_token_ends_a_row_and_is_left_out(small, letters) -> None:
    lm, arguments = letters
    requests = small.requests((3, 20))
    plain = lm.generate(requests, GenerationOptions(arguments), seed=0)[0]
    token = plain.ids[4]
    (answer,) = lm.generate(requests, GenerationOptions(arguments, stop_token_ids=(token,)), seed=0)
    assert answer.ids == plain.ids[: plain.ids.index(token)]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["j", "j\n"])
def test_a_stop_text_that_begins_with_a_special_token_ends_a_row_though_answers_are_decoded_without_it(
    small, letters, stop: str
) -> None:
    lm, arguments = letters
    lm.tokenizer.add_tokens(AddedToken("j", special=True))
    token = lm.tokenizer.convert_tokens_to_ids("j")
    requests = small.requests((3, 40))
    plain = lm.generate(requests, GenerationOptions(arguments), seed=0)[0]
    assert token in plain.ids
    assert "j" not in plain.text
    (answer,) = lm.generate(requests, GenerationOptions(arguments, stop=(stop,)), seed=0)
    assert answer.ids == plain.ids[: plain.ids.index(token)]
    assert answer.finish_reason == "stop"


def test_the_batch_stops_computing_once_every_row_is_done(small) -> None:
    lm = sharp(small)
    steps = []
    lm.base.register_forward_hook(lambda *_: steps.append(1))
    lm.generate(small.requests((3, 4), (5, 2)), GREEDY, seed=0)
    assert len(steps) == 4


def test_beam_search_does_not_depend_on_the_limits_of_other_rows(small) -> None:
    lm = sharp(small, architecture="gpt_neox")
    options = GenerationOptions({"do_sample": False, "num_beams": 3})
    requests = small.requests((3, 9), (5, 4), (8, 9))
    together = lm.generate(requests, options, seed=0)
    assert together == [lm.generate([request], options, seed=0)[0] for request in requests]
    assert together != lm.generate(requests, GREEDY, seed=0)


def test_beam_search_is_refused_with_prefix_tuning(small) -> None:
    lm = small.load(small.config(adapter={"type": "prefix_tuning"}))
    with pytest.raises(ModelError, match=r"beam search does not work with prefix_tuning; write num_beams: 1"):
        lm.generate(small.requests((3, 4)), GenerationOptions({"num_beams": 2}), seed=0)


def test_end_tokens_from_the_checkpoint_end_answers(small, base_folder: Path, tmp_path: Path) -> None:
    plain = small.load(small.config(base_model=str(base_folder)))
    (answer,) = plain.generate(small.requests((3, 5)), GREEDY, seed=0)
    plain.save(tmp_path)
    own = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(own | {"eos_token_id": [1, answer.ids[0]]}))
    (tmp_path / "partita-checksums.json").unlink()  # the file was changed on purpose
    lm = small.load(small.config(base_model=str(tmp_path)))
    (ended,) = lm.generate(small.requests((3, 5)), GREEDY, seed=0)
    assert (ended.ids, ended.finish_reason) == ((), "stop")


def test_generation_options_contain_only_the_keys_of_the_configuration(small) -> None:
    config = small.config(generation={"repetition_penalty": 1.2, "stop": ["\n"], "stop_token_ids": [5]})
    lm = small.load(config)
    options = generation_options(config, tokenizer=lm.tokenizer)
    assert options == GenerationOptions(
        {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.2}, stop=("\n",), stop_token_ids=(5,)
    )


def test_special_tokens_of_the_file_end_answers_also_if_other_stop_texts_replace_its_own(small) -> None:
    config = small.config(generation={"stop": ["<end>\n"]})
    lm = small.load(config)
    lm.tokenizer.add_tokens(AddedToken("<end>", special=True))
    options = generation_options(config, tokenizer=lm.tokenizer)
    assert lm.tokenizer.convert_tokens_to_ids("<end>") in answer_ends(lm, replace(options, stop=("\n",)))


def test_sampling_without_top_k_uses_the_whole_vocabulary(small) -> None:
    config = small.config(generation={"do_sample": True, "temperature": 0.7, "bad_words": ["ab"]})
    tokenizer = small.load(config).tokenizer
    arguments = generation_options(config, tokenizer=tokenizer).arguments
    assert arguments == {
        "do_sample": True,
        "num_beams": 1,
        "temperature": 0.7,
        "top_k": 0,
        "bad_words_ids": [tokenizer.encode("ab"), tokenizer.encode(" ab")],
    }


@pytest.mark.parametrize(
    "generation",
    [
        {"do_sample": True, "temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 0.001, "eta_cutoff": 0.001},
        {"do_sample": True, "top_h": 0.5},
        {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True},
        {"no_repeat_ngram_size": 2, "suppress_tokens": [5], "begin_suppress_tokens": [6], "renormalize_logits": True},
        {"exponential_decay_length_penalty": [2, 1.5], "min_new_tokens": 3},
        {"guidance_scale": 1.5, "bad_words": ["a"]},
        {"temperature": 0},
    ],
    ids=lambda generation: "-".join(generation),
)
def test_every_generation_key_is_accepted_without_a_warning(small, generation: dict) -> None:
    config = small.config(generation=generation)
    lm = small.load(config)
    answers = lm.generate(small.requests((3, 4), (5, 2)), generation_options(config, tokenizer=lm.tokenizer), seed=0)
    assert all(len(answer.ids) <= limit for answer, limit in zip(answers, (4, 2), strict=True))


def test_log_probabilities_are_those_of_the_model_before_guidance(small) -> None:
    lm = sharp(small)
    requests = small.requests((6, 5), (4, 2), (9, 5))
    options = replace(GREEDY, arguments={**GREEDY.arguments, "guidance_scale": 3.0}, logprobs=True)
    answers = lm.generate(requests, options, seed=0)
    assert [one.ids for one in answers] != [one.ids for one in lm.generate(requests, GREEDY, seed=0)]
    for request, answer in zip(requests, answers, strict=True):
        assert answer.finish_reason == "length"
        ids = torch.tensor([[*request.input_ids, *answer.ids]])
        with torch.no_grad():
            chances_TV = lm.base(ids).logits[0, len(request.input_ids) - 1 : -1].log_softmax(-1)
        expected = chances_TV.gather(1, ids[0, len(request.input_ids) :, None]).sum().item()
        assert answer.logprob == pytest.approx(expected, abs=1e-3)


def test_row_limits_count_only_new_tokens_and_apply_to_every_beam() -> None:
    stop = StopStrings((), decode=str)
    limits = RowLimits([1, 2], stop=stop, prompt_length=3)
    assert limits(torch.zeros(4, 4)).tolist() == [True, True, False, False]


@pytest.mark.skipif(not STORIES.exists(), reason="shared/models/stories260k is missing")
def test_zero_shot_on_a_pretrained_model_continues_a_story(small) -> None:
    config = small.config(base_model=str(STORIES), trainer={"type": "none"})
    lm = small.load(config, trainable=False)
    request = GenerationRequest(lm.tokenizer.encode("Once upon a time"), 40)
    (answer,) = lm.generate([request], generation_options(config, tokenizer=lm.tokenizer), seed=0)
    assert answer.text == (
        ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."
    )
