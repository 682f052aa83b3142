"""Measurement of speed, acceptance length and losslessness; it trains nothing and writes no report.

benchmarks -> runner -> records in an output directory -> metrics -> rows, which ctcdraft/report prints. Beside the
runner: losslessness and distribution_test check the text, profiling and tracer look inside the decoding loop, replay
counts acceptance without decoding, latency times the parts of a step without a benchmark.
"""
