"""One thread for every test: two workers share two cores, and a fork does not survive a pool of threads."""

import os

# Before anything imports torch: libgomp reads them once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
