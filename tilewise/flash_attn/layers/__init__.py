"""flash-attn's layers; of them, rotary embeddings."""
