"""Padding of a batch plan beside its peers', and what that is worth to a tiny Llama.

Three workloads of 20,000 row lengths; batches of 32 rows, or of the tokens that 32 mean rows hold. The Llama (128 wide,
two layers, one thread) goes forward and backward over random batches of each plan, in turn, median of three.
"""

import statistics
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import peers_data as peers
from harness import Limit, about, parse_arguments, report
from workloads_data import LENGTHS, LONGEST, spending

Plan = list[tuple[np.ndarray, np.ndarray]]
"""Batches: rows, and the line of each."""
WINDOW, ROWS_OF_A_BATCH = 2048, 32
TIMED = ("random", "HF group_by_length", "AllenNLP bucket", "ParlAI dynamic", "partita token_budget", "partita pack")
MOST_PADDING = {"chat": 0.025, "SNLI-like": 0.025, "squashed dialogues": 0.045}


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count, rounds, timed_tokens = (4096, 1, 10_000) if arguments.quick else (20_000, 3, 100_000)
    rows: list[dict[str, Any]] = []
    limits: list[Limit] = []
    for workload, make in LENGTHS.items():
        lengths = make(count, np.random.default_rng(1))
        budget = int(lengths.mean() * ROWS_OF_A_BATCH)
        budget = max(budget, int(lengths.max()))
        plans, found = {}, {}
        for name, plan in contenders(lengths, budget).items():
            with spending() as spent:
                plans[name] = plan()
            found[name] = describe(plans[name], lengths, budget) | {"plan CPU s": round(spent.cpu, 3)}
            rows.append({"workload": workload, "contender": name, **found[name]})
        timed = TIMED if not arguments.quick else TIMED[:2] + TIMED[-2:] if workload == "chat" else ()
        rates = speeds({name: plans[name] for name in timed}, lengths, tokens=timed_tokens, rounds=rounds)
        for row in rows:
            if row["workload"] == workload and row["contender"] in rates:
                row["tokens/CPU s"] = rates[row["contender"]]
        ours = found["partita token_budget"]
        limits += [
            Limit(f"{workload}: padding, token_budget", ours["padding"], MOST_PADDING[workload], "max"),
            Limit(f"{workload}: batches above the budget", ours["above"], 0, "max"),
            Limit(f"{workload}: rows lost or doubled", ours["lost"] + ours["doubled"], 0, "max"),
        ]
        if workload == "chat":
            best = max(rates["partita token_budget"], rates["partita pack"])
            limits.append(Limit("chat: tokens a CPU second over random", round(best / rates["random"], 2), 3, "min"))
    report("data_padding", rows, limits, arguments=arguments, about=about(__doc__))


