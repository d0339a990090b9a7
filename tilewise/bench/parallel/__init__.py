"""Context parallelism measured: its pieces on one device, its schedules over ranks, its plan."""
