"""Measure speed: a correctness gate, a warm-up, interleaved measurement, records."""
