"""Decoding with a paged KV cache, in steps of constant shapes that a CUDA graph can capture.

It has not been run on a GPU: the suite runs every part of it but the kernel of `varlen` and the capture on a CPU.
"""
