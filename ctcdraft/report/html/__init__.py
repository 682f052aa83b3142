"""report.html, rendered by jinja2 from report.json and explorer.json alone, so that it can be rendered again."""
