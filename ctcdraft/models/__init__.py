"""The frozen base model: loading, checks, fingerprints, several devices."""
