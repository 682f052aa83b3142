"""CTC as pure mathematics on tensors of log-probabilities: nothing here depends on a model, a tree or text."""
