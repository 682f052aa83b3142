"""One HTML file an evaluation, by itself: no network, no library, a few lines of script. Made from report.json and
explorer.json alone, so that it can be made again; this room measures nothing.
"""
