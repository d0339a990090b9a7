"""What a call of attention is on a GPU: its plan, its tiles, its bytes, and what binds it."""
