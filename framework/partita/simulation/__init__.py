"""Multi-turn simulation: rolls out many dialogues at once with an environment, a dataset or other agents."""

from typing import TYPE_CHECKING, Any

from partita.data.episode import Episode
from partita.simulation.agents import Agent, TurnContext
from partita.simulation.contract import Checker, Environment, Verdict
from partita.simulation.worlds import Play, RequestTurn, World

if TYPE_CHECKING:
    from partita.simulation.rollout import Rollout
    from partita.simulation.transcripts import Transcripts

__all__ = [
    "Agent",
    "Checker",
    "Environment",
    "Episode",
    "Play",
    "RequestTurn",
    "Rollout",
    "Transcripts",
    "TurnContext",
    "Verdict",
    "World",
]


def __getattr__(name: str) -> Any:
    """Import `Rollout` and `Transcripts` on first use: an environment process needs neither them nor torch."""
    if name == "Rollout":
        from partita.simulation.rollout import Rollout

        return Rollout
    if name == "Transcripts":
        from partita.simulation.transcripts import Transcripts

        return Transcripts
    raise AttributeError(f"module 'partita.simulation' has no attribute {name!r}")
