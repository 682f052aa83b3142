"""Answer files that other code bases recorded, measured as ours are."""
