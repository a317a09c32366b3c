"""Pairs of answers from transcripts of simulations: a chosen and a rejected answer to the same prompt.

A pair compares one turn of the model. What follows that turn differs between two dialogues in the messages of the other
speakers too, and those are no answers: a row has one answer on each side, without gaps.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from partita.data.episode import AGENT, Episode, answer_part
from partita_schema.sections.sources import Target

Row = dict[str, Any]


def row_of(episode: Episode, end: int, right: str) -> Row:
    """Return the messages before the one at `end`, with the correct answer as the label."""
    own = {reply.index for reply in episode.replies}
    messages = [
        {"role": message["role"], "content": message["content"]}
        | ({"train": True} | answer_part(message) if index in own else {})
        for index, message in enumerate(episode.messages[:end])
    ]
    return {"messages": messages, "labels": [right], "train_all": False}


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


def best_and_worst(attempts: Sequence[Episode]) -> Row | str:
    """Return the first answers in which the best and the worst attempt at a task differ, or why there are none.

    A success is better than a failure; of two with the same outcome, that with the larger reward. Of several attempts
    that are equally good, those count that begin in the same way as their counterpart.
    """
    scores = [(score, attempt) for attempt in attempts if (score := score_of(attempt)) is not None]
    if len(scores) < 2:
        return "with fewer than two attempts of known outcome"
    best, worst = max(score for score, _ in scores), min(score for score, _ in scores)
    if best == worst:
        return "whose attempts are equally good"
    reason = ""
    for one, other in product(*([attempt for score, attempt in scores if score == wanted] for wanted in (best, worst))):
        found = difference(one, other)
        if not isinstance(found, str):
            return found
        reason = reason or found
    return reason


def score_of(episode: Episode) -> tuple[bool, float] | None:
    """Return whether an episode succeeded, and its reward; None if it failed or its outcome is unknown."""
    if episode.status == "failed" or not episode.replies or episode.succeeded is None:
        return None
    return episode.succeeded, episode.reward or 0.0


def difference(better: Episode, worse: Episode) -> Row | str:
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
    return pair_of(better, start, chosen=chosen["content"], rejected=rejected["content"])


def said(message: dict[str, Any]) -> tuple[str, str, str]:
    return message["agent"], message["role"], message["content"].strip()


# Corrected answers


def corrected_pairs(episode: Episode, *, target: Target) -> list[Row]:
    """Return a pair for each wrong answer whose correct version is known, or only for the last one."""
    if episode.status == "failed" or is_right(episode) is None:
        return []
    pairs = []
    for number, reply in enumerate(episode.replies):
        right = correction_of(episode, number)
        if right is not None and right.strip() != reply.text.strip() and reply.text.strip():
            pairs.append(pair_of(episode, reply.index, chosen=right, rejected=reply.text))
    return pairs[-1:] if target == "last_agent_turn" else pairs


def correction_of(episode: Episode, number: int) -> str | None:
    """Return the correct version of an answer: what someone has written, else the answer of the last retry if it was
    accepted, else the right answer that the checker or the environment knows; None if it is unknown."""
    reply, end = episode.replies[number], retries_end(episode, number)
    final = episode.replies[end]
    if reply.correction is not None or final.correction is not None:
        return reply.correction or final.correction
    if episode.succeeded:
        return final.text.strip() or None
    last = end == len(episode.replies) - 1
    return (episode.target if last and episode.target is not None else reply.gold) or None


def retries_end(episode: Episode, number: int) -> int:
    """Return the number of the last retry of an answer: an answer after nothing but messages of the checker."""
    replies = episode.replies
    while number + 1 < len(replies):
        between = episode.messages[replies[number].index + 1 : replies[number + 1].index]
        if not between or any(message["agent"] != "checker" for message in between):
            break
        number += 1
    return number


def is_right(episode: Episode) -> bool | None:
    """Return whether a dialogue needs no correction; None if that is unknown."""
    if any(reply.correction is not None for reply in episode.replies):
        return False
    return episode.succeeded
