"""Reports of evaluations: tables, Markdown, figures, HTML."""
