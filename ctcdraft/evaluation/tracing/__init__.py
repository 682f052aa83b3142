"""Records of every verification step of a few answers, for report.html."""
