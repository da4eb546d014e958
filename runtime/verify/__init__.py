"""Whether an engine computes what the model says: graph by graph, and running free."""
