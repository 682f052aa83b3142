"""The paper's tables, filled from our reports."""
