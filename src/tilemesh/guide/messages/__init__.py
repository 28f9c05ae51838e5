"""Chapter 2: send and receive, deadlock, waiting, the wrong device."""
