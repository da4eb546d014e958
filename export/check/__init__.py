"""Every byte of a checkpoint, store or bundle held to what it must be."""
