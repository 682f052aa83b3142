"""The command line and config files: composition, checks of values, and construction of objects from them."""
