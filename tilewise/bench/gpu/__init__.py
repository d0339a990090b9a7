"""The bench on a GPU: its grids, peers, clock and judgement; `run.py` puts them together."""
