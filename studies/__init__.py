"""Studies that use the package and are not part of it."""
