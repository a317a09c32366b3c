"""Verbs that a model on a server does not support."""

from partita.backends.base import Refusals

REFUSALS = Refusals(
    "there is nothing to {verb} with backend: {{type: endpoint}}: {reason}",
    {
        "train": "the model is the server's; use evaluate or predict, or remove backend",
        "tune": "the server chooses how many rows go through its model at once; backend.concurrency says how many it "
        "is asked at the same time",
        "preview": "tokens are the server's; with a model or its folder as base_model and without backend they are "
        "shown",
        "save": "the model is the server's",
        "simulate": "episodes need a model in this process; remove backend",
    },
)
