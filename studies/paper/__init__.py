"""Published tables of a paper beside the authors' answer files and our own reports."""
