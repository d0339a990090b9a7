"""The bench of attention over a cache: decode, paged, speculative, chunked prefill, MLA."""
