"""Encoder-decoders: the encoder reads the prompt, and the decoder writes the answer."""
