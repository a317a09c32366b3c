"""Language models: transformers models with adapters and quantization, a scripted one for tests."""
