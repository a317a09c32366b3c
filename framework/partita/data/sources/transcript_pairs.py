"""Pairs of answers from transcripts of simulations: a chosen and a rejected answer to the same prompt.

A pair compares one turn of the model. What follows that turn differs between two dialogues in the messages of the other
speakers too, and those are no answers: a row has one answer on each side, without gaps.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from partita.data.episode import AGENT, Episode
from partita.data.sources.transcript_answers import Row, is_right, right_answer, row_of, turns_of
from partita_schema.sections.sources import Target


class Pair(NamedTuple):
    """Two answers to compare."""

    row: Row
    is_cut: bool
    """Whether the chosen answer ended at the token limit."""


def pair_of(episode: Episode, end: int, *, chosen: str, rejected: str) -> Row:
    """Return the messages before an answer, with both answers.

    Args:
        episode: The episode.
        end: Index of the message that is compared.
        chosen: The better answer.
        rejected: The worse answer.
    """
    return row_of(episode, end, chosen) | {"rejected": {"content": rejected}}


# The best and the worst of several attempts


def best_and_worst(attempts: Sequence[Episode]) -> Pair | str:
    """Return the first answers in which the best and the worst attempt at a task differ, or why there are none.

    A success is better than a failure; of two with the same outcome, that with the larger reward. Of several attempts
    that are equally good, those count that begin in the same way as their counterpart, and if possible those whose
    chosen answer did not end at the token limit.
    """
    scores = [(score, attempt) for attempt in attempts if (score := score_of(attempt)) is not None]
    if len(scores) < 2:
        return "with fewer than two attempts of known outcome"
    best, worst = max(score for score, _ in scores), min(score for score, _ in scores)
    if best == worst:
        return "whose attempts are equally good"
    reason, cut = "", list[Pair]()
    for one, other in product(*([attempt for score, attempt in scores if score == wanted] for wanted in (best, worst))):
        found = difference(one, other)
        if isinstance(found, str):
            reason = reason or found
        elif found.is_cut:
            cut.append(found)
        else:
            return found
    return cut[0] if cut else reason


def score_of(episode: Episode) -> tuple[bool, float] | None:
    """Return whether an episode succeeded, and its reward; None if it failed or its outcome is unknown."""
    if episode.status == "failed" or not episode.replies or episode.succeeded is None:
        return None
    return episode.succeeded, episode.reward or 0.0


def difference(better: Episode, worse: Episode) -> Pair | str:
    """Return the first answers in which two dialogues differ as a pair, or why there are none."""
    pairs = zip(better.messages, worse.messages, strict=False)
    start = next((index for index, (one, other) in enumerate(pairs) if said(one) != said(other)), None)
    if start is None:
        return "whose attempts have equal answers"
    chosen, rejected = (episode.messages[start] for episode in (better, worse))
    if chosen["agent"] != AGENT or rejected["agent"] != AGENT:
        return "whose attempts differ before an answer of the model"
    if not (chosen["content"].strip() and rejected["content"].strip()):
        return "with an empty answer"
    row = pair_of(better, start, chosen=chosen["content"], rejected=rejected["content"])
    return Pair(row, is_cut=any(reply.is_cut for reply in better.replies if reply.index == start))


def said(message: dict[str, Any]) -> tuple[str, str, str]:
    return message["agent"], message["role"], message["content"].strip()


# Corrected answers


def corrected_pairs(episode: Episode, *, target: Target) -> list[Row]:
    """Return a pair for each wrong answer whose correct version is known, or only for the last one."""
    if is_right(episode) is None:
        return []
    pairs = []
    for number in turns_of(episode, "every_agent_turn"):
        reply, right = episode.replies[number], right_answer(episode, number)
        if right is not None and right.strip() != reply.text.strip() and reply.text.strip():
            pairs.append(pair_of(episode, reply.index, chosen=right, rejected=reply.text))
    return pairs[-1:] if target == "last_agent_turn" else pairs
