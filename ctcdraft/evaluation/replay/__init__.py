"""Acceptance of draft trees of every size along a known text, without decoding once per size."""
