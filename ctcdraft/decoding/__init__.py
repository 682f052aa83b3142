"""Decoding: token trees, verification and the loop. Nothing here imports a drafter or depends on CTC."""
