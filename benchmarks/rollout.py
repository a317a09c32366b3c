"""Dialogues a CPU second with a program: many at a time in slots, beside a loop over `generate` written by hand.

80 dialogues of 2 to 10 turns with a program that says 8 to 30 words of real text and a number that follows from the
answer it heard, so that an answer that differs is heard of later. Answers are greedy, 24 tokens at most. The model has
5.0 M parameters, of chance; its output layer only says words, so that answers are the same tokens when they are encoded
again, and ends after some of them. Contenders take turns in one process with one thread, a process for each of three
rounds, and medians are told. Those that take long have fewer dialogues, and seconds in proportion to turns; the loop
that answers finished dialogues along runs in one round, since nothing is promised of it. `partita` is `Model.simulate`
as a user calls it, transcripts included; "none enters" is a batch that waits until its last dialogue has ended. The
loop is what subclasses of the Trainer have in their place: texts of the whole batch, encoded anew each turn and padded
left, one call of `generate` for a turn, finished dialogues answered along until the last one has ended (as ParlAI's
BatchWorld does), or left out. It stands without a Trainer around it, which would only add to its time. At the end two
processes share 32 dialogues over gloo, and calls of torch.distributed are counted on both.
"""

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import SHARED, Limit, parse_arguments, report, run_script
from workloads_rollout import NEW_TOKENS, Guide, Workload

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
"""Who has dialogues, how many of them, and how."""
ONCE = ("generate, 16",)
TRUTH = "generate, 16, finished ones left out"
"""What the answers of all are compared with."""
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *(
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "isend",
        "irecv",
        "monitored_barrier",
    ),
    *("recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    if not SHARED.is_dir():
        sys.exit(f"needs the shared folder at {SHARED}")
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run_script([SHARED / "peers" / "workload.py", folder])
        count = QUICK_DIALOGUES if arguments.quick else DIALOGUES
        for number in range(1 if arguments.quick else ROUNDS):
            words = [__file__, "--round", folder, count, *(("again",) if number else ())]
            for name, found in json.loads(run_script(words).splitlines()[-1]).items():
                runs.setdefault(name, []).append(found)
                print(name, found, flush=True)
        ranks = json.loads(run_script([__file__, "--ranks", folder]).splitlines()[-1])
        print(ranks, flush=True)
    rows = [summary(name, found, count, turns=runs[TRUTH][0]["turns"]) for name, found in runs.items()]
    report(
        "rollout",
        rows,
        [*limits_of(runs), *limits_of_ranks(ranks)],
        arguments=arguments,
        about=" ".join((__doc__ or "").split()),
    )


def summary(name: str, runs: Sequence[Mapping[str, Any]], count: int, *, turns: int) -> dict[str, Any]:
    """Medians of the runs of a contender, for all dialogues in proportion to turns."""
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
    """What is promised. Ratios are medians over rounds, of runs of one process."""

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
    """What is promised of two processes."""
    return [
        Limit("calls of torch.distributed in the loop of 2 processes", sum(ranks["inside"]), 0, "max"),
        Limit("calls of torch.distributed around it, which are seen", min(ranks["around"]), 1, "min"),
        Limit("dialogues of 2 processes that differ", ranks["other"], 0, "max"),
    ]


# A round, in a process of its own


def one_round(folder: str, count: str, again: str = "") -> dict[str, dict[str, Any]]:
    """What each contender came to; those that run once are left out of a round that comes again."""
    import torch

    torch.set_num_threads(1)
    work = Workload(Path(folder))
    parts: dict[str, Callable[..., dict[str, list[str]]]] = {"partita": Ours(work).run, "loop": Loop(work).run}
    said: dict[str, dict[str, list[str]]] = {}
    found: dict[str, dict[str, Any]] = {}
    # Kernels are chosen, and files are read, before anything is measured.
    parts["partita"](16, batch=16)
    parts["loop"](16, batch=16, removes=True)
    for name, (kind, dialogues, how) in CONTENDERS.items():
        if again and name in ONCE:
            continue
        dialogues = min(dialogues, int(count))
        with counting_tokens(work.module(kind, dialogues)) as tokens:
            cpu = time.process_time()
            said[name] = parts[kind](dialogues, **how)
            found[name] = {"cpu": time.process_time() - cpu, "tokens": sum(tokens)}
    for name, answers in said.items():
        other = sum(told != said[TRUTH][key] for key, told in answers.items())
        found[name] |= {"dialogues": len(answers), "turns": sum(map(len, answers.values())), "other": other}
    return found


def on_ranks(folder: str) -> dict[str, Any]:
    """Calls of torch.distributed by each of two processes, and how many dialogues differ from those of one."""
    from forked import import_all, run_ranks

    import_all()
    output, count = Path(folder, "ranks"), 2 * QUICK_DIALOGUES

    def work(rank: int) -> None:
        from partita.simulation.rollout import Rollout

        have, model = Rollout.run, Workload(Path(folder)).ours(count)
        inside = 0
        with counting_calls() as calls:

            def watched(rollout: Rollout, dialogues: Iterator[Any]) -> Iterator[Any]:
                nonlocal inside
                before = sum(calls.values())
                yield from have(rollout, dialogues)
                inside += sum(calls.values()) - before

            Rollout.run = watched  # type: ignore[method-assign]
            model.simulate(output, batch_size=16)
        Path(folder, f"calls-{rank}").write_text(json.dumps([inside, dict(calls)]), encoding="utf8")

    if any(run_ranks(2, work, folder=Path(folder)).status):
        raise SystemExit("a rank failed")
    told = [json.loads(Path(folder, f"calls-{rank}").read_text(encoding="utf8")) for rank in range(2)]
    alone = Ours(Workload(Path(folder))).run(count, batch=16)
    together = said_in(output)
    return {
        "inside": [inside for inside, _ in told],
        "around": [sum(calls.values()) - inside for inside, calls in told],
        "calls": [calls for _, calls in told],
        "other": sum(alone[task] != answers for task, answers in together.items()) + len(alone) - len(together),
    }


class Ours:
    """Dialogues as `Model.simulate` has them."""

    def __init__(self, work: Workload) -> None:
        self.work = work

    def run(self, count: int, *, batch: int, keeps: bool = True, removes: bool = True) -> dict[str, list[str]]:
        """What the model said in each of so many dialogues, a batch at a time."""
        from partita.simulation.dialogue_scheduler import DialogueScheduler
        from partita.simulation.rollout import Rollout

        begin = Rollout.begin

        def begin_together(rollout: Rollout) -> None:
            if not rollout.active:
                begin(rollout)

        DialogueScheduler.keeps = keeps
        Rollout.begin = begin if removes else begin_together  # type: ignore[method-assign]
        try:
            with tempfile.TemporaryDirectory() as output:
                self.work.ours(count).simulate(output, batch_size=batch)
                return said_in(Path(output))
        finally:
            DialogueScheduler.keeps = True
            Rollout.begin = begin  # type: ignore[method-assign]


def said_in(folder: Path) -> dict[str, list[str]]:
    """The model's words of each dialogue in transcripts."""
    lines = (folder / "predicted.jsonl").read_text(encoding="utf8").splitlines()
    return {line["task"]: said(line["messages"]) for line in map(json.loads, lines)}


def said(messages: Sequence[Mapping[str, str]]) -> list[str]:
    """The model's words."""
    return [message["content"] for message in messages if message["role"] == "assistant"]


class Loop:
    """The loop that stands in place of it."""

    def __init__(self, work: Workload) -> None:
        from transformers import AutoTokenizer

        self.model = work.module("loop", 0)
        self.tokenizer = AutoTokenizer.from_pretrained(work.path, padding_side="left")
        self.folder = str(work.folder)

    def run(self, count: int, *, batch: int, removes: bool) -> dict[str, list[str]]:
        """What the model said in each of so many dialogues, a batch after the other."""
        found: dict[str, list[str]] = {}
        for start in range(0, count, batch):
            tasks = range(start, min(start + batch, count))
            for task, messages in zip(tasks, self.talk(tasks, removes=removes), strict=True):
                found[f"task-{task}"] = said(messages)
        return found

    def talk(self, tasks: Sequence[int], *, removes: bool) -> list[list[dict[str, str]]]:
        """The messages of dialogues that begin together."""
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
        """One call of the library for all."""
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
    """Inside, tokens that go through the model are taken down, padding included."""
    tokens: list[int] = []
    hook = module.get_input_embeddings().register_forward_hook(lambda *given: tokens.append(given[1][0].numel()))
    try:
        yield tokens
    finally:
        hook.remove()


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Inside, calls of torch.distributed in which processes meet are counted by name."""
    import torch

    calls: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*words: Any, **named: Any) -> Any:
            calls[name] += 1
            return call(*words, **named)

        return counted

    before = {name: getattr(torch.distributed, name) for name in COLLECTIVES}
    for name, call in before.items():
        setattr(torch.distributed, name, counting(name, call))
    try:
        yield calls
    finally:
        for name, call in before.items():
            setattr(torch.distributed, name, call)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--round"]:
        print(json.dumps(one_round(*sys.argv[2:])))
    elif sys.argv[1:2] == ["--ranks"]:
        print(json.dumps(on_ranks(*sys.argv[2:])))
    else:
        main()
