"""The report: runs, benchmarks and plans as one page that a person would rather look at than read logs."""
