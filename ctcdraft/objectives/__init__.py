"""Training objectives: a loss from emissions and labels, whatever network computed the emissions."""
