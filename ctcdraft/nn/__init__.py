"""The layers that drafters are made of; nothing here depends on how they are trained or decoded with."""
