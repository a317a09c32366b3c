"""Language models: tokenizers, transformers models with adapters and quantization, a scripted one for tests."""
