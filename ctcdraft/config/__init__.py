"""Configs become objects; what the command line and config files may contain."""
