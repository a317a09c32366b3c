"""Answers for programs and people while they wait: the engine, the HTTP server and the chat."""
