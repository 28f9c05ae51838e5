"""The gate: every layout computes what one process computes, shown by training both (`tilemesh verify`)."""
