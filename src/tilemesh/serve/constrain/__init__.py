"""Output that matches a regular expression or a JSON schema: what a library is given, and masks of tokens."""
