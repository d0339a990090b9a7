"""The bench: cases, contestants, timing and memory, and a run that refuses to time a wrong one."""
