"""Doing what a schedule says: lowering, running, arithmetic, transports, and the communicator that users hold."""
