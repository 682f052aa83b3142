"""From conversations to training windows: prompts, the base's own answers, what is kept of them."""
