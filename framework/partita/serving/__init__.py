"""Serving of a model: chats in the terminal and the browser."""
