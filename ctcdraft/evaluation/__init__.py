"""Who is faster, by how much, why, and whether the text stayed the same. This room trains nothing and changes nothing.

benchmarks -> measure -> records in a folder -> metrics -> report; certificate and timing stand beside measure.
"""
