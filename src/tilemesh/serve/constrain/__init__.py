"""Output that matches a regular expression or a JSON schema: patterns as values, a machine over bytes, token masks."""
