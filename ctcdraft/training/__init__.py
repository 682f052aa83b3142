"""Training: optimiser steps, checkpoints, metrics, sweeps."""
