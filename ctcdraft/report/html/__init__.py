"""report.html, built from report.json and explorer.json alone, so that it can be built again."""
