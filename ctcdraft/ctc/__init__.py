"""CTC as pure mathematics: tensors in, tensors out; it has never heard of a model, a tree or a text."""
