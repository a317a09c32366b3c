"""Dialogues per CPU second with a program: batched in slots, compared with a hand-written loop over `generate`.

Needs the shared folder next to the repository. 80 dialogues of 2 to 10 turns with a program that says 8 to 30 words of
real text and a number derived from the last answer, so that a different answer changes the dialogue. Answers are
greedy, 24 tokens at most. The model has 5.0 M random parameters; its output layer only produces words, so that answers
have the same tokens when they are encoded again, and it ends after some of them. Contenders take turns in one process
with one thread, with one process for each of three rounds, and the table has medians. Slow contenders have fewer
dialogues, and their seconds are scaled by turns; the loop that also answers finished dialogues runs in one round, since
it has no limit. `partita` is `Model.simulate` as a user calls it, including transcripts; "none enters" is a batch that
waits until its last dialogue has ended. The loop is that of subclasses of the Trainer: texts of the whole batch are
encoded again in each turn and padded left, with one call of `generate` per turn; finished dialogues are answered too
until the last one has ended (as in ParlAI's BatchWorld), or removed. It runs without a Trainer, which would only add to
its time. At the end two processes share 32 dialogues over gloo, and calls of torch.distributed are counted on both.
"""

import json
import random
import statistics
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fixtures import read_rows, zero_shot
from harness import SHARED, Limit, Result, Row, call, main, run_script
from processes import import_all, must_run_ranks

NEW_TOKENS = 24
"""Maximum tokens of an answer."""
DIALOGUES, QUICK_DIALOGUES = 80, 16
ROUNDS = 3
CONTENDERS: dict[str, tuple[str, int, Mapping[str, Any]]] = {
    "partita, 1 at a time": ("partita", 8, {"batch": 1}),
    "partita, 16": ("partita", 80, {"batch": 16}),
    "partita, 64": ("partita", 80, {"batch": 64}),
    "partita, 1, turns read whole": ("partita", 8, {"batch": 1, "keeps": False}),
    "partita, 16, turns read whole": ("partita", 80, {"batch": 16, "keeps": False}),
    "partita, 64, turns read whole": ("partita", 80, {"batch": 64, "keeps": False}),
    "partita, 16, none enters before all have ended": ("partita", 80, {"batch": 16, "removes": False}),
    "generate, 1 at a time": ("loop", 8, {"batch": 1, "removes": True}),
    "generate, 16": ("loop", 16, {"batch": 16, "removes": False}),
    "generate, 16, finished ones left out": ("loop", 80, {"batch": 16, "removes": True}),
    "generate, 64, finished ones left out": ("loop", 80, {"batch": 64, "removes": True}),
}
"""The options and the number of dialogues of each contender."""
ONCE = ("generate, 16",)
TRUTH = "generate, 16, finished ones left out"
"""The contender whose answers are compared with all others."""
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "isend", "irecv", "recv", "reduce"),
    *("monitored_barrier", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)


def rollout(folder: Path, quick: bool) -> Result:
    runs: dict[str, list[Row]] = {}
    run_script([SHARED / "peers" / "workload.py", folder])
    count = QUICK_DIALOGUES if quick else DIALOGUES
    for number in range(1 if quick else ROUNDS):
        for name, found in call(one_round, folder, count, number > 0).items():
            runs.setdefault(name, []).append(found)
            print(name, found, flush=True)
    ranks = call(on_ranks, folder)
    print(ranks, flush=True)
    rows = [summary(name, found, count, turns=runs[TRUTH][0]["turns"]) for name, found in runs.items()]
    return rows, [*limits_of(runs), *limits_of_ranks(ranks)]


