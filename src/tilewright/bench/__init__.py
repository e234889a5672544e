"""What `tilewright bench` runs: cases, contenders, alternating timing, a table."""
