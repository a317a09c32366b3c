"""Tests of environments with tools: a class with `reset` and methods; wrong calls get an error message."""

import json
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from partita import ConfigError
from partita.data.episode import Episode
from partita.data.formatting.formatter import Formatter
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.generation.oom_backoff import BatchBudget
from partita.lm.base import GenerationOptions
from partita.lm.scripted import ScriptedModel
from partita.simulation.adapters import adapt, tools_of
from partita.simulation.adapters.tools import Tools
from partita.simulation.contract import ContractError, Environment, check_reset_result, check_step_result
from partita.simulation.model_speaker import ModelSpec
from partita.simulation.rollout import Rollout
from partita.simulation.turns import TurnEncoder
from partita.simulation.worlds import BackgroundCloser, EnvironmentWorld
from partita_schema.load import load_config
from partita_schema.sections.simulation import Limits

from ..programs_of_tests import Counter, Mute, Shop, Stall, Undescribed


def environment_of(kind: type) -> Environment:
    return adapt(kind, interface="tools", tools=Tools.of(kind).descriptions)()


def opened_environment(kind: type, **task: Any) -> Environment:
    environment = environment_of(kind)
    check_reset_result(environment.reset(seed=1, task=task))
    return environment


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def heard(environment: Environment, action: str) -> list[str]:
    said = check_step_result(environment.step(action))
    assert {message["role"] for message in said.messages} <= {"tool"}
    return [message["content"] for message in said.messages]


def test_public_methods_are_tools_and_are_described_to_the_model() -> None:
    environment = environment_of(Shop)
    system, user = check_reset_result(environment.reset(seed=1, task={})).messages
    tools = [json.loads(line) for line in system["content"].splitlines()[1:-1]]

    assert system["role"] == "system"
    assert [tool["function"]["name"] for tool in tools] == ["burn", "look", "sell"]
    assert tools[2]["function"]["description"] == "Sell an item."
    assert tools[2]["function"]["parameters"]["required"] == ["item", "price"]
    assert tools[2]["function"]["parameters"]["properties"]["price"] == {
        "type": "integer",
        "description": "What it costs.",
    }
    assert user["content"].startswith("one ")


def test_a_tool_is_called_and_its_result_is_shown_to_the_model() -> None:
    shop = opened_environment(Shop)
    price = heard(shop, called("look", item="tea"))[0]

    assert price in {str(number) for number in range(1, 10)}
    assert heard(shop, json.dumps({"name": "look", "arguments": {"item": "tea"}})) == [price], "bare JSON"
    assert heard(shop, json.dumps({"name": "look", "parameters": '{"item": "tea"}'})) == [price], (
        "the format of other models"
    )
    assert heard(shop, f"first {called('look', item='tea')} then {called('sell', item='tea', price=0)}") == [
        price,
        "sold",
    ]
    assert heard(shop, called("sell", item="tea", price=1, note=None)) == ["sold"]
    assert heard(shop, '<tool_call>\n{"name": "look", "arguments": {"item": "tea"}}') == [price], "a missing end"


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (called("lok", item="tea"), "no tool is named lok; did you mean look?"),
        (called("weigh", item="tea"), "no tool is named weigh; there are burn, look, sell"),
        (called("_count"), "no tool is named _count; there are burn, look, sell"),
        (called("reset"), "no tool is named reset; there are burn, look, sell"),
        (called("look"), "look: 'item' is a required property"),
        (called("look", item="tea", size=2), "look has no argument size; it takes item"),
        (called("burn", item="tea"), "burn has no argument item; it takes none"),
        (called("sell", item="tea", price="two"), "sell: price: 'two' is not of type 'integer'"),
        (called("look", item="sand"), "there is no sand"),
        ("<tool_call>look tea</tool_call>", 'a call is <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>'),
        (
            f"<tool_call>{'[' * 100_000}</tool_call>",
            'a call is <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>',
        ),
        ("<tool_call>[1]</tool_call>", 'a call is <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>'),
        (
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            'a call is <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>',
        ),
    ],
)
def test_an_invalid_call_is_reported_to_the_model(action: str, text: str) -> None:
    shop = opened_environment(Shop)
    said = check_step_result(shop.step(action))

    assert said.messages == [{"role": "tool", "content": f"error: {text}"}]
    assert not said.terminated
    assert said.info["metrics"] == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_a_tool_that_raises_fails_the_dialogue() -> None:
    with pytest.raises(OSError, match="there is no shop"):
        opened_environment(Shop).step(called("burn"))


@pytest.mark.parametrize("answer", ["goodbye", '{"name": "tea", "price": 3}', "[1, 2]", "3", ""])
def test_an_answer_without_a_call_ends_the_dialogue(answer: str) -> None:
    said = check_step_result(opened_environment(Shop).step(answer))

    assert (list(said.messages), said.terminated, said.reward) == ([], True, 0.0)


