"""What a transcript tells about the answers of the model: which are right, which were tried again, which to learn."""

from collections.abc import Sequence
from typing import Any

from partita.data.episode import Episode, EpisodeTurn, answer_part
from partita_schema.sections.sources import Target

Row = dict[str, Any]


def row_of(episode: Episode, end: int, right: str) -> Row:
    """Return the messages before the one at `end`, as the model saw them, with the correct answer as the label."""
    own = {reply.index for reply in episode.replies}
    messages = [
        {"role": message["role"], "content": message["content"]}
        | ({"train": True} | answer_part(message) if index in own else {})
        for index, message in enumerate(episode.shown[:end])
    ]
    return {"messages": messages, "labels": [right], "train_all": False}


def is_right(episode: Episode) -> bool | None:
    """Return whether a dialogue needs no correction; None if that is unknown."""
    if any(reply.correction is not None for reply in episode.replies):
        return False
    return episode.succeeded


def turns_of(episode: Episode, target: Target) -> Sequence[int]:
    """Return the numbers of the model's turns to learn: all, or the last one, which is the last corrected one if any
    is. Of a failed dialogue, only corrected turns count."""
    every = target == "every_agent_turn"
    corrected = [number for number, reply in enumerate(episode.replies) if reply.correction is not None]
    if episode.status == "failed":
        return corrected if every else corrected[-1:]
    return range(len(episode.replies)) if every else corrected[-1:] or range(len(episode.replies))[-1:]


def right_answer(episode: Episode, number: int) -> str | None:
    """Return the correct version of the answer of the model's turn `number`; None if it is unknown.

    It is the correction that someone has written, also into the last retry. In a dialogue that succeeded, it is the
    answer, or the last retry if the checker rejected the answer. Else it is what the checker or the environment knows.
    """
    reply, final = episode.replies[number], last_retry(episode, number)
    if reply.correction is not None or final.correction is not None:
        return reply.correction or final.correction
    if episode.succeeded:
        return final.whole.strip() or None
    last = final is episode.replies[-1]
    return (episode.target if last and episode.target is not None else reply.gold) or None


def last_retry(episode: Episode, number: int) -> EpisodeTurn:
    """Return the last retry of an answer, or the answer itself: a retry follows nothing but messages of the checker."""
    replies = episode.replies
    while number + 1 < len(replies):
        between = episode.messages[replies[number].index + 1 : replies[number + 1].index]
        if not between or any(message["agent"] != "checker" for message in between):
            break
        number += 1
    return replies[number]


def is_good(episode: Episode, number: int) -> bool | None:
    """Return whether an answer is good; None if that is unknown.

    An answer is bad if it was corrected or tried again, and the others of a dialogue that succeeded are good. In any
    other dialogue, an answer is good if it equals the right one; where that is not known, the last one is bad.
    """
    reply = episode.replies[number]
    if reply.correction is not None or last_retry(episode, number) is not reply:
        return False
    right = None if episode.succeeded else right_answer(episode, number)
    if right is not None:
        return reply.text.strip() == right.strip()
    return episode.succeeded if episode.succeeded or reply is episode.replies[-1] else None
