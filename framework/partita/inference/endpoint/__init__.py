"""Answers of a server that speaks the protocol of OpenAI, behind the same journal as those of a model in memory."""
