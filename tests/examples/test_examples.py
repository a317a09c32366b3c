"""Tests that every example runs, in a smaller form if it takes long, and does what its README says."""

import json
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from partita import Model, Sweep
from partita.model import open_engine
from partita.serving.address import bound
from partita.serving.app import ServerState, make_app
from partita.serving.server import run_server
from partita_schema.errors import ConfigError
from partita_schema.load import load_config
from partita_schema.rows import check_rows, row_schema

from ..json_lines import read_json_lines

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARED_SGD = Path(__file__).parents[3] / "shared" / "data" / "sgd" / "dialogues.jsonl"


def load_module(path: Path) -> ModuleType:
    spec = util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that copies an example and changes into the copy, whose modules can be imported.

    Modules of the same names that were imported before, for example from a guide, are not used.
    """
    own: set[str] = set()

    def copy(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        own.update(path.stem for path in folder.glob("*.py"))
        for module in own:
            monkeypatch.delitem(sys.modules, module, raising=False)
        return folder

    yield copy
    for module in own:
        sys.modules.pop(module, None)


def write_tickets(folder: Path) -> None:
    load_module(EXAMPLES / "support_tickets" / "make_tickets.py").write(folder)


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_configuration_of_the_examples_loads_without_a_warning(file: Path) -> None:
    assert not load_config(file).warnings


@pytest.mark.parametrize(
    "folder", sorted(path for path in EXAMPLES.iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_every_example_has_a_readme(folder: Path) -> None:
    assert (folder / "README.md").exists()


@pytest.mark.long
def test_questions_find_their_passages_and_name_their_items(copy_of: Any) -> None:
    folder = copy_of("search")
    load_module(folder / "make_questions.py").write(folder)
    before = Model("embed.yaml", overrides=["trainer={type: none}"], quiet=True).evaluate("new_pairs.jsonl")["vector"]
    Model("embed.yaml", quiet=True).train(run="runs/embed")
    after = Model.load("runs/embed", quiet=True).evaluate("new_pairs.jsonl")["vector"]
    assert after["recall_at_1"] > max(0.8, before["recall_at_1"] + 0.2)
    Model("tags.yaml", quiet=True).train(run="runs/tags")
    predictions = Model.load("runs/tags", quiet=True).predict("new_pairs.jsonl")
    right = [
        [{key: span[key] for key in ("start", "end", "label")} for span in row["items_spans"]] == row["items_input"]
        for row in predictions
    ]
    assert sum(right) > 0.9 * len(right)


@pytest.mark.long
def test_support_tickets_are_trained_and_predicted(copy_of: Any) -> None:
    folder = copy_of("support_tickets")
    write_tickets(folder)
    model = Model("tickets.yaml", quiet=True)
    result = model.train()
    assert result.steps == 240
    assert result.metrics["test"]["team.accuracy"] > 0.9
    predictions = model.predict("new_tickets.csv", output="answers.csv")
    assert predictions.stats.ok == 50
    right = sum(row["team"] == row["team_input"] for row in predictions)
    assert right > 45


@pytest.mark.long
def test_a_sweep_over_support_tickets_names_the_best_trial(copy_of: Any) -> None:
    folder = copy_of("support_tickets")
    write_tickets(folder)
    result = Sweep("tickets_sweep.yaml", overrides=["sweep.trials=4"], quiet=True).run(workers=2)
    assert [trial.number for trial in result.trials] == [0, 1, 2, 3]
    assert result.best is not None
    assert (folder / "sweeps" / "tickets_sweep" / "report.html").exists()
    predictions = Model.load(result.model_of(result.best), quiet=True).predict("new_tickets.csv")
    assert predictions.stats.ok == 50


@pytest.mark.long
def test_a_bag_of_words_learns_support_tickets(copy_of: Any) -> None:
    write_tickets(copy_of("support_tickets"))
    model = Model("bag.yaml", quiet=True)
    result = model.train()
    assert result.steps == 160
    assert result.metrics["test"]["team.accuracy"] > 0.9
    predictions = model.predict("new_tickets.csv", output="answers.csv")
    assert sum(row["team"] == row["team_input"] for row in predictions) > 45


@pytest.mark.long
def test_an_encoder_with_a_head_learns_support_tickets(copy_of: Any) -> None:
    write_tickets(copy_of("support_tickets"))
    model = Model("encoder.yaml", quiet=True)
    result = model.train()
    assert result.steps == 80
    assert result.metrics["test"]["team.accuracy"] > 0.9
    predictions = model.predict("new_tickets.csv", output="answers.csv")
    assert sum(row["team"] == row["team_input"] for row in predictions) > 45
    engine, sock = open_engine(model), bound("127.0.0.1", 0)
    with sock, engine:
        ready = threading.Event()
        app = make_app(ServerState(engine, "encoder", 0))
        options = {"finish_seconds": 5.0, "ready": ready.set}
        server = threading.Thread(target=run_server, args=(app, engine, sock), kwargs=options)
        server.start()
        assert ready.wait(30)
        asked = [sys.executable, "ask_service.py", f"http://127.0.0.1:{sock.getsockname()[1]}"]
        printed = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
        engine.refuse_new()
        server.join(30)
    lines = [line.partition("% ")[2].partition(": ") for line in printed.splitlines()]
    assert [(team, message) for team, _, message in lines] == [(row["team"], row["message"]) for row in predictions[:5]]


def test_new_tickets_are_not_among_the_training_tickets(tmp_path: Path) -> None:
    write_tickets(tmp_path)
    learned, new = (
        (tmp_path / name).read_text(encoding="utf8").splitlines()[1:] for name in ("tickets.csv", "new_tickets.csv")
    )
    assert (len(learned), len(new)) == (400, 50)
    assert not set(learned) & set(new)


@pytest.mark.long
def test_calls_are_summarized(copy_of: Any) -> None:
    folder = copy_of("summarization")
    load_module(folder / "make_calls.py").write(folder)
    model = Model("config.yaml", overrides=["trainer.epochs=4"], quiet=True)
    result = model.train()
    assert result.metrics["test"]["summary.rouge_l"] > 0.6
    predictions = model.predict("new_calls.jsonl", output="summaries.jsonl")
    assert predictions.stats.ok == 100
    assert all(" books a table for " in row["summary"] for row in predictions)


@pytest.mark.long
def test_the_custom_trainer_lowers_the_loss(copy_of: Any) -> None:
    folder = copy_of("custom_trainer")
    write_tickets(folder)
    model = Model("config.yaml", overrides=["trainer.options.steps=60"], quiet=True)
    with model._backend.context.open_run(Path("run")):  # started and killed
        (folder / "run" / "log.jsonl").write_text('{"step": 1, "loss": 9.0}\n', encoding="utf8")
    result = model.train(run="run")
    losses = [json.loads(line)["loss"] for line in (result.run / "log.jsonl").read_text(encoding="utf8").splitlines()]
    assert len(losses) == result.steps == 60
    assert losses[-1] < losses[0] / 4
    assert result.metrics["test"]["loss"] == pytest.approx(losses[-1], rel=0.3)
    assert Model.load(result.run, quiet=True).evaluate()["model"]["loss"] == pytest.approx(
        result.metrics["test"]["loss"]
    )


def test_the_custom_trainer_reverts_its_ascent_step() -> None:
    move = load_module(EXAMPLES / "custom_trainer" / "sharpness.py").move
    weight, way = torch.nn.Parameter(torch.tensor([1.0, 2.0])), [torch.tensor([0.5, -0.5])]
    move([weight], way, sign=1)
    assert weight.tolist() == [1.5, 1.5]
    move([weight], way, sign=-1)
    assert weight.tolist() == [1.0, 2.0]


def test_the_custom_trainer_refuses_unknown_options(copy_of: Any) -> None:
    folder = copy_of("custom_trainer")
    write_tickets(folder)
    with pytest.raises(ConfigError) as caught:
        Model("config.yaml", overrides=["trainer.options.stepz=3"], quiet=True).train()
    assert str(caught.value) == "trainer.options.stepz: unknown option; write one of steps, learning_rate, radius"


def test_zero_shot_sentiment_answers_every_review_with_a_local_model(copy_of: Any) -> None:
    copy_of("sentiment_zero_shot")
    scratch = load_config(EXAMPLES / "sentiment_zero_shot" / "config.yaml").config.model_dump(exclude_unset=True)
    scratch |= {"base_model": {"type": "scratch", "size": "nano"}, "data": {"source": "reviews.csv"}}
    Model(scratch, quiet=True).save("local_model")
    model = Model("config.yaml", overrides=["base_model=local_model"], quiet=True)
    predictions = model.predict("reviews.csv", output="labels.csv")
    assert predictions.stats.ok == 8
    assert all(row["label"] in (None, "negative", "neutral", "positive") for row in predictions)
    assert model.evaluate("reviews.csv")["label"]["n"] == 8


@pytest.mark.long
def test_dialogues_of_both_formats_are_trained_and_predicted(copy_of: Any) -> None:
    folder = copy_of("dialogues")
    load_module(folder / "make_chats.py").write(folder)
    model = Model("config.yaml", quiet=True)
    assert model.train().metrics["test"]["reply.exact_match"] > 0.9
    asked = read_json_lines(folder / "open_chats.jsonl")
    predictions = model.predict("open_chats.jsonl", output="answers.jsonl")
    orders = [row["messages"][0]["content"].removeprefix("I take ") for row in asked]
    right = sum(row["reply"] == f"that was {order}" for row, order in zip(predictions, orders, strict=True))
    assert right >= 18
    report = model.simulate()
    assert {history: outcomes.dialogues for history, outcomes in report.histories.items()} == {
        "gold": 200,
        "predicted": 200,
    }
    assert all(outcomes.means["reward"].mean > 0.9 for outcomes in report.histories.values())
    Model("guest.yaml", quiet=True).train()
    talk = Model("talk.yaml", quiet=True).simulate().histories["predicted"]
    assert talk.statuses == {"done": 60}
    assert talk.means["order_correct"].mean > 0.8
    assert 0.3 < talk.means["success"].mean < 0.95
    rounds = Model("preferences.yaml", quiet=True).train().dialogues
    assert [dialogues["dialogues.n"] for dialogues in rounds] == [60, 60, 60]
    assert rounds[2]["success"] > max(0.9, rounds[0]["success"] + 0.2)
    overrides = ["data.source=chats.parlai", "data.dialogue.mode=squash", "trainer.epochs=1"]
    result = Model("config.yaml", overrides=overrides, quiet=True).train(run="parlai")
    assert result.steps == 58  # of 360 chats with two or three answers
    assert result.metrics["test"]["loss"] < 1.5


@pytest.mark.long
def test_streams_of_chats_and_letters_are_trained_in_equal_shares(copy_of: Any) -> None:
    folder = copy_of("streams")
    load_module(folder / "make_messages.py").write(folder)
    result = Model("config.yaml", quiet=True).train()
    assert result.metrics["validation"]["team.accuracy"] > 0.9
    log = read_json_lines(result.run / "log.jsonl")
    assert max(step["tokens"] for step in log) <= 2 * 512
    chats, letters = (sum(step[f"rows/{source}"] for step in log) for source in ("chats", "letters"))
    assert chats == pytest.approx(letters, rel=0.05)
    assert sum(step["padding"] * step["tokens"] for step in log) < 0.03 * sum(step["tokens"] for step in log)
    manifest = json.loads((result.run / "manifest.json").read_text(encoding="utf8"))
    assert manifest["sources"]["letters"]["rows"] == letters


@pytest.mark.long
def test_a_small_model_learns_to_write_stories(copy_of: Any) -> None:
    folder = copy_of("language_modelling")
    load_module(folder / "make_stories.py").write(folder, count=400)

    model = Model("config.yaml", quiet=True)
    metrics = model.train().metrics["test"]

    assert metrics["perplexity"] < 4
    assert metrics["bits_per_byte"] < 0.5
    assert model.generate("The fox", max_new_tokens=8)[0].strip()


@pytest.mark.long
def test_table_booking_runs_from_zero_shot_to_predictions(copy_of: Any) -> None:
    folder = copy_of("table_booking")
    (folder / "data").mkdir()
    made = load_module(folder / "make_data.py").make_rows(300, seed=1, test=40)
    for name, rows in zip(("train", "test"), made, strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{name}.jsonl").write_text(text, encoding="utf8")
    before = Model("zero_shot.yaml", quiet=True).train().metrics["test"]
    assert before["exact_match"] == 0
    model = Model(
        "finetune.yaml",
        overrides=["trainer.max_steps=20", "trainer.epochs=3", "trainer.learning_rate=0.003"],
        quiet=True,
    )
    after = model.train().metrics["test"]
    assert after["loss"] < before["loss"] / 2
    assert set(after) == set(before)
    predictions = model.predict("data/test.jsonl", output="predictions.jsonl")
    assert len(predictions) == 40
    assert {"guests", "day", "time", "name"} < set(predictions.columns)


def test_table_booking_tests_on_unseen_bookings(tmp_path: Path) -> None:
    load_module(EXAMPLES / "table_booking" / "make_data.py").write(tmp_path, rows=2000, seed=3)
    train, test = (read_json_lines(tmp_path / f"{name}.jsonl") for name in ("train", "test"))

    def meanings(rows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
        return {tuple(row[key] for key in ("guests", "day", "time", "name")) for row in rows}

    assert len(train) == 2000
    assert not meanings(train) & meanings(test)


@pytest.mark.long
def test_the_booking_desk_improves_by_self_training(copy_of: Any) -> None:
    folder = copy_of("booking_desk")
    load_module(folder / "make_bookings.py").main(folder / "bookings.jsonl", count=200)
    smaller = {"epochs": 1, "max_steps": None}
    overrides = [f"trainer.{key}={json.dumps(value)}" for key, value in smaller.items()]
    overrides += [
        "simulation.self_training.tasks.count=20",
        "simulation.self_training.max_steps=3",
        "simulation.tasks.count=20",
    ]
    model = Model("config.yaml", overrides=overrides, quiet=True)

    model.train()

    manifest = json.loads((folder / "runs" / "config" / "manifest.json").read_text("utf8"))
    assert [round_["steps"] for round_ in manifest["rounds"]] == [3, 3]
    assert sum("success" in path.read_text("utf8") for path in folder.glob("runs/config/rounds/*/simulation.json")) == 3
    report = model.simulate()
    assert set(report.histories) == {"gold", "predicted"}
    assert report.histories["predicted"].statuses == {"done": 20}


def test_messages_of_a_guest_reach_the_desk_nine_times_in_ten(copy_of: Any) -> None:
    desk = load_module(copy_of("booking_desk") / "desk.py")
    dialogues = [list(desk.wishes_of(seed)) for seed in range(2000)]

    said = " ".join(text for dialogue in dialogues for text, _ in dialogue).split()
    assert said.count(desk.LOST) / sum(word in desk.SLOTS for word in said) == pytest.approx(0.1, abs=0.01)
    assert sum(text.startswith("no , ") for dialogue in dialogues for text, _ in dialogue) / 2000 == pytest.approx(
        0.3, abs=0.03
    )
    assert all(len(booking) == 5 and text == "book" for *_, (text, booking) in dialogues)
    # With all values in the messages, the answer is correct; a missing value can only be guessed.
    heard_all = [dialogue for dialogue in dialogues if desk.LOST not in " ".join(text for text, _ in dialogue)]
    for dialogue in heard_all[:200]:
        booking: dict[str, str] = {}
        for text, right in dialogue:
            words = text.removeprefix("no , ").replace(",", " ").split()
            booking |= dict(zip(words[::2], words[1::2], strict=False)) if text != "book" else {}
            assert desk.written(right) == " ".join(booking.get(slot, "-") for slot in desk.SLOTS)


def test_the_desk_asks_the_guest_to_repeat_wrong_values(copy_of: Any) -> None:
    from partita.simulation import Episode

    desk = load_module(copy_of("booking_desk") / "desk.py")
    goal = list(desk.wishes_of(7))[-1][1]
    right = desk.written(goal)
    dialogue = Episode("task-0", "task-0", {}, 7)
    dialogue.observe([{"role": "user", "content": "book"}], gold=right)
    dialogue.act(right.replace(right.split()[1], "area99"), (1,))

    verdict = desk.Desk().check(dialogue)
    assert (verdict.ok, verdict.target) == (False, right)
    assert verdict.feedback in (f"not area99 but {right.split()[1]}", f"not area99 but {desk.LOST}")
    dialogue.replies[-1].text = right
    assert desk.Desk().check(dialogue).ok
    dialogue.replies[-1].text = ""
    assert desk.Desk().check(dialogue).feedback.count("not - but ") == 5


def write_states(folder: Path, *, sgd: Path | None = None) -> None:
    load_module(EXAMPLES / "dialogue_state" / "make_dialogues.py").write(folder, sgd=sgd)


SMALL_STATES = [
    *("base_model.hidden_size=32", "base_model.num_hidden_layers=1", "trainer.max_steps=2", "trainer.epochs=null"),
    *("output_features.0.decoder.max_new_tokens=8", "output_features.2.decoder.max_new_tokens=4"),
    "data.split.probabilities=[1,0,0]",
]


def test_state_action_and_reply_are_trained_and_scored_with_both_histories(copy_of: Any) -> None:
    folder = copy_of("dialogue_state")
    write_states(folder)
    for name in ("train", "test"):
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:16] if name == "train" else lines[:2]), encoding="utf8")
    model = Model("config.yaml", overrides=SMALL_STATES, quiet=True)

    result = model.train()
    report = model.simulate().flat()

    assert {"state.joint_accuracy", "action.accuracy", "reply.exact_match"} <= result.metrics["test"].keys()
    assert report["gold"]["state.n"] == report["predicted"]["state.n"] == result.metrics["test"]["state.n"]


@pytest.mark.skipif(not SHARED_SGD.exists(), reason="the shared dialogues are not here")
def test_dialogues_of_the_shared_dataset_are_read_with_an_action_for_each_turn(copy_of: Any) -> None:
    folder = copy_of("dialogue_state")
    write_states(folder, sgd=SHARED_SGD)
    config = load_config("config.yaml").config
    schema = row_schema(config, supervised=True)

    checked = check_rows(schema, read_json_lines(folder / "test.jsonl"))

    assert not checked.bad
    messages = [message for row in checked.clean.values() for message in row["turns"]["messages"]]
    assert {message["values"]["action"] for message in messages if "values" in message} == {"ask", "tell"}
    assert any("Restaurants_2-time" in row["state"] for row in checked.clean.values())


def test_original_files_of_schema_guided_dialogues_are_converted(tmp_path: Path) -> None:
    frame = {"service": "Taxi_1", "state": {"slot_values": {"to": ["the airport", "airport"]}}}
    user = {"speaker": "USER", "utterance": "to the airport", "frames": [frame]}
    system = {"speaker": "SYSTEM", "utterance": "when ?", "frames": [{"actions": [{"act": "REQUEST"}]}]}
    dialogue = {"dialogue_id": "1", "turns": [user, system] * 5}
    (tmp_path / "dialogues_001.json").write_text(json.dumps([dialogue] * 5), encoding="utf8")

    write_states(tmp_path, sgd=tmp_path)

    [row] = read_json_lines(tmp_path / "test.jsonl")
    asked = {"speaker": "user", "text": "to the airport", "state": {"Taxi_1-to": "the airport"}, "action": "request"}
    assert row["turns"][:2] == [asked, {"speaker": "system", "text": "when ?"}]


SMALL_FIRST = [
    *("base_model.hidden_size=16", "base_model.num_hidden_layers=1", "trainer.epochs=null", "trainer.max_steps=5"),
    "trainer.skip_all_evaluation=true",
]


def test_answers_are_judged_by_their_price_and_their_length(copy_of: Any) -> None:
    menu = load_module(copy_of("preferences") / "make_questions.py")
    menu.write(Path())
    learned, new = (read_json_lines(Path(name)) for name in ("answers.jsonl", "new_questions.jsonl"))

    assert (len(learned), len(new)) == (600, 120)
    assert not {row["question"] for row in learned} & {row["question"] for row in new}
    assert all(menu.is_good(row["dish"], row["answer"]) for row in new)
    assert [menu.is_good("soup", text) for text in ("4 euros.", "The soup is 4 euros.", "5 euros.", "4 or 5")] == [
        *(True, False, False, False)
    ]
    right = sum(menu.is_right(row["dish"], row["answer"]) for row in learned) / len(learned)
    assert right == pytest.approx(0.8, abs=0.05)


def test_own_answers_become_pairs_and_labels_for_every_trainer(copy_of: Any) -> None:
    folder = copy_of("preferences")
    load_module(folder / "make_questions.py").write(folder)
    Model("first.yaml", overrides=SMALL_FIRST, quiet=True).train(run="runs/first")
    # The answers of a model that has hardly learned are long: a few questions are enough.
    pairs = load_module(folder / "make_pairs.py")
    pairs.write("runs/first", most=6)
    labelled = read_json_lines(folder / "labelled.jsonl")
    assert 6 <= len(labelled) <= 6 * pairs.SAMPLES
    assert pairs.rank("soup", "4 euros.") < pairs.rank("soup", "The soup is 4 euros.") < pairs.rank("soup", "5 euros.")
    assert pairs.rank("soup", "5 euros.") == pairs.rank("soup", "Good morning!")
    answers = [("4 euros.", True), ("The soup is 9 euros.", False)]
    asked = {"question": "How much is the soup?", "dish": "soup"}
    rows = [{**asked, "chosen": "4 euros.", "rejected": text} for text, good in answers if not good] * 8
    pairs.write_lines(folder / "pairs.jsonl", rows)
    pairs.write_lines(
        folder / "labelled.jsonl", [{**asked, "answer": text, "good": good} for text, good in answers] * 8
    )
    for file in ("config.yaml", "kto.yaml"):
        steps = [
            "trainer.max_steps=2",
            "trainer.epochs=null",
            "trainer.batch_size=4",
            "trainer.skip_all_evaluation=true",
            "data.split={type: random, probabilities: [1, 0, 0]}",
        ]
        assert Model(file, overrides=steps, quiet=True).train(run=f"runs/{file}").steps == 2
    (folder / "new_questions.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf8")
    judged = load_module(folder / "judge.py").judge("runs/config.yaml")
    assert set(judged) == {"good", "right", "words"}


@pytest.mark.long
def test_dpo_teaches_short_right_answers(copy_of: Any) -> None:
    folder = copy_of("preferences")
    load_module(folder / "make_questions.py").write(folder)
    Model("first.yaml", overrides=["trainer.skip_all_evaluation=true"], quiet=True).train(run="runs/first")
    load_module(folder / "make_pairs.py").write()
    Model("config.yaml", overrides=["trainer.skip_all_evaluation=true"], quiet=True).train(run="runs/config")
    judge = load_module(folder / "judge.py").judge
    assert judge("runs/config")["good"] > judge("runs/first")["good"] + 0.2
    # Not the mean: a few answers may repeat their words up to the token limit.
    assert median_words("runs/config") <= median_words("runs/first") - 2


def median_words(run: str) -> float:
    """Return the median number of words of a run's answers to the new questions."""
    questions = [{"question": row["question"]} for row in read_json_lines(Path("new_questions.jsonl"))]
    answers = Model.load(run, quiet=True).predict(questions)
    return statistics.median(len(str(one["answer"]).split()) for one in answers)
