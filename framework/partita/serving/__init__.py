"""Answers to requests as they arrive: the engine, the HTTP server and the chat."""
