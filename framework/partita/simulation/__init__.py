"""Multi-turn simulation: rolls out many dialogues at once with an environment, a dataset or other agents.

This package exports what users implement: environments, checkers, agents and worlds.
"""

from typing import TYPE_CHECKING

from partita.data.episode import Episode, EpisodeTurn
from partita.simulation.agents import Agent, TurnContext
from partita.simulation.contract import Checker, Environment, Message, Verdict
from partita.simulation.worlds import Play, RequestTurn, World
from partita_schema.common.lazy import lazy_exports

if TYPE_CHECKING:
    from partita.simulation.rollout import Rollout
    from partita.simulation.transcripts import Transcripts
else:  # on first access: an environment process needs neither them nor torch
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {"partita.simulation.rollout": ("Rollout",), "partita.simulation.transcripts": ("Transcripts",)},
    )

__all__ = [
    "Agent",
    "Checker",
    "Environment",
    "Episode",
    "EpisodeTurn",
    "Message",
    "Play",
    "RequestTurn",
    "Rollout",
    "Transcripts",
    "TurnContext",
    "Verdict",
    "World",
]
