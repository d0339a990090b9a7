"""Attention over a KV cache: decode, speculative decode, chunked prefill, mixed batches, MLA."""
