"""A first look at a cluster: every link and every rank measured, the slow ones by name."""
