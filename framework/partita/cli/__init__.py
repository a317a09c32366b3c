"""The command line: one file a command, each a few lines over the Python interface."""

import os

# pydantic looks through the metadata of every installed package for plugins when the first model is made, which is a
# third of what `partita validate` takes; the schema needs none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
