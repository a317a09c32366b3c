"""Tokenizers: loading, training, the Hub, and fingerprints of files."""
