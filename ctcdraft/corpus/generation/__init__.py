"""Responses of the base to the prompts of a corpus."""
