"""Continuous batching over any full-attention Hugging Face causal LM, in this process.

stops, prefixes   rules: has it ended; whose keys and values are kept
kv_slots          the cache and the attention that reads it
sampler           logits -> tokens and logprobs, from a counter-based random stream
weights           the in-place swap and its checksum
core              one step = joiners' prompts and everybody's next token in one forward
engine            the core on a device thread, behind `inference/interface.py`
"""
