"""The frozen base model: loading, compatibility checks, fingerprints, several devices."""
