"""Trees, verdicts, the loop. This room never imports a drafter and has never heard of CTC."""
