"""Costs of corpora and training runs, planned before anything is begun."""
