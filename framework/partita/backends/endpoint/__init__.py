"""Generation on a server with an OpenAI-compatible API, with the same journal as for a local model."""
