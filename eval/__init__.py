"""Fair comparison of decoding methods: metrics, statistics, speed and the report. Never imports
`rl`."""
