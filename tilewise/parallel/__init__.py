"""Context parallelism: the tokens of a sequence dealt to many ranks, attention still exact."""
