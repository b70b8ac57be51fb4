"""What several benchmarks share; none of it is a benchmark by itself."""
