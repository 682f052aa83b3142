"""What is learned from emissions. An objective knows scores, labels and lengths; not the network they came from."""