def summary(name: str, runs: Sequence[Mapping[str, Any]], count: int, *, turns: int) -> dict[str, Any]:
    """Return medians of the runs of a contender, extrapolated to all dialogues by turns."""
    whole = turns / runs[0]["turns"]
    seconds = statistics.median(run["cpu"] for run in runs) * whole
    return {
        "who": name,
        "dialogues/CPU s": round(count / seconds, 2),
        "CPU s": round(seconds, 2),
        "tokens through the model": round(statistics.median(run["tokens"] for run in runs) * whole),
        "dialogues had": runs[0]["dialogues"],
        "of these differ": max(run["other"] for run in runs),
        "runs": [round(run["cpu"] * whole, 2) for run in runs],
    }


def limits_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Limit]:
    """Return the limits. Ratios are medians over rounds, of runs in one process."""

    def ratio(slower: str, faster: str) -> float:
        pairs = zip(runs[slower], runs[faster], strict=True)
        turns = ((one["cpu"] / one["turns"], other["cpu"] / other["turns"]) for one, other in pairs)
        return round(statistics.median(one / other for one, other in turns), 3)

    ours = "partita, 16"
    loops = [name for name in runs if name.startswith("generate") and name not in ONCE]
    best = min(loops, key=lambda name: statistics.median(run["cpu"] / run["turns"] for run in runs[name]))
    mine = [name for name in runs if name.startswith("partita")]
    return [
        Limit("16 at a time over 1", ratio("partita, 1 at a time", ours), 2.5, "min"),
        Limit("dialogues of partita that differ", max(run["other"] for name in mine for run in runs[name]), 0, "max"),
        Limit("16: over reading turns whole", ratio("partita, 16, turns read whole", ours), 1, "min"),
        Limit("64: over reading turns whole", ratio("partita, 64, turns read whole", "partita, 64"), 1, "min"),
        Limit("1 at a time: over generate", ratio("generate, 1 at a time", "partita, 1 at a time"), 1, "min"),
        Limit(f"64: over the best loop ({best})", ratio(best, "partita, 64"), 1, "min"),
    ]


def limits_of_ranks(ranks: Mapping[str, Any]) -> list[Limit]:
    """Return the limits of two processes."""
    return [
        Limit("calls of torch.distributed in the loop of 2 processes", sum(ranks["inside"]), 0, "max"),
        Limit("calls of torch.distributed around it, which are seen", min(ranks["around"]), 1, "min"),
        Limit("dialogues of 2 processes that differ", ranks["other"], 0, "max"),
    ]


# The program and the model


class Guide:
    """A program whose messages and number of turns depend on the task and the answers."""

    def __init__(self, folder: str) -> None:
        self.texts = texts_of(folder)

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Return the system message and the first message; `seed` is not used, since the loop has none."""
        self.rng = random.Random(task["number"])
        self.turns = min(10, 2 + int(self.rng.expovariate(0.5)))
        system = {"role": "system", "content": " ".join(self.texts[0][:40])}
        return [system, {"role": "user", "content": self.words("")}], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return the next message."""
        self.turns -= 1
        return self.words(action), float(len(action)), not self.turns, False, {}

    def words(self, heard: str) -> str:
        """Return a part of a text, and a number that depends on the answer."""
        text = self.rng.choice(self.texts)
        start, count = self.rng.randrange(len(text)), self.rng.randint(8, 30)
        return " ".join([str(zlib.crc32(heard.encode()) % 1000), *text[start : start + count]])

    def close(self) -> None:
        """Do nothing."""


@cache
def texts_of(folder: str) -> list[list[str]]:
    """Return the words of real texts."""
    texts = (row["prompt"].split() for row in read_rows(Path(folder, "rows.jsonl")))
    return [words for words in texts if len(words) > 40]


