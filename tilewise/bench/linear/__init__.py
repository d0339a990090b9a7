"""The bench of linear attention: its cells, its contestants and one run of them."""
