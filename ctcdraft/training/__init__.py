"""Training: steps, checkpoints, figures. It knows drafters and objectives by their contracts only."""
