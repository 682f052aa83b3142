"""Drafters: each proposes a token tree for a context. One file and one YAML per method; none computes a loss."""
