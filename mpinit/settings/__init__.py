"""The words of a user: properties, how they may be spelt, the levels, and how these resolve into one set."""
