"""Answer files of other code bases (Medusa, EAGLE, CTC-drafter, Spec-Bench), measured as our own runs are."""
