"""Cost of corpora and training runs, planned before they begin."""
