"""Continuous batching over any full-attention Hugging Face causal LM, in this process.

kv_cache   keys and values in blocks, and the attention that reads them
sampler    logits -> tokens and logprobs, from a counter-based random stream; whether a response has ended
weights    the in-place swap of weights or adapter, and its checksum
core       one step = joiners' prompts and every row's next token in one forward pass
engine     the core on a device thread, behind `inference/interface.py`
"""
