"""From conversations to training windows: prompts, responses of the base model, filters and batches."""
