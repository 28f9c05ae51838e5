"""Measuring methods beyond one all-reduce per step: stragglers, servers, compression, MapReduce."""