def test_step_rewards_add_up_to_the_total_and_done_ends_the_dialogue() -> None:
    counter = opened_environment(Counter, prompt="count")
    first, second = (check_step_result(counter.step(called("add", number=number))) for number in (2, 4))

    assert (first.reward, first.terminated) == (0.2, False)
    assert second.terminated
    assert first.reward + (second.reward or 0) == pytest.approx(0.6)
    assert second.messages == [{"role": "tool", "content": '{"count": 6}'}]


def test_rounding_errors_of_step_rewards_do_not_add_up() -> None:
    counter = opened_environment(Counter, prompt="count")
    numbers = (10, 6, 0, -17, 17, -12, 6)  # totals of 1, 1.6, 1.6, -0.1, 1.6, 0.4 and 1
    rewards = [check_step_result(counter.step(called("add", number=number))).reward or 0.0 for number in numbers]

    assert sum(rewards) == 1.0


def test_the_prompt_of_a_task_precedes_the_text_of_reset() -> None:
    prompt = [{"role": "system", "content": "Be polite."}, {"role": "user", "content": "A guest comes."}]
    shop, counter = environment_of(Shop), environment_of(Counter)
    said = check_reset_result(shop.reset(seed=1, task={"prompt": prompt})).messages
    plain = check_reset_result(counter.reset(seed=1, task={"prompt": "Count."})).messages

    assert said[0]["content"].startswith("Be polite.\n\nYou have these tools:\n")
    assert said[1]["content"].startswith("A guest comes.\none ")
    assert [message["role"] for message in plain] == ["system", "user"]
    assert plain[1]["content"] == "Count."
    with pytest.raises(ContractError, match="reset said nothing, and the task has no prompt; one of them begins"):
        counter.reset(seed=1, task={})


def test_the_system_prompt_precedes_the_description_of_the_tools() -> None:
    def first(system: str | None, **task: Any) -> str:
        make = partial(environment_of, Shop)
        world = EnvironmentWorld(make, max_turns=1, closer=BackgroundCloser(), system=system)
        episode = Episode("a", "a", task, 1)
        next(world.run(episode))
        return str(episode.messages[0]["content"])

    assert first("Be brief.").startswith("Be brief.\n\nYou have these tools:\n")
    assert first(None).startswith("You have these tools:\n")
    prompt = [{"role": "system", "content": "Be polite."}, {"role": "user", "content": "A guest comes."}]
    assert first("Be brief.", prompt=prompt).startswith("Be polite.\n\nYou have these tools:\n")


def test_done_may_be_a_bool_of_numpy_and_nothing_else() -> None:
    shop = Shop()
    environment = adapt(lambda: shop, interface="tools", tools=Tools.of(Shop).descriptions)()
    check_reset_result(environment.reset(seed=1, task={}))
    shop.done = np.bool_(True)  # type: ignore[attr-defined]
    assert check_step_result(environment.step(called("look"))).terminated
    shop.done = "yes"  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match="the program gave done of 'yes'; give True or False"):
        environment.step(called("look"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            Mute,
            "simulation.world.environment: Mute has no tools; its public methods but reset, close, reward, get_reward",
        ),
        (Undescribed, "simulation.world.environment: Undescribed.act cannot be described to a model: "),
        (str, "simulation.world.environment: str has no method reset, which begins a dialogue"),
    ],
)
def test_a_class_without_tools_is_refused(kind: type, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        tools_of(kind, interface="tools")
    assert str(error.value).startswith(text), str(error.value)


def clerk(prompt: str) -> str:
    """Answer like a model trained to sell: look up the price, sell at the price in the reply, and say bye."""
    tool_replies = [line.removeprefix("tool: ") for line in prompt.splitlines() if line.startswith("tool: ")]
    if not tool_replies:
        return called("look")
    return called("sell", price=tool_replies[0]) if len(tool_replies) == 1 else "bye"


def test_dialogues_with_tools_run_like_other_dialogues() -> None:
    config = load_config(
        {
            "base_model": "clerk",
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "data": {"dialogue": {"speakers": {"tool": "tool: "}}},
        }
    ).config
    lm = ScriptedModel(clerk)
    row_tokenizer = RowTokenizer(Formatter(config, tokenizer=lm.tokenizer, labels={}, retriever=None))
    agent = ModelSpec(
        cast(Any, lm),
        TurnEncoder(row_tokenizer, "messages", lm.tokenizer.decode),
        options=GenerationOptions({}),
        budget=BatchBudget(4),
        context_tokens=4000,
        max_new_tokens=100,
        seed=1,
    )
    world = EnvironmentWorld(partial(environment_of, Stall), max_turns=5, closer=BackgroundCloser())
    rollout = Rollout(world, {"agent": agent}, concurrency=4, seed=1, limits=Limits())
    had = list(rollout.run(iter(Episode(str(seed), "a", {}, seed) for seed in range(12))))

    assert len(had) == 12
    for dialogue in had:
        assert (dialogue.status, dialogue.reward) == ("done", 1.0)
        assert [message["role"] for message in dialogue.messages] == [
            *("system", "user", "assistant", "tool", "assistant", "tool", "assistant")
        ]
        assert dialogue.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}
    assert len({dialogue.messages[3]["content"] for dialogue in had}) == 3
