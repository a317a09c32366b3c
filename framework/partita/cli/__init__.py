"""The command line: one module per command, each a thin wrapper around the Python interface."""

import os

# When the first model is created, pydantic searches the metadata of every installed package for plugins. This takes
# a third of the time of `partita validate`, and the schema needs no plugin.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
