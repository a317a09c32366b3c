"""Dialogues that the model has, many at the same time, with a program or with the questions of a data set."""

from partita.simulation.contract import Checker, Environment, Verdict
from partita.simulation.dialogue import Dialogue

__all__ = ["Checker", "Dialogue", "Environment", "Verdict"]