class Workload:
    """The model in a folder, loaded for each contender."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "talker"
        if not self.path.exists():
            make_talker(folder / "tiny", self.path)
        self.theirs: Any = None
        self.models: dict[int, Any] = {}

    def ours(self, count: int) -> Any:
        """Return partita's model for `count` dialogues, loaded once."""
        from partita import Model

        if count in self.models:
            return self.models[count]
        options = {"folder": str(self.folder)}
        world = {"type": "environment", "environment": "rollout:Guide", "options": options}
        simulation = {"world": world, "tasks": {"count": count}}
        config = zero_shot(str(self.path), "messages reply", tokens=NEW_TOKENS, simulation=simulation)
        config["input_features"][0]["type"] = "dialogue"
        self.models[count] = Model(config, quiet=True)
        return self.models[count]

    def module(self, kind: str, count: int) -> Any:
        """Return the module of a contender; all have the same weights."""
        from transformers import AutoModelForCausalLM

        if kind == "partita":
            return self.ours(count)._backend.pipeline().lm.module
        if self.theirs is None:
            self.theirs = AutoModelForCausalLM.from_pretrained(self.path, dtype="float32").eval()
        return self.theirs


def make_talker(source: Path, target: Path) -> None:
    """Create a model that only generates words, each a token that survives decoding and encoding, and end tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    silent = [token for text, token in tokenizer.get_vocab().items() if not (text[0] == "Ġ" and text[1:].isalpha())]
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        ending = 2 * weight[tokenizer.eos_token_id]
        weight[silent] = 0
        weight[tokenizer.eos_token_id] = ending
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


# A round, in a separate process


def one_round(name: str, count: int, again: bool) -> dict[str, Row]:
    """Run each contender and return its measurements; in rounds after the first, without those that run once."""
    import torch

    torch.set_num_threads(1)
    work = Workload(Path(name))
    parts: dict[str, Callable[..., dict[str, list[str]]]] = {"partita": Ours(work).run, "loop": Loop(work).run}
    said: dict[str, dict[str, list[str]]] = {}
    found: dict[str, dict[str, Any]] = {}
    # The first calls select kernels and read files.
    parts["partita"](16, batch=16)
    parts["loop"](16, batch=16, removes=True)
    for name, (kind, dialogues, how) in CONTENDERS.items():
        if again and name in ONCE:
            continue
        dialogues = min(dialogues, count)
        with counting_tokens(work.module(kind, dialogues)) as tokens:
            cpu = time.process_time()
            said[name] = parts[kind](dialogues, **how)
            found[name] = {"cpu": time.process_time() - cpu, "tokens": sum(tokens)}
    for name, answers in said.items():
        other = sum(texts != said[TRUTH][key] for key, texts in answers.items())
        found[name] |= {"dialogues": len(answers), "turns": sum(map(len, answers.values())), "other": other}
    return found


def on_ranks(name: str) -> Row:
    """Count the calls of torch.distributed on two processes, and the dialogues that differ from those of one."""
    import_all()
    folder, count = Path(name), 2 * QUICK_DIALOGUES
    output = folder / "ranks"

    def work(rank: int) -> None:
        from partita.simulation.rollout import Rollout

        run_rollout, model = Rollout.run, Workload(folder).ours(count)
        inside = 0
        with counting_calls() as calls:

            def watched(rollout: Rollout, dialogues: Iterator[Any]) -> Iterator[Any]:
                nonlocal inside
                before = sum(calls.values())
                yield from run_rollout(rollout, dialogues)
                inside += sum(calls.values()) - before

            Rollout.run = watched  # type: ignore[method-assign]
            model.simulate(output, batch_size=16)
        (folder / f"calls-{rank}").write_text(json.dumps([inside, dict(calls)]), encoding="utf8")

    must_run_ranks(2, work)
    found = [json.loads((folder / f"calls-{rank}").read_text(encoding="utf8")) for rank in range(2)]
    alone = Ours(Workload(folder)).run(count, batch=16)
    together = said_in(output)
    return {
        "inside": [inside for inside, _ in found],
        "around": [sum(calls.values()) - inside for inside, calls in found],
        "calls": [calls for _, calls in found],
        "other": sum(alone[task] != answers for task, answers in together.items()) + len(alone) - len(together),
    }


class Ours:
    """Dialogues by `Model.simulate`."""

    def __init__(self, work: Workload) -> None:
        self.work = work

    def run(self, count: int, *, batch: int, keeps: bool = True, removes: bool = True) -> dict[str, list[str]]:
        """Return the model's messages in each of `count` dialogues, with `batch` at a time."""
        from partita.simulation.dialogue_scheduler import WaitingEpisodes
        from partita.simulation.rollout import Rollout

        begin = Rollout.begin

        def begin_together(rollout: Rollout) -> None:
            if not rollout.active:
                begin(rollout)

        WaitingEpisodes.keeps = keeps
        Rollout.begin = begin if removes else begin_together  # type: ignore[method-assign]
        try:
            with tempfile.TemporaryDirectory() as output:
                self.work.ours(count).simulate(output, batch_size=batch)
                return said_in(Path(output))
        finally:
            WaitingEpisodes.keeps = True
            Rollout.begin = begin  # type: ignore[method-assign]