def contenders(lengths: np.ndarray, budget: int) -> dict[str, Callable[[], Plan]]:
    """Plans of an epoch by who makes them."""
    size, seed = ROWS_OF_A_BATCH, 1
    by_rows: dict[str, Any] = {
        "random": peers.in_random_order,
        "HF group_by_length": peers.group_by_length,
        "AllenNLP bucket": peers.allennlp_bucket,
        "ParlAI batch cache": peers.parlai_batch_cache,
    }
    by_tokens: dict[str, Any] = {
        "AllenNLP max tokens": peers.allennlp_max_tokens,
        "ParlAI dynamic": peers.parlai_dynamic,
    }
    made: dict[str, Callable[[], Plan]] = {}
    for name, make in by_rows.items():
        made[name] = lambda make=make: alone(make(lengths, batch_size=size, seed=seed))
    for name, make in by_tokens.items():
        made[name] = lambda make=make: alone(make(lengths, max_tokens=budget, seed=seed))
    made["partita bucket"] = lambda: ours(lengths, {"type": "bucket", "window": WINDOW})
    made["partita token_budget"] = lambda: ours(
        lengths, {"type": "token_budget", "window": WINDOW, "max_tokens": budget}
    )
    # A line is as long as the longest row may be, and a batch has the lines that the budget holds.
    made["partita pack"] = lambda: ours(
        lengths,
        {"type": "pack", "window": WINDOW, "max_tokens": int(lengths.max())},
        lines=max(1, budget // int(lengths.max())),
    )
    return made


def alone(batches: list[list[int]]) -> Plan:
    return [(np.array(batch, dtype=np.int64), np.arange(len(batch))) for batch in batches]


def ours(lengths: np.ndarray, batching: dict[str, Any], *, lines: int = ROWS_OF_A_BATCH) -> Plan:
    """The product's plan of the first epoch."""
    from pydantic import TypeAdapter

    from partita.data.batching.indexed import IndexedPlanner
    from partita.data.batching.policies import build_policy
    from partita_schema.batching import Batching

    policy = build_policy(TypeAdapter(Batching).validate_python(batching), batch_size=lines)
    planner = IndexedPlanner(lengths, policy=policy, batches_per_step=1, seed=1)
    return epoch_of(planner)


def epoch_of(planner: Any) -> Plan:
    return [(batch.rows, batch.lines) for step in planner.steps(0) for batch in step.batches]


def describe(plan: Plan, lengths: np.ndarray, budget: int) -> dict[str, Any]:
    """Padding and counts of a plan."""
    real, cells, above, empty = 0, 0, 0, 0
    seen: Counter[int] = Counter()
    for rows, lines in plan:
        seen.update(rows.tolist())
        size = cells_of(lengths[rows], lines)
        real, cells = real + int(lengths[rows].sum()), cells + size
        above, empty = above + (size > budget), empty + (not len(rows))
    return {
        "padding": round(1 - real / cells, 4),
        "batches": len(plan),
        "empty": empty,
        "above": above,
        "lost": len(lengths) - len(seen),
        "doubled": sum(count - 1 for count in seen.values()),
    }


def cells_of(lengths: np.ndarray, lines: np.ndarray) -> int:
    """Tokens of a batch, padding included."""
    if not len(lengths):
        return 0
    filled = np.bincount(lines, weights=lengths)
    return int(filled.max()) * len(filled)


def speeds(plans: dict[str, Plan], lengths: np.ndarray, *, tokens: int, rounds: int) -> dict[str, int]:
    """Real tokens a CPU second of each plan."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=LONGEST, **shape)
    model = LlamaForCausalLM(config).train()
    step(model, np.array([64]), np.array([0]))
    rates: dict[str, list[float]] = {name: [] for name in plans}
    for seed in range(rounds):
        for name, plan in plans.items():
            done, cpu = 0, 0.0
            for place in np.random.default_rng(seed).permutation(len(plan)):
                rows, lines = plan[place]
                with spending() as spent:
                    step(model, lengths[rows], lines)
                done, cpu = done + int(lengths[rows].sum()), cpu + spent.cpu
                if done >= tokens:
                    break
            rates[name].append(done / cpu)
    return {name: round(statistics.median(found)) for name, found in rates.items()}


def step(model: Any, lengths: np.ndarray, lines: np.ndarray) -> None:
    """Forward and backward over tokens that do not matter; rows that share a line do not see each other."""
    import torch

    filled = np.bincount(lines, weights=lengths).astype(int)
    width = int(filled.max())
    ids = torch.randint(1, 512, (len(filled), width))
    inside = torch.arange(width) < torch.tensor(filled)[:, None]
    labels = torch.where(inside, ids, -100)
    if len(filled) == len(lengths):  # padded on the right, which causal attention never looks at
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    else:
        positions = torch.zeros_like(ids)
        ends = dict.fromkeys(range(len(filled)), 0)
        for length, line in zip(lengths.tolist(), lines.tolist(), strict=True):
            positions[line, ends[line] : ends[line] + length] = torch.arange(length)
            ends[line] += length
        model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss.backward()
    model.zero_grad()


if __name__ == "__main__":
    sys.exit(main())
