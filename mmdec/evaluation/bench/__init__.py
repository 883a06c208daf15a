"""What is timed, against what, on which machine; one report form for all benchmarks."""
