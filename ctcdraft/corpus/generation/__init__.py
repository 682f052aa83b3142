"""Responses of the base model to the prompts of a corpus."""
