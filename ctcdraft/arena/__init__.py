"""Who wins, on the same work, at equal budget. This room writes command lines of train.py and evaluate.py and reads
what they leave; it trains nothing and decodes nothing itself, and every other room does without it.

rules -> training (and matching) -> measuring -> judging -> page
"""
