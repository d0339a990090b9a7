"""Dense attention: exact softmax attention, forward and backward."""