def said_in(folder: Path) -> dict[str, list[str]]:
    """Return the model's messages of each dialogue in transcripts."""
    return {line["task"]: said(line["messages"]) for line in read_rows(folder / "predicted.jsonl")}


def said(messages: Sequence[Mapping[str, str]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


class Loop:
    """Dialogues by a loop over `generate`."""

    def __init__(self, work: Workload) -> None:
        from transformers import AutoTokenizer

        self.model = work.module("loop", 0)
        self.tokenizer = AutoTokenizer.from_pretrained(work.path, padding_side="left")
        self.folder = str(work.folder)

    def run(self, count: int, *, batch: int, removes: bool) -> dict[str, list[str]]:
        """Return the model's messages in each of `count` dialogues, batch by batch."""
        found: dict[str, list[str]] = {}
        for start in range(0, count, batch):
            tasks = range(start, min(start + batch, count))
            for task, messages in zip(tasks, self.talk(tasks, removes=removes), strict=True):
                found[f"task-{task}"] = said(messages)
        return found

    def talk(self, tasks: Sequence[int], *, removes: bool) -> list[list[dict[str, str]]]:
        """Return the messages of dialogues that start together."""
        programs = [Guide(self.folder) for _ in tasks]
        dialogues: list[list[dict[str, str]]] = []
        for program, task in zip(programs, tasks, strict=True):
            messages, _ = program.reset(seed=0, task={"number": task})
            dialogues.append(list(messages))
        ended = [False] * len(tasks)
        while not all(ended):
            asked = [place for place in range(len(tasks)) if not (removes and ended[place])]
            texts = ["".join(message["content"] + "\n" for message in dialogues[place]) for place in asked]
            for place, answer in zip(asked, self.answers(texts), strict=True):
                if ended[place]:
                    continue
                dialogues[place].append({"role": "assistant", "content": answer})
                words, _, ended[place], _, _ = programs[place].step(answer)
                dialogues[place].append({"role": "user", "content": words})
        return dialogues

    def answers(self, texts: list[str]) -> list[str]:
        """Answer all texts with one call of `generate`."""
        import torch

        inputs = self.tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            found = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers: list[str] = self.tokenizer.batch_decode(
            found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers


@contextmanager
def counting_tokens(module: Any) -> Iterator[list[int]]:
    """Record the tokens that the model computes, including padding."""
    tokens: list[int] = []
    hook = module.get_input_embeddings().register_forward_hook(lambda *given: tokens.append(given[1][0].numel()))
    try:
        yield tokens
    finally:
        hook.remove()


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Count the collective calls of torch.distributed by name."""
    import torch

    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*words: Any, **named: Any) -> Any:
            calls[name] += 1
            return function(*words, **named)

        return counted

    before = {name: getattr(torch.distributed, name) for name in COLLECTIVES}
    for name, function in before.items():
        setattr(torch.distributed, name, counting(name, function))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(torch.distributed, name, function)


if __name__ == "__main__":
    main(rollout)
