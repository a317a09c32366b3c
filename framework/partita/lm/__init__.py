"""Language models: tokenizers, transformers models with adapters and quantisation, and a scripted one for tests."""
